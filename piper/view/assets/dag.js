// The page of the DAG: which step, which groups are open, what is chosen, and drawing it as SVG.

const dag = readDag(readData());
const SVG = 'http://www.w3.org/2000/svg';

const state = {
  step: dag.steps.length - 1, levels: GROUPINGS[0], open: new Set(), compare: false, order: true,
  chosen: null, // { step, at } or { step, group }
  matches: [], current: -1, query: '',
  said: '', // what the last action could not do
  x: 0, y: 0, k: 1, // the drawing moved and enlarged
  most: 600, // boxes at once: more cannot be read, and slow the browser down
};
const panes = {
  before: { figure: byId('before'), svg: byId('before').querySelector('svg'), boxes: new Map(), edges: [] },
  after: { figure: byId('after'), svg: byId('after').querySelector('svg'), boxes: new Map(), edges: [] },
};

// What is shown

const now = () => dag.steps[state.step];
const earlier = () => dag.steps[state.step - 1];
const shownPanes = () => (state.compare && earlier() ? ['before', 'after'] : ['after']);

function show({ refit = false } = {}) {
  const both = shownPanes().length === 2;
  byId('before').hidden = !both;
  let kept = false;
  for (const name of shownPanes()) kept = render(name) || kept;
  byId('compare').disabled = !earlier();
  showSteps();
  showNote(kept);
  showFacts();
  if (refit) fit();
  else transform();
  mark();
}

// Groups

function open(group, pane) {
  const parts = partsOf(dag, pane.step, group, state.levels).length;
  if (pane.tree.shown - 1 + parts > state.most) {
    state.said = `${group.label} has ${count(parts)} parts, and at most ${count(state.most)} boxes are shown at once: `
      + 'close other groups first, or press x to close all.';
    showNote(false);
    return;
  }
  state.open.add(group.path);
  state.said = '';
  show();
  refocus(group.path);
  announce(`${group.label} open, ${count(parts)} parts`);
}

function close(group) {
  for (const path of [...state.open]) if (path === group.path || path.startsWith(`${group.path}/`)) state.open.delete(path);
  state.said = '';
  show();
  refocus(group.path);
  announce(`${group.label} closed`);
}

function refocus(path) {
  panes.after.boxes.get(path)?.drawn.focus();
}

/** Open the next level of every group, if that is not too much. */
function openLevel() {
  const { leaves, tree, step } = panes.after, closed = leaves.filter((leaf) => leaf.kind === 'group');
  const boxes = closed.reduce((sum, leaf) => sum + partsOf(dag, step, leaf, state.levels).length - 1, tree.shown);
  const most = count(state.most);
  state.said = !closed.length ? 'All groups are open.' : boxes <= state.most ? ''
    : `The next level has ${count(boxes)} boxes, and at most ${most} are shown at once: open single groups instead.`;
  if (boxes <= state.most) closed.forEach((leaf) => state.open.add(leaf.path));
  show({ refit: true });
}

function closeAll() {
  state.open.clear();
  state.said = '';
  show({ refit: true });
}

/** Open the groups around a node; only these, if all together would be too many. */
function reveal(step, at) {
  const paths = [];
  const root = treeOf(dag, step, state.levels, new Set(), state.most).root;
  for (let group = root; ;) {
    const part = partsOf(dag, step, group, state.levels).find((one) => one.members.includes(at));
    if (!part || part.kind === 'node') break;
    paths.push(part.path);
    group = part;
  }
  const all = new Set([...state.open, ...paths]);
  state.open = treeOf(dag, step, state.levels, all, state.most).kept ? new Set(paths) : all;
}

// Steps

function go(step) {
  state.step = Math.min(Math.max(step, 0), dag.steps.length - 1);
  state.chosen = null;
  state.said = '';
  find(state.query);
  show({ refit: true });
  details();
  const { label, diff } = now();
  showCurrent();
  announce(`Step ${state.step}: ${label}${diff ? `; ${effectText(diff.counts)}` : ''}`);
}

function showSteps() {
  byId('where').textContent = `Step ${state.step} of ${dag.steps.length - 1}`;
  byId('slider').value = state.step;
  byId('steps').querySelectorAll('button').forEach((button, i) => {
    if (i === state.step) button.setAttribute('aria-current', 'step');
    else button.removeAttribute('aria-current');
  });
}

const showCurrent = () => byId('steps').querySelector('[aria-current]').scrollIntoView({ block: 'nearest' });

