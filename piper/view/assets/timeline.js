// The timeline page: what is chosen and in sight, and what mouse, fingers and keys do to it.

const runs = readRuns(readData());
const canvas = byId('canvas'), scroller = byId('scroller'), tip = byId('tip');
const MANY_ROWS = 80, MANY_ROWS_OF_TWO = 24; // more than these begin collapsed
const NARROWEST = 1e-9, WIDEST = 1.012; // shares of the step in sight: at most all of it and a margin

const scene = {
  ctx: canvas.getContext('2d'), width: 1, height: 1, ratio: 1, left: 236, scroll: 0,
  runs, view: { from: 0, to: 1 }, scaled: false,
  layout: null, colours: null, lit: runs.map(() => null), ink: null, hatch: null,
  critical: false, bubbles: true, pairs: null,
  selected: null, hovered: null, partner: null, match: null, range: null, cursor: null,
};
const state = { collapsed: new Set(), memory: true, query: '', matches: [], current: -1 };
const frames = [];
let dirty = false, work = { events: 0, shapes: 0 };

// Drawing: once a frame at most, and only if something changed

function redraw() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    const begin = performance.now();
    work = draw(scene);
    frames.push(performance.now() - begin);
    if (frames.length > 1000) frames.shift();
  });
}

function relayout() {
  scene.layout = layoutOf(runs, state.collapsed, state.memory);
  byId('spacer').style.height = `${Math.max(0, scene.layout.height + 8 - scene.height)}px`;
  redraw();
}

function resize() {
  scene.width = Math.max(scroller.clientWidth, 50);
  scene.height = Math.max(scroller.clientHeight, 50);
  scene.ratio = devicePixelRatio || 1;
  scene.left = scene.width < 620 ? 124 : 236;
  canvas.width = Math.round(scene.width * scene.ratio);
  canvas.height = Math.round(scene.height * scene.ratio);
  canvas.style.height = `${scene.height}px`;
  repaintInks();
  relayout();
}

function repaintInks() {
  scene.ink = inks();
  scene.hatch = hatching(scene.ctx, scene.ink, scene.ratio);
  redraw();
}

// What is in sight

/** Show the shares `from` to `to` of the step, and nothing before its start or after its end. */
function look(from, to) {
  const wide = Math.min(Math.max(to - from, NARROWEST), WIDEST);
  const begin = Math.min(Math.max(from, 0), WIDEST - wide);
  scene.view = { from: begin, to: begin + wide };
  redraw();
}

const fit = () => look(0, WIDEST);
const shareAt = (x) => scene.view.from + ((x - scene.left) / plotWidth(scene)) * (scene.view.to - scene.view.from);

/** Zoom so that what is below `x` stays there. */
function zoom(factor, x = scene.left + plotWidth(scene) / 2) {
  const { from, to } = scene.view, at = shareAt(x);
  const wide = Math.min(Math.max((to - from) / factor, NARROWEST), WIDEST);
  look(at - ((at - from) / (to - from)) * wide, at - ((at - from) / (to - from)) * wide + wide);
}

function pan(pixels) {
  const move = (pixels / plotWidth(scene)) * (scene.view.to - scene.view.from);
  look(scene.view.from + move, scene.view.to + move);
}

/** Bring an event into sight: opened, centred, and wide enough to be seen. */
function centre({ run: number, index }) {
  const run = runs[number], row = rowOf(run, index);
  const key = `${number}/${run.rows[row].device}`;
  if (!rectOf(scene, run, index)) { state.collapsed.delete(key); relayout(); }
  const whole = horizon(scene, run), middle = (run.start[index] + run.end[index]) / 2 / whole;
  const length = (run.end[index] - run.start[index]) / whole;
  let wide = scene.view.to - scene.view.from;
  if (length > 0 && (length / wide) * plotWidth(scene) < 12) wide = Math.max((length * plotWidth(scene)) / 40, NARROWEST);
  if (length > wide) wide = length * 1.5;
  const box = rectOf(scene, run, index);
  const inSight = box.x >= scene.left && box.x + box.width <= scene.width && box.width >= 12;
  if (!inSight) look(middle - wide / 2, middle + wide / 2);
  if (box.y < AXIS + PAD || box.y + ROW > scene.height - 8) scroller.scrollTop += box.y - scene.height / 2;
}

