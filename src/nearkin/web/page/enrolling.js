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
  const text = going ? (done < total ? t("enrolling.going", { n: done, all: total }) : t("enrolling.calibrating", { n: total })) : t("enrolling.ended", { n: done });
  $("enrolling").hidden = closed || !(going || seen || note || unreadable);
  $("enrolling-text").textContent = text;
  $("enrolling-bar").hidden = !going;
  $("enrolling-bar").max = total;
  $("enrolling-bar").value = done;
  const notes = [unreadable ? t("enrolling.unreadable", { n: unreadable }) : null, ...(note ? fill("service_note", { sentence: h("span", { lang: "en" }, note) }) : [])];
  $("enrolling-note").replaceChildren(...notes.filter(Boolean).flatMap((one) => [one, " "]));
  $("enrolling-again").hidden = !(ended && isShown());
  $("enrolling-close").hidden = going;
  if (ended) say(text);
  seen ||= going;
};
on("stats", (stats) => {
  if (!stats.enrolling) return;
  show(stats.enrolling);
  if (rows !== null && rows !== stats.rows) emit("written");  // the map and the diagnosis are out of date
  rows = stats.rows;
  if (isGoing(stats.enrolling)) look();
});
$("enrolling-again").addEventListener("click", () => { $("enrolling-again").hidden = true; again(); });
$("enrolling-close").addEventListener("click", () => { closed = true; $("enrolling").hidden = true; });
