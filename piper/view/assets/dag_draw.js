// Drawing a pane of the graph as SVG: frames of open groups, edges, boxes.

const SIDES = 150, ENDS = 56;
/* Room around the boxes, at the sides for edges that pass by. */

function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Draw one pane; whether some group stayed closed for lack of room. */
function render(name) {
  const pane = panes[name], step = name === 'before' ? earlier() : now();
  const marks = name === 'before' ? now().diff.before : now().diff?.after ?? null;
  const tree = treeOf(dag, step, state.levels, state.open, state.most);
  const leaves = leavesOf(tree.root), edges = edgesOf(dag, step, leaves);
  const { width, height } = panes.after.svg.getBoundingClientRect();
  const page = { w: Math.max(width - SIDES, 100), h: Math.max(height - ENDS, 100) };
  pane.size = layOut(tree, edges, graphOf(dag, step).depth, page);
  Object.assign(pane, { step, tree, marks, leaves, boxes: new Map(), edges: [], names: [] });
  const under = draw('g'), lines = draw('g'), over = draw('g'), names = draw('g');
  frames(pane, tree.root, under, names);
  for (const edge of edges) if (edge.values || state.order) lines.append(...edgeDrawn(pane, edge));
  for (const leaf of leaves) over.append(boxDrawn(pane, leaf));
  const arrow = draw('marker', {
    id: `arrow-${name}`, viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 8, markerHeight: 8,
    markerUnits: 'userSpaceOnUse', orient: 'auto-start-reverse',
  }, draw('path', { d: 'M0,0.5L8,4L0,7.5z', class: 'arrow' }));
  pane.world = draw('g', {}, under, lines, over, names);
  pane.svg.replaceChildren(draw('defs', {}, arrow), pane.world);
  const what = name === 'before' ? 'Before' : both() ? 'After' : 'Step';
  pane.figure.querySelector('figcaption').replaceChildren(el('b', {}, what), ` ${step.label} · ${count(step.size)} nodes`);
  return tree.kept;
}

const both = () => shownPanes().length === 2;

/** Frames around the groups that are open, and their large names. */
function frames(pane, group, into, names) {
  for (const part of group.parts) {
    if (!part.open) continue;
    const head = draw('g', { class: 'head' },
      draw('rect', { x: part.x, y: part.y, width: part.w, height: HEAD }),
      draw('text', { x: part.x + INSET, y: part.y + 18 }, `▾ ${shortTo(part.label, part.w - 30)}`));
    const drawn = draw('g', {
      class: 'container', tabindex: 0, role: 'button', 'aria-expanded': 'true',
      'aria-label': `${part.label}, ${count(part.members.length)} nodes, open`,
    }, draw('rect', { class: 'frame', x: part.x, y: part.y, width: part.w, height: part.h, rx: 8 }), head);
    activate(drawn, () => close(part), head);
    pane.boxes.set(part.path, { part, drawn });
    into.append(drawn);
    names.append(largeName(pane, part));
    frames(pane, part, into, names);
  }
}

/** The name of an open group, for when its boxes are too small to read; a click zooms to the group. */
function largeName(pane, part) {
  const text = draw('text', { x: part.x + part.w / 2, y: part.y + part.h / 2, class: 'large-name' }, part.label);
  text.addEventListener('click', () => { if (!moved) look(part); });
  pane.names.push({ text, part });
  return text;
}