function zoomTo(number, start, end) {
  const whole = horizon(scene, runs[number]), margin = (end - start) * 0.15;
  look((start - margin) / whole, (end + margin) / whole);
}

// Events under the pointer, and the chosen one

function hitAt(x, y) {
  const part = partAt(scene, y);
  if (!part) return null;
  const run = runs[part.block.run];
  if (x < scene.left) return { device: part.block };
  if (part.row !== null) {
    const index = eventNear(scene, run, part.row, x);
    return index === null ? null : { event: { run: run.number, index } };
  }
  return part.memory ? { memory: run.devices[part.block.device], time: timeAt(scene, run, x) } : null;
}

function select(which, { show = true } = {}) {
  scene.selected = which;
  byId('details').replaceChildren(...(which ? detailsOf(runs, which, (other) => select(other)) : NOTHING));
  scene.partner = partnerMark(which);
  if (which) {
    if (show) centre(which);
    const event = eventOf(runs[which.run], which.index);
    const when = `from ${duration(event.start)} for ${duration(event.end - event.start)}`;
    announce(`${event.name}, ${event.device}, ${event.stream}, ${when}`);
  }
  redraw();
}

function partnerMark(which) {
  const index = which && partnerOf(runs, which.run, which.index);
  return index === null || index === undefined ? null : { run: 1 - which.run, index };
}

function hover(x, y, clientX, clientY) {
  const hit = x === null ? null : hitAt(x, y);
  const event = hit?.event ?? null;
  const same = event && scene.hovered && event.run === scene.hovered.run && event.index === scene.hovered.index;
  scene.hovered = event;
  scene.partner = partnerMark(event ?? scene.selected);
  scene.cursor = x !== null && x >= scene.left ? x : null;
  canvas.classList.toggle('point', Boolean(event || hit?.device));
  if (event && !same) tip.replaceChildren(...tipOf(runs, event));
  if (hit?.memory) tip.replaceChildren(...memoryTip(hit.memory, hit.time));
  tip.hidden = !(event || hit?.memory);
  if (!tip.hidden) placeTip(clientX, clientY);
  redraw();
}

function placeTip(x, y) {
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = `${x + 16 + wide < innerWidth ? x + 16 : Math.max(4, x - wide - 12)}px`;
  tip.style.top = `${y + 18 + high < innerHeight ? y + 18 : Math.max(4, y - high - 12)}px`;
}

/** The next event of the row, or the first in sight if none is chosen; false where the row ends. */
function step(by) {
  if (!scene.selected) return select(firstInSight());
  const { run, index } = scene.selected, row = runs[run].rows[rowOf(runs[run], index)];
  const next = index + by;
  if (next < row.first || next >= row.last) return false;
  return select({ run, index: next });
}

function firstInSight() {
  for (const block of scene.layout.blocks) {
    if (block.top + block.height < scene.scroll + AXIS) continue;
    const run = runs[block.run];
    for (const { row } of block.rows) {
      const { first, last } = run.rows[row];
      const i = upperBound(run.end, firstTime(scene, run), first, last);
      if (i < last) return { run: block.run, index: i };
    }
  }
  return null;
}

/** The event at the same time on the next row that is shown and has any. */
function stepRow(by) {
  if (!scene.selected) return select(firstInSight());
  const { run, index } = scene.selected, t = (runs[run].start[index] + runs[run].end[index]) / 2;
  const shown = scene.layout.blocks.flatMap((block) => block.rows.map(({ row }) => ({ run: block.run, row })));
  const row = rowOf(runs[run], index);
  let at = shown.findIndex((one) => one.run === run && one.row === row) + by;
  for (; at >= 0 && at < shown.length; at += by) {
    const other = runs[shown[at].run], { first, last } = other.rows[shown[at].row];
    if (last === first) continue;
    return select({ run: shown[at].run, index: Math.min(upperBound(other.end, t, first, last), last - 1) });
  }
  return undefined;
}

// Search

function search(query) {
  state.query = query;
  const masks = runs.map((run) => matchesOf(run, query));
  const marked = (marks) => (marks ? [...marks.keys()].filter((i) => marks[i]) : []);
  state.matches = masks.flatMap((marks, run) => marked(marks).map((index) => ({ run, index })));
  state.matches.sort((a, b) => a.run - b.run || runs[a.run].start[a.index] - runs[b.run].start[b.index]);
  state.masks = masks;
  state.current = -1;
  scene.match = null;
  showCount();
  light();
}

