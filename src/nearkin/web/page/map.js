/* The map of a gallery on a canvas: points by label, thumbnails when there is room, pan, zoom, lasso. */
import { labelText } from "./state.js";
import { t } from "./texts.js";

export class GalleryMap {
  constructor(canvas, { picture, tip, onItem, onLasso }) {
    Object.assign(this, { canvas, picture, tip, onItem, onLasso });
    this.ids = []; this.x = []; this.y = []; this.label = []; this.labels = []; this.hues = [];
    this.zoom = 1; this.dx = 0; this.dy = 0; this.lasso = false; this.loop = null;
    this.selected = new Set(); this.only = null; this.hovered = -1; this.images = new Map(); this.pointers = new Map();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("wheel", (e) => { e.preventDefault(); const at = this.at(e); this.zoomBy(Math.exp(-e.deltaY * 0.0015), at.x, at.y); }, { passive: false });
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", (e) => this.up(e));
    canvas.addEventListener("pointercancel", (e) => { this.pointers.delete(e.pointerId); this.loop = null; this.draw(); });
    canvas.addEventListener("pointerleave", () => this.hover(-1));
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  show(map) {
    const before = new Map(this.ids.map((id, i) => [id, [this.x[i], this.y[i]]]));
    Object.assign(this, { ids: map.ids, label: map.label, labels: map.labels, hues: map.hues });
    const moves = !matchMedia("(prefers-reduced-motion: reduce)").matches && map.ids.some((id) => before.has(id));
    const from = map.ids.map((id, i) => before.get(id) ?? [map.x[i], map.y[i]]);
    const start = performance.now(), turn = (this.turn = (this.turn ?? 0) + 1);
    const step = (now) => {
      if (turn !== this.turn) return;
      const t = moves ? Math.min(1, (now - start) / 600) : 1, soft = t * t * (3 - 2 * t);
      this.x = map.x.map((to, i) => from[i][0] + (to - from[i][0]) * soft);
      this.y = map.y.map((to, i) => from[i][1] + (to - from[i][1]) * soft);
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    step(start);
  }

  get size() { return { w: this.canvas.clientWidth, h: this.canvas.clientHeight }; }
  at(e) { const box = this.canvas.getBoundingClientRect(); return { x: e.clientX - box.left, y: e.clientY - box.top }; }
  place(i) {
    const { w, h } = this.size, edge = 40;
    return [(edge + this.x[i] * (w - 2 * edge)) * this.zoom + this.dx, (edge + this.y[i] * (h - 2 * edge)) * this.zoom + this.dy];
  }
  inView() {
    const { w, h } = this.size, points = [];
    for (let i = 0; i < this.ids.length; i++) {
      const [x, y] = this.place(i);
      if (x > -20 && y > -20 && x < w + 20 && y < h + 20) points.push([i, x, y]);
    }
    return points;
  }
  zoomBy(factor, x = this.size.w / 2, y = this.size.h / 2) {
    const next = Math.min(60, Math.max(1, this.zoom * factor)), f = next / this.zoom;
    this.dx = x - (x - this.dx) * f; this.dy = y - (y - this.dy) * f; this.zoom = next; this.clamp(); this.hover(-1); this.draw();
  }
  pan(x, y) { this.dx += x; this.dy += y; this.clamp(); this.hover(-1); this.draw(); }
  clamp() {
    const { w, h } = this.size;
    this.dx = Math.min(0, Math.max(w - w * this.zoom, this.dx)); this.dy = Math.min(0, Math.max(h - h * this.zoom, this.dy));
  }
  all() { this.zoom = 1; this.dx = this.dy = 0; this.draw(); }
  point(x, y) {
    let best = -1, near = 14 ** 2;
    for (const [i, px, py] of this.inView()) {
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < near && (this.only === null || this.label[i] === this.only)) { near = distance; best = i; }
    }
    return best;
  }
  focusLabel(name) {
    const index = name ? this.labels.indexOf(name) : -1;
    this.only = index < 0 ? null : index;
    this.draw();
    return this.only !== null ? this.label.filter((one) => one === index).length : 0;
  }

  draw() { if (!this.due) { this.due = true; requestAnimationFrame(() => { this.due = false; this.paint(); }); } }
  paint() {
    const { canvas } = this, { w, h } = this.size, dpr = window.devicePixelRatio || 1;
    if (!w) return;
    if (canvas.width !== Math.round(w * dpr) || canvas.height !== Math.round(h * dpr)) { canvas.width = Math.round(w * dpr); canvas.height = Math.round(h * dpr); }
    const pen = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const hues = Array.from({ length: 10 }, (_, i) => colour(`--k${i}`)), accent = colour("--accent"), paper = colour("--paper");
    pen.setTransform(dpr, 0, 0, dpr, 0, 0);
    pen.clearRect(0, 0, w, h);
    const visible = this.inView(), room = Math.sqrt((w * h) / Math.max(1, visible.length));
    const pictures = room > 26 && visible.length <= 600, side = Math.min(64, Math.max(22, room * 0.72)), r = Math.min(6, Math.max(2.6, room * 0.16));
    let drawn = 0;
    const framed = pictures ? this.spread(visible, side) : new Set();
    for (const [i, x, y] of [...visible.filter(([i]) => !framed.has(i)), ...visible.filter(([i]) => framed.has(i))]) {
      const off = this.only !== null && this.label[i] !== this.only, on = this.selected.has(this.ids[i]), hue = hues[this.hues[this.label[i]]];
      pen.globalAlpha = off ? 0.1 : 1;
      const image = framed.has(i) && !off ? this.image(this.ids[i]) : null;
      if (image) {
        pen.imageSmoothingEnabled = image.width > 64;
        drawn++;
        pen.drawImage(image, x - side / 2, y - side / 2, side, side);
        pen.strokeStyle = on ? accent : hue; pen.lineWidth = on ? 4 : 2;
        pen.strokeRect(x - side / 2, y - side / 2, side, side);
      } else {
        pen.beginPath(); pen.arc(x, y, on ? r + 2 : r, 0, 7); pen.fillStyle = hue; pen.fill();
        pen.strokeStyle = on ? accent : paper; pen.lineWidth = on ? 2.5 : 0.7; pen.stroke();
      }
    }
    pen.globalAlpha = 1;
    if (this.loop?.length > 1) {
      pen.beginPath(); this.loop.forEach(([x, y], n) => (n ? pen.lineTo(x, y) : pen.moveTo(x, y))); pen.closePath();
      pen.strokeStyle = accent; pen.lineWidth = 2; pen.setLineDash([5, 4]); pen.stroke(); pen.setLineDash([]);
      pen.globalAlpha = 0.12; pen.fillStyle = accent; pen.fill(); pen.globalAlpha = 1;
    }
    canvas.dataset.points = this.ids.length; canvas.dataset.pictures = drawn;
    if (this.ids.length && !visible.length) { pen.fillStyle = colour("--soft"); pen.font = "15px system-ui, sans-serif"; pen.textAlign = "center"; pen.fillText(t("explore.nothing_here"), w / 2, h / 2); }
  }
  /* Which points get a thumbnail: one after the other, where it covers no other thumbnail. */
  spread(points, side) {
    const cells = new Map(), framed = new Set();
    for (const [i, x, y] of points) {
      const cx = Math.floor(x / side), cy = Math.floor(y / side);
      let free = true;
      for (let a = cx - 1; free && a <= cx + 1; a++) for (let b = cy - 1; free && b <= cy + 1; b++) {
        for (const [px, py] of cells.get(`${a},${b}`) ?? []) if (Math.abs(px - x) < side && Math.abs(py - y) < side) free = false;
      }
      if (!free) continue;
      framed.add(i);
      const key = `${cx},${cy}`;
      cells.set(key, [...(cells.get(key) ?? []), [x, y]]);
    }
    return framed;
  }
  image(id) {
    const cached = this.images.get(id);
    if (cached !== undefined) return cached;
    this.images.set(id, null);
    this.picture(id).then((address) => {
      if (!address) return;
      const image = new Image();
      image.onload = () => { this.images.set(id, image); this.draw(); };
      image.src = address;
    }).catch(() => this.images.delete(id));
    return null;
  }

  down(e) {
    this.canvas.setPointerCapture(e.pointerId);
    const at = this.at(e);
    this.pointers.set(e.pointerId, at); this.start = at; this.moved = false;
    if (this.lasso && this.pointers.size === 1) this.loop = [[at.x, at.y]];
  }
  move(e) {
    const at = this.at(e), before = this.pointers.get(e.pointerId);
    if (!before) { this.hover(this.point(at.x, at.y)); return; }
    if (Math.hypot(at.x - this.start.x, at.y - this.start.y) > 4) this.moved = true;
    this.pointers.set(e.pointerId, at);
    if (this.pointers.size === 2) {
      const other = [...this.pointers].find(([id]) => id !== e.pointerId)[1];
      const span = (p) => Math.max(10, Math.hypot(p.x - other.x, p.y - other.y));
      this.loop = null; this.moved = true;
      this.zoomBy(span(at) / span(before), (at.x + other.x) / 2, (at.y + other.y) / 2);
    } else if (this.loop) { this.loop.push([at.x, at.y]); this.draw(); }
    else if (this.moved) this.pan(at.x - before.x, at.y - before.y);
  }
  up(e) {
    const at = this.at(e), loop = this.loop;
    this.pointers.delete(e.pointerId);
    this.loop = null;
    if (loop && this.moved) this.select(this.inView().filter(([i, x, y]) => this.within(loop, x, y) && (this.only === null || this.label[i] === this.only)).map(([i]) => this.ids[i]));
    else if (!this.moved) { const i = this.point(at.x, at.y); if (i >= 0) this.onItem(this.ids[i]); }
    this.draw();
  }
  within(loop, x, y) {
    let inside = false;
    for (let i = 0, j = loop.length - 1; i < loop.length; j = i++) {
      const [xi, yi] = loop[i], [xj, yj] = loop[j];
      if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) inside = !inside;
    }
    return inside;
  }
  select(ids) { this.selected = new Set(ids); this.draw(); this.onLasso(ids); }
  hover(i) {
    if (i === this.hovered) return;
    this.hovered = i;
    this.tip.hidden = i < 0;
    if (i < 0) return;
    const [x, y] = this.place(i), { w } = this.size;
    this.tip.textContent = labelText(this.labels[this.label[i]]);
    this.tip.style.left = `${Math.max(4, Math.min(x + 12, w - this.tip.offsetWidth - 8))}px`; this.tip.style.top = `${Math.max(4, y - 34)}px`;
  }
  key(e) {
    const { w, h } = this.size, step = 0.12;
    const action = {
      "+": () => this.zoomBy(1.4), "=": () => this.zoomBy(1.4), "-": () => this.zoomBy(1 / 1.4), "0": () => this.all(),
      ArrowLeft: () => this.pan(w * step, 0), ArrowRight: () => this.pan(-w * step, 0), ArrowUp: () => this.pan(0, h * step), ArrowDown: () => this.pan(0, -h * step),
      Enter: () => this.select(this.inView().filter(([i, x, y]) => x >= 0 && y >= 0 && x <= w && y <= h && (this.only === null || this.label[i] === this.only)).map(([i]) => this.ids[i])),
      Escape: () => this.select([]),
    }[e.key];
    if (action && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); action(); }
  }
}
