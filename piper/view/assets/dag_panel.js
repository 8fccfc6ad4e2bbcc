// The panel beside the graph: a node, a group, the effect of a step.

/** "+36 ±12 −1" in colours; nothing where nothing changed. */
function effectOf({ added, removed, changed }) {
  const parts = [['added', '+', added], ['changed', '±', changed], ['removed', '−', removed]].filter(([, , n]) => n);
  return parts.map(([name, sign, n], i) => el('span', { class: name }, `${i ? ' ' : ''}${sign}${count(n)}`));
}

const effectText = ({ added, removed, changed }) => `${count(added)} added, ${count(changed)} changed, ${count(removed)} removed`;

/** Everything known of a node; `jump` goes to another node of the same step. */
function nodeDetails(dag, step, at, jump) {
  const graph = graphOf(dag, step), text = (column) => textOf(dag, step, at, column);
  const link = (other) => el('button', { class: 'link mono', onclick: () => jump(other) },
    `#${other} ${textOf(dag, step, other, 'name')}`);
  const after = listOf(dag, step, at, 'after'), why = listOf(dag, step, at, 'after_by');
  const reasons = new Map(after.map((other, i) => [other, dag.strings[why[i]]]));
  const reason = (other) => reasons.get(other) && el('span', { class: 'quiet' }, ` by ${shortened(reasons.get(other))}`);
  const ordered = (other) => [link(other), reason(other) || ''];
  return [
    el('h2', {}, `Node #${at}`),
    el('p', { class: 'node-name' }, text('name')),
    pairs([
      ['Kind', text('kind')],
      ['Tags', tagText(tagsOf(dag, step, at).filter(([name]) => name !== 'PASS'))],
      ['Devices', text('devices') || 'not placed yet'],
      ['Stream', text('stream')],
      ['Sends on', text('sends')],
      ['Made by', el('code', { class: 'mono directive' }, text('made_by'))],
      ['Ordered by', orderedBy(text('ordered_by'), text('made_by'))],
    ]),
    ...changeDetails(dag, step, at, jump),
    ...valueList('Reads', dag, listOf(dag, step, at, 'reads'), (value) => [graph.makers.get(value)], 'from', link),
    ...valueList('Writes', dag, listOf(dag, step, at, 'writes'), (value) => graph.readers.get(value) ?? [], 'to', link),
    ...(after.length ? [el('h3', {}, 'Ordered after'), shortList(after, 24, ordered)] : []),
    ...(graph.followers.has(at) ? [el('h3', {}, 'Ordered before'), shortList(graph.followers.get(at), 24, link)] : []),
  ];
}

const orderedBy = (text, made) => (!text ? null : text === made ? 'same directive' : el('code', { class: 'mono directive' }, text));

const shortened = (text) => (text.length > 48 ? text.slice(0, 47) + '…' : text);

function valueList(title, dag, values, ends, word, link) {
  if (!values.length) return [];
  const item = (value) => {
    const { text, size } = valueOf(dag, value), others = ends(value).filter((other) => other !== undefined);
    const more = others.length > 6 ? `and ${count(others.length - 6)} more` : '';
    return [
      text,
      el('span', { class: 'quiet' }, ` · ${bytes(size)}${others.length ? ` ${word}` : ''}`),
      el('div', { class: 'ends' }, others.slice(0, 6).map(link), more),
    ];
  };
  return [el('h3', {}, title), shortList(values, 40, item)];
}

/** What the step did to a node. */
function changeDetails(dag, step, at) {
  if (!step.diff) return [];
  const was = step.diff.source[at], before = dag.steps[step.number - 1];
  const title = el('h3', {}, 'In this step');
  if (was < 0) {
    const family = dag.nodes.family[step.nodes[at]];
    const origin = before.nodes.findIndex((node) => dag.nodes.family[node] === family);
    const text = origin < 0 ? 'added' : `added, like #${origin} before: ${textOf(dag, before, origin, 'name')}`;
    return [title, el('p', { class: 'added' }, text)];
  }
  const changes = step.diff.after[at] === CHANGED ? changesOf(dag, before, was, step, at) : [];
  if (!changes.length) return [title, el('p', { class: 'quiet' }, was === at ? 'not changed' : `not changed; it was #${was}`)];
  const change = ([what, earlier, later]) =>
    [what, [el('span', { class: 'quiet' }, `${shortened(earlier)} → `), shortened(later)]];
  return [title, pairs(changes.map(change))];
}

/** A group in figures. */
function groupDetails(dag, step, group, effect) {
  const tally = (column) => {
    const counts = new Map();
    for (const at of group.members) {
      const text = textOf(dag, step, at, column) || '–';
      counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    const shown = [...counts].sort((a, b) => b[1] - a[1]).map(([text, n]) => `${text}\u00a0×\u00a0${count(n)}`);
    if (shown.length > 12) shown.splice(12, shown.length, `and ${count(shown.length - 12)} more`);
    return shown.map((text, i) => [el('span', { class: 'whole' }, i < shown.length - 1 ? `${text} ·` : text), ' ']);
  };
  return [
    el('h2', {}, group.label || 'The whole step'),
    pairs([
      ['Nodes', count(group.members.length)],
      ['Kinds', tally('kind')],
      ['Devices', tally('devices')],
      ['Streams', tally('stream')],
      ['In this step', effect ? effectText(effect) : null],
    ]),
  ];
}

/** How many nodes of a group a step added, removed and changed. */
function effectIn(group, marks) {
  const counts = { added: 0, removed: 0, changed: 0 };
  for (const at of group.members) if (marks[at]) counts[STATUS[marks[at]]] += 1;
  return counts;
}
