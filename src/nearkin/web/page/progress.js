/* While a folder is enrolled (nearkin serve photos/): how far it is. The statistics are read again until it has ended. */
import { $, h, say } from "./dom.js";
import { on, refresh, written } from "./state.js";
import { fill, t } from "./texts.js";

const AGAIN = 1000, LATER = 4000;  // milliseconds
let timer = null, wasRunning = false;

const look = async () => {
  timer = null;
  try { await refresh(); } catch { timer = setTimeout(look, LATER); }  // the service may be busy
};
const ending = ({ note, unreadable }) => [
  unreadable ? h("span", {}, t("progress.unreadable", { n: unreadable })) : null,
  note ? h("span", { lang: "en" }, ...fill("service_note", { sentence: note })) : null,
];

on("stats", ({ enrolling }) => {
  const box = $("progress");
  if (!enrolling) { box.hidden = true; return; }
  const { done, total, running } = enrolling;
  box.hidden = !running && !enrolling.note && !enrolling.unreadable;
  const text = done < total ? t("progress.enrolled", { done, n: total }) : t("progress.calibrating");
  box.replaceChildren(...(running ? [h("progress", { value: done, max: total, "aria-label": text }), h("span", {}, text)] : ending(enrolling)).filter(Boolean));
  if (running) timer ??= setTimeout(look, AGAIN);
  else if (wasRunning) { wasRunning = false; say(t("progress.ended", { n: done })); written(); }
  wasRunning = running;
});
