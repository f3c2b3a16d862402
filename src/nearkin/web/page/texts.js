/* Texts by language, from /page/texts/<language>.json. t("find.title") is one of them: {name} is replaced by a value, and of
   "{n} item|{n} items" the form that belongs to n is taken; a language without plurals has one form. */
const LANGUAGES = ["en", "ko"];
const wanted = [new URLSearchParams(location.search).get("lang"), ...navigator.languages];
export const language = wanted.map((one) => one?.toLowerCase().split("-")[0]).find((one) => LANGUAGES.includes(one)) ?? LANGUAGES[0];

const load = async (tries = 5) => {
  try {
    const answer = await fetch(`/page/texts/${language}.json`);
    if (answer.ok) return await answer.json();
  } catch { /* asked again below */ }
  if (tries <= 1) throw new Error(`no texts in ${language}`);
  await new Promise((done) => setTimeout(done, 1000));
  return load(tries - 1);
};
const texts = await load();
const plural = new Intl.PluralRules(language);

export const number = (n) => n.toLocaleString(language);

/* A text as a list of strings and values, which may be elements. */
export const fill = (key, values = {}) => {
  const text = key.split(".").reduce((part, name) => part?.[name], texts);
  if (typeof text !== "string") throw new Error(`no text ${key}`);
  const forms = text.split("|");
  const form = forms[forms.length > 1 && plural.select(values.n) !== "one" ? forms.length - 1 : 0];
  return form.split(/\{(\w+)\}/).map((part, i) => {
    if (i % 2 === 0) return part;
    if (values[part] === undefined) throw new Error(`text ${key} needs ${part}`);
    return typeof values[part] === "number" ? number(values[part]) : values[part];
  });
};
export const t = (key, values) => fill(key, values).join("");

export const percent = (p) => {
  if (p > 0.9995 && p < 1) return `> ${t("percent", { p: "99.9" })}`;
  if (p < 0.0005 && p > 0) return `< ${t("percent", { p: "0.1" })}`;
  return t("percent", { p: (100 * p).toFixed(1) });
};

/* A probability that something is so: whole percents, and never quite certain. */
export const chance = (p) => {
  if (p > 0.995) return `> ${t("percent", { p: "99" })}`;
  if (p < 0.005) return `< ${t("percent", { p: "1" })}`;
  return t("percent", { p: (100 * p).toFixed(0) });
};

/* data-t="key" is the text of an element, data-t-aria-label="key" that of an attribute. */
const translate = (root) => {
  for (const element of root.querySelectorAll("*")) {
    if (element.dataset.t) element.textContent = t(element.dataset.t);
    for (const { name, value } of [...element.attributes]) if (name.startsWith("data-t-")) element.setAttribute(name.slice(7), t(value));
  }
};
document.documentElement.lang = language;
translate(document);
