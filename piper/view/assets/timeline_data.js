// Runs as the page holds them: columns of numbers, and what is found out about them once.

const PASSES = new Set(['F', 'B', 'BI', 'BW']);

/** The first place in `array[low..high)` whose item is greater than `x`; the items rise. */
function upperBound(array, x, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

function readRuns(data) {
  return data.runs.map((raw, number) => readRun(raw, number, data.strings));
}

function readRun(raw, number, strings) {
  const run = {
    number, strings, title: raw.title, seconds: raw.seconds, facts: raw.facts,
    size: raw.start.length,
    start: Float64Array.from(raw.start), end: Float64Array.from(raw.end),
    name: Int32Array.from(raw.name), node: Int32Array.from(raw.node), pc: Int32Array.from(raw.pc),
    kind: Int32Array.from(raw.kind), microbatch: Int32Array.from(raw.microbatch),
    stage: Int32Array.from(raw.stage), directive: Int32Array.from(raw.directive),
    tags: Int32Array.from(raw.tags), critical: Uint8Array.from(raw.critical),
    nbytes: Float64Array.from(raw.nbytes), flops: Float64Array.from(raw.flops),
  };
  run.rows = raw.rows.map(([device, stream], i) => ({ device, stream, first: raw.firsts[i], last: raw.firsts[i + 1] }));
  for (const row of run.rows) row.computes = row.stream === 'compute' || holdsPass(run, row);
  run.devices = raw.devices.map((device, i) => readDevice(run, device, i));
  run.ends = Math.max(run.seconds, run.end.reduce((a, b) => Math.max(a, b), 0)) || 1;
  for (const device of run.devices) device.idle = idleOf(device, run.ends);
  return run;
}

function holdsPass(run, row) {
  for (let i = row.first; i < row.last; i++) if (PASSES.has(run.strings[run.kind[i]])) return true;
  return false;
}

function readDevice(run, raw, number) {
  const rows = run.rows.map((_, i) => i).filter((i) => run.rows[i].device === number);
  const memory = { times: Float64Array.from(raw.times), bytes: Float64Array.from(raw.bytes), peak: 0, at: 0 };
  memory.bytes.forEach((held, i) => { if (held > memory.peak) { memory.peak = held; memory.at = i; } });
  const computing = rows.filter((i) => run.rows[i].computes);
  return { name: raw.name, limit: raw.limit, rows, memory, computes: computing.length > 0, busy: busyOf(run, computing) };
}

/** Whether a device needs more memory than it has. */
const isOver = ({ limit, memory }) => limit !== null && memory.peak > limit;

/** When at least one of `rows` is busy: rising spans that do not touch, and the sum before each. */
function busyOf(run, rows) {
  const spans = [];
  for (const row of rows.map((i) => run.rows[i])) {
    for (let i = row.first; i < row.last; i++) spans.push([run.start[i], run.end[i]]);
  }
  if (rows.length > 1) spans.sort((a, b) => a[0] - b[0]);
  const start = [], end = [];
  for (const [from, to] of spans) {
    if (end.length && from <= end[end.length - 1]) end[end.length - 1] = Math.max(end[end.length - 1], to);
    else { start.push(from); end.push(to); }
  }
  const before = [0];
  start.forEach((from, i) => before.push(before[i] + end[i] - from));
  return { start: Float64Array.from(start), end: Float64Array.from(end), before };
}

/** Seconds of busy spans between two moments. */
function busyWithin({ start, end, before }, from, to) {
  const until = (t) => {
    const i = upperBound(start, t, 0, start.length);
    return i === 0 ? 0 : before[i - 1] + Math.min(t, end[i - 1]) - start[i - 1];
  };
  return Math.max(0, until(to) - until(from));
}

const idleOf = (device, whole) => (device.computes ? 1 - busyWithin(device.busy, 0, whole) / whole : null);

/** What is known of one event, in words. */
function eventOf(run, i) {
  const text = (column) => run.strings[run[column][i]];
  const row = rowOf(run, i);
  return {
    run: run.number, index: i, name: text('name'), node: run.node[i], pc: run.pc[i], kind: text('kind'),
    stage: text('stage'), directive: text('directive'), tags: text('tags'),
    microbatch: run.microbatch[i] < 0 ? null : run.microbatch[i],
    start: run.start[i], end: run.end[i], nbytes: run.nbytes[i], flops: run.flops[i], critical: run.critical[i] === 1,
    device: run.devices[run.rows[row].device].name, stream: run.rows[row].stream,
  };
}

/** The row of an event; rows may be empty, so it is the last that begins at or before it. */
function rowOf(run, i) {
  let low = 0, high = run.rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.rows[middle].last > i) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** All other events of the same node. */
function sameNode(run, i) {
  run.byNode ??= run.node.reduce((events, node, at) => {
    if (!events.has(node)) events.set(node, []);
    events.get(node).push(at);
    return events;
  }, new Map());
  return run.byNode.get(run.node[i]).filter((other) => other !== i);
}

/** The event of another run that stands for this one: the same name and kind on the device of that
 * name, or where there is none at its place; of several with one name, the same in the row. */
function partnerOf(runs, number, i) {
  const mine = runs[number], other = runs[1 - number];
  if (!other) return null;
  mine.turns ??= turnsOf(mine);
  other.byName ??= byNameOf(other);
  const device = mine.rows[rowOf(mine, i)].device;
  const twin = other.devices.findIndex((one) => one.name === mine.devices[device].name);
  const key = `${twin < 0 ? device : twin}/${mine.name[i]}/${mine.kind[i]}/${mine.turns[i]}`;
  return other.byName.get(key) ?? null;
}

/** For each event, how many of its device came before with its name and kind. */
function turnsOf(run) {
  const seen = new Map();
  const turns = new Int32Array(run.size);
  for (const row of run.rows) {
    for (let i = row.first; i < row.last; i++) {
      const key = `${row.device}/${run.name[i]}/${run.kind[i]}`;
      turns[i] = seen.get(key) ?? 0;
      seen.set(key, turns[i] + 1);
    }
  }
  return turns;
}

function byNameOf(run) {
  run.turns ??= turnsOf(run);
  const events = new Map();
  for (const row of run.rows) {
    for (let i = row.first; i < row.last; i++) {
      events.set(`${row.device}/${run.name[i]}/${run.kind[i]}/${run.turns[i]}`, i);
    }
  }
  return events;
}

/** Which events a query speaks of: 1 for each that it does. `#12` is a node, `kind:F`, `mb:3`,
 * `stage:…` and `directive:…` are columns, anything else is looked for in all texts. */
function matchesOf(run, query) {
  const marks = new Uint8Array(run.size);
  const wanted = query.trim().toLowerCase();
  if (!wanted) return null;
  const node = /^#(\d+)$/.exec(wanted);
  const column = /^(kind|mb|stage|directive):\s*(.*)$/.exec(wanted);
  const has = (text) => text.toLowerCase().includes(wanted);
  if (node) run.node.forEach((n, i) => { if (n === Number(node[1])) marks[i] = 1; });
  else if (column && column[1] === 'mb') {
    run.microbatch.forEach((n, i) => { if (n === Number(column[2] || NaN)) marks[i] = 1; });
  } else if (column) mark(run, marks, [column[1]], (text) => text.toLowerCase() === column[2]);
  else mark(run, marks, ['name', 'tags', 'kind', 'directive'], has);
  return marks;
}

/** Mark the events one of whose texts passes; every distinct text is looked at once. */
function mark(run, marks, columns, passes) {
  const good = run.strings.map(passes);
  for (const column of columns) run[column].forEach((text, i) => { if (good[text]) marks[i] = 1; });
}

const groupLabel = (run, i) =>
  `${run.strings[run.stage[i]]} ${run.strings[run.kind[i]]}${run.microbatch[i]}`.trim();

/** Where a device runs two groups at once, each a stage's pass for a microbatch. Three or more at
 * once are not pairs: nothing tells which two belong together. */
function pairsOf(run) {
  return run.devices.flatMap((device, number) => {
    const groups = groupsOf(run, device).sort((a, b) => a.start - b.start);
    const least = run.ends * 1e-9;
    let open = [], candidates = [];
    for (const next of groups) {
      open = open.filter((one) => one.end > next.start + least);
      if (open.length === 1) {
        const [first] = open, end = Math.min(first.end, next.end);
        candidates.push({ device: number, first, second: next, start: next.start, end });
      } else if (open.length > 1) {
        const crowded = (pair) => open.includes(pair.first) && open.includes(pair.second);
        candidates = candidates.filter((pair) => pair.end <= next.start + least || !crowded(pair));
      }
      open.push(next);
    }
    return candidates;
  });
}

function groupsOf(run, device) {
  const groups = new Map();
  for (const row of device.rows.map((i) => run.rows[i])) {
    for (let i = row.first; i < row.last; i++) {
      if (run.microbatch[i] < 0 || !PASSES.has(run.strings[run.kind[i]])) continue;
      const key = `${run.stage[i]}/${run.kind[i]}/${run.microbatch[i]}`;
      const group = groups.get(key);
      if (group) { group.start = Math.min(group.start, run.start[i]); group.end = Math.max(group.end, run.end[i]); }
      else groups.set(key, { label: groupLabel(run, i), start: run.start[i], end: run.end[i] });
    }
  }
  return [...groups.values()];
}

/** The colours of all events under one way to choose them: palette, the legend, and for each event
 * the place of its colour. The runs share them, so that a colour means the same in both. */
function coloured(runs, by) {
  const used = new Set();
  for (const run of runs) for (const value of run[by]) used.add(value);
  const name = by === 'microbatch' ? (v) => (v < 0 ? '' : String(v)) : (v) => runs[0].strings[v];
  const values = [...used].sort(by === 'directive' ? (a, b) => a - b : (a, b) => natural(name(a), name(b)));
  const named = values.filter((v) => name(v) !== '');
  const palette = by === 'kind' ? kindColours(named.map(name)) : coloursOf(named, by === 'microbatch');
  const place = new Map(named.map((value, i) => [value, i]));
  const other = palette.length;
  const columns = runs.map((run) => Uint16Array.from(run[by], (value) => place.get(value) ?? other));
  const prefix = by === 'microbatch' ? 'mb' : by;
  const legend = named.map((v, i) => ({ label: name(v), colour: palette[i], query: `${prefix}:${name(v)}` }));
  if (by === 'kind') legend.sort((a, b) => rank(a.label) - rank(b.label));
  const all = [...palette, OTHER];
  return { palette: all, words: all.map(wordOf), columns, legend };
}

/** Kinds that have no colour of their own share those that no known kind has taken. */
function kindColours(kinds) {
  const spare = ['#5b6ee1', '#b5654a', '#4d908e', '#c9a0dc'];
  let next = 0;
  return kinds.map((kind) => KIND_COLOURS[kind] ?? spare[next++ % spare.length]);
}
