/* What an answer of identify means: the best candidate and its chance, the next ones with "nobody we know" among them, and why. */
import { bar, h, words } from "./dom.js";
import { face, openItem } from "./items.js";
import { isEnrolling } from "./state.js";
import { chance, fill, t } from "./texts.js";

const SHOWN = 4, NEAREST = 8;
const CERTAIN = 0.98, VERY = 0.9, LEFT = 0.01;  // probabilities
const digits = (similarity) => similarity.toFixed(3);

/* Where none of the nearest items has a label there are no candidates, but a similarity. */
const isEmpty = (identity) => !identity.candidates.length && identity.similarity === null;
const isUnlabelled = (identity) => !identity.candidates.length && identity.similarity !== null;
/* Nothing is learned from the labels yet: similarities alone. */
const isBare = (identity) => identity.candidates.length > 0 && identity.p_right === null;

export const title = (identity) => {
  if (identity.label !== null) return identity.label;
  if (isUnlabelled(identity)) return t("compare.similarity", { similarity: digits(identity.similarity) });
  if (isEmpty(identity) || identity.verdict === "unknown") return t("unknown");
  return t("find.perhaps", { label: identity.candidates[0].label });
};
const kind = (identity) => {
  if (isEmpty(identity) || identity.verdict === "unknown") return "unknown";
  return identity.verdict === "named" ? "" : "bare";
};

const headline = (identity, stats) => {
  if (isEmpty(identity)) return isEnrolling(stats) ? t("find.enrolling_answer") : t("find.empty_answer");
  if (isUnlabelled(identity)) return t("find.unlabelled");
  if (isBare(identity)) return t("find.uncalibrated", { similarity: digits(identity.similarity) });
  const { label } = identity.candidates[0], right = chance(identity.p_right), unknown = chance(identity.p_unknown);
  if (identity.verdict === "unknown") return t("find.none", { p: unknown, label, right });
  if (identity.verdict === "unsure") return t("find.unsure", { label, right, unknown });
  const how = identity.p_right >= CERTAIN ? "certain" : identity.p_right >= VERY ? "very" : "probable";
  return t(`chance.${how}`, { p: right });
};

/* How many of the nearest items have the best label; and what to do where it is right and was not named. */
const reasons = (identity, stats) => {
  if (isEmpty(identity) && isEnrolling(stats)) return [t("why.enrolling")];
  if (!identity.candidates.length || !identity.hits.length) return [];
  const { label, similarity } = identity.candidates[0], nearest = identity.hits.slice(0, NEAREST);
  const n = nearest.filter((hit) => hit.label === label).length;
  const evidence = t("why.nearest", { n, all: nearest.length, label, similarity: digits(similarity) });
  return identity.verdict === "named" || isBare(identity) ? [evidence] : [evidence, t("why.enrol", { label })];
};

/* The candidates, nobody and, where something is left for them, the other labels: the likeliest first. */
const row = (name, p, text, picture, nobody = false) => ({ p, element: h("li", {}, h("span", { class: "thumbs" }, picture),
  h("span", { class: nobody ? "what nobody" : "what", title: name }, h("span", {}, ...words(name))), bar(p, nobody), h("span", { class: "much" }, text)) });
const sign = (text) => h("span", { class: "face sign", "aria-hidden": "true" }, text);
const likeliest = (identity) => {
  const shown = identity.candidates.slice(0, SHOWN);
  const rows = shown.map((one) => row(one.label, one.confidence ?? one.similarity, one.confidence === null ? digits(one.similarity) : chance(one.confidence),
    h("button", { type: "button", "aria-label": one.label, title: one.label, onclick: () => openItem(one.id) }, face(one.id, one.label))));
  if (!isBare(identity)) {
    const left = 1 - identity.p_unknown - shown.reduce((sum, one) => sum + one.confidence, 0);
    if (left >= LEFT && Math.max(identity.classes ?? 0, identity.candidates.length) > shown.length) rows.push(row(t("find.others"), left, chance(left), sign("…")));
    rows.push(row(t("find.nobody"), identity.p_unknown, chance(identity.p_unknown), sign("?"), true));
    rows.sort((one, other) => other.p - one.p);
  }
  return h("ol", { class: "bars", "aria-label": t("find.likeliest") }, ...rows.map((one) => one.element));
};

export const verdict = (identity, stats) => {
  const who = title(identity), sure = headline(identity, stats), why = reasons(identity, stats);
  const small = (...children) => h("p", { class: "small soft" }, ...children);
  const left = h("div", {}, h("p", { class: `who ${kind(identity)}` }, who), h("p", { class: "sure" }, sure),
    isBare(identity) && identity.note ? small(...fill("service_note", { sentence: h("span", { lang: "en" }, identity.note) })) : null,
    identity.prior === null ? null : small(t("find.assumed", { p: chance(identity.prior) })));
  return { parts: identity.candidates.length ? [left, likeliest(identity)] : [left], why: why.join(" "), spoken: [who, sure, ...why].map((one) => one.replace(/[.]?$/, ".")).join(" ") };
};
