/* Pictures by choice, drop and paste: each zone and each part takes files. */
import { trouble } from "./api.js";
import { $ } from "./dom.js";
import { state } from "./state.js";
import { open, tab } from "./tabs.js";
import { t } from "./texts.js";

const takers = {};
/* Who takes pictures that are dropped beside a zone or pasted while a part is open; Find takes those of all other parts. */
export const takePictures = (part, take) => { takers[part] = take; };
const give = (files) => {
  if (!takers[tab()]) open("find");
  takers[tab()](files);
};
const isPicture = (file) => file.type.startsWith("image/");

/* The zone of a file input; take is called with a list of files. */
export const wire = (id, take) => {
  const zone = $(id), input = zone.querySelector("input");
  input.addEventListener("change", () => { if (input.files.length) take([...input.files]); input.value = ""; });
  for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (e) => { e.preventDefault(); zone.classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
  zone.addEventListener("drop", (e) => {
    e.preventDefault();
    e.stopPropagation();
    const file = [...e.dataTransfer.files].find(isPicture);
    if (file) take([file]); else trouble(Object.assign(new Error(t("input.no_picture")), { sentence: true }));
  });
};
export const preview = (id, file) => {
  const image = $(id).querySelector("img"), ask = $(id).querySelector(".ask");
  if (image.src) URL.revokeObjectURL(image.src);
  image.hidden = !file;
  ask.hidden = Boolean(file);
  if (!file) { image.removeAttribute("src"); return; }
  image.onload = () => image.classList.toggle("tiny", image.naturalWidth <= 64);
  image.onerror = () => { image.hidden = true; ask.hidden = false; };
  image.alt = file.name;
  image.src = URL.createObjectURL(file);
};
addEventListener("dragover", (e) => e.preventDefault());
addEventListener("drop", (e) => e.preventDefault());  // a picture beside the zone does not replace the page
addEventListener("paste", (e) => {
  const files = [...(e.clipboardData?.files ?? [])].filter(isPicture);
  if (!files.length || !state.stats?.pictures) return;
  e.preventDefault();
  give(files);
});
