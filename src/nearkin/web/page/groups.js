/* Groups: rows that show the same as cards, to be named, merged and split by hand; every step can be undone. */
import { get, guarded, post } from "./api.js";
import { $, h, say } from "./dom.js";
import { face } from "./items.js";
import { on, written } from "./state.js";
import { tab } from "./tabs.js";
import { t } from "./texts.js";

const PAGE = 24, FACES = 8;
let state = null, changed = true, shown = PAGE, reading = 0;
const merging = new Set();
on("written", () => { changed = true; });
on("changed", () => { if (tab() === "groups") load(); });
on("tab", (name) => { if (name === "groups" && changed) load(); });

/* Of several readings only the last one is shown: an earlier answer may arrive after it. */
const read = async () => {
  const mine = ++reading;
  changed = false;
  const next = await get(`groups?most=${shown}`);
  if (mine === reading) show(next);
};
const load = guarded(read);

/* A step is decided on the version that is shown; the answer is the state after it. */
const step = async (path, body, text) => {
  busy(true);
  try {
    while (state === null) await read();  // pressed before the first answer
    await post(`groups/${path}`, { version: state.version, ...body });
  } catch (error) {
    if (!error.transient) await load();  // someone else may have been first: their groups are shown
    throw error;
  } finally { busy(false); }
  merging.clear();
  await written();
  await load();
  if (text) say(text);
};
const busy = (on) => {
  $("groups-list").classList.toggle("waiting", on);
  for (const button of $("groups").querySelectorAll("button")) button.disabled = on;
  if (!on && state) tools();
};

const show = (next) => {
  state = next;
  const known = new Set(state.groups.map((one) => one.group));
  for (const group of merging) if (!known.has(group)) merging.delete(group);
  $("groups-list").replaceChildren(...state.groups.map(card));
  $("groups-more").hidden = state.total <= state.groups.length;
  const parts = state.similarity === null && !state.total ? [t("groups.none_yet")] : [t("groups.count", { n: state.total })];
  if (state.ungrouped) parts.push(t("groups.ungrouped", { n: state.ungrouped }));
  $("groups-note").textContent = parts.join(" · ");
  tools();
};
const tools = () => {
  const undo = $("groups-undo"), merge = $("groups-merge");
  undo.disabled = state.undo === null;
  undo.textContent = state.undo === null ? t("groups.undo") : t(`groups.undo_step.${state.undo}`);
  merge.disabled = merging.size < 2;
  merge.textContent = merging.size < 2 ? t("groups.merge") : t("groups.merge_n", { n: merging.size });
  for (const button of $("groups-list").querySelectorAll(".split")) button.disabled = !picked(button.closest("li")).length;
};
const picked = (card) => [...card.querySelectorAll('.pick[aria-pressed="true"]')].map((one) => Number(one.dataset.id));

const pick = (id) => {
  const button = h("button", { type: "button", class: "pick", "data-id": id, "aria-pressed": "false", "aria-label": t("groups.pick", { id: String(id) }) }, face(id, t("groups.item", { id: String(id) })));
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    tools();
  });
  return button;
};
const card = (one) => {
  const number = one.group;
  const select = h("input", { type: "checkbox", "aria-label": t("groups.select", { n: number }) });
  select.checked = merging.has(number);
  select.addEventListener("change", () => { if (select.checked) merging.add(number); else merging.delete(number); tools(); });
  const faces = h("div", { class: "picks" }, ...one.ids.slice(0, FACES).map((id) => pick(id)));
  const all = h("button", { type: "button", class: "plain" }, t("groups.all", { n: one.rows }));
  all.hidden = one.rows <= FACES;
  all.addEventListener("click", guarded(async () => {
    const { ids } = await get(`groups/${number}`);
    faces.replaceChildren(...ids.map((id) => pick(id)));
    all.hidden = true;
    tools();
  }));
  const split = h("button", { type: "button", class: "plain split" }, t("groups.split"));
  const element = h("li", { "data-group": number },
    h("label", { class: "line" }, select, h("b", {}, t("items", { n: one.rows }))),
    faces, nameForm(number), h("p", { class: "line" }, split, all));
  split.addEventListener("click", guarded(() => step("split", { group: number, ids: picked(element) }, t("groups.was_split"))));
  return element;
};
const nameForm = (number) => {
  const input = h("input", { list: "labels", required: "", maxlength: 500, autocomplete: "off", placeholder: t("enrol.label"), "aria-label": t("groups.label", { n: number }) });
  const form = h("form", { class: "line" }, input, h("button", { type: "submit" }, t("groups.name")));
  form.addEventListener("submit", (e) => {
    e.preventDefault();
    const label = input.value.trim();
    if (label) guarded(() => step("name", { group: number, label }, t("groups.named", { label })))();
  });
  return form;
};

$("groups-scope").append(h("option", { value: "unlabelled" }, t("groups.unlabelled")), h("option", { value: "all" }, t("groups.everything")));
$("groups-propose").addEventListener("submit", (e) => {
  e.preventDefault();
  guarded(async () => {
    $("groups-note").textContent = t("groups.working");
    try { await step("propose", { scope: $("groups-scope").value }); } catch (error) { if (state) show(state); else $("groups-note").textContent = ""; throw error; }
    say(t("groups.count", { n: state.total }));
  })();
});
$("groups-undo").addEventListener("click", guarded(() => step("undo", {}, t("groups.undone"))));
$("groups-merge").addEventListener("click", guarded(() => step("merge", { groups: [...merging] }, t("groups.merged"))));
$("groups-more").addEventListener("click", () => { shown += PAGE; load(); });