function listSteps() {
  byId('slider').max = dag.steps.length - 1;
  byId('steps').append(...dag.steps.map((step, i) => {
    const effect = step.diff ? effectOf(step.diff.counts) : [];
    const said = [effect.length ? effect : null, ...step.notes].filter(Boolean);
    const shown = said.flatMap((part, n) => (n ? [' · ', part] : [part]));
    return el('li', {}, el('button', { onclick: () => go(i), title: step.label.length > 60 ? step.label.slice(0, 600) : null },
      el('span', { class: 'place' }, String(i)), el('span', { class: 'directive' }, step.label.slice(0, 300)),
      el('span', { class: 'effect' }, shown.length ? shown : i ? 'no node changed' : `${count(step.size)} nodes`)));
  }));
}

function showFacts() {
  const counts = now().diff?.counts;
  const facts = [['nodes', now().size], ...Object.entries(counts ?? {})];
  byId('facts').replaceChildren(...facts.map(([name, n]) =>
    el('div', {}, el('dt', {}, name), el('dd', { class: name }, count(n)))));
}

/** Why some groups are closed. */
function showNote(kept) {
  const begin = now().size > state.most && !state.open.size;
  const text = state.said
    || (kept && `More than ${count(state.most)} boxes would be open here: some groups stay closed.`)
    || (begin && `The ${count(now().size)} nodes are in closed groups: click a group to open it. `
      + `At most ${count(state.most)} boxes are shown at once.`)
    || '';
  byId('note').textContent = text;
  byId('note').hidden = !text;
}

// The chosen one

function choose(chosen, { focus = false } = {}) {
  state.chosen = chosen;
  details();
  mark();
  if (!chosen) return;
  announce(`#${chosen.at} ${textOf(dag, dag.steps[chosen.step], chosen.at, 'name')}`);
  if (focus) centre(chosen);
}

function details() {
  const { chosen } = state;
  const pane = panes.after;
  if (!chosen) {
    const whole = groupDetails(dag, now(), pane.tree.root, now().diff?.counts ?? null);
    const hint = 'Click a group to open it, or a node for its details; ? lists all keys.';
    byId('details').replaceChildren(...whole, el('p', { class: 'quiet hint' }, hint));
    return;
  }
  byId('details').replaceChildren(...nodeDetails(dag, dag.steps[chosen.step], chosen.at, (at) => jump(chosen.step, at)));
}

function jump(step, at) {
  reveal(dag.steps[step], at);
  show();
  choose({ step, at }, { focus: true });
}

const boxOf = (pane, at) => pane.leaves.find((leaf) => leaf.members.includes(at));

/** Bring a node's box into the middle, large enough to read. */
function centre({ step, at }) {
  const name = shownPanes().find((one) => panes[one].step.number === step);
  const box = name && boxOf(panes[name], at);
  if (box) look(box, Math.max(state.k, 0.8));
}

/** Bring a box into the middle, at scale `k`; without, as large as fits. */
function look(box, k) {
  const { width, height } = panes.after.svg.getBoundingClientRect();
  state.k = k ?? Math.min((width - 24) / box.w, (height - 24) / box.h, 1.25);
  state.x = width / 2 - (box.x + box.w / 2) * state.k;
  state.y = height / 2 - (box.y + box.h / 2) * state.k;
  transform();
}

/** Mark what is chosen and found, and the edges of what is chosen. */
function mark() {
  for (const name of shownPanes()) {
    const pane = panes[name];
    const mine = state.chosen && state.chosen.step === pane.step.number ? boxOf(pane, state.chosen.at) : null;
    const matches = name === 'after' ? new Set(state.matches) : new Set();
    pane.svg.classList.toggle('choosing', Boolean(mine));
    for (const { part, drawn } of pane.boxes.values()) {
      if (part.open) continue;
      const hit = matches.size > 0 && part.members.some((at) => matches.has(at));
      drawn.classList.toggle('is-chosen', part === mine);
      drawn.classList.toggle('is-found', hit);
      drawn.classList.toggle('dim', matches.size > 0 && !hit);
    }
    for (const { edge, line } of pane.edges) {
      line.classList.toggle('near', mine !== null && (edge.source === mine || edge.target === mine));
    }
  }
}

// Search

function find(query) {
  state.query = query.trim().toLowerCase();
  state.current = -1;
  const step = now(), number = /^#(\d+)$/.exec(state.query);
  const good = dag.strings.map((text) => text.toLowerCase().includes(state.query));
  const has = (at) => ['name', 'kind', 'devices', 'stream', 'made_by'].some((column) => good[dag.nodes[column][step.nodes[at]]])
    || tagText(tagsOf(dag, step, at)).toLowerCase().includes(state.query);
  const all = Array.from({ length: step.size }, (_, at) => at);
  state.matches = !state.query ? [] : number ? all.filter((at) => at === Number(number[1])) : all.filter(has);
  showCount();
}

