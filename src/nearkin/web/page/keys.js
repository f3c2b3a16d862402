/* Keys that work anywhere outside a field. */
import { toggleLasso } from "./explore.js";
import { openNth, tab } from "./tabs.js";

addEventListener("keydown", (e) => {
  if (e.target.closest("input:not([type=file]), dialog") || e.ctrlKey || e.metaKey || e.altKey) return;
  if (/^[1-9]$/.test(e.key)) openNth(e.key - 1);
  if (e.key.toLowerCase() === "l" && tab() === "explore") toggleLasso();
});
