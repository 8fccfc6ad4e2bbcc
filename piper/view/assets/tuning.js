// The page of a search: the front, the candidates, and what was refused.

const data = readData();
const PARTS = { compute: 'compute', waiting: 'bubble', exposed: 'exposed communication', update: 'update' };
const fitting = data.candidates.filter((c) => c.seconds !== null && !c.refused);
const refused = data.candidates.filter((c) => c.refused);
const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const step = (s) => (s >= 1 ? `${s.toFixed(3)} s` : `${(1000 * s).toFixed(2)} ms`);
const took = (c) => c.measured_seconds ?? c.seconds;

byId('title').textContent = data.title;
byId('proven').textContent = data.proven;
byId('why').textContent = data.why ?? 'Nothing fits.';
byId('code').textContent = fitting.length ? fitting[0].code : '';
byId('json').textContent = JSON.stringify(data.strategy, null, 1);
byId('legend').append(...Object.entries(PARTS).flatMap(([name, text]) => [el('span', { class: `key ${name}` }), text]));

/** The parts of a step as a bar. */
function bar(c) {
  const total = Object.values(c.parts).reduce((a, b) => a + b, 0) || 1;
  const parts = Object.keys(PARTS).map((name) => {
    const part = el('span', { class: name, title: `${PARTS[name]} ${step(c.parts[name])}` });
    part.style.width = `${(100 * Math.max(0, c.parts[name])) / total}%`;
    return part;
  });
  return el('span', { class: 'bar' }, parts);
}

const COLUMNS = [
  ['strategy', (c) => c.name, (c) => c.name],
  ['step', (c) => c.seconds, (c) => step(c.seconds)],
  ['measured', (c) => c.measured_seconds ?? Infinity, (c) => (c.measured_seconds ? step(c.measured_seconds) : '')],
  ['memory', (c) => c.peak_bytes, (c) => gib(c.peak_bytes)],
  ['MFU', (c) => -c.mfu, (c) => percent(c.mfu)],
  ...Object.keys(PARTS).map((name) => [PARTS[name], (c) => c.parts[name], (c) => percent(c.parts[name] / c.seconds)]),
  ['', (c) => c.seconds, bar],
].filter(([name]) => name !== 'measured' || fitting.some((c) => c.measured_seconds));

let sorted = null;
let chosen = fitting[0];

function choose(c) {
  chosen = c;
  byId('code').textContent = c.code;
  table();
  front();
}

function table() {
  const rows = [...fitting];
  if (sorted !== null) {
    const key = COLUMNS[sorted][1];
    rows.sort((a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0));
  }
  const heads = COLUMNS.map(([name], i) =>
    el('th', { 'aria-sort': i === sorted ? 'ascending' : null },
      el('button', { onclick: () => { sorted = i; table(); } }, name)));
  const lines = rows.slice(0, 500).map((c) =>
    el('tr', { class: c === chosen ? 'chosen' : null, onclick: () => choose(c) },
      COLUMNS.map(([, , shown]) => el('td', {}, shown(c)))));
  byId('candidates').replaceChildren(el('thead', {}, el('tr', {}, heads)), el('tbody', {}, lines));
}

function svg(tag, attributes, text = '') {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** Each candidate at its time and memory; those that none beats in both are outlined. */
function front() {
  const points = data.candidates.filter((c) => c.seconds !== null);
  if (!points.length) return;
  const fastest = Math.min(...points.map(took));
  const slowest = Math.min(Math.max(...points.map(took)), 4 * fastest);
  const held = Math.max(...points.map((c) => c.peak_bytes));
  const near = held > 0.4 * data.memory_bytes;
  const most = (near ? Math.max(held, data.memory_bytes) : held) * 1.05;
  const x = (c) => 60 + (720 * (took(c) - fastest)) / (slowest - fastest || 1);
  const y = (bytes) => 320 - (290 * bytes) / most;
  const shown = [
    svg('line', { x1: 60, y1: 320, x2: 790, y2: 320, class: 'axis' }),
    svg('line', { x1: 60, y1: 20, x2: 60, y2: 320, class: 'axis' }),
    ...(near ? [
      svg('line', { x1: 60, y1: y(data.memory_bytes), x2: 790, y2: y(data.memory_bytes), class: 'limit' }),
      svg('text', { x: 700, y: y(data.memory_bytes) - 4 }, gib(data.memory_bytes)),
    ] : []),
    svg('text', { x: 4, y: y(held) + 4 }, gib(held)),
    svg('text', { x: 60, y: 340 }, step(fastest)),
    svg('text', { x: 740, y: 340 }, step(slowest)),
    svg('text', { x: 380, y: 352 }, 'seconds of a step'),
    svg('text', { x: 4, y: 12 }, 'memory'),
  ];
  let least = Infinity;
  const best = new Set();
  for (const c of [...fitting].sort((a, b) => took(a) - took(b))) {
    if (c.peak_bytes < least) best.add(c);
    least = Math.min(least, c.peak_bytes);
  }
  for (const c of points.filter((one) => took(one) <= slowest)) {
    const kind = [c.refused ? 'over' : '', best.has(c) ? 'front' : '', c === chosen ? 'chosen' : ''].join(' ');
    const dot = svg('circle', { cx: x(c), cy: y(c.peak_bytes), r: best.has(c) ? 6 : 4, class: kind });
    dot.addEventListener('click', () => { if (!c.refused) choose(c); });
    dot.addEventListener('pointermove', (event) => {
      const tip = byId('tip');
      tip.replaceChildren(el('strong', {}, c.name), pairs([
        ['step', step(c.seconds)], ['measured', c.measured_seconds ? step(c.measured_seconds) : null],
        ['memory', gib(c.peak_bytes)], ['MFU', percent(c.mfu)],
        ...Object.keys(PARTS).map((name) => [PARTS[name], step(c.parts[name])]),
        ['refused', c.refused],
      ]));
      tip.hidden = false;
      tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 430)}px`;
      tip.style.top = `${event.clientY + 12}px`;
    });
    dot.addEventListener('pointerleave', () => { byId('tip').hidden = true; });
    shown.push(dot);
  }
  byId('front').replaceChildren(...shown);
}

if (data.sensitivity) {
  const names = data.compared;
  const rows = Object.entries(data.sensitivity).map(([change, figures]) =>
    el('tr', {}, el('td', {}, change), figures.map((s) => el('td', {}, s === null ? '' : step(s)))));
  byId('sensitivity').append(
    el('thead', {}, el('tr', {}, el('th', {}, 'if the hardware were'), names.map((n) => el('th', {}, n)))),
    el('tbody', {}, rows));
}
byId('refused').append(el('tbody', {}, refused.slice(0, 300).map((c) =>
  el('tr', {}, el('td', {}, c.name), el('td', {}, c.refused)))));
table();
front();
