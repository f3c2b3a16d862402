/* The enrolment of a folder while the service answers: how far it is, and how it ended. */
import { $, h, say } from "./dom.js";
import { again, isShown } from "./find.js";
import { emit, on, refresh } from "./state.js";
import { fill, t } from "./texts.js";

const EVERY = 1500;  // milliseconds
let seen = false, closed = false, rows = null, due = 0;
/* Before its first picture it does not run yet, and is not over either. */
const isGoing = (one) => one.running || (one.done < one.total && !one.note);

const look = () => {
  clearTimeout(due);
  due = setTimeout(() => refresh().catch(look), EVERY);  // a service that is gone may come back
};
const show = (enrolling) => {
  const { done, total, unreadable, note } = enrolling, going = isGoing(enrolling), ended = seen && !going;
  const just = ended && !$("progress-bar").hidden;
  const text = going ? (done < total ? t("progress.going", { n: done, all: total }) : t("progress.calibrating", { n: total })) : t("progress.ended", { n: done - unreadable });
  $("progress").hidden = closed || !(going || seen || note || unreadable);
  $("progress-text").textContent = text;
  $("progress-bar").hidden = !going;
  $("progress-bar").max = total;
  $("progress-bar").value = done;
  const notes = [unreadable ? t("progress.unreadable", { n: unreadable }) : null, ...(note ? fill("service_note", { sentence: h("span", { lang: "en" }, note) }) : [])];
  $("progress-note").replaceChildren(...notes.filter(Boolean).flatMap((one) => [one, " "]));
  $("progress-again").hidden = !(ended && isShown());
  $("progress-close").hidden = going;
  if (just) say(text);
  seen ||= going;
};
on("stats", (stats) => {
  if (!stats.enrolling) return;
  show(stats.enrolling);
  if (rows !== null && rows !== stats.rows) emit("written");  // the map and the diagnosis are out of date
  rows = stats.rows;
  if (isGoing(stats.enrolling)) look();
});
$("progress-again").addEventListener("click", () => { $("progress-again").hidden = true; again(); });
$("progress-close").addEventListener("click", () => { closed = true; $("progress").hidden = true; });