function cycle(by) {
  const { matches } = state;
  if (!matches.length) return;
  state.current = state.current < 0 ? (by > 0 ? 0 : matches.length - 1) : (state.current + by + matches.length) % matches.length;
  scene.match = matches[state.current];
  showCount();
  select(scene.match);
}

function showCount() {
  byId('matches').textContent = foundText(state);
}

/** Which events are lit: those found, or only the critical ones of these; null if all are. */
function light() {
  scene.lit = runs.map((run, number) => {
    const mask = state.masks?.[number] ?? null;
    if (!scene.critical) return mask;
    return mask ? mask.map((one, i) => one & run.critical[i]) : run.critical;
  });
  redraw();
}

// Choices

function colourBy(by) {
  scene.colours = coloured(runs, by);
  byId('colour').value = by;
  byId('legend').replaceChildren(...legendOf(scene.colours.legend));
  redraw();
}

/** The colours with their names; of many, some. Each finds what it stands for. */
function legendOf(items) {
  const most = 28, every = Math.ceil(items.length / most);
  const shown = items.filter((_, i) => i % every === 0 || i === items.length - 1);
  return shown.map(({ label, colour, query }) => {
    const swatch = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    const rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    rect.setAttribute('fill', colour);
    swatch.append(rect);
    const find = () => {
      const again = byId('search').value === query;
      byId('search').value = again ? '' : query;
      search(byId('search').value);
    };
    return el('button', { title: `Find ${label}`, onclick: find }, swatch, el('span', { class: 'label' }, label));
  });
}

function nextColour() {
  const names = [...byId('colour').options].map((option) => option.value);
  colourBy(names[(names.indexOf(byId('colour').value) + 1) % names.length]);
}

const TOGGLES = {
  critical: (on) => { scene.critical = on; light(); },
  bubbles: (on) => { scene.bubbles = on; redraw(); },
  memory: (on) => { state.memory = on; relayout(); },
  scaled: (on) => { scene.scaled = on; selectRange(null); redraw(); },
  overlaps: (on) => {
    scene.pairs = on ? runs.map(pairsOf) : null;
    byId('pairs').hidden = !on;
    if (on) byId('pairs').replaceChildren(...pairsShown(runs, scene.pairs, showPair));
    redraw();
  },
};

function toggle(name) {
  const button = byId(name);
  if (button.hidden) return;
  button.setAttribute('aria-pressed', String(!pressed(button)));
  TOGGLES[name](pressed(button));
}

function showPair(pair) {
  const start = Math.min(pair.first.start, pair.second.start), end = Math.max(pair.first.end, pair.second.end);
  zoomTo(pair.run, start, end);
  const block = scene.layout.blocks.find((one) => one.run === pair.run && one.device === pair.device);
  const y = block.top - scene.scroll;
  if (y < AXIS || y + ROW > scene.height) scroller.scrollTop = block.top - scene.height / 3;
}

function collapse(block) {
  const key = `${block.run}/${block.device}`;
  if (!state.collapsed.delete(key)) state.collapsed.add(key);
  relayout();
}

function collapseChosen() {
  const { selected } = scene;
  if (!selected) return;
  const run = runs[selected.run];
  collapse({ run: selected.run, device: run.rows[rowOf(run, selected.index)].device });
}

function collapseAll() {
  const keys = runs.flatMap((run) => run.devices.map((_, i) => `${run.number}/${i}`));
  state.collapsed = new Set(state.collapsed.size < keys.length ? keys : []);
  relayout();
}

/** Choose a range, in shares of the step, or none. */
function selectRange(range) {
  scene.range = range;
  byId('range').hidden = !range;
  if (range) {
    const spans = runs.map((run) => {
      const whole = horizon(scene, run);
      return { from: Math.max(0, range.from * whole), to: Math.min(run.ends, range.to * whole) };
    });
    byId('range').replaceChildren(...rangeOf(runs, spans, () => look(range.from, range.to), () => selectRange(null)));
  }
  redraw();
}

// Mouse and fingers

const pointers = new Map();
let drag = null;

const within = (event) => {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};

canvas.addEventListener('pointerdown', (event) => {
  if (event.button !== 0) return;
  const at = within(event);
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, at);
  drag = { ...at, lastX: at.x, lastY: at.y, moved: false, range: event.shiftKey && at.x >= scene.left, from: shareAt(at.x) };
});

