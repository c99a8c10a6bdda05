"use strict";
// Draws what a recording says, line by line: a file, or the feed of a server. It computes nothing of its own:
// what a block holds and who shares it follows from the tables in the frames (docs/recordings.md).
const $ = (id) => document.getElementById(id);
const lanes = new Map();  // lane name -> Lane, in the order in which they came
let picked = null, pointed = null, dirty = true, onSpeak = () => {};
const request = (name) => name.slice(0, name.lastIndexOf("/"));
const short = (name) => name.replace(/\/0$/, "");

class Lane {
  constructor(header) {
    this.sequences = new Map();
    this.published = new Map();
    this.contents = new Map();  // block -> the texts it was last seen to hold
    this.history = [];
    this.events = [];  // [step, kind, …what its words take], newest first
    this.frame = { running: 0, waiting: 0, blocks_held: 0, index: 0, preemptions: 0 };
    this.most = 0;
    this.begin(header);
  }

  begin(header) {  // a feed that starts anew tells everything again
    if (this.header && this.header.num_blocks !== header.num_blocks) this.contents.clear();
    this.header = header;
    this.sequences.clear();
    this.published.clear();
    this.anew = this.history.length > 0;
  }

  apply(frame) {
    const before = new Map();  // sequence -> its table until now
    for (const [name, change] of Object.entries(frame.sequences || {})) {
      let s = this.sequences.get(name);
      if (!s) this.sequences.set(name, s = { status: "", prompt: 0, stored: 0, blocks: [], tokens: [] });
      before.set(name, s.blocks);
      if (change.tokens) s.tokens.push(...change.tokens);
      if (change.blocks) s.blocks = [...s.blocks.slice(0, change.from), ...change.blocks];
      for (const key of ["status", "prompt", "stored"]) if (key in change) s[key] = change[key];
    }
    if (!this.anew) this.notice(frame, before);
    this.anew = false;
    const found = Object.entries(frame.published || {}), owners = found.length ? this.owners() : null;
    for (const [block, hash] of found) {
      this.published.set(+block, hash);
      const at = owners.get(+block);
      if (at) this.contents.set(+block, this.texts(at[0])); else this.contents.delete(+block);
    }
    for (const block of frame.unpublished || []) this.published.delete(block);
    for (const name of frame.gone || []) this.sequences.delete(name);
    const counted = frame.index !== this.frame.index ? frame.preempted || 0 : 0;
    const idle = "sequences" in frame && !this.sequences.size ? { running: 0, waiting: 0 } : {};
    this.frame = { ...this.frame, ...frame, ...idle, preemptions: this.frame.preemptions + counted };
    this.most = Math.max(this.most, this.frame.running);
    if (!("index" in frame)) return;  // no step was taken yet
    const pool = this.header.num_blocks, last = this.history.at(-1), time = (frame.time || 0) + (frame.duration || 0);
    const stored = "running" in idle ? 0 : (frame.used_bytes || 0) / (this.header.bytes_per_block * pool);
    const entry = { time, held: this.frame.blocks_held / pool, stored, made: frame.generated || 0 };
    if (last && time <= last.time) Object.assign(last, entry); else this.history.push(entry);
    if (this.history.length > 3000) this.history.splice(0, 1000);
  }

  notice(frame, before) {  // forks, copies, hits and preemptions, as the changes of the tables show them
    const say = (...event) => { this.events.unshift([frame.index, ...event]); this.events.length = Math.min(8, this.events.length); };
    for (const name of frame.gone || []) say("ended", name, this.sequences.get(name)?.blocks.length ?? 0);
    const owners = this.owners(frame.gone);
    for (const [name, change] of Object.entries(frame.sequences || {})) {
      const old = before.get(name), now = this.sequences.get(name).blocks, tail = old.length - 1;
      if (change.status === "preempted" || change.status === "swapped") say("gaveWay", name, old.length);
      if (!change.blocks) continue;
      if (old.length && change.from === tail && now.length > tail && now[tail] !== old[tail] && owners.has(old[tail]))
        say("copy", name, old[tail], now[tail]);
      if (old.length || !now.length) continue;
      const isSibling = ([other]) => other !== name && request(other) === request(name);
      const shared = now.filter((block) => owners.get(block).some(isSibling));
      if (shared.length && !name.endsWith("/0")) { say("fork", name, shared.length); continue; }
      const fresh = (block) => block in (frame.published || {}) || (frame.unpublished || []).includes(block);
      let hits = 0;
      while (hits < now.length && (owners.get(now[hits]).length > 1 || (this.published.has(now[hits]) && !fresh(now[hits])))) hits++;
      if (hits && !shared.length) say("hit", name, hits);
    }
  }

