// The panel beside the timeline, and the tooltip: events, ranges, pairs and comparisons in words.

const rate = (amount, seconds, unit) => (amount > 0 && seconds > 0 ? si(amount / seconds, unit) : null);

/** Everything known of an event; `jump` goes to another one. */
function detailsOf(runs, which, jump) {
  const run = runs[which.run], event = eventOf(run, which.index);
  const length = event.end - event.start;
  const others = sameNode(run, which.index);
  const link = (i) => {
    const other = eventOf(run, i);
    const text = `${other.device} · ${other.stream} · ${duration(other.start)}`;
    return el('button', { class: 'link', onclick: () => jump({ run: which.run, index: i }) }, text);
  };
  return [
    el('h2', {}, runs.length > 1 ? `Event of ${'AB'[which.run]}` : 'Event'),
    el('p', { class: 'event-name' }, event.name),
    pairs([
      ['Node', `#${event.node}`],
      ['Device', event.device],
      ['Stream', event.stream],
      ['Program counter', String(event.pc)],
      ['Kind', event.kind],
      ['Stage', event.stage],
      ['Microbatch', event.microbatch === null ? null : String(event.microbatch)],
      ['Tags', event.tags],
      ['Start', duration(event.start)],
      ['End', duration(event.end)],
      ['Duration', duration(length)],
      ['Bytes', event.nbytes ? bytes(event.nbytes) : null],
      ['Bandwidth', rate(event.nbytes, length, 'B/s')],
      ['FLOPs', event.flops ? si(event.flops, 'FLOP') : null],
      ['Speed', rate(event.flops, length, 'FLOP/s')],
      ['Critical', event.critical ? 'yes: a delay here delays the step' : 'no'],
      ['Directive', el('code', { class: 'mono directive' }, event.directive || '–')],
    ]),
    ...comparedWith(runs, which, jump),
    ...(others.length ? [el('h3', {}, 'Same node on other devices'), shortList(others, 48, link)] : []),
  ];
}

/** The same event in the other run. */
function comparedWith(runs, which, jump) {
  const index = partnerOf(runs, which.run, which.index);
  if (index === null) return [];
  const other = { run: 1 - which.run, index };
  const text = `${duration(durationOf(runs, other))} (${differenceOf(runs, which, other)})`;
  const name = `In ${'AB'[other.run]}`;
  return [el('h3', {}, name), el('p', {}, el('button', { class: 'link', onclick: () => jump(other) }, text))];
}

const durationOf = (runs, { run, index }) => runs[run].end[index] - runs[run].start[index];

/** How much longer the second event takes, and how much later it starts. */
function differenceOf(runs, mine, other) {
  const now = durationOf(runs, mine), more = durationOf(runs, other) - now;
  const later = runs[other.run].start[other.index] - runs[mine.run].start[mine.index];
  const least = 1e-6 * Math.max(...runs.map((run) => run.ends)); // rounding
  const share = now > 0 ? `, ${signed(more / now, percent)}` : '';
  const longer = Math.abs(more) < 1e-6 * now ? 'as long' : signed(more, duration) + share;
  return Math.abs(later) < least ? longer : `${longer}; starts ${duration(Math.abs(later))} ${later > 0 ? 'later' : 'earlier'}`;
}

const NOTHING = [
  el('h2', {}, 'Event'),
  el('p', { class: 'quiet' }, 'Click an event, or press ] to step through them. '
    + 'Shift-drag selects a time range; ? lists all keys.'),
];

/** What a tooltip says of an event. */
function tipOf(runs, which) {
  const event = eventOf(runs[which.run], which.index);
  const length = event.end - event.start;
  const moved = event.nbytes ? `${bytes(event.nbytes)}${length > 0 ? ` · ${rate(event.nbytes, length, 'B/s')}` : ''}` : null;
  const made = event.flops ? `${si(event.flops, 'FLOP')}${length > 0 ? ` · ${rate(event.flops, length, 'FLOP/s')}` : ''}` : null;
  const index = partnerOf(runs, which.run, which.index);
  const other = index === null ? null : { run: 1 - which.run, index };
  return [
    el('p', { class: 'name' }, event.name),
    el('p', { class: 'quiet' }, `#${event.node} · ${event.device} · ${event.stream}`),
    pairs([
      ['Duration', duration(length)],
      ['Start', duration(event.start)],
      ['Bytes', moved],
      ['FLOPs', made],
      ['Critical', event.critical ? 'yes' : null],
    ]),
    other && el('p', { class: 'other' },
      `In ${'AB'[other.run]}: ${duration(durationOf(runs, other))}, ${differenceOf(runs, which, other)}`),
  ].filter(Boolean);
}

function memoryTip(device, t) {
  const { times, bytes: held } = device.memory;
  const i = upperBound(times, t, 0, times.length) - 1;
  return [
    el('p', { class: 'name' }, device.name),
    pairs([
      ['Allocated', bytes(held[Math.max(i, 0)])],
      ['Time', duration(t)],
      ['Peak', bytes(device.memory.peak)],
      ['Limit', device.limit === null ? null : bytes(device.limit)],
    ]),
  ];
}

function bar(share) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  made.setAttribute('class', 'bar');
  made.setAttribute('viewBox', '0 0 64 6');
  made.setAttribute('aria-hidden', 'true');
  for (const [name, wide] of [['all', 64], ['part', 64 * Math.min(share, 1)]]) {
    const rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    for (const [key, value] of Object.entries({ class: name, width: wide, height: 6, rx: 2 })) rect.setAttribute(key, value);
    made.append(rect);
  }
  return made;
}

