/* What an answer of identify means: the label and how sure it is, or unknown and why. */
import { bar, h, words } from "./dom.js";
import { isEnrolling } from "./state.js";
import { fill, percent, t } from "./texts.js";

const SHOWN = 5, NAMED = 3;
const digits = (similarity) => similarity.toFixed(3);
/* A similarity and a larger threshold with as many digits as show that they differ, and the difference of what is shown. */
const apart = (low, high) => {
  let n = 3;
  while (n < 7 && low.toFixed(n) === high.toFixed(n)) n++;
  return { similarity: low.toFixed(n), threshold: high.toFixed(n), missing: (high.toFixed(n) - low.toFixed(n)).toFixed(n) };
};

/* Where none of the nearest items has a label there are no candidates, but a similarity. */
const isEmpty = (identity) => !identity.candidates.length && identity.similarity === null;
const isUnlabelled = (identity) => !identity.candidates.length && identity.similarity !== null;
export const title = (identity) => identity.label ?? (isUnlabelled(identity) ? t("compare.similarity", { similarity: digits(identity.similarity) }) : t("unknown"));

const headline = (identity, stats) => {
  if (isEmpty(identity)) return isEnrolling(stats) ? t("find.enrolling_answer") : t("find.empty_answer");
  if (isUnlabelled(identity)) return t("find.unlabelled");
  if (identity.confidence === null) return t("find.uncalibrated", { similarity: digits(identity.similarity) });
  if (identity.label !== null) return t("find.sure", { p: percent(identity.confidence) });
  const nearest = identity.candidates.slice(0, NAMED).map((one) => t("find.candidate", { label: one.label, p: percent(one.confidence), similarity: digits(one.similarity) }));
  return t("find.none", { p: percent(identity.confidence), nearest: nearest.join(", ") });
};

/* From which similarity on a label is accepted, and at which false-accept rate. */
const accepted = (identity) => {
  if (identity.threshold === null) return "";
  const values = { similarity: digits(identity.similarity), threshold: digits(identity.threshold) };
  return identity.far === null ? t("find.accepted", values) : t("find.accepted_far", { ...values, far: percent(identity.far), classes: identity.classes });
};

/* Why a picture is unknown, as sentences. */
const reasons = (identity, stats) => {
  if (!identity.candidates.length) return [isEnrolling(stats) ? t("why.enrolling") : t("why.empty")];
  const { label } = identity.candidates[0], similarity = digits(identity.similarity);
  if (identity.threshold === null) return [t("why.no_threshold", { label, similarity, n: stats.labels, classes: identity.classes }), t("why.calibrate")];
  const rate = identity.far === null ? t("why.no_far", { classes: identity.classes }) : t("why.far", { far: percent(identity.far), classes: identity.classes });
  return [t("why.below", { label, ...apart(identity.similarity, identity.threshold) }), rate, t("why.enrol", { label })];
};
const scale = (identity) => {
  const line = bar(identity.similarity, true), mark = h("span", { class: "mark-at" });
  mark.style.left = `${Math.max(0, Math.min(1, identity.threshold)) * 100}%`;
  const title = t("why.scale", { similarity: digits(identity.similarity), threshold: digits(identity.threshold) });
  return h("div", { class: "scale", role: "img", "aria-label": title, title }, line, mark);
};
const why = (identity, stats) => h("div", { class: "why", id: "why" }, h("h3", {}, t("why.title")),
  identity.threshold === null ? null : scale(identity), ...reasons(identity, stats).map((one) => h("p", {}, one)));

export const verdict = (identity, stats) => {
  const empty = isEmpty(identity), bare = !empty && identity.confidence === null, unknown = identity.label === null && !bare;
  const who = title(identity), sure = headline(identity, stats);
  const small = (...children) => h("p", { class: "small soft" }, ...children);
  const note = bare && identity.label !== null && identity.note ? small(...fill("service_note", { sentence: h("span", { lang: "en" }, identity.note) })) : null;
  const far = !unknown && !bare && identity.far === null ? small(t("why.no_far", { classes: identity.classes })) : null;
  const left = h("div", {},
    h("p", { class: `who ${unknown ? "unknown" : bare ? "bare" : ""}` }, who), h("p", { class: "sure" }, sure),
    unknown ? null : small(accepted(identity)), far, note);
  const likeliest = h("ol", { class: "bars", "aria-label": t("find.likeliest") }, ...identity.candidates.slice(0, SHOWN).map((one) => h("li", {},
    h("span", { class: "what", title: one.label }, h("span", {}, ...words(one.label))),
    bar(one.confidence ?? one.similarity),
    h("span", { class: "much" }, one.confidence === null ? digits(one.similarity) : percent(one.confidence)))));
  const spoken = [`${who}.`, sure, ...(unknown && !empty ? reasons(identity, stats) : [])].join(" ");
  return { parts: [left, ...(identity.candidates.length ? [likeliest] : []), ...(unknown ? [why(identity, stats)] : [])], spoken };
};