function showCount() {
  byId('matches').textContent = foundText(state);
}

function cycle(by) {
  const { matches } = state;
  if (!matches.length) return;
  state.current = state.current < 0 ? (by > 0 ? 0 : matches.length - 1) : (state.current + by + matches.length) % matches.length;
  showCount();
  jump(state.step, matches[state.current]);
}

// Moving and zooming: both panes together

const READABLE = 0.45; // below this scale, open groups have large names, and a click on a node zooms in
const isSmall = (group) => group.w * state.k < 500;

function transform() {
  const where = `translate(${state.x},${state.y}) scale(${state.k})`;
  for (const { world, svg, names } of shownPanes().map((name) => panes[name])) {
    world.setAttribute('transform', where);
    svg.classList.toggle('far', state.k < READABLE);
    for (const { text, part } of names) {
      text.setAttribute('font-size', Math.min(20 / state.k, (1.6 * part.w) / part.label.length));
      text.toggleAttribute('hidden', !isSmall(part) || isSmall(part.parent));
    }
  }
}

function fit() {
  const sizes = shownPanes().map((name) => panes[name].size), box = panes.after.svg.getBoundingClientRect();
  const w = Math.max(...sizes.map((size) => size.w), 1), h = Math.max(...sizes.map((size) => size.h), 1);
  state.k = Math.min(Math.max(Math.min((box.width - SIDES) / w, (box.height - ENDS) / h), 0.02), 1.25);
  state.x = Math.max(24, (box.width - w * state.k) / 2);
  state.y = Math.max(24, (box.height - h * state.k) / 2 - 12);
  transform();
}

function zoom(factor, x, y) {
  const box = panes.after.svg.getBoundingClientRect();
  const [cx, cy] = [x ?? box.width / 2, y ?? box.height / 2];
  const k = Math.min(Math.max(state.k * factor, 0.02), 4);
  state.x = cx - ((cx - state.x) * k) / state.k;
  state.y = cy - ((cy - state.y) * k) / state.k;
  state.k = k;
  transform();
}

function pan(dx, dy) {
  state.x += dx;
  state.y += dy;
  transform();
}

let drag = null, moved = false;
const fingers = new Map();

for (const { svg } of Object.values(panes)) {
  svg.addEventListener('wheel', (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    if (event.shiftKey) pan(-(event.deltaY || event.deltaX), 0);
    else zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  svg.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    fingers.set(event.pointerId, event);
    drag = { x: event.clientX, y: event.clientY };
    moved = false;
  });
  svg.addEventListener('pointermove', (event) => {
    if (!fingers.has(event.pointerId)) return;
    if (fingers.size === 2) return pinch(svg, event);
    if (!moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 4) return undefined;
    if (!moved) svg.setPointerCapture(event.pointerId);
    moved = true;
    svg.classList.add('pan');
    pan(event.clientX - drag.x, event.clientY - drag.y);
    drag = { x: event.clientX, y: event.clientY };
    return undefined;
  });
  for (const type of ['pointerup', 'pointercancel', 'pointerleave']) {
    svg.addEventListener(type, (event) => { fingers.delete(event.pointerId); svg.classList.remove('pan'); });
  }
  svg.addEventListener('dblclick', (event) => { if (event.target === svg) fit(); });
}

function pinch(svg, event) {
  const other = [...fingers.values()].find((one) => one.pointerId !== event.pointerId), was = fingers.get(event.pointerId);
  const far = (one) => Math.max(Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY), 8);
  const box = svg.getBoundingClientRect();
  zoom(far(event) / far(was), other.clientX - box.left, other.clientY - box.top);
  fingers.set(event.pointerId, event);
  moved = true;
}

// Controls

const help = byId('keys');
const HELP = [
  ['+ −', 'zoom (also: wheel, pinch)'],
  ['← → ↑ ↓', 'move (also: drag)'],
  ['0', 'show the whole graph (also: double-click)'],
  ['Tab', 'next box; Enter opens a group or selects a node'],
  ['[ ]', 'previous, next step'],
  ['v', 'before and after the step, side by side'],
  ['o', 'show edges that only order nodes'],
  ['g', 'next grouping'],
  ['e x', 'open the next level, close all groups'],
  ['/', 'search by name, tag, kind, device, directive, or #node'],
  ['n N', 'next, previous match (Enter in the search field)'],
  ['t', 'light or dark theme'],
  ['Esc', 'clear selection and search'],
  ['?', 'this help'],
];

