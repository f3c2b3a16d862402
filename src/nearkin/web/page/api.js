/* Requests to the service: the token, waiting where it is full, errors in the language of the page. */
import { $, h } from "./dom.js";
import { fill, t } from "./texts.js";

let token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
if (location.hash.includes("token=")) {
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname + location.search);
}
let prompt = null;
const askToken = (wrong) => (prompt ??= new Promise((done) => {
  const dialog = $("ask-token");
  $("token-wrong").hidden = !wrong;
  dialog.showModal();
  dialog.addEventListener("close", () => {
    token = $("token").value.trim();
    sessionStorage.setItem("token", token);
    $("token").value = "";
    prompt = null;
    done();
  }, { once: true });
}));

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const KINDS = { 400: "refused", 403: "forbidden", 404: "missing", 408: "slow", 409: "conflict", 413: "large", 415: "format", 422: "refused", 503: "busy" };

/* An error whose parts are shown: a sentence of the page, around the service's own one where it sent one. */
const failure = (parts, transient) => Object.assign(new Error(parts.map((part) => part.textContent ?? part).join("")), { parts, transient });

export const call = async (path, options = {}, tries = 4) => {
  let answer;
  const used = token;
  const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
  try { answer = await fetch(`/api/${path}`, { ...options, headers }); } catch { throw failure([t("error.lost")], true); }
  if (answer.status === 401) {
    if (used === token) await askToken(used !== "");  // else it was entered during this request
    return call(path, options, tries);
  }
  if (answer.status === 503 && tries > 1) {
    await sleep(1000 * (Number(answer.headers.get("Retry-After")) || 1) * (0.6 + Math.random()));
    return call(path, options, tries - 1);
  }
  if (!answer.ok) {
    const sentence = (await answer.json().catch(() => ({}))).error;
    if (!sentence) throw failure([t("error.status", { status: String(answer.status) })], answer.status >= 500);
    const kind = KINDS[answer.status] ?? "failed";
    throw failure(fill(`error.service.${kind}`, { sentence: h("span", { lang: "en" }, sentence) }), answer.status >= 500);
  }
  return answer;
};
export const get = async (path) => (await call(path)).json();
export const post = async (path, value) => {
  const body = value instanceof FormData ? value : JSON.stringify(value);
  const headers = value instanceof FormData ? {} : { "Content-Type": "application/json" };
  return (await call(path, { method: "POST", body, headers })).json();
};
export const form = (parts) => {
  const data = new FormData();
  for (const [key, value] of parts) {
    if (value instanceof Blob) data.append(key, value, value.name ?? "picture.png");
    else data.append(key, value);
  }
  return data;
};

/* ---- errors, shown above the content until they are closed or the next request succeeds */
let again = null;
export const trouble = (error, retry = null) => {
  const box = $("trouble");
  box.hidden = !error;
  if (!error) return;
  if (!(error.parts || error.sentence)) console.error(error);  // a mistake of ours, not an answer
  box.querySelector("span").replaceChildren(...(error.parts ?? [error.message]));
  again = error.transient ? retry : null;  // a refusal would be repeated
  box.querySelector("button").textContent = again ? t("error.again") : t("close");
  box.scrollIntoView({ block: "nearest" });
};
$("trouble").querySelector("button").addEventListener("click", () => { trouble(null); again?.(); });
export const guarded = (work) => async (...values) => {
  try { trouble(null); await work(...values); } catch (error) { trouble(error, () => guarded(work)(...values)); }
};