function boxDrawn(pane, leaf) {
  const group = leaf.kind === 'group';
  const effect = pane.marks ? effectIn(leaf, pane.marks) : null;
  const touched = effect && Object.keys(effect).filter((name) => effect[name]);
  const status = !touched?.length ? '' : touched.length === 1 ? ` is-${touched[0]}` : ' is-changed';
  const title = group ? leaf.label : labelOf(pane.step, leaf);
  const under = group ? `${count(leaf.members.length)} nodes` : placeOf(pane.step, leaf.at);
  const said = group ? `${title}, ${under}, closed` : textOf(dag, pane.step, leaf.at, 'name');
  const drawn = draw('g', {
    class: `item ${leaf.kind}${status}`, tabindex: 0, role: 'button', transform: `translate(${leaf.x},${leaf.y})`,
    'aria-expanded': group ? 'false' : null, 'aria-label': said,
  }, draw('title', {}, group ? said : `#${leaf.at} ${said}`),
    group ? draw('rect', { class: 'back', x: 4, y: 4, width: leaf.w, height: leaf.h, rx: 6 }) : null,
    draw('rect', { class: 'box', width: leaf.w, height: leaf.h, rx: 6 }),
    stripe(pane.step, leaf),
    draw('text', { x: 14, y: group ? 21 : 18 }, shortTo(title, leaf.w - 24)),
    draw('text', { class: 'small', x: 14, y: group ? 38 : 33 }, shortTo(under, leaf.w - 24 - (touched?.length ? (group ? 50 : 8) : 0))),
    effect ? draw('text', { class: 'effect', x: leaf.w - 10, y: group ? 38 : 33 }, signs(effect, group)) : null);
  const chosen = { step: pane.step.number, at: leaf.at };
  activate(drawn, () => (group ? open(leaf, pane) : choose(chosen, { focus: state.k < READABLE })));
  pane.boxes.set(leaf.path, { part: leaf, drawn });
  return drawn;
}

/** The kinds of a box's nodes as a bar at its left, each as high as its share. */
function stripe(step, leaf) {
  const tally = new Map();
  for (const at of leaf.members) { const kind = textOf(dag, step, at, 'kind'); tally.set(kind, (tally.get(kind) ?? 0) + 1); }
  const kinds = [...tally].sort((a, b) => rank(a[0]) - rank(b[0])), room = leaf.h - 12;
  let y = 6;
  return kinds.map(([kind, n]) => {
    const high = (n / leaf.members.length) * room;
    const part = draw('rect', { x: 5, y, width: 4, height: high, fill: KIND_COLOURS[kind] ?? OTHER });
    y += high;
    return part;
  });
}

function signs(effect, group) {
  return [['added', '+'], ['changed', '±'], ['removed', '−']].filter(([name]) => effect[name])
    .map(([name, sign], i) => draw('tspan', { class: name }, `${i ? ' ' : ''}${sign}${group ? count(effect[name]) : ''}`));
}

/** A node by its kind and those tags that no group around it has said. */
function labelOf(step, leaf) {
  const around = leaf.parent.path.split('/').flatMap((part) => part.split(', '));
  const tags = tagsOf(dag, step, leaf.at).filter(([name]) => name !== 'PASS')
    .map(([name, value]) => `${name} ${value}`).filter((tag) => !around.includes(tag));
  const kind = textOf(dag, step, leaf.at, 'kind');
  return tags.length ? `${kind} ${tags.join(' ')}` : textOf(dag, step, leaf.at, 'name');
}

function placeOf(step, at) {
  const devices = textOf(dag, step, at, 'devices'), stream = textOf(dag, step, at, 'stream');
  return [`#${at}`, devices && `@${devices}`, stream !== 'compute' && stream].filter(Boolean).join(' · ');
}

const shortTo = (text, room) => (text.length * 6 <= room ? text : text.slice(0, Math.max(1, Math.floor(room / 6) - 1)) + '…');

function edgeDrawn(pane, edge) {
  const { path, x, y } = curve(edge.source, edge.target);
  const many = edge.values + (state.order ? edge.orders : 0);
  const values = edge.values && `${count(edge.values)} values, ${bytes(edge.size)}`;
  const said = [values, edge.orders && `${count(edge.orders)} by order`].filter(Boolean).join('; ');
  const far = edge.source.parent !== edge.target.parent;
  const line = draw('path', {
    class: `edge${edge.values ? '' : ' order'}${far ? ' far' : ''}`, d: path,
    'stroke-width': 1 + Math.min(Math.log2(many) / 3, 2.5),
    'marker-end': `url(#arrow-${pane === panes.before ? 'before' : 'after'})`,
  }, draw('title', {}, said));
  pane.edges.push({ edge, line });
  return many > 1 ? [line, draw('text', { class: 'times', x, y: y + 3 }, `×${count(many)}`)] : [line];
}

/** Click, Enter or Space on a drawn thing; `target` is the part of it that is clicked. */
function activate(drawn, action, target = drawn) {
  target.addEventListener('click', () => { if (!moved) action(); });
  drawn.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}
