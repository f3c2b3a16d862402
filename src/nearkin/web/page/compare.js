/* Compare: whether two pictures show the same. */
import { form, guarded, post, trouble } from "./api.js";
import { $, bar, h, say } from "./dom.js";
import { preview, takePictures, wire } from "./inputs.js";
import { on } from "./state.js";
import { fill, percent, t } from "./texts.js";

const sides = { a: null, b: null };
let turn = 0;
/* One picture goes to its side, two to both. */
const take = (side) => ([file]) => {
  sides[side] = file;
  preview(`drop-${side}`, file);
  if (sides.a && sides.b) compare();
};
const compare = guarded(async () => {
  const request = ++turn, box = $("same");
  box.classList.add("waiting");
  let answer;
  try { answer = await post("verify", form([["a", sides.a], ["b", sides.b]])); }
  catch (error) { box.hidden = true; throw error; }
  finally { box.classList.remove("waiting"); }
  if (request === turn) show(answer);
});
const show = (answer) => {
  const box = $("same"), similarity = answer.similarity.toFixed(3);
  const word = answer.same === null ? t("compare.similarity", { similarity }) : answer.same ? t("compare.same") : t("compare.not");
  const p = answer.probability === null ? "" : percent(answer.probability);
  const sure = answer.probability === null ? "" : answer.same ? t("compare.same_sure", { p }) : t("compare.not_sure", { p });
  const limit = answer.threshold === null ? "" : t("compare.limit", { similarity, threshold: answer.threshold.toFixed(3), far: percent(answer.far), classes: answer.classes, tar: percent(answer.tar) });
  box.hidden = false;
  box.replaceChildren(
    h("div", {}, h("p", { class: `who ${answer.same === null ? "bare" : answer.same ? "same" : "not"}` }, word), h("p", { class: "sure" }, sure)),
    h("div", {}, answer.probability === null ? null : bar(answer.probability, !answer.same),
      h("p", { class: "small soft" }, limit), answer.note ? h("p", { class: "small soft" }, ...fill("service_note", { sentence: h("span", { lang: "en" }, answer.note) })) : null));
  say(`${word}. ${sure}`);
};
wire("drop-a", take("a"));
wire("drop-b", take("b"));
takePictures("compare", (files) => {
  if (files.length === 1) { take(sides.a ? "b" : "a")(files); return; }
  sides.b = null;  // so that the first of two does not start a comparison
  take("a")(files);
  take("b")(files.slice(1));
});
$("compare-clear").addEventListener("click", () => {
  turn++;
  for (const side of ["a", "b"]) { sides[side] = null; preview(`drop-${side}`, null); }
  $("same").hidden = true;
  trouble(null);
});
on("stats", (stats) => { $("compare-inputs").hidden = !stats.pictures; });
