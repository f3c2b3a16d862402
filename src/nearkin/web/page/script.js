"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const percent = (p) => (p > 0.9995 && p < 1 ? "> 99.9 %" : p < 0.0005 && p > 0 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
  const number = (n) => n.toLocaleString("en");
  const many = (n, one, more) => `${number(n)} ${n === 1 ? one : more}`;
  /* An element; text is always text, never markup: labels and names are strangers' words. */
  const h = (tag, facts = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(facts)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key === "class") made.className = value;
      else if (value !== null && value !== false) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };
  /* A label word by word: a long word is cut with …, never broken; a title has the whole. */
  const words = (text) => text.split(/(\s+)|(?<=[-_/])/).filter(Boolean).map((part) => (part.trim() ? h("span", { class: "word" }, part) : part));
  const say = (text) => { $("status").textContent = text; };

  /* ---- asking the service */
  let token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
  if (location.hash.includes("token=")) { sessionStorage.setItem("token", token); history.replaceState(null, "", location.pathname); }
  let asking = null;
  const askToken = (wrong) => (asking ??= new Promise((done) => {
    const dialog = $("ask-token");
    $("token-wrong").hidden = !wrong;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      token = $("token").value.trim(); sessionStorage.setItem("token", token); $("token").value = "";
      asking = null; done();
    }, { once: true });
  }));
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
  const call = async (path, options = {}, tries = 4) => {
    let answer;
    const brought = token;
    const headers = { ...options.headers, ...(brought ? { Authorization: `Bearer ${brought}` } : {}) };
    try { answer = await fetch(`/api/${path}`, { ...options, headers }); }
    catch { throw Object.assign(new Error("The service does not answer; is it still running?"), { passing: true }); }
    if (answer.status === 401) {
      if (brought === token) await askToken(brought !== "");  // else it was given while this was under way
      return call(path, options, tries);
    }
    if (answer.status === 503 && tries > 1) {
      await sleep(1000 * (Number(answer.headers.get("Retry-After")) || 1) * (0.6 + Math.random()));
      return call(path, options, tries - 1);
    }
    if (!answer.ok) {
      const said = (await answer.json().catch(() => ({}))).error ?? `The service answered ${answer.status}.`;
      throw Object.assign(new Error(said), { passing: answer.status >= 500 });
    }
    return answer;
  };
  const get = async (path) => (await call(path)).json();
  const post = async (path, value) => {
    const body = value instanceof FormData ? value : JSON.stringify(value);
    const headers = value instanceof FormData ? {} : { "Content-Type": "application/json" };
    return (await call(path, { method: "POST", body, headers })).json();
  };
  let again = null;
  const trouble = (error, retry = null) => {
    const box = $("trouble");
    box.hidden = !error;
    if (!error) return;
    box.querySelector("span").textContent = error.message;
    again = error.passing ? retry : null;  // what was refused would be refused again
    box.querySelector("button").textContent = again ? "Try again" : "Close";
    box.scrollIntoView({ block: "nearest" });
  };
  $("trouble").querySelector("button").addEventListener("click", () => { trouble(null); again?.(); });
  const guarded = (work) => async (...given) => { try { trouble(null); await work(...given); } catch (error) { trouble(error, () => guarded(work)(...given)); } };

  /* ---- thumbnails, which a plain <img> could not fetch with a token */
  const kept = new Map();
  const picture = (id) => {
    if (!kept.has(id)) {
      if (kept.size > 3000) { const [oldest, made] = kept.entries().next().value; kept.delete(oldest); made.then((url) => url && URL.revokeObjectURL(url)); }
      const made = call(`items/${id}/thumbnail`).then((a) => a.blob()).then((blob) => URL.createObjectURL(blob)).catch(() => null);
      kept.set(id, made);
    }
    return kept.get(id);
  };
  const face = (id, alt) => {
    const frame = h("span", { class: "face" });
    picture(id).then((url) => {
      if (!url) { frame.append(h("span", { class: "noimg" }, alt)); return; }
      const image = h("img", { alt, src: url });
      image.addEventListener("load", () => frame.classList.toggle("smooth", image.naturalWidth > 64));
      frame.append(image);
    });
    return frame;
  };
  const itemButton = (hit, kin = null) => h("button", { class: "one", type: "button", "data-id": hit.id, title: hit.name, onclick: () => openItem(hit.id) },
    face(hit.id, hit.label), h("b", { class: kin === hit.label ? "kin" : "", title: hit.label }, ...words(hit.label)), h("small", {}, hit.similarity === undefined ? "" : hit.similarity.toFixed(3)));
  const bar = (share, wrong = false) => { const inner = h("span"); inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`; return h("span", { class: wrong ? "bar wrong" : "bar" }, inner); };

  /* ---- tabs */
  const tabs = ["find", "compare", "explore"];
  let tab = "find";
  const open = (name, focus = false) => {
    tab = tabs.includes(name) ? name : "find";
    for (const one of tabs) {
      const on = one === tab;
      $(one).hidden = !on; $(`tab-${one}`).setAttribute("aria-selected", String(on)); $(`tab-${one}`).tabIndex = on ? 0 : -1;
    }
    if (focus) $(`tab-${tab}`).focus();
    if (location.hash !== `#${tab}`) history.replaceState(null, "", `#${tab}`);
    if (tab === "explore") explore();
  };
  for (const one of tabs) $(`tab-${one}`).addEventListener("click", () => open(one));
  document.querySelector(".tabs").addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (step) open(tabs[(tabs.indexOf(tab) + step + 3) % 3], true);
  });
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  addEventListener("keydown", (e) => {
    if (e.target.closest("input, dialog") || e.ctrlKey || e.metaKey || e.altKey) return;
    if (["1", "2", "3"].includes(e.key)) open(tabs[e.key - 1], true);
    if (e.key.toLowerCase() === "l" && tab === "explore") $("map-lasso").click();
  });

  /* ---- what there is */
  let stats = null, changed = true;
  const refresh = async () => {
    stats = await get("stats");
    $("summary").textContent = `${many(stats.rows, "item", "items")} · ${many(stats.labels, "label", "labels")}${stats.calibrated ? "" : " · not calibrated"}${stats.damaged ? ` · ${stats.damaged} damaged` : ""}`;
    $("find-empty").hidden = stats.rows > 0 || !stats.pictures;
    $("find-vectors").hidden = stats.pictures;
    document.querySelector(".givers").hidden = !stats.pictures;
    document.querySelector(".two").hidden = !stats.pictures;
    $("pad").hidden = !stats.drawing;
    const { labels } = await get("labels?most=2000");
    $("labels").replaceChildren(...labels.map((one) => h("option", { value: one.label })));
  };
  const written = async () => { changed = true; await refresh(); };

  /* ---- pictures by drop, paste, choice */
  const wire = (id, take) => {
    const zone = $(id), input = zone.querySelector("input");
    input.addEventListener("change", () => { if (input.files[0]) take(input.files[0]); input.value = ""; });
    for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (e) => { e.preventDefault(); zone.classList.add("over"); });
    for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
    zone.addEventListener("drop", (e) => {
      e.preventDefault(); e.stopPropagation();
      const file = [...e.dataTransfer.files].find((one) => one.type.startsWith("image/"));
      if (file) take(file); else trouble(new Error("What was dropped is no picture file."));
    });
  };
  const preview = (id, file) => {
    const image = $(id).querySelector("img"), ask = $(id).querySelector(".ask");
    if (image.src) URL.revokeObjectURL(image.src);
    image.hidden = !file; ask.hidden = Boolean(file);
    if (!file) { image.removeAttribute("src"); return; }
    image.onload = () => image.classList.toggle("tiny", image.naturalWidth <= 64);
    image.onerror = () => { image.hidden = true; ask.hidden = false; };
    image.alt = file.name; image.src = URL.createObjectURL(file);
  };
  addEventListener("dragover", (e) => e.preventDefault());
  addEventListener("drop", (e) => e.preventDefault());  // a picture beside the zone does not replace the page
  addEventListener("paste", (e) => {
    const file = [...(e.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (!file || !stats?.pictures) return;
    e.preventDefault();
    if (tab === "compare") takeSide(sides.a ? "b" : "a")(file); else { open("find"); find(file); }
  });

  /* ---- find */
  let query = null, turn = 0;
  const form = (parts) => { const made = new FormData(); for (const [key, value] of parts) value instanceof Blob ? made.append(key, value, value.name ?? "picture.png") : made.append(key, value); return made; };
  const find = guarded(async (file, drawn = false) => {
    query = file;
    const mine = ++turn;
    preview("find-drop", drawn ? null : file);
    if (!drawn) wipe();
    $("answer").classList.add("waiting"); say("Looking …"); $("enrol-said").textContent = "";
    let found;
    try { found = await post("identify?hits=24", form([["item", file]])); }
    catch (error) { if (mine === turn) { $("answer").hidden = true; throw error; } return; }
    finally { if (mine === turn) $("answer").classList.remove("waiting"); }
    if (mine !== turn) return;
    $("answer").hidden = false;
    showIdentity(found);
  });
  const showIdentity = (found) => {
    const empty = !found.candidates.length, bare = !empty && found.confidence === null;
    const who = found.label ?? "unknown";
    const sure = empty ? "Nothing is enrolled to compare it with." : bare ? "The nearest label; how sure that is was not measured."
      : found.label === null ? `none of the enrolled: ${percent(found.confidence)}; nearest of them ${found.candidates.slice(0, 3).map((one) => `${one.label}: ${percent(one.confidence)} (similarity ${one.similarity.toFixed(3)})`).join(", ")}` : `${percent(found.confidence)} sure`;
    const limit = found.threshold === null || empty ? "" : `Nearest similarity ${found.similarity.toFixed(3)}; known from ${found.threshold.toFixed(3)} on${found.far === null ? "" : `, where at most ${percent(found.far)} of queries by strangers pass (95 % sure, from ${found.classes} classes)`}.`;
    $("verdict").replaceChildren(
      h("div", {}, h("p", { class: `who ${found.label === null ? "unknown" : bare ? "bare" : ""}` }, who), h("p", { class: "sure" }, sure), h("p", { class: "small soft" }, limit), found.note && !empty ? h("p", { class: "small soft" }, found.note) : null),
      h("ol", { class: "bars", "aria-label": "Likeliest labels" }, ...found.candidates.slice(0, 5).map((one) => h("li", {}, h("span", { class: "what", title: one.label }, h("span", {}, ...words(one.label))), bar(one.confidence ?? one.similarity), h("span", { class: "much" }, one.confidence === null ? one.similarity.toFixed(3) : percent(one.confidence))))));
    $("hits").replaceChildren(...(found.hits.length ? found.hits.map((hit) => itemButton(hit, found.label)) : [h("p", { class: "soft" }, "Nothing yet.")]));
    say(`${who}. ${sure}`);
  };
  wire("find-drop", (file) => find(file));
  $("enrol").addEventListener("submit", (e) => {
    e.preventDefault();
    guarded(async () => {
      const label = $("enrol-label").value.trim();
      if (!label || !query) return;
      const found = await post("enrol", form([["items", query], ["label", label]]));
      const said = found.added ? `Enrolled as “${label}” (id ${found.ids[0]}).` : `This picture is enrolled as “${label}” already (id ${found.ids[0]}).`;
      $("enrol-label").value = "";
      await written();
      const shown = await post("identify?hits=24", form([["item", query]]));
      showIdentity(shown);
      $("enrol-said").textContent = shown.label === label ? `${said} It is recognised from now on.` : said;
      say(said);
    })();
  });

  /* ---- drawing: white on black, the ink in the middle at the size of the glyphs */
  const pad = $("pad").querySelector("canvas"), pen = pad.getContext("2d", { willReadFrequently: true });
  let last = null, later = 0;
  const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  const wipe = () => { pen.clearRect(0, 0, pad.width, pad.height); };
  const spot = (e) => { const box = pad.getBoundingClientRect(); return [((e.clientX - box.left) * pad.width) / box.width, ((e.clientY - box.top) * pad.height) / box.height]; };
  const stroke = (from, to) => { pen.strokeStyle = ink(); pen.lineWidth = 36; pen.lineCap = pen.lineJoin = "round"; pen.beginPath(); pen.moveTo(...from); pen.lineTo(...to); pen.stroke(); };
  pad.addEventListener("pointerdown", (e) => { pad.setPointerCapture(e.pointerId); clearTimeout(later); last = spot(e); stroke(last, last); });
  pad.addEventListener("pointermove", (e) => { if (!last) return; for (const one of e.getCoalescedEvents?.() ?? [e]) { const to = spot(one); stroke(last, to); last = to; } });
  for (const kind of ["pointerup", "pointercancel"]) pad.addEventListener(kind, () => { if (last) { last = null; clearTimeout(later); later = setTimeout(findDrawing, 450); } });
  const findDrawing = () => {
    const { data } = pen.getImageData(0, 0, pad.width, pad.height), n = pad.width;
    let left = n, top = n, right = -1, bottom = -1;
    for (let y = 0; y < n; y++) for (let x = 0; x < n; x++) if (data[4 * (y * n + x) + 3] > 40) { left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y); }
    if (right < 0) return;
    const w = right - left + 1, tall = bottom - top + 1, side = 128, scale = (0.65 * side) / Math.max(w, tall);
    const mask = new OffscreenCanvas(n, n), white = mask.getContext("2d");
    white.drawImage(pad, 0, 0); white.globalCompositeOperation = "source-in"; white.fillStyle = "#fff"; white.fillRect(0, 0, n, n);
    const sheet = h("canvas", { width: side, height: side }), paint = sheet.getContext("2d");
    paint.fillStyle = "#000"; paint.fillRect(0, 0, side, side); paint.imageSmoothingQuality = "high";
    paint.drawImage(mask, left, top, w, tall, (side - w * scale) / 2, (side - tall * scale) / 2, w * scale, tall * scale);
    sheet.toBlob((blob) => find(new File([blob], "drawing.png", { type: "image/png" }), true));
  };
  $("pad-clear").addEventListener("click", () => { wipe(); clearTimeout(later); $("answer").hidden = true; query = null; });

  /* ---- compare */
  const sides = { a: null, b: null };
  let compared = 0;
  const takeSide = (side) => (file) => { sides[side] = file; preview(`drop-${side}`, file); if (sides.a && sides.b) compare(); };
  const compare = guarded(async () => {
    const mine = ++compared, box = $("same");
    box.classList.add("waiting");
    let found;
    try { found = await post("verify", form([["a", sides.a], ["b", sides.b]])); }
    catch (error) { box.hidden = true; throw error; }
    finally { box.classList.remove("waiting"); }
    if (mine !== compared) return;
    const word = found.same === null ? `similarity ${found.similarity.toFixed(3)}` : found.same ? "the same" : "not the same";
    const sure = found.probability === null ? "" : `${percent(found.probability)} probable that they are ${word}`;
    const limit = found.threshold === null ? "" : `Similarity ${found.similarity.toFixed(3)}; the same from ${found.threshold.toFixed(3)} on, where at most ${percent(found.far)} of pairs of strangers pass (95 % sure, from ${found.classes} classes) and ${percent(found.tar)} of pairs of the same are found. The probability is for pairs of which half are the same.`;
    box.hidden = false;
    box.replaceChildren(h("div", {}, h("p", { class: `who ${found.same === null ? "bare" : found.same ? "same" : "not"}` }, word), h("p", { class: "sure" }, sure)), h("div", {}, found.probability === null ? null : bar(found.probability, !found.same), h("p", { class: "small soft" }, limit), found.note ? h("p", { class: "small soft" }, found.note) : null));
    say(`${word}. ${sure}`);
  });
  wire("drop-a", takeSide("a")); wire("drop-b", takeSide("b"));
  $("compare-clear").addEventListener("click", () => { compared++; for (const side of ["a", "b"]) { sides[side] = null; preview(`drop-${side}`, null); } $("same").hidden = true; trouble(null); });

  /* ---- one item */
  const openItem = guarded(async (id) => {
    const [hit, around] = await Promise.all([get(`items/${id}`), post("neighbours", { ids: [id], k: 12 })]);
    const dialog = $("item");
    const facts = Object.entries(hit.metadata).map(([key, value]) => h("p", { class: "small" }, `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`));
    const input = h("input", { value: hit.label, list: "labels", required: "", maxlength: 500, "aria-label": "Label", autocomplete: "off" });
    const relabel = h("form", { class: "line" }, input, h("button", { type: "submit" }, "Relabel"));
    relabel.addEventListener("submit", (e) => {
      e.preventDefault();
      guarded(async () => { dialog.close(); await changeLabel([id], input.value.trim()); })();
    });
    let sure = false;
    const remove = h("button", { type: "button", class: "plain danger" }, "Remove");
    remove.addEventListener("click", () => {
      if (!sure) { sure = true; remove.textContent = "Really remove it?"; return; }
      guarded(async () => { dialog.close(); await post("remove", { ids: [id] }); say(`Removed ${id}.`); for (const one of document.querySelectorAll(`[data-id="${id}"]`)) one.remove(); await written(); if (tab === "explore") explore(); })();
    });
    dialog.replaceChildren(
      h("div", { class: "head" }, face(id, hit.label), h("div", {}, h("h2", {}, hit.label), h("p", { class: "small soft" }, `${hit.name || "unnamed"} · id ${id}`), ...facts)),
      relabel, h("h3", {}, "Its nearest"), h("div", { class: "items" }, ...around.hits.map((one) => itemButton(one, hit.label))),
      h("p", { class: "line" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close"), remove));
    if (!dialog.open) dialog.showModal();
  });
  $("item").addEventListener("click", (e) => { if (e.target === $("item")) $("item").close(); });
  const changeLabel = async (ids, label) => {
    const { rows } = await post("relabel", { ids, label });
    say(`${many(rows, "item is", "items are")} “${label}” now.`);
    for (const id of ids) for (const one of document.querySelectorAll(`.one[data-id="${id}"] b`)) { one.replaceChildren(...words(label)); one.title = label; }
    await written();
    if (tab === "explore") await explore();
  };

  /* ---- explore */
  const map = new GalleryMap($("map"), { picture, tip: $("tip"), onItem: (id) => openItem(id), onLasso: (ids) => showChosen(ids) });
  let method = null;
  const showMap = (found) => {
    map.show(found);
    const part = found.rows > found.ids.length ? `${number(found.ids.length)} of ${number(found.rows)} items, evenly taken` : many(found.ids.length, "item", "items");
    $("map-said").textContent = `${part}, by ${found.method === "pca" ? "PCA" : "t-SNE"}.`;
    $("map-methods").replaceChildren(...(found.methods.length < 2 ? [] : found.methods).map((one) => h("button", { type: "button", "aria-pressed": String(one === found.method), onclick: () => draw(one) }, one === "pca" ? "PCA" : "t-SNE")));
  };
  const draw = guarded(async (wanted) => {
    method = wanted;
    $("map-wait").hidden = false; $("map-wait").textContent = wanted === "tsne" ? "t-SNE is computed, which may take half a minute …" : "reading the gallery …";
    try { const found = await get(`map?method=${wanted}`); if (method === wanted) { showMap(found); $("map-wait").hidden = found.ids.length > 0; $("map-wait").textContent = "Nothing is enrolled yet: enrol something under Find."; } }
    catch (error) { $("map-wait").hidden = true; throw error; }
  });
  const explore = guarded(async () => {
    if (!changed) { map.draw(); return; }
    changed = false;
    await draw(method ?? "pca");
    showDiagnosis(await get("diagnosis"));
  });
  const showDiagnosis = (found) => {
    const side = (label, ids) => h("span", { class: "side" }, h("span", { class: "thumbs" }, ...ids.slice(0, 2).map((id) => h("button", { type: "button", "aria-label": `${label}, id ${id}`, onclick: () => openItem(id) }, face(id, label)))), h("span", { class: "what", title: label }, h("span", {}, ...words(label))));
    $("confused").replaceChildren(...found.confusions.map((row) => h("li", {}, h("span", { class: "pair" }, side(row.labels[0], row.examples[0]), h("span", { class: "arrow", "aria-label": "and" }, "↔"), side(row.labels[1], row.examples[1])), bar(row.share, true), h("span", { class: "much" }, `${percent(row.share)} `, h("small", {}, many(row.neighbours, "neighbour", "neighbours"))))));
    $("confused-said").textContent = found.note || (found.confusions.length ? "Labels that stand among one another's nearest; the share of those places." : "No label stands among another's nearest.");
    $("suspects").replaceChildren(...found.suspects.map((row) => {
      const card = h("li", { "data-id": row.id });
      const done = (text) => { card.querySelector(".line").replaceChildren(h("span", { class: "soft" }, text)); };
      card.append(h("button", { class: "one", type: "button", "aria-label": `Open ${row.label}, id ${row.id}`, onclick: () => openItem(row.id) }, face(row.id, row.label)),
        h("div", {}, h("p", { class: "small soft" }, row.name), h("p", {}, "labelled ", h("b", {}, row.label)), h("p", {}, `${percent(row.agreement)} of its neighbours: `, h("b", {}, row.suggested)),
          h("span", { class: "thumbs" }, ...row.examples.map((id) => face(id, row.suggested))),
          h("p", { class: "line" }, h("button", { type: "button", onclick: guarded(async () => { await changeLabel([row.id], row.suggested); done(`is “${row.suggested}” now`); }) }, `Relabel as ${row.suggested}`), h("button", { type: "button", class: "plain", onclick: () => done("kept as it is") }, "Keep"))));
      return card;
    }));
    $("suspects-said").textContent = found.suspects.length ? "Items whose neighbours agree on another label, the surest first." : found.note ? "" : "None: no item's neighbours agree on another label.";
  };
  const showChosen = guarded(async (ids) => {
    const box = $("chosen");
    box.hidden = !ids.length;
    if (!ids.length) { say("Nothing is chosen."); return; }
    const found = await post("neighbours", { ids: ids.slice(0, 1000), k: 16 });
    const counts = new Map();
    for (const one of found.chosen) counts.set(one.label, (counts.get(one.label) ?? 0) + 1);
    const most = [...counts].sort((a, b) => b[1] - a[1]);
    const input = h("input", { list: "labels", required: "", maxlength: 500, placeholder: "one label for all of them", "aria-label": "One label for all of them", autocomplete: "off" });
    const relabel = h("form", { class: "line" }, input, h("button", { type: "submit" }, `Relabel ${number(found.chosen.length)}`), h("button", { type: "button", class: "plain", onclick: () => map.choose([]) }, "Let go"));
    relabel.addEventListener("submit", (e) => { e.preventDefault(); guarded(async () => { await changeLabel(found.chosen.map((one) => one.id), input.value.trim()); await showChosen(ids); })(); });
    box.replaceChildren(h("h3", {}, `${many(ids.length, "item", "items")} chosen${ids.length > 1000 ? ", the first 1,000 of them taken" : ""}`),
      h("p", { class: "small soft" }, most.slice(0, 12).map(([label, n]) => `${label} × ${n}`).join(", ") + (most.length > 12 ? `, and ${most.length - 12} more labels` : "")),
      h("div", { class: "items" }, ...found.chosen.slice(0, 40).map((one) => itemButton(one))),
      ...(found.chosen.length > 40 ? [h("p", { class: "small soft" }, `40 of ${number(found.chosen.length)} shown.`)] : []), relabel,
      h("h3", {}, "Their nearest neighbours"), h("div", { class: "items", id: "around" }, ...found.hits.map((one) => itemButton(one))));
    say(`${many(ids.length, "item", "items")} chosen.`);
  });
  $("map-lasso").addEventListener("click", () => { map.lasso = !map.lasso; $("map-lasso").setAttribute("aria-pressed", String(map.lasso)); $("map").classList.toggle("lasso", map.lasso); });
  $("map-in").addEventListener("click", () => map.zoomBy(1.5));
  $("map-out").addEventListener("click", () => map.zoomBy(1 / 1.5));
  $("map-all").addEventListener("click", () => map.all());
  $("map-label").addEventListener("input", (e) => { const n = map.focusLabel(e.target.value); if (n) say(`${many(n, "item", "items")} of this label.`); });

  const start = guarded(async () => { await refresh(); open(location.hash.slice(1)); });
  start();
})();
