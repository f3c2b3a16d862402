"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const percent = (p) => (p > 0.9995 && p < 1 ? "> 99.9 %" : p < 0.0005 && p > 0 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
  const number = (n) => n.toLocaleString("en");
  const many = (n, one, more) => `${number(n)} ${n === 1 ? one : more}`;
  /* An element; text is always text, never markup: labels and names are untrusted. */
  const h = (tag, facts = {}, ...children) => {
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
  const words = (text) => text.split(/(\s+)|(?<=[-_/])/).filter(Boolean).map((part) => (part.trim() ? h("span", { class: "word" }, part) : part));
  const say = (text) => { $("status").textContent = text; };

  /* ---- requests */
  let token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
  if (location.hash.includes("token=")) { sessionStorage.setItem("token", token); history.replaceState(null, "", location.pathname); }
  let prompt = null;
  const askToken = (wrong) => (prompt ??= new Promise((done) => {
    const dialog = $("ask-token");
    $("token-wrong").hidden = !wrong;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      token = $("token").value.trim(); sessionStorage.setItem("token", token); $("token").value = "";
      prompt = null; done();
    }, { once: true });
  }));
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
  const call = async (path, options = {}, tries = 4) => {
    let answer;
    const used = token;
    const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    try { answer = await fetch(`/api/${path}`, { ...options, headers }); }
    catch { throw Object.assign(new Error("The service does not answer; is it still running?"), { transient: true }); }
    if (answer.status === 401) {
      if (used === token) await askToken(used !== "");  // else it was entered during this request
      return call(path, options, tries);
    }
    if (answer.status === 503 && tries > 1) {
      await sleep(1000 * (Number(answer.headers.get("Retry-After")) || 1) * (0.6 + Math.random()));
      return call(path, options, tries - 1);
    }
    if (!answer.ok) {
      const message = (await answer.json().catch(() => ({}))).error ?? `The service answered ${answer.status}.`;
      throw Object.assign(new Error(message), { transient: answer.status >= 500 });
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
    again = error.transient ? retry : null;  // a refusal would be repeated
    box.querySelector("button").textContent = again ? "Try again" : "Close";
    box.scrollIntoView({ block: "nearest" });
  };
  $("trouble").querySelector("button").addEventListener("click", () => { trouble(null); again?.(); });
  const guarded = (work) => async (...values) => { try { trouble(null); await work(...values); } catch (error) { trouble(error, () => guarded(work)(...values)); } };

  /* ---- thumbnails, which a plain <img> could not fetch with a token */
  const thumbnails = new Map();
  const picture = (id) => {
    if (!thumbnails.has(id)) {
      if (thumbnails.size > 3000) { const [oldest, address] = thumbnails.entries().next().value; thumbnails.delete(oldest); address.then((url) => url && URL.revokeObjectURL(url)); }
      const address = call(`items/${id}/thumbnail`).then((a) => a.blob()).then((blob) => URL.createObjectURL(blob)).catch(() => null);
      thumbnails.set(id, address);
    }
    return thumbnails.get(id);
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
  const itemButton = (hit, match = null) => h("button", { class: "one", type: "button", "data-id": hit.id, title: hit.name, onclick: () => openItem(hit.id) },
    face(hit.id, hit.label), h("b", { class: match === hit.label ? "match" : "", title: hit.label }, ...words(hit.label)), h("small", {}, hit.similarity === undefined ? "" : hit.similarity.toFixed(3)));
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

  /* ---- statistics and labels */
  let stats = null, changed = true;
  const refresh = async () => {
    stats = await get("stats");
    $("summary").textContent = `${many(stats.rows, "item", "items")} · ${many(stats.labels, "label", "labels")}${stats.calibrated ? "" : " · not calibrated"}${stats.damaged ? ` · ${stats.damaged} damaged` : ""}`;
    $("find-empty").hidden = stats.rows > 0 || !stats.pictures;
    $("find-vectors").hidden = stats.pictures;
    document.querySelector(".inputs").hidden = !stats.pictures;
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
      if (file) take(file); else trouble(new Error("The dropped file is not a picture."));
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
  const form = (parts) => { const data = new FormData(); for (const [key, value] of parts) value instanceof Blob ? data.append(key, value, value.name ?? "picture.png") : data.append(key, value); return data; };
  const find = guarded(async (file, drawn = false) => {
    query = file;
    const request = ++turn;
    preview("find-drop", drawn ? null : file);
    if (!drawn) wipe();
    $("answer").classList.add("waiting"); say("Searching …"); $("enrol-note").textContent = "";
    let identity;
    try { identity = await post("identify?hits=24", form([["item", file]])); }
    catch (error) { if (request === turn) { $("answer").hidden = true; throw error; } return; }
    finally { if (request === turn) $("answer").classList.remove("waiting"); }
    if (request !== turn) return;
    $("answer").hidden = false;
    showIdentity(identity);
  });
  const showIdentity = (identity) => {
    const empty = !identity.candidates.length, bare = !empty && identity.confidence === null;
    const who = identity.label ?? "unknown";
    const sure = empty ? "The gallery is empty." : bare ? "The nearest label; without a calibration its confidence is not known."
      : identity.label === null ? `none of the enrolled labels: ${percent(identity.confidence)}; nearest: ${identity.candidates.slice(0, 3).map((one) => `${one.label}: ${percent(one.confidence)} (similarity ${one.similarity.toFixed(3)})`).join(", ")}` : `${percent(identity.confidence)} sure`;
    const limit = identity.threshold === null || empty ? "" : `Nearest similarity ${identity.similarity.toFixed(3)}; accepted from ${identity.threshold.toFixed(3)} on${identity.far === null ? "" : `, with a false-accept rate of at most ${percent(identity.far)} per query (95 % confidence, from ${identity.classes} classes)`}.`;
    $("verdict").replaceChildren(
      h("div", {}, h("p", { class: `who ${identity.label === null ? "unknown" : bare ? "bare" : ""}` }, who), h("p", { class: "sure" }, sure), h("p", { class: "small soft" }, limit), identity.note && !empty ? h("p", { class: "small soft" }, identity.note) : null),
      h("ol", { class: "bars", "aria-label": "Likeliest labels" }, ...identity.candidates.slice(0, 5).map((one) => h("li", {}, h("span", { class: "what", title: one.label }, h("span", {}, ...words(one.label))), bar(one.confidence ?? one.similarity), h("span", { class: "much" }, one.confidence === null ? one.similarity.toFixed(3) : percent(one.confidence))))));
    $("hits").replaceChildren(...(identity.hits.length ? identity.hits.map((hit) => itemButton(hit, identity.label)) : [h("p", { class: "soft" }, "No items yet.")]));
    say(`${who}. ${sure}`);
  };
  wire("find-drop", (file) => find(file));
  $("enrol").addEventListener("submit", (e) => {
    e.preventDefault();
    guarded(async () => {
      const label = $("enrol-label").value.trim();
      if (!label || !query) return;
      const enrolled = await post("enrol", form([["items", query], ["label", label]]));
      const message = enrolled.added ? `Enrolled as “${label}” (id ${enrolled.ids[0]}).` : `This picture is already enrolled as “${label}” (id ${enrolled.ids[0]}).`;
      $("enrol-label").value = "";
      await written();
      const shown = await post("identify?hits=24", form([["item", query]]));
      showIdentity(shown);
      $("enrol-note").textContent = shown.label === label ? `${message} It is recognised from now on.` : message;
      say(message);
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
    const request = ++compared, box = $("same");
    box.classList.add("waiting");
    let verification;
    try { verification = await post("verify", form([["a", sides.a], ["b", sides.b]])); }
    catch (error) { box.hidden = true; throw error; }
    finally { box.classList.remove("waiting"); }
    if (request !== compared) return;
    const word = verification.same === null ? `similarity ${verification.similarity.toFixed(3)}` : verification.same ? "the same" : "not the same";
    const sure = verification.probability === null ? "" : `${percent(verification.probability)} probability that they are ${word}`;
    const limit = verification.threshold === null ? "" : `Similarity ${verification.similarity.toFixed(3)}; the same from ${verification.threshold.toFixed(3)} on, with a false-accept rate of at most ${percent(verification.far)} per pair (95 % confidence, from ${verification.classes} classes) and a true-accept rate of ${percent(verification.tar)}. The probability assumes that half of all pairs are the same.`;
    box.hidden = false;
    box.replaceChildren(h("div", {}, h("p", { class: `who ${verification.same === null ? "bare" : verification.same ? "same" : "not"}` }, word), h("p", { class: "sure" }, sure)), h("div", {}, verification.probability === null ? null : bar(verification.probability, !verification.same), h("p", { class: "small soft" }, limit), verification.note ? h("p", { class: "small soft" }, verification.note) : null));
    say(`${word}. ${sure}`);
  });
  wire("drop-a", takeSide("a")); wire("drop-b", takeSide("b"));
  $("compare-clear").addEventListener("click", () => { compared++; for (const side of ["a", "b"]) { sides[side] = null; preview(`drop-${side}`, null); } $("same").hidden = true; trouble(null); });

  /* ---- one item */
  const openItem = guarded(async (id) => {
    const [hit, around] = await Promise.all([get(`items/${id}`), post("neighbours", { ids: [id], k: 12 })]);
    const dialog = $("item");
    const facts = Object.entries(hit.metadata).map(([key, value]) => h("p", { class: "small" }, `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`));
    if (hit.quality !== null) facts.push(h("p", { class: "small" }, `quality: ${hit.quality.toPrecision(4)}`));
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
  const map = new GalleryMap($("map"), { picture, tip: $("tip"), onItem: (id) => openItem(id), onLasso: (ids) => showSelected(ids) });
  let method = null;
  const showMap = (data) => {
    map.show(data);
    const part = data.rows > data.ids.length ? `${number(data.ids.length)} of ${number(data.rows)} items, evenly sampled` : many(data.ids.length, "item", "items");
    $("map-note").textContent = `${part}, by ${data.method === "pca" ? "PCA" : "t-SNE"}.`;
    $("map-methods").replaceChildren(...(data.methods.length < 2 ? [] : data.methods).map((one) => h("button", { type: "button", "aria-pressed": String(one === data.method), onclick: () => draw(one) }, one === "pca" ? "PCA" : "t-SNE")));
  };
  const draw = guarded(async (name) => {
    method = name;
    $("map-wait").hidden = false; $("map-wait").textContent = name === "tsne" ? "computing t-SNE, up to half a minute …" : "loading the gallery …";
    try { const data = await get(`map?method=${name}`); if (method === name) { showMap(data); $("map-wait").hidden = data.ids.length > 0; $("map-wait").textContent = "The gallery is empty: enrol something under Find."; } }
    catch (error) { $("map-wait").hidden = true; throw error; }
  });
  const explore = guarded(async () => {
    if (!changed) { map.draw(); return; }
    changed = false;
    await draw(method ?? "pca");
    showDiagnosis(await get("diagnosis"));
  });
  const showDiagnosis = (diagnosis) => {
    const side = (label, ids) => h("span", { class: "side" }, h("span", { class: "thumbs" }, ...ids.slice(0, 2).map((id) => h("button", { type: "button", "aria-label": `${label}, id ${id}`, onclick: () => openItem(id) }, face(id, label)))), h("span", { class: "what", title: label }, h("span", {}, ...words(label))));
    $("confused").replaceChildren(...diagnosis.confusions.map((row) => h("li", {}, h("span", { class: "pair" }, side(row.labels[0], row.examples[0]), h("span", { class: "arrow", "aria-label": "and" }, "↔"), side(row.labels[1], row.examples[1])), bar(row.share, true), h("span", { class: "much" }, `${percent(row.share)} `, h("small", {}, many(row.neighbours, "neighbour", "neighbours"))))));
    $("confused-note").textContent = diagnosis.note || (diagnosis.confusions.length ? "Labels that are among each other's nearest neighbours, with the share of those neighbours." : "No label is among another's nearest neighbours.");
    $("suspects").replaceChildren(...diagnosis.suspects.map((row) => {
      const card = h("li", { "data-id": row.id });
      const done = (text) => { card.querySelector(".line").replaceChildren(h("span", { class: "soft" }, text)); };
      card.append(h("button", { class: "one", type: "button", "aria-label": `Open ${row.label}, id ${row.id}`, onclick: () => openItem(row.id) }, face(row.id, row.label)),
        h("div", {}, h("p", { class: "small soft" }, row.name), h("p", {}, "labelled ", h("b", {}, row.label)), h("p", {}, `${percent(row.agreement)} of its neighbours: `, h("b", {}, row.suggested)),
          h("span", { class: "thumbs" }, ...row.examples.map((id) => face(id, row.suggested))),
          h("p", { class: "line" }, h("button", { type: "button", onclick: guarded(async () => { await changeLabel([row.id], row.suggested); done(`is “${row.suggested}” now`); }) }, `Relabel as ${row.suggested}`), h("button", { type: "button", class: "plain", onclick: () => done("unchanged") }, "Keep"))));
      return card;
    }));
    $("suspects-note").textContent = diagnosis.suspects.length ? "Items whose neighbours agree on another label, most certain first." : diagnosis.note ? "" : "None: no item's neighbours agree on another label.";
  };
  const showSelected = guarded(async (ids) => {
    const box = $("selected");
    box.hidden = !ids.length;
    if (!ids.length) { say("Nothing is selected."); return; }
    const around = await post("neighbours", { ids: ids.slice(0, 1000), k: 16 });
    const counts = new Map();
    for (const one of around.chosen) counts.set(one.label, (counts.get(one.label) ?? 0) + 1);
    const most = [...counts].sort((a, b) => b[1] - a[1]);
    const input = h("input", { list: "labels", required: "", maxlength: 500, placeholder: "one label for all of them", "aria-label": "One label for all of them", autocomplete: "off" });
    const relabel = h("form", { class: "line" }, input, h("button", { type: "submit" }, `Relabel ${number(around.chosen.length)}`), h("button", { type: "button", class: "plain", onclick: () => map.select([]) }, "Clear selection"));
    relabel.addEventListener("submit", (e) => { e.preventDefault(); guarded(async () => { await changeLabel(around.chosen.map((one) => one.id), input.value.trim()); await showSelected(ids); })(); });
    box.replaceChildren(h("h3", {}, `${many(ids.length, "item", "items")} selected${ids.length > 1000 ? ", the first 1,000 of them used" : ""}`),
      h("p", { class: "small soft" }, most.slice(0, 12).map(([label, n]) => `${label} × ${n}`).join(", ") + (most.length > 12 ? `, and ${most.length - 12} more labels` : "")),
      h("div", { class: "items" }, ...around.chosen.slice(0, 40).map((one) => itemButton(one))),
      ...(around.chosen.length > 40 ? [h("p", { class: "small soft" }, `40 of ${number(around.chosen.length)} shown.`)] : []), relabel,
      h("h3", {}, "Their nearest neighbours"), h("div", { class: "items", id: "around" }, ...around.hits.map((one) => itemButton(one))));
    say(`${many(ids.length, "item", "items")} selected.`);
  });
  $("map-lasso").addEventListener("click", () => { map.lasso = !map.lasso; $("map-lasso").setAttribute("aria-pressed", String(map.lasso)); $("map").classList.toggle("lasso", map.lasso); });
  $("map-in").addEventListener("click", () => map.zoomBy(1.5));
  $("map-out").addEventListener("click", () => map.zoomBy(1 / 1.5));
  $("map-all").addEventListener("click", () => map.all());
  $("map-label").addEventListener("input", (e) => { const n = map.focusLabel(e.target.value); if (n) say(`${many(n, "item", "items")} with this label.`); });

  const start = guarded(async () => { await refresh(); open(location.hash.slice(1)); });
  start();
})();
