/* The keyboard: keys that work anywhere outside a field, and arrows between results. */
import { trouble } from "./api.js";
import { openCamera } from "./camera.js";
import { $ } from "./dom.js";
import { toggleLasso } from "./explore.js";
import { state } from "./state.js";
import { open, openNth, tab } from "./tabs.js";

const focusSearch = () => {
  if (!$(tab()).querySelector("[data-search]")) open("find");
  $(tab()).querySelector("[data-search]").focus();
};
const KEYS = {
  "/": focusSearch,
  "?": () => $("help").showModal(),
  c: () => { if (state.stats?.pictures) openCamera(); },
  l: () => { if (tab() === "explore") toggleLasso(); },
  Escape: () => trouble(null),
};
addEventListener("keydown", (e) => {
  if (e.target.closest("input:not([type=file]), select, textarea, dialog") || e.ctrlKey || e.metaKey || e.altKey) return;
  const act = /^[1-9]$/.test(e.key) ? () => openNth(e.key - 1) : KEYS[e.key.length === 1 ? e.key.toLowerCase() : e.key];
  if (!act) return;
  if (e.key !== "Escape") e.preventDefault();
  act();
});

/* ---- arrows between the buttons of a list of items: one of them is reached by Tab, the others by arrows */
const LISTS = ".items, .picks", MEMBERS = ".items > .one, .picks > .pick";
const members = (list) => [...list.children].filter((one) => one.matches(MEMBERS));
const columns = (all) => all.filter((one) => one.offsetTop === all[0].offsetTop).length;
addEventListener("keydown", (e) => {
  const list = e.target.closest(MEMBERS)?.parentElement;
  if (!list || e.ctrlKey || e.metaKey || e.altKey) return;
  const all = members(list), at = all.indexOf(e.target), across = columns(all);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + across, ArrowUp: at - across, Home: 0, End: all.length - 1 }[e.key];
  if (to === undefined) return;
  e.preventDefault();
  all[to]?.focus();
});
addEventListener("focusin", (e) => {
  const list = e.target.closest(MEMBERS)?.parentElement;
  if (list) for (const one of members(list)) one.tabIndex = one === e.target ? 0 : -1;
});
const rove = () => {
  for (const list of document.querySelectorAll(LISTS)) {
    const all = members(list);
    if (all.filter((one) => one.tabIndex === 0).length !== 1) all.forEach((one, i) => { one.tabIndex = i ? -1 : 0; });
  }
};
new MutationObserver(rove).observe(document.body, { childList: true, subtree: true });

for (const close of document.querySelectorAll("dialog .dialog-close")) close.addEventListener("click", () => close.closest("dialog").close());
$("help-open").addEventListener("click", () => $("help").showModal());
