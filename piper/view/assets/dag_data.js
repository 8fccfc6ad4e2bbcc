// Graphs as the page holds them: distinct nodes as columns, a step as the row of its nodes; edges,
// differences between two steps, and the tree of groups that a step's nodes stand in.

const NODE_COLUMNS = [
  'identity', 'family', 'name', 'kind', 'tags', 'devices', 'stream', 'reads', 'writes', 'after', 'after_by',
  'made_by', 'ordered_by', 'sends',
];

function readDag(data) {
  const dag = { ...data, nodes: {}, stages: new Set(data.stages) };
  for (const name of NODE_COLUMNS) dag.nodes[name] = Int32Array.from(data.nodes[name]);
  let before = null;
  dag.steps = data.steps.map((raw, number) => {
    const nodes = raw.places ? Int32Array.from(before) : Int32Array.from(raw.nodes);
    raw.places?.forEach((place, i) => { nodes[place] = raw.nodes[i]; });
    before = nodes;
    return { number, label: raw.label, notes: raw.notes, nodes, size: nodes.length, graph: null };
  });
  dag.steps.forEach((step, i) => { step.diff = i ? diffOf(dag, dag.steps[i - 1], step) : null; });
  return dag;
}

const textOf = (dag, step, at, column) => dag.strings[dag.nodes[column][step.nodes[at]]];
const listOf = (dag, step, at, column) => dag.lists[dag.nodes[column][step.nodes[at]]];

/** The tags of a node, pairs of name and value. */
function tagsOf(dag, step, at) {
  const flat = listOf(dag, step, at, 'tags');
  const pairs = [];
  for (let i = 0; i < flat.length; i += 2) pairs.push([dag.strings[flat[i]], dag.strings[flat[i + 1]]]);
  return pairs;
}

/** A value in words, and its bytes on a device. */
function valueOf(dag, number) {
  const { texts, bytes: sizes, first, extra } = dag.values;
  if (number >= first) {
    const [role, of, bucket, size] = extra[number - first];
    const whose = of < 0 ? '' : bucket ? ` bucket ${of}` : ` ${valueOf(dag, of).text}`;
    return { text: role + whose, size };
  }
  const part = Math.floor(number / texts.length);
  const suffix = dag.microbatch && first > texts.length ? ` · ${dag.microbatch} ${part}` : '';
  return { text: texts[number % texts.length] + suffix, size: sizes[number % texts.length] };
}

/** The edges of a step: by values with their bytes, and by order alone; who makes and who reads each
 * value; and how deep each node stands. */
function graphOf(dag, step) {
  if (step.graph) return step.graph;
  for (const other of dag.steps) if (Math.abs(other.number - step.number) > 1) other.graph = null;
  const makers = new Map(), readers = new Map(), followers = new Map();
  const from = [], to = [], order = [], size = [];
  for (let at = 0; at < step.size; at++) for (const value of listOf(dag, step, at, 'writes')) makers.set(value, at);
  for (let at = 0; at < step.size; at++) {
    for (const value of listOf(dag, step, at, 'reads')) {
      push(readers, value, at);
      const maker = makers.get(value);
      if (maker === undefined) continue;
      from.push(maker); to.push(at); order.push(0); size.push(valueOf(dag, value).size);
    }
    for (const other of listOf(dag, step, at, 'after')) {
      push(followers, other, at);
      from.push(other); to.push(at); order.push(1); size.push(0);
    }
  }
  step.graph = { makers, readers, followers, from, to, order, size, depth: depthsOf(step.size, from, to, order) };
  return step.graph;
}

function push(lists, key, item) {
  const list = lists.get(key);
  if (list) list.push(item);
  else lists.set(key, [item]);
}

/** The length of the longest way of values to each node. */
function depthsOf(size, from, to, order) {
  const depth = new Int32Array(size), waiting = new Int32Array(size), next = Array.from({ length: size }, () => []);
  from.forEach((source, i) => { if (!order[i]) { next[source].push(to[i]); waiting[to[i]] += 1; } });
  const ready = [];
  waiting.forEach((n, at) => { if (n === 0) ready.push(at); });
  for (let i = 0; i < ready.length; i++) {
    for (const other of next[ready[i]]) {
      depth[other] = Math.max(depth[other], depth[ready[i]] + 1);
      if (--waiting[other] === 0) ready.push(other);
    }
  }
  return depth;
}

const SAME = 0, ADDED = 1, REMOVED = 2, CHANGED = 3;
const STATUS = ['same', 'added', 'removed', 'changed'];

