/* Find: who the pictures are of, how probably and why, and the nearest items; enrolment under a label. */
import { form, guarded, post, trouble } from "./api.js";
import { $, h, say } from "./dom.js";
import { preview, takePictures, wire } from "./inputs.js";
import { itemButton } from "./items.js";
import { emit, isEnrolling, on, state, written } from "./state.js";
import { t } from "./texts.js";
import { title, verdict } from "./verdict.js";

const HITS = 24;
/* The pictures of one drop, paste or choice, each with its answer or error; and which of them is shown. */
let batch = [], current = null, turn = 0;
const search = (file) => post(`identify?hits=${HITS}`, form([["item", file]]));

/* drawn: the picture is on the drawing pad, not in the zone. */
export const find = guarded(async (files, drawn = false) => {
  const request = ++turn;
  for (const one of batch) URL.revokeObjectURL(one.url);
  batch = files.map((file) => ({ file, drawn, url: URL.createObjectURL(file), identity: null, error: null }));
  current = batch[0];
  if (!drawn) emit("picture");
  $("enrol-note").textContent = "";
  listBatch();
  display();
  say(t("find.searching"));
  for (const one of batch) {
    try { one.identity = await search(one.file); } catch (error) { one.error = error; }
    if (request !== turn) return;
    if (one.error?.transient) { display(); throw one.error; }  // the service is gone: no use in asking for the next one
    listBatch();
    if (one === current) display();
  }
});
export const isShown = () => current !== null;
export const again = () => find(batch.map((one) => one.file), current.drawn);
export const forget = () => { turn++; batch = []; current = null; $("answer").hidden = true; };

/* The current picture and its answer, as far as there is one. */
const display = () => {
  const { file, drawn, identity, error } = current;
  preview("find-drop", drawn ? null : file);
  $("answer").classList.toggle("waiting", !identity && !error);
  if (error) { $("answer").hidden = true; trouble(error); return; }
  if (!identity) return;
  $("answer").hidden = false;
  const { parts, why, spoken } = verdict(identity, state.stats), best = identity.candidates[0]?.label;
  $("verdict").replaceChildren(...parts);
  $("why").textContent = why;
  $("hits").replaceChildren(...(identity.hits.length ? identity.hits.map((hit) => itemButton(hit, best)) : [h("p", { class: "soft" }, t("find.no_items"))]));
  say(spoken);
  emit("answer", { file, identity });
};

/* ---- several pictures: one button each, with its answer */
const choose = (one) => { current = one; trouble(null); listBatch(); display(); };
const listBatch = () => {
  const several = batch.length > 1, focused = [...$("batch").children].indexOf(document.activeElement);
  $("batch-part").hidden = $("enrol-all-part").hidden = !several;
  if (!several) { $("batch").replaceChildren(); $("enrol-all").checked = false; return; }
  const done = batch.filter((one) => one.identity || one.error).length;
  $("batch-note").textContent = done < batch.length ? t("find.batch_going", { n: done, all: batch.length }) : t("find.batch", { n: batch.length });
  $("enrol-all-text").textContent = t("enrol.all", { n: batch.length });
  $("batch").replaceChildren(...batch.map((one) => {
    const answer = one.error ? t("find.failed") : one.identity ? title(one.identity) : "…";
    return h("button", { class: "one", type: "button", title: one.file.name, "aria-pressed": String(one === current), onclick: () => choose(one) },
      h("span", { class: "face smooth" }, h("img", { alt: one.file.name, src: one.url })), h("b", {}, h("span", { class: "word" }, answer)));
  }));
  $("batch").children[focused]?.focus();
};

/* ---- enrolment, in requests that the service takes */
const portions = (files) => {
  const { largest_upload: most, largest_body: bytes } = state.stats, lists = [];
  let size = Infinity;
  for (const file of files) {
    if (size + file.size > 0.95 * bytes || lists.at(-1).length >= most) { lists.push([]); size = 0; }
    lists.at(-1).push(file);
    size += file.size;
  }
  return lists;
};
const enrol = guarded(async (label, chosen) => {
  const request = turn;
  let added = 0, id = null;
  for (const files of portions(chosen.map((one) => one.file))) {
    const enrolled = await post("enrol", form([...files.map((file) => ["items", file]), ["label", label]]));
    added += enrolled.added;
    id ??= String(enrolled.ids[0]);
  }
  $("enrol-label").value = "";
  await written();
  let recognised = true;
  for (const one of chosen) {
    one.error = null;
    one.identity = await search(one.file);
    recognised &&= one.identity.label === label;
  }
  if (request !== turn) return;
  const several = { n: chosen.length, known: chosen.length - added, label };
  const message = chosen.length > 1 ? t("enrol.several", several) : added ? t("enrol.enrolled", { label, id }) : t("enrol.known", { label, id });
  listBatch();
  display();
  $("enrol-note").textContent = recognised ? `${message} ${t("enrol.recognised")}` : message;
  say(message);
});
$("enrol").addEventListener("submit", (e) => {
  e.preventDefault();
  const label = $("enrol-label").value.trim();
  if (label && current) enrol(label, $("enrol-all").checked ? batch : [current]);
});

wire("find-drop", (files) => find(files));
takePictures("find", (files) => find(files));
on("stats", (stats) => {
  $("find-empty").hidden = stats.rows > 0 || !stats.pictures || isEnrolling(stats);
  $("find-vectors").hidden = stats.pictures;
  document.querySelector(".inputs").hidden = !stats.pictures;
});
