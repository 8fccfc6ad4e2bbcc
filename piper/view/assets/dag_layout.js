// Where boxes stand: in layers along the values, groups inside groups. A group of nodes runs down,
// since nodes are wide and low; everything else runs to the right.

const NODE = { w: 176, h: 42 }, GROUP = { w: 176, h: 50 };
const HEAD = 28, INSET = 14;
const INNER = { w: 1.3, h: 1 };
/* What a group is like inside: somewhat wide. */
const STRAIGHT = 1.7;
/* How much smaller a drawing may be for its edges to be straight. */

/** Give every box of a tree a place: x, y, w, h, in the coordinates of the whole, which is to fill
 * a page. */
function layOut(tree, edges, depth, page) {
  if (!tree.root.parts.length) return { w: 1, h: 1 };
  const inner = innerEdges(edges);
  const size = place(tree.root, inner, depth, page);
  shift(tree.root, 0, 0);
  return size;
}

/** Edges by values, lifted to where they join two parts of one group. */
function innerEdges(edges) {
  const inner = new Map();
  for (const { source, target, values } of edges) {
    if (!values) continue;
    let a = source, b = target;
    while (a.deep > b.deep) a = a.parent;
    while (b.deep > a.deep) b = b.parent;
    while (a.parent !== b.parent) { a = a.parent; b = b.parent; }
    push(inner, a.parent, [a, b]);
  }
  return inner;
}

function place(group, inner, depth, page) {
  const parts = group.parts;
  for (const part of parts) {
    part.first = part.members.reduce((least, at) => Math.min(least, depth[at]), Infinity);
    if (part.open) {
      const size = place(part, inner, depth, INNER);
      part.w = Math.max(size.w + 2 * INSET, 150);
      part.h = size.h + HEAD + INSET;
    } else Object.assign(part, part.kind === 'node' ? NODE : GROUP);
  }
  return inRows(layersOf(parts, inner.get(group) ?? []), parts.every((part) => part.kind === 'node'), page);
}

/** Parts in layers such that edges lead from one layer to a later one. Those that lead back, from a
 * part that is reached later to one that is reached earlier, do not count: groups can form circles. */
function layersOf(parts, edges) {
  const order = [...parts].sort((a, b) => a.first - b.first);
  const turn = new Map(order.map((part, i) => [part, i]));
  const before = new Map(), layer = new Map();
  for (const [a, b] of edges) if (turn.get(a) < turn.get(b)) push(before, b, a);
  const layers = [];
  for (const part of order) {
    const at = (before.get(part) ?? []).reduce((most, other) => Math.max(most, layer.get(other) + 1), 0);
    layer.set(part, at);
    (layers[at] ??= []).push(part);
  }
  return untangled(layers, parts, before);
}

/** Each layer sorted by where its parts' sources stand; without any, as the parts were given. */
function untangled(layers, parts, before) {
  const given = new Map(parts.map((part, i) => [part, i / parts.length]));
  const at = new Map();
  for (const layer of layers) {
    const wish = (part) => {
      const sources = (before.get(part) ?? []).map((other) => at.get(other));
      return sources.length ? sources.reduce((a, b) => a + b, 0) / sources.length : given.get(part);
    };
    const wished = new Map(layer.map((part) => [part, wish(part)]));
    layer.sort((a, b) => wished.get(a) - wished.get(b) || given.get(a) - given.get(b));
    layer.forEach((part, i) => at.set(part, (i + 0.5) / layer.length));
  }
  return layers;
}

/** Layers one after another, downwards or to the right, in as many rows as fill the page best. */
function inRows(layers, down, page) {
  const [along, across] = down ? ['h', 'w'] : ['w', 'h'];
  const gaps = down ? { along: 20, beside: 20, rows: 40 } : { along: 56, beside: 16, rows: 34 };
  const most = Math.max(down ? 600 : 480, ...layers.flat().map((part) => part[across]));
  const strips = layers.flatMap((layer) => cut(layer, along, across, gaps.beside, most));
  const whole = strips.reduce((sum, strip) => sum + strip.along + gaps.along, 0);
  let best = null;
  for (let rows = 1; rows <= Math.min(strips.length, 24); rows++) {
    const lines = wrapped(strips, whole / rows, gaps);
    const [w, h] = down ? [lines.across, lines.along] : [lines.along, lines.across];
    const straight = lines.rows.length === 1 || lines.rows.every((row) => row.strips.length === 1);
    const scale = Math.min(page.w / w, page.h / h, 1.1) * (straight ? STRAIGHT : 1);
    if (!best || scale > best.scale * 1.001) best = { scale, w, h, rows: lines.rows };
  }
  for (const row of best.rows) setRow(row, down, gaps.beside);
  return { w: best.w, h: best.h };
}

