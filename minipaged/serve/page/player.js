"use strict";
// Draws what a recording says, line by line: a file, or the feed of a server. It computes nothing of its own.
const $ = (id) => document.getElementById(id);
const lanes = new Map();  // lane name -> Lane, in the order in which they came
let picked = null, pointed = null, dirty = true;

class Lane {
  constructor(header) {
    this.sequences = new Map();
    this.published = new Map();
    this.contents = new Map();  // block -> the texts it was last seen to hold
    this.history = [];
    this.frame = { running: 0, waiting: 0, blocks_held: 0, index: 0 };
    this.most = this.preemptions = 0;
    this.begin(header);
  }

  begin(header) {  // a feed that starts anew tells everything again
    if (this.header && this.header.num_blocks !== header.num_blocks) this.contents.clear();
    this.header = header;
    this.sequences.clear();
    this.published.clear();
  }

  apply(frame) {
    const seqs = frame.sequences || {};
    for (const [name, change] of Object.entries(seqs)) {
      let s = this.sequences.get(name);
      if (!s) this.sequences.set(name, s = { status: "", prompt: 0, stored: 0, blocks: [], tokens: [] });
      if (change.tokens) s.tokens.push(...change.tokens);
      if (change.blocks) s.blocks.splice(change.from, s.blocks.length, ...change.blocks);
      for (const key of ["status", "prompt", "stored"]) if (key in change) s[key] = change[key];
    }
    const found = Object.entries(frame.published || {});
    if (found.length) {
      const owners = this.owners();
      for (const [block, hash] of found) {
        this.published.set(+block, hash);
        const at = owners.get(+block);
        if (at) this.contents.set(+block, this.texts(at[0]));
        else this.contents.delete(+block);
      }
    }
    for (const block of frame.unpublished || []) this.published.delete(block);
    for (const name of frame.gone || []) this.sequences.delete(name);
    if (frame.index !== this.frame.index) this.preemptions += frame.preempted || 0;
    if (!this.sequences.size && "sequences" in frame) Object.assign(frame, { running: 0, waiting: 0 });
    this.frame = { ...this.frame, ...frame, preemptions: this.preemptions };
    this.most = Math.max(this.most, frame.running || 0);
    const size = this.header.bytes_per_block * this.header.num_blocks;
    const stored = this.sequences.size || !("sequences" in frame) ? (frame.used_bytes || 0) / size : 0;
    const last = this.history.at(-1), time = (frame.time || 0) + (frame.duration || 0);
    if (!("index" in frame)) return;  // no step was taken yet
    if (!last || time > last.time) {
      this.history.push({ time, held: frame.blocks_held / this.header.num_blocks, stored, made: frame.generated || 0 });
      if (this.history.length > 3000) this.history.splice(0, 1000);
    } else Object.assign(last, { held: frame.blocks_held / this.header.num_blocks, stored });
  }

  owners() {  // block -> [[sequence name, its place in that table], …]
    const owners = new Map();
    for (const [name, s] of this.sequences)
      s.blocks.forEach((block, place) => {
        const at = owners.get(block);
        if (at) at.push([name, place]); else owners.set(block, [[name, place]]);
      });
    return owners;
  }

  filled([name, place]) {  // tokens in the block at this place of a table
    const size = this.header.block_size;
    return Math.max(0, Math.min(size, this.sequences.get(name).stored - place * size));
  }

  texts([name, place]) {
    const start = place * this.header.block_size;
    return this.sequences.get(name).tokens.slice(start, start + this.filled([name, place]));
  }
}

function read(line) {  // one line of a recording
  const value = JSON.parse(line);
  if (!value.format) return lanes.get(value.lane)?.apply(value);
  if (value.format !== "minipaged-recording" || value.version !== 1)
    throw new Error(`${value.format} of version ${value.version} cannot be read, only minipaged-recording of version 1`);
  const lane = lanes.get(value.lane);
  if (lane) lane.begin(value); else lanes.set(value.lane, new Lane(value));
}

// The pool: one cell a block; a strip is as many cells as blocks would fit into it.