function toggle(name) {
  if (byId(name).disabled) return;
  state[name] = !state[name];
  byId(name).setAttribute('aria-pressed', String(state[name]));
  show({ refit: name === 'compare' });
}

function groupBy(number) {
  byId('levels').value = number;
  state.levels = GROUPINGS[number];
  closeAll();
}

bindKeys({
  '+': () => zoom(1.3), '=': () => zoom(1.3), '-': () => zoom(1 / 1.3), '−': () => zoom(1 / 1.3), 0: fit,
  ArrowLeft: () => pan(60, 0), ArrowRight: () => pan(-60, 0), ArrowUp: () => pan(0, 60), ArrowDown: () => pan(0, -60),
  '[': () => go(state.step - 1), ']': () => go(state.step + 1),
  v: () => toggle('compare'), o: () => toggle('order'), e: openLevel, x: closeAll,
  g: () => groupBy((Number(byId('levels').value) + 1) % GROUPINGS.length),
  '/': () => { byId('search').focus(); byId('search').select(); },
  n: () => cycle(1), N: () => cycle(-1), t: () => byId('theme').click(),
  Escape: () => { byId('search').value = ''; find(''); choose(null); },
  '?': () => help.showModal(),
});

byId('search').addEventListener('input', (event) => { find(event.target.value); mark(); });
byId('search').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') cycle(event.shiftKey ? -1 : 1);
  else if (event.key === 'Escape') { event.target.value = ''; find(''); mark(); event.target.blur(); }
  else return;
  event.preventDefault();
});
byId('slider').addEventListener('input', (event) => go(Number(event.target.value)));
byId('levels').addEventListener('change', (event) => groupBy(Number(event.target.value)));
byId('compare').addEventListener('click', () => toggle('compare'));
byId('order').addEventListener('click', () => toggle('order'));
byId('expand').addEventListener('click', openLevel);
byId('collapse').addEventListener('click', closeAll);
byId('fit').addEventListener('click', fit);
byId('zoom-in').addEventListener('click', () => zoom(1.3));
byId('zoom-out').addEventListener('click', () => zoom(1 / 1.3));
byId('help').addEventListener('click', () => help.showModal());

// Begin

function legend() {
  const kinds = [...new Set(Array.from(dag.nodes.kind, (kind) => dag.strings[kind]))].sort((a, b) => rank(a) - rank(b));
  const swatch = (kind) => draw('svg', { viewBox: '0 0 11 11' },
    draw('rect', { width: 11, height: 11, rx: 2.5, fill: KIND_COLOURS[kind] ?? OTHER }));
  const marks = [['added', '+ added'], ['changed', '± changed'], ['removed', '− removed']];
  byId('legend').append(
    ...kinds.map((kind) => el('span', {}, swatch(kind), kind)),
    el('span', { class: 'spring' }),
    el('span', {}, marks.map(([name, text]) => el('span', { class: name }, text))),
  );
}

document.title = dag.title;
byId('title').textContent = dag.title || 'Graph';
byId('levels').append(...GROUPINGS.map((levels, i) => el('option', { value: i }, levels.slice(0, 3).join(' › '))));
listSteps();
legend();
fillHelp(help, HELP);
startTheme(byId('theme'), () => {});
show();
details();
show({ refit: true }); // the details have their height now
showCurrent();

let size = byId('panes').getBoundingClientRect();
new ResizeObserver(() => {
  const next = byId('panes').getBoundingClientRect();
  const slight = next.width === size.width && Math.abs(next.height - size.height) < 60; // a note came or went
  if (!slight) { size = next; show({ refit: true }); }
}).observe(byId('panes'));

// For tests, and for the curious.

window.piper = {
  steps: () => dag.steps.map(({ label, size, diff, notes }) => ({ label, size, notes, counts: diff?.counts ?? null })),
  shown: (name = 'after') => panes[name].leaves.map((leaf) => ({
    kind: leaf.kind, path: leaf.path, nodes: leaf.members.length,
    label: leaf.kind === 'group' ? leaf.label : labelOf(panes[name].step, leaf),
  })),
  edges: (name = 'after') => panes[name].edges.map(({ edge }) => ({
    from: edge.source.path, to: edge.target.path, values: edge.values, orders: edge.orders,
  })),
  overlaps: (name = 'after') => overlapping(panes[name].leaves),
  state, go,
};

/** Boxes that lie on each other: there should be none. */
function overlapping(boxes) {
  const overlaps = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
    if (a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h) overlaps.push([a.path, b.path]);
  }));
  return overlaps;
}