  owners(gone = []) {  // block -> [[sequence name, its place in that table], …]
    const owners = new Map();
    for (const [name, s] of this.sequences)
      if (!gone.includes(name)) s.blocks.forEach((block, place) => {
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

function read(value) {  // one line of a recording, parsed
  if (!value.format) return lanes.get(value.lane)?.apply(value);
  if (value.format !== "minipaged-recording" || value.version !== 1)
    throw new Error(`${value.format} of version ${value.version} cannot be read, only minipaged-recording of version 1`);
  const lane = lanes.get(value.lane);
  if (lane) lane.begin(value); else lanes.set(value.lane, new Lane(value));
}

// The pool: one cell a block; a strip is as many cells as blocks would fit into it.

function places(lane, width) {
  const all = [...lanes.values()].map((l) => l.header), unit = Math.min(...all.map((h) => h.block_size));
  const per = Math.max(1, Math.round(lane.header.block_size / unit)), cells = lane.header.num_blocks * per;
  const most = Math.max(...all.map((h) => h.num_blocks * h.block_size / unit));
  const size = Math.max(6, Math.min(38, Math.floor(Math.sqrt(width * 300 / most))));
  let columns = Math.max(1, Math.floor(width / size));
  if (per > 1 && columns >= per) columns -= columns % per;
  const at = (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size];
  return { unit, per, cells, size, columns, height: Math.ceil(cells / columns) * size + 1, at };
}

function colours() {
  const style = getComputedStyle(document.documentElement), found = {};
  for (const name of ["ground", "ink", "grey", "cached", "pale", "blue", "reserved", "on-blue"]) found[name] = style.getPropertyValue("--" + name);
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
  const p = places(lane, view.canvas.clientWidth), [c] = fit(view.canvas, p.height), owners = lane.owners();
  const gap = p.size > 18 ? 3 : p.size > 8 ? 2 : 1, inner = p.size - gap, numbered = p.per === 1 && inner >= 24;
  const own = new Set(lane.sequences.get(picked)?.blocks || []);
  view.places = p;
  c.font = "11px system-ui, sans-serif"; c.textAlign = "center"; c.textBaseline = "middle";
  for (let block = 0; block < lane.header.num_blocks; block++) {
    const at = owners.get(block), have = at ? Math.max(...at.map((a) => lane.filled(a))) : 0;
    const cached = !at && lane.published.has(block), dim = own.size && at && !own.has(block) ? 0.3 : 1;
    for (let i = 0; i < p.per; i++) {
      const [x, y] = p.at(block * p.per + i), part = Math.max(0, Math.min(1, (have - i * p.unit) / p.unit));
      const fill = (style, alpha) => { c.globalAlpha = alpha; c.fillStyle = style; c.fillRect(x, y, inner, inner); c.globalAlpha = 1; };
      const frame = (style, width) => { c.lineWidth = width; c.strokeStyle = style; c.strokeRect(x + width / 2, y + width / 2, inner - width, inner - width); };
      if (at) { fill(colour.reserved, dim); if (part) fill(colour.blue, (0.3 + 0.7 * part) * dim); }
      else if (cached) fill(colour.cached, 1);
      else frame(colour.pale, 1);
      if (at && at.length > 1) frame(colour.ink, inner > 12 ? 2 : 1);
      if (pointed && pointed[0] === view.name && pointed[1] === block) frame(colour.ink, 3);
      if (numbered) {
        c.fillStyle = at && part > 0.45 && dim === 1 ? colour["on-blue"] : cached || at ? colour.ink : colour.grey;
        c.fillText(block, x + inner / 2, y + inner / 2 + 0.5);
      }
    }
    if (p.per > 1) {  // where a strip begins
      const [x, y] = p.at(block * p.per);
      c.fillStyle = colour.ink; c.fillRect(x - 1, y, 2, inner);
    }
  }
}

function drawTable(lane, view) {
  const s = picked && lane.sequences.get(picked), blocks = s ? s.blocks : [], w = word();
  const hint = picked || view.name !== "blocks" ? "" : w.pickOne, text = blocks.join() || hint;
  if (text !== view.shown) {
    view.shown = text;
    view.table.replaceChildren(...blocks.map((block, place) => {
      const item = document.createElement("li"), number = document.createElement("b");
      number.textContent = place + " → ";
      item.append(number, block);
      item.addEventListener("pointerenter", () => point(view.name, block));
      return item;
    }));
    if (!blocks.length) view.table.textContent = hint;
  }
  view.table.setAttribute("aria-label", picked ? w.tableOf(picked) : w.pickOne);
  const box = view.root.getBoundingClientRect(), pool = view.canvas.getBoundingClientRect(), p = view.places;
  view.lines.replaceChildren(...blocks.slice(0, 200).map((block, place) => {
    const from = view.table.children[place].getBoundingClientRect(), [x, y] = p.at(block * p.per);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path"), half = p.per > 1 ? 3 : p.size / 2;
    const x1 = from.left + from.width / 2 - box.left, y1 = from.bottom - box.top;
    const x2 = pool.left - box.left + x + half, y2 = pool.top - box.top + y + (p.size > 24 ? 4 : p.size / 2), bend = Math.min(28, (y2 - y1) / 2);
    line.setAttribute("d", `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`);
    if (pointed && pointed[0] === view.name && pointed[1] === block) line.setAttribute("class", "pointed");
    return line;
  }));
}

const views = new Map();
function view(name) {
  if (views.has(name)) return views.get(name);
  const make = (tag, className) => Object.assign(document.createElement(tag), { className });
  const root = make("section", "lane"), title = make("h3", ""), counts = make("p", "counts"), table = make("ol", "table");
  const canvas = make("canvas", ""), lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  lines.setAttribute("aria-hidden", "true");
  root.append(title, counts, table, canvas, lines);
  const made = { name, root, title, counts, table, canvas, lines, shown: null, places: null };
  const under = (event) => {
    const box = canvas.getBoundingClientRect(), p = made.places;
    const column = Math.floor((event.clientX - box.left) / p.size), row = Math.floor((event.clientY - box.top) / p.size);
    const cell = row * p.columns + column;
    if (column < p.columns && cell >= 0 && cell < p.cells) point(name, Math.floor(cell / p.per));
  };
  const pickPointed = () => { const at = pointed && lanes.get(name).owners().get(pointed[1]); if (at) pick(at[0][0]); };
  canvas.addEventListener("pointermove", under);
  canvas.addEventListener("click", (event) => { under(event); pickPointed(); });
  canvas.addEventListener("keydown", (event) => {
    const p = made.places, last = lanes.get(name).header.num_blocks - 1, now = pointed && pointed[0] === name ? pointed[1] : 0;
    const row = Math.max(1, Math.round(p.columns / p.per));
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowUp: now - row, ArrowDown: now + row, Home: 0, End: last }[event.key];
    if (to === undefined && event.key !== "Enter") return;
    event.preventDefault();
    if (to === undefined) pickPointed(); else point(name, Math.max(0, Math.min(last, to)));
  });
  views.set(name, made);
  $("lanes").append(root);
  return made;
}

function point(name, block) { pointed = [name, block]; dirty = true; }
function pick(name) { picked = picked === name ? null : name; dirty = true; }
function write(element, text) { if (element.textContent !== String(text)) element.textContent = text; }

let blockShown = "", told = null;
function drawBlock() {
  const lane = pointed && lanes.get(pointed[0]), w = word();
  if (!lane) { write($("block"), blockShown = w.hoverOne); return; }
  const block = pointed[1], at = lane.owners().get(block) || [], hash = lane.published.get(block);
  const texts = at.length ? lane.texts(at[0]) : hash ? lane.contents.get(block) : [];
  const have = at.length ? lane.filled(at[0]) : hash ? lane.header.block_size : 0;
  const parts = [w.block(block, have, lane.header.block_size, at.length)];
  if (at.length) parts.push(w.heldBy(at.slice(0, 6).map((a) => short(a[0])).join(", ") + (at.length > 6 ? " …" : "")));
  else parts.push(hash ? w.isCached : w.isFree);
  if (hash) parts.push(w.hash(hash));
  const line = document.createElement("p"), code = document.createElement("code");
  line.textContent = parts.join(" · ");
  if (!texts) code.textContent = w.unseen;
  else code.replaceChildren(...texts.slice(0, 64).map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  const shown = line.textContent + code.textContent;
  if (shown === blockShown) return;
  blockShown = shown;
  $("block").setAttribute("aria-live", told === pointed ? "off" : "polite");  // spoken when asked for, not as it fills
  told = pointed;
  $("block").replaceChildren(line, code);
}

// The requests: one row each, under what they are doing. The same as a table, for who cannot see the pool.

const rows = new Map(), GROUPS = ["running", "preempted", "waiting"];
function drawRequests() {
  const all = new Map(), sizes = { running: 0, preempted: 0, waiting: 0 };
  for (const lane of lanes.values()) for (const [name, s] of lane.sequences) if (!all.has(name)) all.set(name, s);
  for (const [name, row] of rows) if (!all.has(name)) { row.remove(); rows.delete(name); }
  for (const [name, s] of all) {
    const group = s.status === "swapped" ? "preempted" : s.status || "waiting";
    sizes[group]++;
    let row = rows.get(name);
    if (!row) {
      if (rows.size >= 200) continue;
      row = document.createElement("tr");
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: short(name), onclick: () => pick(name) });
      row.append(document.createElement("td"), document.createElement("td"), document.createElement("td"));
      row.firstChild.append(button);
      rows.set(name, row);
    }
    if (row.parentElement !== $(group)) $(group).append(row);
    row.className = name === picked ? "picked" : "";
    row.firstChild.firstChild.setAttribute("aria-pressed", name === picked);
    write(row.children[1], s.stored);
    write(row.children[2], s.blocks.length);
  }
  for (const group of GROUPS) {
    const body = $(group);
    body.hidden = !sizes[group];
    write(body.querySelector("th"), `${word().groups[group]} · ${sizes[group]}`);
  }
}

function drawEvents() {
  const events = lanes.values().next().value?.events || [], w = word();
  const text = events.join();
  if ($("events").dataset.shown === text + language) return;
  $("events").dataset.shown = text + language;
  $("events").replaceChildren(...events.map(([step, kind, name, ...more]) => {
    const item = Object.assign(document.createElement("li"), { className: kind }), number = document.createElement("b");
    number.textContent = step;
    item.append(number, " ", w[kind](short(name), ...more));
    return item;
  }));
}

function drawCurves(colour) {
  const [c, width] = fit($("curves"), 190), lane = lanes.values().next().value, history = lane ? lane.history : [], w = word();
  if (history.length < 2) return;
  const steps = lane.header.clock === "steps", end = history.at(-1).time, start = Math.max(history[0].time, end - (steps ? 400 : 120));
  const left = 44, right = width - (width < 500 ? 106 : 128), top = 12, bottom = 160, shown = history.filter((h) => h.time >= start);
  const x = (t) => left + (t - start) / Math.max(1e-9, end - start) * (right - left), span = steps ? 8 : 1;
  let first = 0;
  const rates = shown.map((h, i) => {
    while (first < i - 1 && h.time - shown[first].time > span) first++;
    return first < i ? (h.made - shown[first].made) / (h.time - shown[first].time) : 0;
  });
  rates[0] = rates[1];
  const most = Math.max(1, ...rates), labels = [];
  c.font = "12px system-ui, sans-serif";
  c.strokeStyle = colour.pale; c.lineWidth = 1; c.fillStyle = colour.grey;
  for (const [share, text] of [[0, "0"], [0.5, "50 %"], [1, "100 %"]]) {
    const y = Math.round(bottom - share * (bottom - top)) + 0.5;
    c.beginPath(); c.moveTo(left, y); c.lineTo(right, y); c.stroke();
    c.textAlign = "right"; c.fillText(text, left - 7, y + 4);
  }
  const timeText = (t) => steps ? w.stepNumber(Math.round(t)) : w.second(Math.round(t - history[0].time));
  c.textAlign = "left"; c.fillText(timeText(start), left, bottom + 18);
  c.textAlign = "right"; c.fillText(timeText(end), right, bottom + 18);
  const curve = (values, top1, stroke, dash, label) => {
    c.beginPath(); c.strokeStyle = stroke; c.lineWidth = 1.75; c.lineJoin = "round"; c.setLineDash(dash);
    values.forEach((v, i) => c.lineTo(x(shown[i].time), bottom - v / top1 * (bottom - top)));
    c.stroke(); c.setLineDash([]);
    labels.push([bottom - values.at(-1) / top1 * (bottom - top), stroke, label]);
  };
  const rate = rates.at(-1), digits = rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate);
  curve(rates, most * 1.05, colour.ink, [2, 3], steps ? w.perStep(digits) : w.perSecond(digits));
  curve(shown.map((h) => h.held), 1, colour.grey, [], w.held);
  curve(shown.map((h) => h.stored), 1, colour.blue, [], w.filled);
  labels.sort((a, b) => a[0] - b[0]);
  labels.forEach((label, i) => { if (i) label[0] = Math.max(label[0], labels[i - 1][0] + 15); });
  const over = Math.max(0, labels.at(-1)[0] - bottom);
  c.textAlign = "left";
  for (const [y, fill, text] of labels) { c.fillStyle = fill; c.fillText(text, right + 7, y - over + 4); }
}

function draw() {
  requestAnimationFrame(draw);
  if (!dirty || document.hidden) return;
  dirty = false;
  const colour = colours(), w = word();
  if (![...lanes.values()].some((lane) => lane.sequences.has(picked))) picked = null;
  for (const [name, shown] of views) if (!lanes.has(name)) { shown.root.remove(); views.delete(name); }
  for (const [name, lane] of lanes) {
    const v = view(name), kind = (name === "strips" ? w.stripsOf : w.blocks)(lane.header), many = document.createElement("b");
    write(v.title, kind);
    many.textContent = lane.frame.running;
    v.counts.replaceChildren(many, `${w.atOnce} · ${w.counts(lane.frame, lane.most)}`);
    v.canvas.setAttribute("aria-label", w.poolLabel(kind));
    drawPool(lane, v, colour);
    drawTable(lane, v);
  }
  document.documentElement.classList.toggle("two", lanes.size > 1);
  drawBlock();
  drawRequests();
  drawEvents();
  drawCurves(colour);
  grow();
}

function speak() {  // write every fixed word anew
  const w = word(), first = lanes.values().next().value;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  $("language").textContent = w.other;
  if (first) $("about").textContent = w.about(first.header);
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = w[element.dataset.word];
  $("curves-title").textContent = w.curves;
  $("curves").setAttribute("aria-label", w.curves);
  const legend = ["tokens", "some", "shared", "cached", "free", ...(lanes.size > 1 ? ["reserved"] : [])];
  $("legend").replaceChildren(...legend.map((kind) => {
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("i"), { className: kind }), w[kind]);
    return item;
  }));
  for (const v of views.values()) v.shown = null;
  dirty = true;
}

