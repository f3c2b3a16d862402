/* Explore: the map of the gallery, what is selected on it, confused labels and likely label errors. */
import { get, guarded, post } from "./api.js";
import { $, bar, h, say, words } from "./dom.js";
import { changeLabel, face, itemButton, openItem, picture } from "./items.js";
import { GalleryMap } from "./map.js";
import { isEnrolling, labelText, on, state } from "./state.js";
import { tab } from "./tabs.js";
import { fill, percent, t } from "./texts.js";

const NAMES = { pca: "PCA", tsne: "t-SNE" };
const USED = 1000, SHOWN = 40, LABELS = 12, AROUND = 16;
const map = new GalleryMap($("map"), { picture, tip: $("tip"), onItem: (id) => openItem(id), onLasso: (ids) => showSelected(ids) });
let method = null, changed = true;
on("written", () => { changed = true; });
on("changed", () => { if (tab() === "explore") explore(); });
on("tab", (name) => { if (name === "explore") explore(); });

const explore = guarded(async () => {
  if (!changed) { map.draw(); return; }
  changed = false;
  await draw(method ?? "pca");
  showDiagnosis(await get("diagnosis"));
});
const draw = guarded(async (name) => {
  method = name;
  const wait = $("map-wait");
  wait.hidden = false;
  wait.textContent = name === "tsne" ? t("explore.computing") : t("explore.loading");
  try {
    const data = await get(`map?method=${name}`);
    if (method !== name) return;
    showMap(data);
    wait.hidden = data.ids.length > 0;
    wait.textContent = isEnrolling(state.stats) ? t("explore.enrolling") : t("explore.empty");
  } catch (error) { wait.hidden = true; throw error; }
});
const showMap = (data) => {
  map.show(data);
  const values = { n: data.ids.length, rows: data.rows, method: NAMES[data.method] };
  $("map-note").textContent = data.rows > data.ids.length ? t("explore.sampled", values) : t("explore.whole", values);
  const methods = data.methods.length < 2 ? [] : data.methods;
  $("map-methods").replaceChildren(...methods.map((one) => h("button", { type: "button", "aria-pressed": String(one === data.method), onclick: () => draw(one) }, NAMES[one])));
};

/* ---- confused labels, label errors */
const side = (label, ids) => h("span", { class: "side" },
  h("span", { class: "thumbs" }, ...ids.slice(0, 2).map((id) => h("button", { type: "button", "aria-label": t("explore.open", { label, id: String(id) }), onclick: () => openItem(id) }, face(id, label)))),
  h("span", { class: "what", title: label }, h("span", {}, ...words(labelText(label)))));
const confusion = (row) => h("li", {},
  h("span", { class: "pair" }, side(row.labels[0], row.examples[0]), h("span", { class: "arrow", role: "img", "aria-label": t("explore.and") }, "↔"), side(row.labels[1], row.examples[1])),
  bar(row.share, true),
  h("span", { class: "much" }, `${percent(row.share)} `, h("small", {}, t("explore.neighbours", { n: row.neighbours }))));
const suspect = (row) => {
  const card = h("li", { "data-id": row.id });
  const done = (text) => card.querySelector(".line").replaceChildren(h("span", { class: "soft" }, text));
  const accept = guarded(async () => { await changeLabel([row.id], row.suggested); done(t("explore.relabelled", { label: row.suggested })); });
  card.append(
    h("button", { class: "one", type: "button", "aria-label": t("explore.open", { label: row.label, id: String(row.id) }), onclick: () => openItem(row.id) }, face(row.id, row.label)),
    h("div", {}, h("p", { class: "small soft" }, row.name),
      h("p", {}, ...fill("explore.labelled", { label: h("b", {}, row.label) })),
      h("p", {}, ...fill("explore.agreement", { p: percent(row.agreement), label: h("b", {}, row.suggested) })),
      h("span", { class: "thumbs" }, ...row.examples.map((id) => face(id, row.suggested))),
      h("p", { class: "line" }, h("button", { type: "button", onclick: accept }, t("explore.relabel_as", { label: row.suggested })),
        h("button", { type: "button", class: "plain", onclick: () => done(t("explore.unchanged")) }, t("explore.keep")))));
  return card;
};
const showDiagnosis = (diagnosis) => {
  $("confused").replaceChildren(...diagnosis.confusions.map(confusion));
  $("confused-note").textContent = diagnosis.note ? t("explore.too_few") : diagnosis.confusions.length ? t("explore.confused_note") : t("explore.not_confused");
  $("suspects").replaceChildren(...diagnosis.suspects.map(suspect));
  $("suspects-note").textContent = diagnosis.suspects.length ? t("explore.suspects_note") : diagnosis.note ? "" : t("explore.no_suspects");
};

/* ---- the selection */
const showSelected = guarded(async (ids) => {
  const box = $("selected");
  box.hidden = !ids.length;
  if (!ids.length) { say(t("explore.nothing_selected")); return; }
  const around = await post("neighbours", { ids: ids.slice(0, USED), k: AROUND });
  const counts = new Map();
  for (const one of around.chosen) counts.set(one.label, (counts.get(one.label) ?? 0) + 1);
  const labels = [...counts].sort((a, b) => b[1] - a[1]);
  const listed = labels.slice(0, LABELS).map(([label, n]) => `${labelText(label)} × ${n}`).join(", ");
  const title = t("explore.selected", { n: ids.length });
  box.replaceChildren(
    h("h3", {}, title), ids.length > USED ? h("p", { class: "small soft" }, t("explore.used", { n: USED })) : "",
    h("p", { class: "small soft" }, labels.length > LABELS ? t("explore.more_labels", { listed, n: labels.length - LABELS }) : listed),
    h("div", { class: "items" }, ...around.chosen.slice(0, SHOWN).map((one) => itemButton(one))),
    around.chosen.length > SHOWN ? h("p", { class: "small soft" }, t("explore.shown", { n: SHOWN, all: around.chosen.length })) : "",
    relabelSelected(ids, around.chosen),
    h("h3", {}, t("explore.around")), h("div", { class: "items", id: "around" }, ...around.hits.map((one) => itemButton(one))));
  say(title);
});
const relabelSelected = (ids, chosen) => {
  const ask = t("explore.one_label");
  const input = h("input", { list: "labels", required: "", maxlength: 500, placeholder: ask, "aria-label": ask, autocomplete: "off" });
  const relabel = h("form", { class: "line" }, input, h("button", { type: "submit" }, t("explore.relabel_all", { n: chosen.length })),
    h("button", { type: "button", class: "plain", onclick: () => map.select([]) }, t("explore.clear")));
  relabel.addEventListener("submit", (e) => {
    e.preventDefault();
    guarded(async () => { await changeLabel(chosen.map((one) => one.id), input.value.trim()); await showSelected(ids); })();
  });
  return relabel;
};

export const toggleLasso = () => {
  map.lasso = !map.lasso;
  $("map-lasso").setAttribute("aria-pressed", String(map.lasso));
  $("map").classList.toggle("lasso", map.lasso);
};
$("map-lasso").addEventListener("click", toggleLasso);
$("map-in").addEventListener("click", () => map.zoomBy(1.5));
$("map-out").addEventListener("click", () => map.zoomBy(1 / 1.5));
$("map-all").addEventListener("click", () => map.all());
$("map-label").addEventListener("input", (e) => { const n = map.focusLabel(e.target.value); if (n) say(t("explore.with_label", { n })); });
