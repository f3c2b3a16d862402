/* The enrolment of a folder while the service answers: how far it is, and how it ended. */
import { $, h, say } from "./dom.js";
import { again, isShown } from "./find.js";
import { emit, isEnrolling, on, refresh } from "./state.js";
import { fill, t } from "./texts.js";

const EVERY = 1500;  // milliseconds
let seen = false, closed = false, rows = null, due = 0;

const look = () => {
  clearTimeout(due);
  due = setTimeout(() => refresh().catch(look), EVERY);  // a service that is gone may come back
};
const phase = (done, total) => {
  if (!done) return t("progress.starting", { n: total });
  return done < total ? t("progress.going", { n: done, all: total }) : t("progress.calibrating", { n: total });
};
const show = ({ done, total, unreadable, note }, going) => {
  const ended = seen && !going;
  const just = ended && !$("progress-bar").hidden;
  const text = going ? phase(done, total) : t("progress.ended", { n: done - unreadable });
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
  show(stats.enrolling, isEnrolling(stats));
  if (rows !== null && rows !== stats.rows) emit("written");  // the map and the diagnosis are out of date
  rows = stats.rows;
  if (isEnrolling(stats)) look();
});
$("progress-again").addEventListener("click", () => { $("progress-again").hidden = true; again(); });
$("progress-close").addEventListener("click", () => { closed = true; $("progress").hidden = true; });
