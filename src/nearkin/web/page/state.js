/* What the parts of the page share: the statistics of the gallery, and events. on("stats", (stats) => …) after each reading,
   "written" after a change, "tab" with the name of the part that was opened, "answer" with {file, identity} when an answer
   is shown, "item" with {id, dialog} when an item is. */
import { get } from "./api.js";
import { $, h } from "./dom.js";
import { t } from "./texts.js";

const events = new EventTarget();
export const on = (name, act) => events.addEventListener(name, (event) => act(event.detail));
export const emit = (name, detail) => events.dispatchEvent(new CustomEvent(name, { detail }));

/* The label of items that have none; they are found, and are no answer. */
export const UNLABELLED = "unlabelled";
export const labelText = (label) => (label === UNLABELLED ? t("item.unlabelled") : label);

/* Before its first picture an enrolment does not run yet, and is not over either. */
export const isEnrolling = ({ enrolling: one }) => Boolean(one) && (one.running || (one.done < one.total && !one.note));

export const state = { stats: null };
export const refresh = async () => {
  const [stats, { labels }] = await Promise.all([get("stats"), get("labels?most=2000")]);
  const named = labels.filter((one) => one.label !== UNLABELLED), nameless = labels.find((one) => one.label === UNLABELLED)?.rows ?? 0;
  state.stats = stats;
  const parts = [t("items", { n: stats.rows })], labelled = stats.labels - (nameless ? 1 : 0);
  if (labelled || !nameless) parts.push(t("labels", { n: labelled }));
  if (nameless) parts.push(t("summary.unlabelled", { n: nameless }));
  if (!stats.learned && !stats.calibrated) parts.push(t("summary.uncalibrated"));
  if (stats.damaged) parts.push(t("summary.damaged", { n: stats.damaged }));
  $("summary").textContent = parts.join(" · ");
  $("labels").replaceChildren(...named.map((one) => h("option", { value: one.label })));
  emit("stats", stats);
};
/* After every change of the gallery. */
export const written = async () => { emit("written"); await refresh(); };
