/* Find: the label of a picture, or why it is unknown, and its nearest items. */
import { form, guarded, post } from "./api.js";
import { $, bar, h, say, words } from "./dom.js";
import { preview, takePictures, wire } from "./inputs.js";
import { itemButton } from "./items.js";
import { emit, on, written } from "./state.js";
import { percent, t } from "./texts.js";

const HITS = 24;
let query = null, turn = 0;
/* drawn: the picture is on the drawing pad, not in the zone. */
export const find = guarded(async (file, drawn = false) => {
  query = file;
  const request = ++turn;
  preview("find-drop", drawn ? null : file);
  if (!drawn) emit("picture");
  $("answer").classList.add("waiting");
  say(t("find.searching"));
  $("enrol-note").textContent = "";
  let identity;
  try { identity = await post(`identify?hits=${HITS}`, form([["item", file]])); }
  catch (error) { if (request === turn) { $("answer").hidden = true; throw error; } return; }
  finally { if (request === turn) $("answer").classList.remove("waiting"); }
  if (request !== turn) return;
  $("answer").hidden = false;
  show(identity);
});
export const forget = () => { turn++; query = null; $("answer").hidden = true; };

const reason = (identity) => {
  if (!identity.candidates.length) return t("find.empty_answer");
  if (identity.confidence === null) return t("find.uncalibrated");
  if (identity.label !== null) return t("find.sure", { p: percent(identity.confidence) });
  const nearest = identity.candidates.slice(0, 3).map((one) => t("find.candidate", { label: one.label, p: percent(one.confidence), similarity: one.similarity.toFixed(3) }));
  return t("find.none", { p: percent(identity.confidence), nearest: nearest.join(", ") });
};
const limit = (identity) => {
  if (identity.threshold === null || !identity.candidates.length) return "";
  const values = { similarity: identity.similarity.toFixed(3), threshold: identity.threshold.toFixed(3) };
  return identity.far === null ? t("find.accepted", values) : t("find.accepted_far", { ...values, far: percent(identity.far), classes: identity.classes });
};
const show = (identity) => {
  const empty = !identity.candidates.length, bare = !empty && identity.confidence === null;
  const who = identity.label ?? t("unknown"), why = reason(identity);
  $("verdict").replaceChildren(
    h("div", {},
      h("p", { class: `who ${identity.label === null ? "unknown" : bare ? "bare" : ""}` }, who),
      h("p", { class: "sure" }, why), h("p", { class: "small soft" }, limit(identity)),
      identity.note && !empty ? h("p", { class: "small soft", lang: "en" }, identity.note) : null),
    h("ol", { class: "bars", "aria-label": t("find.likeliest") }, ...identity.candidates.slice(0, 5).map((one) => h("li", {},
      h("span", { class: "what", title: one.label }, h("span", {}, ...words(one.label))),
      bar(one.confidence ?? one.similarity),
      h("span", { class: "much" }, one.confidence === null ? one.similarity.toFixed(3) : percent(one.confidence))))));
  $("hits").replaceChildren(...(identity.hits.length ? identity.hits.map((hit) => itemButton(hit, identity.label)) : [h("p", { class: "soft" }, t("find.no_items"))]));
  say(`${who}. ${why}`);
  emit("answer", { file: query, identity });
};
wire("find-drop", ([file]) => find(file));
takePictures("find", ([file]) => find(file));

$("enrol").addEventListener("submit", (e) => {
  e.preventDefault();
  guarded(async () => {
    const label = $("enrol-label").value.trim();
    if (!label || !query) return;
    const enrolled = await post("enrol", form([["items", query], ["label", label]]));
    const values = { label, id: String(enrolled.ids[0]) };
    const message = enrolled.added ? t("find.enrolled", values) : t("find.known", values);
    $("enrol-label").value = "";
    await written();
    const identity = await post(`identify?hits=${HITS}`, form([["item", query]]));
    show(identity);
    $("enrol-note").textContent = identity.label === label ? `${message} ${t("find.recognised")}` : message;
    say(message);
  })();
});
on("stats", (stats) => {
  $("find-empty").hidden = stats.rows > 0 || !stats.pictures;
  $("find-vectors").hidden = stats.pictures;
  document.querySelector(".inputs").hidden = !stats.pictures;
});
