/* A picture from the camera: the camera app of a phone, else a dialog with the live picture. */
import { trouble } from "./api.js";
import { $, h } from "./dom.js";
import { give } from "./inputs.js";
import { t } from "./texts.js";

const ERRORS = { NotAllowedError: "denied", SecurityError: "denied", NotFoundError: "none", OverconstrainedError: "none", NotReadableError: "busy", AbortError: "busy" };
const dialog = $("camera"), video = $("camera-video"), choice = $("camera-choice"), file = $("camera-file"), shoot = $("camera-shoot");
let stream = null;
const stop = () => {
  for (const track of stream?.getTracks() ?? []) track.stop();
  stream = null;
  video.srcObject = null;
};
const start = async (device = null) => {
  stop();
  shoot.disabled = true;
  $("camera-error").textContent = "";
  const wanted = device ? { deviceId: { exact: device } } : { facingMode: "environment" };
  try {
    const started = await navigator.mediaDevices.getUserMedia({ audio: false, video: { ...wanted, width: { ideal: 1280 }, height: { ideal: 960 } } });
    stop();
    stream = started;
    if (!dialog.open) { stop(); return; }  // closed while the browser asked
    video.srcObject = stream;
    await video.play();
    shoot.disabled = false;
    shoot.focus();
    await list();
  } catch (error) {
    if (dialog.open) $("camera-error").textContent = t(`camera.error.${ERRORS[error.name] ?? "failed"}`);
  }
};
/* The cameras have names only once one is allowed. */
const list = async () => {
  const cameras = (await navigator.mediaDevices.enumerateDevices()).filter((one) => one.kind === "videoinput");
  const used = stream?.getVideoTracks()[0]?.getSettings().deviceId;
  choice.hidden = cameras.length < 2;
  choice.replaceChildren(...cameras.map((one, i) => h("option", { value: one.deviceId, selected: one.deviceId === used }, one.label || t("camera.nth", { n: i + 1 }))));
};

export const openCamera = () => {
  if (dialog.open || document.querySelector("dialog[open]")) return;
  if (matchMedia("(pointer: coarse)").matches) { file.click(); return; }
  if (!navigator.mediaDevices?.getUserMedia) {  // a page that came by plain http from another machine
    trouble(Object.assign(new Error(t("camera.error.insecure")), { sentence: true }));
    return;
  }
  dialog.showModal();
  start();
};
$("camera-form").addEventListener("submit", (e) => {
  e.preventDefault();
  const sheet = h("canvas", { width: video.videoWidth, height: video.videoHeight });
  sheet.getContext("2d").drawImage(video, 0, 0);
  dialog.close();
  sheet.toBlob((blob) => give([new File([blob], "camera.jpg", { type: "image/jpeg" })]), "image/jpeg", 0.92);
});
dialog.addEventListener("close", stop);
choice.addEventListener("change", () => start(choice.value));
file.addEventListener("change", () => { if (file.files[0]) give([file.files[0]]); file.value = ""; });
for (const button of document.querySelectorAll(".camera-open")) button.addEventListener("click", openCamera);
