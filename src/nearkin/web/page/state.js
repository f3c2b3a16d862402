/* What the parts of the page share: the statistics of the gallery, and events. on("stats", (stats) => …) after each reading,
   "written" after a change, "tab" with the name of the part that was opened, "answer" with {file, identity} when an answer
   is shown, "item" with {id, dialog} when an item is. */
import { get } from "./api.js";
import { $, h } from "./dom.js";
import { t } from "./texts.js";

const events = new EventTarget();
export const on = (name, act) => events.addEventListener(name, (event) => act(event.detail));
export const emit = (name, detail) => events.dispatchEvent(new CustomEvent(name, { detail }));

export const state = { stats: null };
export const refresh = async () => {
  const stats = (state.stats = await get("stats"));
  const parts = [t("items", { n: stats.rows }), t("labels", { n: stats.labels })];
  if (!stats.calibrated) parts.push(t("summary.uncalibrated"));
  if (stats.damaged) parts.push(t("summary.damaged", { n: stats.damaged }));
  $("summary").textContent = parts.join(" · ");
  emit("stats", stats);
  const { labels } = await get("labels?most=2000");
  $("labels").replaceChildren(...labels.map((one) => h("option", { value: one.label })));
};
/* After every change of the gallery. */
export const written = async () => { emit("written"); await refresh(); };