function places(lane, width) {
  const unit = Math.min(...[...lanes.values()].map((l) => l.header.block_size));
  const per = Math.max(1, Math.round(lane.header.block_size / unit)), cells = lane.header.num_blocks * per;
  const most = Math.max(...[...lanes.values()].map((l) => l.header.num_blocks * l.header.block_size / unit));
  const size = Math.max(5, Math.min(24, Math.floor(Math.sqrt(width * 330 / most))));
  let columns = Math.max(1, Math.floor(width / size));
  if (per > 1 && columns >= per) columns -= columns % per;
  const at = (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size];
  return { unit, per, cells, size, columns, height: Math.ceil(cells / columns) * size, at };
}

function colours() {
  const style = getComputedStyle(document.documentElement), found = {};
  for (const name of ["ground", "ink", "grey", "cached", "pale", "blue", "reserved"]) found[name] = style.getPropertyValue("--" + name);
  return found;
}

function fit(canvas, height) {  // sharp on any screen; returns the context in CSS pixels
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = height + "px"; }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

function drawPool(lane, view, colour) {
  const p = places(lane, view.canvas.clientWidth), [c] = fit(view.canvas, p.height);
  const owners = lane.owners(), inner = p.size - (p.size > 8 ? 2 : 1);
  view.places = p;
  for (let block = 0; block < lane.header.num_blocks; block++) {
    const at = owners.get(block), have = at ? Math.max(...at.map((a) => lane.filled(a))) : 0;
    for (let i = 0; i < p.per; i++) {
      const [x, y] = p.at(block * p.per + i), part = Math.max(0, Math.min(1, (have - i * p.unit) / p.unit));
      if (at) {
        c.fillStyle = colour.reserved;
        c.fillRect(x, y, inner, inner);
        if (part) { c.globalAlpha = 0.3 + 0.7 * part; c.fillStyle = colour.blue; c.fillRect(x, y, inner, inner); c.globalAlpha = 1; }
      } else if (lane.published.has(block)) { c.fillStyle = colour.cached; c.fillRect(x, y, inner, inner); }
      c.lineWidth = 1; c.strokeStyle = colour.pale;
      if (!at && !lane.published.has(block)) c.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      if (at && at.length > 1) { c.lineWidth = 2; c.strokeStyle = colour.ink; c.strokeRect(x + 1, y + 1, inner - 2, inner - 2); }
      if (pointed && pointed[0] === view.name && pointed[1] === block) { c.lineWidth = 3; c.strokeStyle = colour.ink; c.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1); }
    }
    if (p.per > 1) {  // where a strip begins
      const [x, y] = p.at(block * p.per);
      c.fillStyle = colour.ink; c.fillRect(x - 1, y, 2, inner);
    }
  }
}

function drawTable(lane, view) {
  const s = picked && lane.sequences.get(picked), blocks = s ? s.blocks : [];
  const text = blocks.map((block, place) => `${place}:${block}`).join();
  if (text !== view.shown) {
    view.shown = text;
    view.table.replaceChildren(...blocks.map((block, place) => {
      const item = document.createElement("li"), number = document.createElement("b");
      number.textContent = place + " → ";
      item.append(number, block);
      return item;
    }));
  }
  view.table.setAttribute("aria-label", picked ? word().tableOf(picked) : word().pickOne);
  if (!blocks.length) view.table.textContent = picked || view.name !== "blocks" ? "" : word().pickOne;
  const box = view.root.getBoundingClientRect(), pool = view.canvas.getBoundingClientRect();
  view.lines.replaceChildren(...blocks.slice(0, 200).map((block, place) => {
    const from = view.table.children[place].getBoundingClientRect(), p = view.places;
    const [x, y] = p.at(block * p.per), line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const ends = { x1: from.left + from.width / 2 - box.left, y1: from.bottom - box.top,
                   x2: pool.left - box.left + x + p.size / 2, y2: pool.top - box.top + y + p.size / 2 };
    for (const [key, value] of Object.entries(ends)) line.setAttribute(key, value);
    return line;
  }));
}

