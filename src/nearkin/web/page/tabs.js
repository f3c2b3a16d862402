/* The parts of the page: one button in .tabs and one section each, found in index.html. */
import { $ } from "./dom.js";
import { emit } from "./state.js";

const buttons = [...document.querySelectorAll(".tabs [role=tab]")];
const names = () => buttons.filter((one) => !one.hidden).map((one) => one.getAttribute("aria-controls"));
let current = "find";
export const tab = () => current;
export const open = (name, focus = false) => {
  current = names().includes(name) ? name : "find";
  for (const button of buttons) {
    const selected = button.getAttribute("aria-controls") === current;
    $(button.getAttribute("aria-controls")).hidden = !selected;
    button.setAttribute("aria-selected", String(selected));
    button.tabIndex = selected ? 0 : -1;
    if (selected && focus) button.focus();
  }
  if (location.hash !== `#${current}`) history.replaceState(null, "", `#${current}`);
  emit("tab", current);
};
export const openNth = (n) => { if (names()[n]) open(names()[n], true); };

for (const button of buttons) button.addEventListener("click", () => open(button.getAttribute("aria-controls")));
document.querySelector(".tabs").addEventListener("keydown", (e) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key], all = names();
  if (step) open(all[(all.indexOf(current) + step + all.length) % all.length], true);
});
addEventListener("hashchange", () => open(location.hash.slice(1)));