/** A layer cut where it would grow too wide. */
function cut(layer, along, across, beside, most) {
  const rows = [];
  for (const part of layer) {
    const last = rows[rows.length - 1];
    if (last && last.across + beside + part[across] <= most) {
      last.parts.push(part);
      last.across += beside + part[across];
      last.along = Math.max(last.along, part[along]);
    } else rows.push({ parts: [part], across: part[across], along: part[along] });
  }
  return rows;
}

/** Strips in rows that end once they are about so long. */
function wrapped(strips, long, gaps) {
  const rows = [];
  let at = 0, begin = 0, far = 0;
  for (const strip of strips) {
    let row = rows[rows.length - 1];
    if (!row || at + strip.along / 2 > long) {
      if (row) begin += row.across + gaps.rows;
      row = { begin, across: 0, strips: [] };
      rows.push(row);
      at = 0;
    }
    row.strips.push({ strip, at });
    row.across = Math.max(row.across, strip.across);
    at += strip.along + gaps.along;
    far = Math.max(far, at - gaps.along);
  }
  return { rows, along: far, across: begin + rows[rows.length - 1].across };
}

function setRow(row, down, beside) {
  const [along, across, x, y] = down ? ['h', 'w', 'y', 'x'] : ['w', 'h', 'x', 'y'];
  for (const { strip, at } of row.strips) {
    let begin = row.begin + (row.across - strip.across) / 2;
    for (const part of strip.parts) {
      part[x] = at + (strip.along - part[along]) / 2;
      part[y] = begin;
      begin += part[across] + beside;
    }
  }
}

/** From coordinates inside a group to those of the whole. */
function shift(group, dx, dy) {
  for (const part of group.parts) {
    part.x += dx;
    part.y += dy;
    if (part.open) shift(part, part.x + INSET, part.y + HEAD);
  }
}

/** A curve from box to box, and where its middle is. */
function curve(a, b) {
  const right = b.x - (a.x + a.w), below = b.y - (a.y + a.h), above = a.y - (b.y + b.h);
  if (right >= 8) return bent([a.x + a.w, a.y + a.h / 2], [b.x, b.y + b.h / 2], Math.max(right / 2, 24), 0);
  const bulge = Math.min(30 + Math.max(below, above) * 0.14, 180), passes = Math.abs(a.x - b.x) < 8 && below > 70;
  if (passes) return bent([a.x, a.y + a.h / 2], [b.x, b.y + b.h / 2], -bulge, 0, bulge); // by the left of what is between
  if (below >= 4) return bent([a.x + a.w / 2, a.y + a.h], [b.x + b.w / 2, b.y], 0, Math.max(below / 2, 12));
  if (above >= 4) return bent([a.x + a.w, a.y + a.h / 2], [b.x + b.w, b.y + b.h / 2], bulge, 0, -bulge);
  const drop = 26 + Math.abs(right) / 14; // back to the left, below both
  return bent([a.x + a.w / 2, a.y + a.h], [b.x + b.w / 2, b.y + b.h], 0, drop, 0, drop);
}

/** A cubic curve whose ends leave in the direction (dx, dy); the far end arrives against it unless
 * told otherwise. */
function bent([x, y], [u, v], dx, dy, ux = dx, uy = -dy) {
  const p = [x + dx, y + dy], q = [u - ux, v + uy];
  const middle = (a, b, c, d) => (a + 3 * b + 3 * c + d) / 8;
  const path = `M${x},${y}C${p[0]},${p[1]} ${q[0]},${q[1]} ${u},${v}`;
  return { path, x: middle(x, p[0], q[0], u), y: middle(y, p[1], q[1], v) };
}