canvas.addEventListener('pointermove', (event) => {
  const at = within(event);
  if (pointers.size === 2 && pointers.has(event.pointerId)) return pinch(event.pointerId, at);
  if (!drag || !pointers.has(event.pointerId)) return hover(at.x, at.y, event.clientX, event.clientY);
  if (!drag.moved && Math.hypot(at.x - drag.x, at.y - drag.y) < 4) return undefined;
  drag.moved = true;
  tip.hidden = true;
  canvas.classList.add(drag.range ? 'select' : 'pan');
  if (drag.range) {
    const ends = [drag.from, shareAt(at.x)].sort((a, b) => a - b);
    selectRange({ from: ends[0], to: ends[1] });
  } else {
    pan(drag.lastX - at.x);
    scroller.scrollTop += drag.lastY - at.y;
  }
  drag.lastX = at.x;
  drag.lastY = at.y;
  return undefined;
});

/** Two fingers: what was between them stays between them. */
function pinch(moved, at) {
  const other = [...pointers].find(([id]) => id !== moved)[1], before = pointers.get(moved);
  const was = Math.max(Math.abs(before.x - other.x), 8), now = Math.max(Math.abs(at.x - other.x), 8);
  zoom(now / was, other.x);
  pointers.set(moved, at);
  if (drag) drag.moved = true;
}

function release(event) {
  pointers.delete(event.pointerId);
  canvas.classList.remove('pan', 'select');
  if (!drag) return;
  const { moved, x, y } = drag;
  drag = null;
  if (moved || event.type === 'pointercancel') return;
  const hit = hitAt(x, y);
  if (hit?.device) collapse(hit.device);
  else if (x >= scene.left) select(hit?.event ?? null, { show: false });
}
canvas.addEventListener('pointerup', release);
canvas.addEventListener('pointercancel', release);
canvas.addEventListener('pointerleave', () => { if (!drag) hover(null); });
canvas.addEventListener('dblclick', (event) => { if (within(event).x >= scene.left) fit(); });

canvas.addEventListener('wheel', (event) => {
  const { x } = within(event);
  if (x < scene.left && !event.ctrlKey) return; // over the names it scrolls
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1;
  const swiped = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : swiped;
  if (sideways) pan(sideways * unit);
  else zoom(Math.exp(-event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.0018)), x);
  hover(x, within(event).y, event.clientX, event.clientY);
}, { passive: false });

scroller.addEventListener('scroll', () => { scene.scroll = scroller.scrollTop; redraw(); });

// Keys

const help = byId('keys');
const HELP = [
  ['+ −', 'zoom (also: wheel, pinch)'],
  ['← →', 'move in time (also: drag, Shift + wheel)'],
  ['↑ ↓', 'scroll (also: wheel over the device names)'],
  ['0', 'show the whole step (also: double-click)'],
  ['] [', 'next, previous event of the stream'],
  ['Tab', 'next event, once one is selected; Esc to leave the timeline'],
  ['j k', 'event on the stream below, above'],
  ['Enter', 'zoom to the selected event'],
  ['/', 'search by name, tag, kind, directive, or #node'],
  ['n N', 'next, previous match (Enter in the search field)'],
  ['c', 'colour by pass, microbatch, stage, directive'],
  ['p', 'critical path'],
  ['b', 'bubbles: time in which a device does not compute'],
  ['o', 'overlapping passes'],
  ['m', 'memory'],
  ['r', 'select the visible time range (also: Shift + drag)'],
  ['x X', 'collapse the selected device, all devices'],
  ['s', 'comparison: one time axis, or fit each run'],
  ['t', 'light or dark theme'],
  ['Esc', 'clear selection and search'],
  ['?', 'this help'],
];

const scrollBy = (pixels) => { scroller.scrollTop += pixels; };
const onCanvas = () => document.activeElement === canvas;