/** What a step did to each node: the status of every node before and after, and who became whom.
 * Nodes have no lasting number; the same pass of the same chunk for the same microbatch is one node,
 * and so is the same communication with the same tags, counted where there are several. */
function diffOf(dag, a, b) {
  const before = new Uint8Array(a.size).fill(REMOVED), after = new Uint8Array(b.size).fill(ADDED);
  const source = new Int32Array(b.size).fill(-1);
  const keys = keysOf(dag, a), places = new Map();
  keys.forEach((key, at) => places.set(key, at));
  keysOf(dag, b).forEach((key, at) => {
    const was = places.get(key);
    if (was === undefined) return;
    source[at] = was;
    const same = a.nodes[was] === b.nodes[at] || changesOf(dag, a, was, b, at).length === 0;
    before[was] = after[at] = same ? SAME : CHANGED;
  });
  const number = (marks, status) => marks.reduce((sum, mark) => sum + (mark === status), 0);
  const counts = { added: number(after, ADDED), removed: number(before, REMOVED), changed: number(after, CHANGED) };
  return { before, after, source, counts };
}

/** A key for each node that it keeps from step to step. */
function keysOf(dag, step) {
  const seen = new Map();
  return Array.from(step.nodes, (node) => {
    const same = dag.nodes.identity[node], turn = seen.get(same) ?? 0;
    seen.set(same, turn + 1);
    return turn ? `${same}/${turn}` : same;
  });
}

const CHANGES = [['tags', 'tags'], ['devices', 'devices'], ['stream', 'stream'], ['sends', 'sends on']];

/** What differs between a node and what it became: rows of [what, before, after]. */
function changesOf(dag, a, was, b, at) {
  const column = (name) => [dag.nodes[name][a.nodes[was]], dag.nodes[name][b.nodes[at]]];
  const shown = (step, place, name) =>
    (name === 'tags' ? tagText(tagsOf(dag, step, place)) : textOf(dag, step, place, name) || 'none');
  const changes = CHANGES.filter(([name]) => { const [x, y] = column(name); return x !== y; })
    .map(([name, what]) => [what, shown(a, was, name), shown(b, at, name)]);
  const [earlier, later] = [followed(dag, a, was), followed(dag, b, at)];
  if (earlier.key !== later.key) changes.push(['order', earlier.text, later.text]);
  for (const name of ['reads', 'writes']) {
    const [x, y] = column(name);
    if (x !== y) changes.push([name, ...[[a, was], [b, at]].map(([step, place]) => valuesText(dag, step, place, name))]);
  }
  return changes;
}

const tagText = (tags) => tags.map(([name, value]) => `${name} ${value}`).join(', ') || 'none';

/** What a node must wait for by order alone, in a way that does not depend on numbers. */
function followed(dag, step, at) {
  const after = listOf(dag, step, at, 'after');
  if (!after.length) return { key: '', text: 'after nothing' };
  const names = after.map((other) => dag.nodes.identity[step.nodes[other]]).sort((x, y) => x - y);
  return { key: names.join(), text: `after ${after.map((other) => textOf(dag, step, other, 'name')).join('; ')}` };
}

const valuesText = (dag, step, at, name) =>
  listOf(dag, step, at, name).map((value) => valueOf(dag, value).text).join('; ') || 'nothing';

// Groups

const LEVELS = {
  stage: (dag, tags) => tagText(tags.filter(([name]) => dag.stages.has(name))),
  microbatch: (dag, tags) => tagText(tags.filter(([name]) => name === dag.microbatch)),
  region: (dag, tags) => tagText(tags.filter(([name]) => isRegion(dag, name)).slice(0, 1)),
};
const NAMELESS = { stage: 'no stage', microbatch: 'all microbatches', region: 'no region' };
const isRegion = (dag, name) => !dag.stages.has(name) && name !== dag.microbatch && name !== 'PASS';

const GROUPINGS = [
  ['stage', 'microbatch', 'pass', 'region'],
  ['stage', 'pass', 'microbatch', 'region'],
  ['microbatch', 'stage', 'pass', 'region'],
  ['pass', 'stage', 'microbatch', 'region'],
  ['region', 'pass', 'microbatch', 'stage'],
  ['stage', 'region', 'pass', 'microbatch'],
];
const FEW = 12, MANY = 64;