const views = new Map();
function view(name) {
  if (views.has(name)) return views.get(name);
  const root = document.createElement("section"), title = document.createElement("h3"), table = document.createElement("ol");
  const canvas = document.createElement("canvas"), lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  root.className = "lane"; table.className = "table"; canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  lines.setAttribute("aria-hidden", "true");
  root.append(title, table, canvas, lines);
  const made = { name, root, title, table, canvas, lines, shown: "", places: null };
  const under = (event) => {
    const box = canvas.getBoundingClientRect(), p = made.places;
    const column = Math.floor((event.clientX - box.left) / p.size), row = Math.floor((event.clientY - box.top) / p.size);
    const cell = row * p.columns + column;
    if (column < p.columns && cell >= 0 && cell < p.cells) point(name, Math.floor(cell / p.per));
  };
  canvas.addEventListener("pointermove", under);
  canvas.addEventListener("click", (event) => {
    under(event);
    const at = pointed && lanes.get(name).owners().get(pointed[1]);
    if (at) pick(at[0][0]);
  });
  canvas.addEventListener("keydown", (event) => {
    const p = made.places, by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -p.columns / p.per, ArrowDown: p.columns / p.per }[event.key];
    if (!by) return;
    event.preventDefault();
    const now = pointed && pointed[0] === name ? pointed[1] : 0;
    point(name, Math.max(0, Math.min(lanes.get(name).header.num_blocks - 1, now + Math.round(by))));
  });
  views.set(name, made);
  $("lanes").append(root);
  return made;
}

function point(name, block) { pointed = [name, block]; dirty = true; }
function pick(name) { picked = picked === name ? null : name; dirty = true; }