/** How busy each device is in a time range. */
function rangeOf(runs, spans, zoom, clear) {
  const rows = runs.flatMap((run) => run.devices.filter((d) => d.computes).map((device) => {
    const { from, to } = spans[run.number];
    const busy = to > from ? busyWithin(device.busy, from, to) / (to - from) : 0;
    const name = runs.length > 1 ? `${'AB'[run.number]} ${device.name}` : device.name;
    const shares = [busy, 1 - busy].map((share) => el('td', { class: 'number' }, percent(share)));
    return el('tr', {}, el('td', {}, name), el('td', {}, bar(busy)), shares);
  }));
  const lengths = runs.map((run) => duration(spans[run.number].to - spans[run.number].from));
  const begins = runs.map((run) => duration(spans[run.number].from));
  return [
    el('h2', {}, 'Range'),
    pairs([['Length', [...new Set(lengths)].join(' · ')], ['From', [...new Set(begins)].join(' · ')]]),
    el('table', {},
      el('thead', {}, el('tr', {}, el('th', {}, 'Compute'), el('th', {}),
        ['busy', 'idle'].map((name) => el('th', { class: 'number' }, name)))),
      el('tbody', {}, rows)),
    el('div', { class: 'actions' }, el('button', { onclick: zoom }, 'Zoom in'), el('button', { onclick: clear }, 'Clear')),
  ];
}

/** All pairs of overlapping passes. */
function pairsShown(runs, pairsByRun, jump) {
  const all = pairsByRun.flatMap((list, run) => list.map((pair) => ({ run, ...pair })));
  const text = ({ run, device, first, second, start, end }) =>
    `${runs.length > 1 ? `${'AB'[run]} ` : ''}${runs[run].devices[device].name}: `
    + `${first.label} + ${second.label} · ${duration(end - start)}`;
  const link = (pair) => el('button', { class: 'link', onclick: () => jump(pair) }, text(pair));
  return [
    el('h2', {}, `Overlapped pairs: ${count(all.length)}`),
    all.length
      ? shortList(all, 120, link)
      : el('p', { class: 'quiet' }, 'No device runs two passes at once.'),
  ];
}

const UNITS = new Map([...TIMES, ...SIZES].map(([size, unit]) => [unit, size]));

/** A figure as a number, if it is one with a unit: "1,234.5 ms (slow)" is 1.2345 in seconds. */
function figureOf(text) {
  const parts = /^\s*([+\-−]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([^\s(]*)\s*(?:\(.*\))?\s*$/i.exec(text);
  if (!parts) return null;
  const value = Number(parts[1].replaceAll(',', '').replace('−', '-')), unit = parts[2];
  if (!Number.isFinite(value)) return null;
  const isOf = (units) => units.some(([, name]) => name === unit);
  const kind = isOf(TIMES) ? 'time' : isOf(SIZES) || unit === 'B' ? 'bytes' : unit;
  return { value: value * (UNITS.get(unit) ?? 1), kind };
}

/** The second figure minus the first, as text. */
function changeOf(first, second) {
  const a = figureOf(first), b = figureOf(second);
  if (!a || !b || a.kind !== b.kind) return '';
  const more = b.value - a.value, { kind } = a;
  if (more === 0) return '=';
  if (kind === '%') return `${signed(more, (x) => x.toFixed(1))} pp`;
  const text = kind === 'time' ? duration : kind === 'bytes' ? bytes : (x) => count(Number(x.toPrecision(4)));
  return a.value ? signed(more / a.value, percent) : signed(more, text);
}

/** The figures of a run. The peak is computed here, like those beside the devices. */
function factsOf(run) {
  const facts = new Map([['step', duration(run.seconds)], ...run.facts]);
  const top = topDevice(run);
  if (top) facts.set('peak memory', bytes(top.memory.peak));
  return [...facts.set('events', count(run.size))];
}

/** The device with the highest peak, if any holds memory. */
const topDevice = (run) => run.devices.filter((device) => device.memory.peak)
  .sort((a, b) => b.memory.peak - a.memory.peak)[0];

/** The device of the peak in words, and whether any device needs more than it has. */
function peakNote(run) {
  const name = run.devices.length > 1 && topDevice(run) ? [topDevice(run).name] : [];
  return [...name, ...(run.devices.some(isOver) ? ['over the limit'] : [])].join(', ');
}

function comparisonOf(runs) {
  const [a, b] = runs.map((run) => new Map(factsOf(run)));
  const rows = [...new Set([...a.keys(), ...b.keys()])].map((name) => {
    const first = a.get(name) ?? '–', second = b.get(name) ?? '–', head = el('th', { scope: 'row' }, name);
    if (Math.max(first.length, second.length) > 14) {
      const lines = first === second ? [first] : [`A: ${first}`, `B: ${second}`];
      return el('tr', {}, head, el('td', { colspan: 3 }, lines.map((line) => el('div', {}, line))));
    }
    return el('tr', {}, head, [first, second, changeOf(first, second)].map((text) => el('td', { class: 'number' }, text)));
  });
  return [
    el('h2', {}, 'A and B'),
    el('table', {},
      el('thead', {}, el('tr', {}, ['', 'A', 'B', 'B − A'].map((name, i) =>
        el('th', { class: i ? 'number' : '', scope: 'col' }, name)))),
      el('tbody', {}, rows)),
  ];
}