$("language").addEventListener("click", () => { language = language === "en" ? "zh" : "en"; speak(); onSpeak(); });
window.addEventListener("resize", () => { dirty = true; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { dirty = true; });
requestAnimationFrame(draw);

// Inside another page: as high as it needs, light or dark as that page is. A page read from a disk may not ask.

function grow() {
  const frame = embedded && window.frameElement, height = document.body.scrollHeight + 8;
  if (frame && Math.abs(frame.clientHeight - height) > 2) frame.style.height = height + "px";
}
let embedded = false;
try {
  if (window.frameElement) {
    embedded = true;
    const outside = window.parent.document.documentElement;
    const follow = () => { document.documentElement.dataset.theme = outside.dataset.theme || document.documentElement.dataset.theme || ""; dirty = true; };
    follow();
    new MutationObserver(follow).observe(outside, { attributes: true, attributeFilter: ["data-theme"] });
  }
} catch { /* it keeps its own height and follows the system */ }
if (window !== window.parent) document.documentElement.classList.add("embed");

// A recorded run

function replay(text, start = 0, name = null) {
  const lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const headers = lines.filter((value) => value.format), moments = [];
  for (const value of lines) {  // one moment: frames up to the next of a lane that has one
    if (value.format) continue;
    if (!moments.length || moments.at(-1).some((other) => other.lane === value.lane)) moments.push([]);
    moments.at(-1).push(value);
  }
  let done = 0, timer = null;
  const last = moments.length - 1, here = () => +$("slider").value;
  const seek = (to) => {
    to = Math.max(0, Math.min(last, to));
    if (to + 1 < done || !done) { lanes.clear(); headers.forEach(read); done = 0; }
    while (done <= to) moments[done++].forEach(read);
    const lane = lanes.values().next().value, w = word(), leftOut = lane.frame.left_out;
    $("slider").value = to;
    $("slider").setAttribute("aria-valuetext", w.summary(lane.frame, lane.header.num_blocks));
    $("place").textContent = w.place(to, last);
    if (timer === null) $("status").textContent = w.summary(lane.frame, lane.header.num_blocks) + (leftOut && to === last ? w.leftOut(leftOut) : "");
    dirty = true;
  };
  const play = (on) => {
    clearInterval(timer);
    timer = on ? setInterval(() => { if (here() < last) seek(here() + 1); else play(false); }, 1000 / +$("pace").value) : null;
    $("play").textContent = on ? word().pause : word().play;
    if (!on) seek(here());
  };
  const label = () => {
    $("back").textContent = "◀"; $("forward").textContent = "▶";
    for (const id of ["back", "forward"]) { $(id).title = word()[id]; $(id).setAttribute("aria-label", word()[id]); }
    for (const option of $("pace").options) { option.value = parseInt(option.value); option.textContent = word().paceOf(option.value); }
    play(timer !== null);
  };
  $("replay").hidden = false;
  $("slider").max = last;
  $("slider").oninput = () => { play(false); seek(here()); };
  $("play").onclick = () => { if (timer === null && here() === last) seek(0); play(timer === null); };
  $("back").onclick = () => { play(false); seek(here() - 1); };
  $("forward").onclick = () => { play(false); seek(here() + 1); };
  $("pace").onchange = () => play(timer !== null);
  onSpeak = () => { seek(here()); label(); };
  seek(start);
  picked = name;
  speak();
  label();
}

$("file").addEventListener("change", async (event) => replay(await event.target.files[0].text()));
const recorded = $("recording");  // laid into the page by `coursekit.player`, with the step to begin at
if (recorded) {
  const asked = new URLSearchParams(location.hash.slice(1)), { step, pick: name, language: spoken } = { ...recorded.dataset, ...Object.fromEntries(asked) };
  if (spoken in WORDS) language = spoken;
  replay(recorded.textContent, +step || 0, name || null);
} else if (!document.querySelector("script[src]")) {  // a player without a server waits for a file
  $("replay").hidden = $("open").hidden = false;
  speak();
}