let blockShown = "";
function drawBlock() {
  const lane = pointed && lanes.get(pointed[0]), w = word();
  if (!lane) { $("block").textContent = blockShown = w.hoverOne; return; }
  const block = pointed[1], at = lane.owners().get(block) || [], hash = lane.published.get(block);
  const texts = at.length ? lane.texts(at[0]) : hash ? lane.contents.get(block) : [];
  const have = at.length ? lane.filled(at[0]) : hash ? lane.header.block_size : 0;
  const parts = [w.block(block, have, lane.header.block_size, at.length)];
  if (at.length) parts.push(w.heldBy(at.slice(0, 6).map((a) => a[0]).join(", ") + (at.length > 6 ? " …" : "")));
  else parts.push(hash ? w.isCached : w.isFree);
  if (hash) parts.push(w.hash(hash));
  const line = document.createElement("p"), code = document.createElement("code");
  line.textContent = parts.join(" · ");
  if (!texts) code.textContent = w.unseen;
  else code.replaceChildren(...texts.slice(0, 64).map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  const shown = line.textContent + code.textContent;
  if (shown === blockShown) return;  // a screen reader hears only what is new
  blockShown = shown;
  $("block").replaceChildren(line, code);
}

const buttons = new Map();
function drawRequests() {
  const all = new Map();
  for (const lane of lanes.values()) for (const [name, s] of lane.sequences) if (!all.has(name)) all.set(name, s);
  for (const [name, button] of buttons) if (!all.has(name)) { button.remove(); buttons.delete(name); }
  for (const [name, s] of all) {
    let button = buttons.get(name);
    if (!button) {
      if (buttons.size >= 200) continue;
      button = document.createElement("button");
      button.type = "button";
      button.addEventListener("click", () => pick(name));
      buttons.set(name, button);
      $("requests").append(button);
    }
    const text = `${name.replace(/\/0$/, "")} · ${s.blocks.length}`, label = `${name}, ${word().state[s.status] || s.status}, ${s.stored}`;
    if (button.textContent !== text) button.textContent = text;
    if (button.title !== label) button.title = label;
    if (button.className !== s.status) button.className = s.status;
    button.setAttribute("aria-pressed", name === picked);
  }
}

function drawCurves(colour) {
  const [c, width] = fit($("curves"), 170), lane = lanes.values().next().value, history = lane ? lane.history : [];
  c.font = "13px system-ui, sans-serif";
  if (history.length < 2) return;
  const end = history.at(-1).time, start = Math.max(history[0].time, end - 120), right = width - 135, bottom = 160;
  const shown = history.filter((h) => h.time >= start), x = (t) => (t - start) / Math.max(1e-9, end - start) * right;
  const rates = shown.map((h, i) => {
    let j = i;
    while (j > 0 && h.time - shown[j].time < 1) j--;
    return j < i ? (h.made - shown[j].made) / (h.time - shown[j].time) : 0;
  });
  const top = Math.max(1, ...rates), labels = [];
  const curve = (values, most, stroke, dash, label) => {
    c.beginPath(); c.strokeStyle = stroke; c.lineWidth = 1.6; c.setLineDash(dash);
    values.forEach((v, i) => c.lineTo(x(shown[i].time), bottom - v / most * (bottom - 12)));
    c.stroke(); c.setLineDash([]);
    labels.push([bottom - values.at(-1) / most * (bottom - 12), stroke, label]);
  };
  c.strokeStyle = colour.pale; c.lineWidth = 1; c.strokeRect(0.5, 11.5, right, bottom - 11);
  curve(shown.map((h) => h.held), 1, colour.grey, [], word().held);
  curve(shown.map((h) => h.stored), 1, colour.blue, [], word().filled);
  curve(rates, top, colour.ink, [3, 3], word().speedNow(Math.round(rates.at(-1))));
  labels.sort((a, b) => a[0] - b[0]);
  labels.forEach((label, i) => { if (i) label[0] = Math.max(label[0], labels[i - 1][0] + 15); });
  const over = Math.max(0, labels.at(-1)[0] - bottom);
  for (const [y, fill, text] of labels) { c.fillStyle = fill; c.fillText(text, right + 6, y - over + 4); }
}

function draw() {
  requestAnimationFrame(draw);
  if (!dirty || document.hidden) return;
  dirty = false;
  const colour = colours(), w = word();
  if (![...lanes.values()].some((lane) => lane.sequences.has(picked))) picked = null;
  for (const [name, shown] of views) if (!lanes.has(name)) { shown.root.remove(); views.delete(name); }
  for (const [name, lane] of lanes) {
    const v = view(name), kind = name === "strips" ? w.stripsOf : w.blocks, small = document.createElement("small");
    small.textContent = " " + w.counts({ preemptions: 0, ...lane.frame }, lane.most);
    v.title.replaceChildren(kind(lane.header), small);
    v.canvas.setAttribute("aria-label", w.poolLabel(kind(lane.header)));
    drawPool(lane, v, colour);
    drawTable(lane, v);
  }
  drawBlock();
  drawRequests();
  drawCurves(colour);
}

function speak() {  // write every fixed word anew
  const w = word(), first = lanes.values().next().value;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  $("language").textContent = w.other;
  if (first) $("about").textContent = w.about(first.header);
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = w[element.dataset.word];
  $("curves-title").textContent = w.curves;
  $("curves").setAttribute("aria-label", w.curves);
  const legend = [["tokens", "tokens"], ["some", "some"], ["shared", "shared"], ["cached", "cached"], ["free", "free"]];
  if (lanes.size > 1) legend.push(["reserved", "reserved"]);
  $("legend").replaceChildren(...legend.map(([kind, key]) => {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.className = kind;
    item.append(mark, w[key]);
    return item;
  }));
  for (const v of views.values()) v.shown = "";
  dirty = true;
}

$("language").addEventListener("click", () => { language = language === "en" ? "zh" : "en"; speak(); onSpeak(); });
window.addEventListener("resize", () => { dirty = true; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { dirty = true; });
let onSpeak = () => {};
requestAnimationFrame(draw);

// A recorded run

function replay(text) {
  const lines = text.split("\n").filter(Boolean);
  let place = 0, timer = null;
  const headers = lines.findIndex((line) => !JSON.parse(line).format);
  const seek = (to) => {
    if (to < place || !place) { lanes.clear(); place = 0; }
    while (place < Math.min(lines.length, to + headers + 1)) read(lines[place++]);
    const frame = lanes.values().next().value.frame;
    $("slider").value = to;
    $("place").textContent = frame.index ?? to;
    $("status").textContent = word().summary(frame);
    dirty = true;
  };
  const play = (on) => {
    clearInterval(timer);
    timer = on ? setInterval(() => { const to = +$("slider").value + 1; if (to <= +$("slider").max) seek(to); else play(false); }, 80) : null;
    $("play").textContent = on ? word().pause : word().play;
    $("play").setAttribute("aria-pressed", on);
  };
  $("replay").hidden = false;
  $("slider").max = lines.length - headers - 1;
  $("slider").oninput = () => seek(+$("slider").value);
  $("play").onclick = () => { if (timer === null && $("slider").value === $("slider").max) seek(0); play(timer === null); };
  onSpeak = () => { play(timer !== null); seek(+$("slider").value); };
  seek(0);
  speak();
  play(false);
}

$("file").addEventListener("change", async (event) => replay(await event.target.files[0].text()));
const recorded = document.getElementById("recording");  // laid into the page by `minipaged.serve.player`
if (recorded) replay(recorded.textContent);
if (!recorded && !document.querySelector("script[src]")) speak();  // a player without a server waits for a file
