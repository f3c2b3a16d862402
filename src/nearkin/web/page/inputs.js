/* Pictures by choice, drop anywhere on the page, and paste. */
import { trouble } from "./api.js";
import { $ } from "./dom.js";
import { state } from "./state.js";
import { open, tab } from "./tabs.js";
import { t } from "./texts.js";

const NAMES = 3;
const takers = {};
/* Who takes pictures that are dropped, pasted or photographed while a part is open; Find takes those of parts that take none. */
export const takePictures = (part, take) => { takers[part] = take; };
export const give = (files) => {
  if (!takers[tab()]) open("find");
  takers[tab()](files);
};

const isPicture = (file) => file.type.startsWith("image/") || (!file.type && /\.(jpe?g|png|gif|webp|bmp|avif)$/i.test(file.name));
const complain = (text) => trouble(Object.assign(new Error(text), { sentence: true }));
/* The pictures among some files; others are named. */
const pictures = (files) => {
  const others = files.filter((file) => !isPicture(file)).map((file) => file.name);
  if (others.length) {
    const names = others.slice(0, NAMES).join(", ");
    setTimeout(() => complain(t("input.not_pictures", { n: others.length, names: others.length > NAMES ? `${names}, …` : names })));  // after the search has cleared older errors
  }
  return files.filter(isPicture);
};
const pass = (files, take) => {
  const usable = pictures(files);
  if (usable.length) take(usable);
};

/* The zone of a file input; take is called with a list of pictures. */
export const wire = (id, take) => {
  const zone = $(id), input = zone.querySelector("input");
  input.addEventListener("change", () => { pass([...input.files], take); input.value = ""; });
  zone.addEventListener("dragover", () => zone.classList.add("over"));
  for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
  zone.addEventListener("drop", (e) => {
    if (!e.dataTransfer.files.length) return;
    e.preventDefault();
    e.stopPropagation();
    endDrag();
    pass([...e.dataTransfer.files], take);
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

/* ---- anywhere on the page; enter and leave come for every element on the way, so they are counted */
let depth = 0;
const endDrag = () => { depth = 0; $("drop-hint").hidden = true; };
addEventListener("dragenter", (e) => {
  depth++;
  $("drop-hint").hidden = !(state.stats?.pictures && e.dataTransfer?.types.includes("Files"));
});
addEventListener("dragleave", () => { if (--depth <= 0) endDrag(); });
addEventListener("dragover", (e) => e.preventDefault());
addEventListener("drop", (e) => {
  e.preventDefault();  // a picture does not replace the page
  endDrag();
  if (!state.stats?.pictures) return;
  const files = [...(e.dataTransfer?.files ?? [])];
  if (files.length) pass(files, give); else if (e.dataTransfer?.types.includes("text/uri-list")) complain(t("input.address"));
});
addEventListener("paste", (e) => {
  const files = [...(e.clipboardData?.files ?? [])];
  if (!files.length || !state.stats?.pictures || document.querySelector("dialog[open]")) return;
  e.preventDefault();
  pass(files, give);
});
