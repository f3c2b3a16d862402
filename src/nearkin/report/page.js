"use strict";
(() => {
  const map = document.querySelector(".mapbox");
  if (map) {
    const marks = map.querySelectorAll("[data-c]");
    let held = null;
    const show = (kind) => {
      map.classList.toggle("focus", kind !== null);
      for (const mark of marks) mark.classList.toggle("on", mark.dataset.c === kind);
    };
    const kindOf = (event) => event.target.closest("[data-c]")?.dataset.c ?? null;
    const hold = (kind) => {
      held = kind !== null && kind !== held ? kind : null;
      for (const chip of map.querySelectorAll("button")) chip.setAttribute("aria-pressed", String(chip.dataset.c === held));
      show(held);
    };
    map.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") show(kindOf(event) ?? held); });
    map.addEventListener("pointerleave", () => show(held));
    map.addEventListener("focusin", (event) => show(kindOf(event) ?? held));
    map.addEventListener("focusout", () => show(held));
    map.addEventListener("click", (event) => hold(kindOf(event)));
    map.addEventListener("keydown", (event) => { if (event.key === "Escape") hold(null); });
  }
  for (const button of document.querySelectorAll("button.copy")) {
    const code = button.parentElement.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
})();
