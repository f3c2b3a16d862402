/* Elements, and what screen readers are told. */
export const $ = (id) => document.getElementById(id);

/* An element; text is always text, never markup: labels and names are untrusted. */
export const h = (tag, facts = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(facts)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

/* A label word by word: a long word is cut with …, never broken; the title has all of it. */
export const words = (text) => text.split(/(\s+)|(?<=[-_/])/).filter(Boolean).map((part) => (part.trim() ? h("span", { class: "word" }, part) : part));

export const bar = (share, wrong = false) => {
  const inner = h("span");
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("span", { class: wrong ? "bar wrong" : "bar" }, inner);
};

export const say = (text) => { $("status").textContent = text; };
