/* Items of the gallery: their thumbnails, the button of a result, the dialog of one item. */
import { call, get, guarded, post } from "./api.js";
import { $, h, say, words } from "./dom.js";
import { UNLABELLED, emit, written } from "./state.js";
import { t } from "./texts.js";

/* ---- thumbnails, which a plain <img> could not fetch with a token */
const MOST = 3000;
const thumbnails = new Map();
export const picture = (id) => {
  if (!thumbnails.has(id)) {
    if (thumbnails.size > MOST) {
      const [oldest, address] = thumbnails.entries().next().value;
      thumbnails.delete(oldest);
      address.then((url) => url && URL.revokeObjectURL(url));
    }
    const address = call(`items/${id}/thumbnail`).then((answer) => answer.blob()).then((blob) => URL.createObjectURL(blob)).catch((error) => {
      if (error.transient) thumbnails.delete(id);  // asked for again the next time
      return null;
    });
    thumbnails.set(id, address);
  }
  return thumbnails.get(id);
};
export const face = (id, alt) => {
  const frame = h("span", { class: "face" });
  picture(id).then((url) => {
    if (!url) { frame.append(h("span", { class: "noimg" }, alt)); return; }
    const image = h("img", { alt, src: url });
    image.addEventListener("load", () => frame.classList.toggle("smooth", image.naturalWidth > 64));
    frame.append(image);
  });
  return frame;
};

/* What an item is called: its label, or the name of its file where it has none. */
export const title = (hit) => (hit.label === UNLABELLED ? hit.name.split(/[\\/]/).at(-1) || t("item.unlabelled") : hit.label);

/* The button of one item; match: the label that counts as right. */
export const itemButton = (hit, match = null) => h("button", { class: "one", type: "button", "data-id": hit.id, title: hit.name, onclick: () => openItem(hit.id) },
  face(hit.id, title(hit)),
  h("b", { class: match === hit.label ? "match" : hit.label === UNLABELLED ? "nameless" : "", title: title(hit) }, ...words(title(hit))),
  h("small", {}, hit.similarity === undefined ? "" : hit.similarity.toFixed(3)));

/* ---- one item */
export const openItem = guarded(async (id) => {
  const [hit, around] = await Promise.all([get(`items/${id}`), post("neighbours", { ids: [id], k: 12 })]);
  const dialog = $("item");
  const facts = Object.entries(hit.metadata).map(([key, value]) => h("p", { class: "small" }, `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`));
  if (hit.quality !== null) facts.push(h("p", { class: "small" }, t("item.quality", { quality: hit.quality.toPrecision(4) })));
  dialog.replaceChildren(
    h("div", { class: "head" }, face(id, title(hit)),
      h("div", {}, h("h2", { id: "item-title", tabindex: -1, autofocus: "" }, title(hit)), h("p", { class: "small soft" }, t("item.name", { name: hit.name || t("item.unnamed"), id: String(id) })), ...facts)),
    relabelForm(hit, dialog),
    h("h3", {}, t("item.nearest")),
    h("div", { class: "items" }, ...around.hits.map((one) => itemButton(one, hit.label))),
    h("p", { class: "line" }, h("button", { type: "button", onclick: () => dialog.close() }, t("close")), removeButton(id, dialog)));
  if (dialog.open) $("item-title").focus(); else dialog.showModal();
  emit("item", { id, dialog });
});
const relabelForm = (hit, dialog) => {
  const input = h("input", { value: hit.label === UNLABELLED ? "" : hit.label, list: "labels", required: "", maxlength: 500, "aria-label": t("item.label"), autocomplete: "off" });
  const relabel = h("form", { class: "line" }, input, h("button", { type: "submit" }, t("item.relabel")));
  relabel.addEventListener("submit", (e) => {
    e.preventDefault();
    guarded(async () => { dialog.close(); await changeLabel([hit.id], input.value.trim()); })();
  });
  return relabel;
};
const removeButton = (id, dialog) => {
  let sure = false;
  const remove = guarded(async () => {
    const opener = document.querySelector(`.items [data-id="${id}"]`), next = opener?.nextElementSibling ?? opener?.previousElementSibling;
    dialog.close();
    await post("remove", { ids: [id] });
    say(t("item.removed", { id: String(id) }));
    for (const one of document.querySelectorAll(`[data-id="${id}"]`)) one.remove();
    next?.focus();
    await written();
    emit("changed");
  });
  const button = h("button", { type: "button", class: "plain danger" }, t("item.remove"));
  button.addEventListener("click", () => {
    if (sure) { remove(); return; }
    sure = true;
    button.textContent = t("item.really");
  });
  return button;
};
$("item").addEventListener("click", (e) => { if (e.target === $("item")) $("item").close(); });

export const changeLabel = async (ids, label) => {
  const { rows } = await post("relabel", { ids, label });
  say(t("item.relabelled", { n: rows, label }));
  for (const id of ids) {
    for (const one of document.querySelectorAll(`.one[data-id="${id}"] b`)) { one.replaceChildren(...words(label)); one.title = label; one.classList.remove("nameless"); }
  }
  await written();
  emit("changed");
};