bindKeys({
  '+': () => zoom(1.5), '=': () => zoom(1.5), '-': () => zoom(1 / 1.5), '−': () => zoom(1 / 1.5),
  ArrowLeft: () => pan(-plotWidth(scene) / 8), ArrowRight: () => pan(plotWidth(scene) / 8),
  ArrowUp: () => scrollBy(-60), ArrowDown: () => scrollBy(60),
  PageUp: () => scrollBy(60 - scene.height), PageDown: () => scrollBy(scene.height - 60),
  0: fit,
  ']': () => step(1), '[': () => step(-1), j: () => stepRow(1), k: () => stepRow(-1),
  Tab: (event) => {
    if (!onCanvas() || !scene.selected) return false; // leaves the canvas as anywhere
    return step(event.shiftKey ? -1 : 1);
  },
  Enter: () => {
    if (!onCanvas() || !scene.selected) return false;
    const { run, index } = scene.selected;
    return zoomTo(run, runs[run].start[index], runs[run].end[index] || runs[run].ends);
  },
  '/': () => { byId('search').focus(); byId('search').select(); },
  n: () => cycle(1), N: () => cycle(-1),
  c: nextColour, p: () => toggle('critical'), b: () => toggle('bubbles'), o: () => toggle('overlaps'),
  m: () => toggle('memory'), s: () => toggle('scaled'), t: () => byId('theme').click(),
  r: () => selectRange({ from: Math.max(0, scene.view.from), to: Math.min(1, scene.view.to) }),
  x: collapseChosen, X: collapseAll,
  Escape: () => { selectRange(null); select(null); byId('search').value = ''; search(''); },
  '?': () => help.showModal(),
});

byId('search').addEventListener('input', (event) => search(event.target.value));
byId('search').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') cycle(event.shiftKey ? -1 : 1);
  else if (event.key === 'Escape') { event.target.value = ''; search(''); canvas.focus(); }
  else return;
  event.preventDefault();
});
byId('colour').addEventListener('change', (event) => colourBy(event.target.value));
for (const name of Object.keys(TOGGLES)) byId(name).addEventListener('click', () => toggle(name));
byId('zoom-in').addEventListener('click', () => zoom(1.5));
byId('zoom-out').addEventListener('click', () => zoom(1 / 1.5));
byId('fit').addEventListener('click', fit);
byId('help').addEventListener('click', () => help.showModal());

// Begin

function start() {
  document.title = runs.map((run) => run.title).join(' and ');
  byId('title').textContent = runs.length > 1 ? 'Two runs compared' : runs[0].title || 'Timeline';
  if (runs.length > 1) {
    byId('scaled').hidden = false;
    byId('comparison').hidden = false;
    byId('comparison').replaceChildren(...comparisonOf(runs));
  } else {
    const note = (name) => (name === 'peak memory' && peakNote(runs[0]) ? ` (${peakNote(runs[0])})` : '');
    byId('facts').append(...factsOf(runs[0]).map(([name, figure]) =>
      el('div', {}, el('dt', {}, name), el('dd', {}, figure + note(name)))));
  }
  const devices = runs.reduce((sum, run) => sum + run.devices.length, 0);
  const events = runs.reduce((sum, run) => sum + run.size, 0);
  canvas.setAttribute('aria-label', `Timeline of ${count(devices)} devices and ${count(events)} events; press ? for keys`);
  const rows = runs.reduce((sum, run) => sum + run.rows.length, 0);
  if (rows > (runs.length > 1 ? MANY_ROWS_OF_TWO : MANY_ROWS)) collapseAll();
  fillHelp(help, HELP);
  select(null);
  if (!events) byId('details').replaceChildren(el('p', { class: 'quiet' }, 'There are no events in this step.'));
  colourBy('kind');
  startTheme(byId('theme'), repaintInks);
  new ResizeObserver(resize).observe(scroller);
  resize();
  fit();
}

start();

// For tests, and for the curious: points are pixels of the window, as the mouse has them.

window.piper = {
  runs,
  view: () => ({
    ...scene.view, width: scene.width, height: scene.height, left: scene.left, scroll: scene.scroll,
    scaled: scene.scaled, critical: scene.critical, bubbles: scene.bubbles, memory: state.memory,
    pairs: scene.pairs, range: scene.range, selected: scene.selected, hovered: scene.hovered,
    partner: scene.partner, matches: state.matches.length, collapsed: state.collapsed.size, ...work,
  }),
  event: (run, index) => eventOf(runs[run], index),
  eventAt: (x, y) => {
    const box = canvas.getBoundingClientRect();
    return hitAt(x - box.left, y - box.top)?.event ?? null;
  },
  rectOf: (run, index) => {
    const box = canvas.getBoundingClientRect(), rect = rectOf(scene, runs[run], index);
    return rect && { ...rect, x: rect.x + box.left, y: rect.y + box.top };
  },
  frameTimes: () => [...frames],
  look, select,
};