/** The group of a node on a level; many nodes share their tags, which are looked at once. */
function groupOf(dag, step, at, level) {
  if (level === 'pass') return textOf(dag, step, at, 'kind');
  const known = (dag.groups ??= {}), byTags = (known[level] ??= new Map()), tags = dag.nodes.tags[step.nodes[at]];
  if (!byTags.has(tags)) byTags.set(tags, LEVELS[level](dag, tagsOf(dag, step, at)));
  return byTags.get(tags);
}

/** What a group is made of: groups of the next level that tells its nodes apart, or, of a few nodes
 * or where no level does, the nodes; where there are very many, ranges of them. */
function partsOf(dag, step, group, levels) {
  group.parts ??= foundParts(dag, step, group, levels);
  return group.parts;
}

function foundParts(dag, step, group, levels) {
  const here = { parent: group, deep: group.deep + 1 };
  const node = (at) => ({ ...here, kind: 'node', at, path: `${group.path}/#${at}`, members: [at] });
  const inner = (label, members, level) =>
    ({ ...here, kind: 'group', label, path: `${group.path}/${label}`, members, level, parts: null });
  const ranges = (items, level, name, members) => cutEvenly(items).map((some) =>
    inner(`${name(some[0])} … ${name(some[some.length - 1])}`, some.flatMap(members), level));
  for (let level = group.level; level < levels.length && group.members.length > FEW; level++) {
    const byName = new Map();
    for (const at of group.members) push(byName, groupOf(dag, step, at, levels[level]), at);
    if (byName.size < 2) continue;
    const by = levels[level] === 'pass' ? (a, b) => rank(a) - rank(b) : natural;
    const labels = [...byName.keys()].sort((a, b) => (a === 'none') - (b === 'none') || by(a, b));
    const label = (name) => (name === 'none' ? NAMELESS[levels[level]] : name);
    if (labels.length > MANY) return ranges(labels, level, label, (name) => byName.get(name));
    return labels.map((name) => {
      const members = byName.get(name);
      return members.length === 1 ? node(members[0]) : inner(label(name), members, level + 1);
    });
  }
  if (group.members.length > MANY) return ranges(group.members, levels.length, (at) => `#${at}`, (at) => [at]);
  return group.members.map(node);
}

/** Items in ranges of equal length: many enough to be few, and none longer than it must be. */
function cutEvenly(items) {
  const each = Math.max(16, Math.ceil(items.length / 48));
  return Array.from({ length: Math.ceil(items.length / each) }, (_, i) => items.slice(i * each, (i + 1) * each));
}

/** The tree of what is shown: groups in `open` are opened, outer ones first, as long as no more than
 * `most` boxes come of it. */
function treeOf(dag, step, levels, open, most) {
  const root = rootOf(step, levels);
  let shown = partsOf(dag, step, root, levels).length, kept = false;
  const queue = [...root.parts];
  for (let i = 0; i < queue.length; i++) {
    const group = queue[i];
    group.open = false;
    if (group.kind !== 'group' || !open.has(group.path)) continue;
    const parts = partsOf(dag, step, group, levels);
    if (shown - 1 + parts.length > most) { kept = true; continue; }
    shown += parts.length - 1;
    group.open = true;
    queue.push(...parts);
  }
  return { root, shown, kept };
}

/** All nodes of a step as one group; its parts are found once for each way to group. */
function rootOf(step, levels) {
  if (step.levels !== levels) {
    const members = Array.from({ length: step.size }, (_, at) => at);
    step.root = { kind: 'group', label: '', path: '', members, level: 0, parent: null, deep: 0, parts: null, open: true };
    step.levels = levels;
  }
  return step.root;
}

/** The boxes of a tree that are not opened, in order. */
function leavesOf(group) {
  return group.parts.flatMap((part) => (part.open ? leavesOf(part) : [part]));
}

/** Edges between boxes: how many values and how many bytes go along, and how many orders. */
function edgesOf(dag, step, leaves) {
  const graph = graphOf(dag, step), box = new Int32Array(step.size);
  leaves.forEach((leaf, i) => { leaf.index = i; for (const at of leaf.members) box[at] = i; });
  const edges = new Map();
  for (let i = 0; i < graph.from.length; i++) {
    const source = box[graph.from[i]], target = box[graph.to[i]];
    if (source === target) continue;
    const key = source * leaves.length + target;
    let edge = edges.get(key);
    if (!edge) edges.set(key, (edge = { source: leaves[source], target: leaves[target], values: 0, orders: 0, size: 0 }));
    if (graph.order[i]) edge.orders += 1;
    else { edge.values += 1; edge.size += graph.size[i]; }
  }
  return [...edges.values()];
}
