/* Which part matched: point at a result, or reach it with the keyboard, and a card shows heat maps over the query and the
   result; touched, a result opens its dialog, which has the same. */
import { form, post } from "./api.js";
import { $, h } from "./dom.js";
import { on } from "./state.js";
import { t } from "./texts.js";

const OPEN_AFTER = 200, CLOSE_AFTER = 150;  // milliseconds: passing over results asks for nothing
let file = null, answers = new Map(), anchor = null, timer = 0;

const explained = (id) => {
  if (!answers.has(id)) {
    const answer = post(`explain?id=${id}`, form([["item", file]]));
    answer.catch(() => answers.delete(id));  // asked again next time
    answers.set(id, answer);
  }
  return answers.get(id);
};

/* ---- what is shown of an answer */
const side = (map, name) => h("figure", {},
  h("span", { class: "heat" }, h("img", { src: map.picture, alt: name }), h("img", { class: "over", src: map.overlay, alt: "" })),
  h("figcaption", {}, name));
const parts = (answer, label) => {
  const similarity = answer.similarity.toFixed(3);
  const missing = [answer.query.missing, answer.row.missing].map((one) => one.toFixed(3));
  const complete = missing.every((one) => Math.abs(one) < 0.0005);
  return [
    h("div", { class: "maps" }, side(answer.query, t("explain.query")), side(answer.row, label)),
    h("p", {}, complete ? t("explain.sum", { similarity }) : t("explain.missing", { similarity, query: missing[0], row: missing[1] })),
    h("p", { class: "soft" }, t("explain.legend")),
    answer.source === "thumbnail" ? h("p", { class: "soft" }, t("explain.thumbnail", { similarity: answer.row_similarity.toFixed(3) })) : null,
  ].filter(Boolean);
};
/* Fills the box as soon as there is an answer; stays: whether it still is wanted then. */
const fillBox = async (box, id, label, stays) => {
  box.replaceChildren(h("p", { class: "soft" }, t("explain.waiting")));
  let shown;
  try { shown = parts(await explained(id), label); } catch (error) { shown = [h("p", {}, ...(error.parts ?? [error.message]))]; }
  if (stays()) box.replaceChildren(h("h3", {}, t("explain.title")), ...shown);
};

/* ---- the card, through which the pointer reaches the results below it */
const card = h("div", { id: "explain", class: "explain", role: "tooltip", hidden: "" });
document.body.append(card);
const place = () => {
  const at = anchor.getBoundingClientRect(), { offsetWidth: width, offsetHeight: height } = card;
  const below = at.bottom + height + 12 < innerHeight || at.top < height + 12;
  card.style.left = `${scrollX + Math.max(8, Math.min(at.left + at.width / 2 - width / 2, document.documentElement.clientWidth - width - 8))}px`;
  card.style.top = `${scrollY + (below ? at.bottom + 6 : at.top - height - 6)}px`;
};
const hide = () => {
  clearTimeout(timer);
  anchor?.removeAttribute("aria-describedby");
  anchor = null;
  card.hidden = true;
};
const show = async (button) => {
  if (button === anchor || !button.isConnected) return;
  hide();
  anchor = button;
  card.hidden = false;
  button.setAttribute("aria-describedby", "explain");
  const stays = () => anchor === button && button.isConnected;
  const filled = fillBox(card, button.dataset.id, button.querySelector("b").title, stays);
  place();
  await filled;
  if (stays()) place();
};
const later = (act, ms) => { clearTimeout(timer); timer = setTimeout(act, ms); };
const result = (e) => (file ? e.target.closest?.("#hits > .one") : null);

$("hits").addEventListener("pointerover", (e) => { if (e.pointerType === "mouse" && result(e)) later(() => show(result(e)), OPEN_AFTER); });
$("hits").addEventListener("focusin", (e) => { if (result(e)?.matches(":focus-visible")) later(() => show(result(e)), OPEN_AFTER); });
for (const event of ["pointerleave", "focusout"]) $("hits").addEventListener(event, () => later(hide, CLOSE_AFTER));
addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });

/* ---- the answers belong to one query; the dialog of a result has its heat maps too */
on("answer", (answer) => {
  hide();
  if (answer.file !== file) answers = new Map();
  file = answer.file;
});
on("picture", () => { hide(); file = null; });
on("item", ({ id, dialog }) => {
  hide();
  const button = file && $("hits").querySelector(`.one[data-id="${id}"]`);
  if (!button) return;
  const box = h("div", { class: "explain" });
  dialog.querySelector(".head").after(box);
  fillBox(box, id, button.querySelector("b").title, () => box.isConnected);
});
