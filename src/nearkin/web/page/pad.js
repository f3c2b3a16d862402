/* The drawing pad of the demo: white on black, the ink in the middle at the size of the glyphs. */
import { $, h } from "./dom.js";
import { find, forget } from "./find.js";
import { on } from "./state.js";

const SIDE = 128, SHARE = 0.65, WAIT = 450;
const pad = $("pad").querySelector("canvas"), pen = pad.getContext("2d", { willReadFrequently: true });
let last = null, later = 0;
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
const wipe = () => pen.clearRect(0, 0, pad.width, pad.height);
const spot = (e) => {
  const box = pad.getBoundingClientRect();
  return [((e.clientX - box.left) * pad.width) / box.width, ((e.clientY - box.top) * pad.height) / box.height];
};
const stroke = (from, to) => {
  pen.strokeStyle = ink();
  pen.lineWidth = 36;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
};
pad.addEventListener("pointerdown", (e) => { pad.setPointerCapture(e.pointerId); clearTimeout(later); last = spot(e); stroke(last, last); });
pad.addEventListener("pointermove", (e) => {
  if (!last) return;
  for (const one of e.getCoalescedEvents?.() ?? [e]) { const to = spot(one); stroke(last, to); last = to; }
});
for (const kind of ["pointerup", "pointercancel"]) pad.addEventListener(kind, () => {
  if (!last) return;
  last = null;
  clearTimeout(later);
  later = setTimeout(findDrawing, WAIT);
});

const inked = () => {
  const { data } = pen.getImageData(0, 0, pad.width, pad.height), n = pad.width;
  let left = n, top = n, right = -1, bottom = -1;
  for (let y = 0; y < n; y++) for (let x = 0; x < n; x++) if (data[4 * (y * n + x) + 3] > 40) {
    left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
  }
  return right < 0 ? null : [left, top, right - left + 1, bottom - top + 1];
};
const findDrawing = () => {
  const box = inked(), n = pad.width;
  if (!box) return;
  const scale = (SHARE * SIDE) / Math.max(box[2], box[3]), w = box[2] * scale, tall = box[3] * scale;
  const mask = new OffscreenCanvas(n, n), white = mask.getContext("2d");
  white.drawImage(pad, 0, 0);
  white.globalCompositeOperation = "source-in";
  white.fillStyle = "#fff";
  white.fillRect(0, 0, n, n);
  const sheet = h("canvas", { width: SIDE, height: SIDE }), paint = sheet.getContext("2d");
  paint.fillStyle = "#000";
  paint.fillRect(0, 0, SIDE, SIDE);
  paint.imageSmoothingQuality = "high";
  paint.drawImage(mask, ...box, (SIDE - w) / 2, (SIDE - tall) / 2, w, tall);
  sheet.toBlob((blob) => find([new File([blob], "drawing.png", { type: "image/png" })], true));
};
$("pad-clear").addEventListener("click", () => { wipe(); clearTimeout(later); forget(); });
on("picture", wipe);
on("stats", (stats) => { $("pad").hidden = !stats.drawing; });
