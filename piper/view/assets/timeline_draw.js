// The picture: drawing what is in sight on a canvas.

const FONT = '11px ' + getComputedStyle(document.documentElement).getPropertyValue('--sans');
const LETTER = 5.8;
/* About the width of a letter: measuring every label would take longer than drawing it. */

/** Draw everything in sight. Returns how many events were looked at and shapes drawn. */
function draw(scene) {
  const { ctx, width, height } = scene;
  const work = { events: 0, shapes: 0 };
  ctx.setTransform(scene.ratio, 0, 0, scene.ratio, 0, 0);
  ctx.font = FONT;
  ctx.textBaseline = 'middle';
  ctx.fillStyle = scene.ink.paper;
  ctx.fillRect(0, 0, width, height);
  const seen = scene.layout.blocks.filter((b) => b.top + b.height > scene.scroll + AXIS && b.top < scene.scroll + height);
  ctx.save();
  ctx.beginPath();
  ctx.rect(scene.left, AXIS, plotWidth(scene), height - AXIS);
  ctx.clip();
  drawTicks(scene);
  for (const block of seen) drawBlock(scene, block, work);
  drawMarks(scene);
  drawRange(scene);
  ctx.restore();
  for (const block of seen) drawGutter(scene, block);
  for (const band of scene.layout.bands) drawBand(scene, band);
  drawAxis(scene);
  return work;
}

// Time

const NICE = [1, 2, 5];

/** Round moments about `apart` pixels from each other. */
function ticksOf(from, to, pixels, apart) {
  const least = ((to - from) * apart) / pixels;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = (NICE.find((n) => n * power >= least) ?? 10) * power;
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push(i * step);
  return { ticks, step };
}

/** A moment on an axis whose ticks are `step` apart. */
function tickLabel(t, step, most) {
  const [unit, name] = TIMES.find(([unit]) => most >= unit) ?? TIMES[3];
  const after = Math.max(0, Math.ceil(-Math.log10((step / unit) * 1.0001)));
  return `${(t / unit).toFixed(after)} ${name}`;
}

function axisOf(scene, run) {
  const from = Math.max(0, timeAt(scene, run, scene.left));
  const to = Math.min(horizon(scene, run), timeAt(scene, run, scene.width));
  if (to <= from) return { ticks: [], label: String };
  const { ticks, step } = ticksOf(from, to, (to - from) * perSecond(scene, run), 96);
  return { ticks, label: (t) => tickLabel(t, step, to) };
}

function drawTicks(scene) {
  if (scene.scaled) return;
  const { ctx } = scene;
  ctx.fillStyle = scene.ink.grid;
  for (const t of axisOf(scene, scene.runs[0]).ticks) ctx.fillRect(Math.round(xOf(scene, scene.runs[0], t)), 0, 1, scene.height);
}

function drawAxis(scene) {
  const { ctx, ink } = scene;
  ctx.fillStyle = ink.paper;
  ctx.fillRect(0, 0, scene.width, AXIS);
  ctx.fillStyle = ink.line;
  ctx.fillRect(0, AXIS - 1, scene.width, 1);
  ctx.textAlign = 'left';
  ctx.fillStyle = ink.faint;
  if (scene.scaled) {
    ctx.fillText('share of each step', 14, AXIS / 2);
    for (let share = 0; share <= 10; share++) {
      const x = scene.left + ((share / 10 - scene.view.from) / (scene.view.to - scene.view.from)) * plotWidth(scene);
      if (x >= scene.left && x < scene.width - 24) labelTick(scene, x, `${share * 10}%`, AXIS);
    }
  } else {
    const run = scene.runs[0], axis = axisOf(scene, run);
    for (const t of axis.ticks) labelTick(scene, xOf(scene, run, t), axis.label(t), AXIS);
  }
  if (scene.cursor !== null && !scene.scaled) drawCursorTime(scene);
}

function labelTick(scene, x, text, bottom) {
  if (x < scene.left - 1 || x > scene.width - 8) return;
  const { ctx, ink } = scene;
  ctx.fillStyle = ink.strong;
  ctx.fillRect(Math.round(x), bottom - 7, 1, 6);
  ctx.fillStyle = ink.soft;
  ctx.textAlign = 'left';
  if (x + text.length * LETTER + 8 < scene.width) ctx.fillText(text, Math.round(x) + 5, bottom - AXIS / 2);
}

function drawCursorTime(scene) {
  const { ctx, ink } = scene;
  const run = scene.runs[0];
  const text = duration(timeAt(scene, run, scene.cursor));
  const wide = ctx.measureText(text).width + 12;
  const x = Math.min(Math.max(scene.cursor - wide / 2, scene.left), scene.width - wide - 2);
  ctx.fillStyle = ink.ink;
  ctx.beginPath();
  ctx.roundRect(x, 5, wide, 19, 4);
  ctx.strokeStyle = ink.paper;
  ctx.lineWidth = 10;
  ctx.stroke();
  ctx.fill();
  ctx.fillStyle = ink.paper;
  ctx.textAlign = 'left';
  ctx.fillText(text, x + 6, 15);
}

/** The name of a run of two, with an axis of its own where they have none in common. */
function drawBand(scene, band) {
  const { ctx, ink } = scene;
  const y = Math.round(band.top - scene.scroll);
  if (y + band.height < AXIS || y > scene.height) return;
  const run = scene.runs[band.run];
  ctx.fillStyle = ink.panel;
  ctx.fillRect(0, y, scene.width, band.height);
  ctx.fillStyle = ink.line;
  ctx.fillRect(0, y + band.height - 1, scene.width, 1);
  const room = (scene.scaled ? scene.left : scene.width) - 48;
  bold(ctx, `${'AB'[run.number]}  ${fitted(run.title, room)}`, 14, y + band.height / 2, ink.ink);
  if (!scene.scaled) return;
  const axis = axisOf(scene, run);
  for (const t of axis.ticks) labelTick(scene, xOf(scene, run, t), axis.label(t), y + band.height);
}

function bold(ctx, text, x, y, colour) {
  ctx.font = '600 ' + FONT;
  ctx.fillStyle = colour;
  ctx.textAlign = 'left';
  ctx.fillText(text, x, y);
  ctx.font = FONT;
}

/** As much of a text as fits. */
function fitted(text, room) {
  const letters = Math.floor(room / LETTER);
  return text.length <= letters ? text : letters < 2 ? '' : text.slice(0, letters - 1) + '…';
}

// Devices

function drawGutter(scene, block) {
  const { ctx, ink } = scene;
  const run = scene.runs[block.run], device = run.devices[block.device];
  const top = Math.round(block.top - scene.scroll), middle = top + PAD + ROW / 2;
  const streams = scene.left > 160 ? scene.left - 104 : scene.left;
  ctx.fillStyle = ink.paper;
  ctx.fillRect(0, top, scene.left, block.height);
  ctx.fillStyle = ink.line;
  ctx.fillRect(0, top + block.height - 1, scene.width, 1);
  ctx.fillRect(scene.left - 1, top, 1, block.height);
  drawChevron(ctx, 13, middle, block.closed, ink.faint);
  bold(ctx, fitted(device.name, streams - 34), 24, middle, ink.ink);
  ctx.fillStyle = ink.faint;
  const lines = [];
  if (device.idle !== null) lines.push(`${percent(device.idle)} idle`);
  if (device.memory.times.length) lines.push(`${bytes(device.memory.peak)} peak`);
  lines.forEach((line, i) => {
    const y = middle + (i + 1) * 17;
    if (y + 8 < top + block.height) ctx.fillText(fitted(line, streams - 28), 24, y);
  });
  if (streams === scene.left) return;
  if (block.closed) {
    if (device.idle !== null) ctx.fillText(`${percent(device.idle)} idle`, streams, middle);
    return;
  }
  for (const { row, top: at } of block.rows) {
    ctx.fillText(fitted(run.rows[row].stream, 96), streams, Math.round(at - scene.scroll) + ROW / 2);
  }
  if (block.memory === null) return;
  const y = Math.round(block.memory - scene.scroll) + MEMORY / 2;
  ctx.fillText('memory', streams, device.limit === null ? y : y - 8);
  if (isOver(device)) ctx.fillStyle = ink.over;
  if (device.limit !== null) ctx.fillText(`limit ${bytes(device.limit)}`, streams, y + 8);
}

function drawChevron(ctx, x, y, closed, colour) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  if (closed) { ctx.moveTo(x - 2, y - 4); ctx.lineTo(x + 2, y); ctx.lineTo(x - 2, y + 4); }
  else { ctx.moveTo(x - 4, y - 2); ctx.lineTo(x, y + 2); ctx.lineTo(x + 4, y - 2); }
  ctx.stroke();
}

function drawBlock(scene, block, work) {
  const run = scene.runs[block.run], device = run.devices[block.device];
  for (const { row, top } of block.rows) {
    const y = Math.round(top - scene.scroll);
    if (y + ROW < AXIS || y > scene.height) continue;
    if (scene.bubbles && run.rows[row].computes) drawBubbles(scene, run, device, y);
    drawRow(scene, run, row, y, work);
    if (scene.pairs && run.rows[row].computes) drawPairs(scene, run, block.device, y);
  }
  if (block.memory !== null) drawMemory(scene, run, device, Math.round(block.memory - scene.scroll));
}

/** The events of a row. Those wider than a pixel are drawn one by one; of the rest, what falls on
 * one pixel is one, in the colour of the longest, the fainter the less of it is covered: these go into
 * a picture one pixel high, since a thousand pixels are written faster than shapes are drawn. */
function drawRow(scene, run, row, y, work) {
  const { first, last } = run.rows[row];
  const scale = perSecond(scene, run), from = firstTime(scene, run), left = scene.left;
  const until = timeAt(scene, run, scene.width);
  const column = scene.colours.columns[run.number], lit = scene.lit[run.number];
  const shapes = new Map(), labels = [], outlined = [], line = lineOf(scene);
  let pixel = null;
  const flush = () => {
    if (pixel === null) return;
    const alpha = Math.max(Math.min(pixel.covered, 1), 0.35) * (pixel.lit ? 1 : DIM);
    if (pixel.x >= left) line.words[pixel.x - left] = scene.colours.words[column[pixel.best]] | (Math.round(alpha * 255) << 24);
    line.used += 1;
    pixel = null;
  };
  let i = upperBound(run.end, from, first, last);
  for (; i < last && run.start[i] < until; i++) {
    work.events += 1;
    const x = left + (run.start[i] - from) * scale, wide = (run.end[i] - run.start[i]) * scale;
    const on = lit === null || lit[i] === 1 ? 1 : 0;
    if (wide >= 1.5) {
      flush();
      const shown = Math.max(x, left - 8), end = Math.min(x + wide, scene.width + 8);
      add(shapes, column[i] * 2 + on, shown, Math.max(1, end - shown - (wide > 4 ? 1 : 0)));
      if (end - shown > 22) labels.push(i, shown, end - shown, on);
      if (scene.critical && run.critical[i] && wide > 7) outlined.push(shown, end - shown - 1);
      continue;
    }
    const at = Math.floor(x);
    if (pixel === null || pixel.x !== at) { flush(); pixel = { x: at, covered: 0, best: i, longest: -1, lit: 0 }; }
    pixel.covered += wide;
    if (on > pixel.lit || (on === pixel.lit && wide > pixel.longest)) { pixel.best = i; pixel.longest = wide; pixel.lit = on; }
  }
  flush();
  stretch(scene, line, y, work);
  paint(scene, shapes, y, work);
  for (let n = 0; n < labels.length; n += 4) drawLabel(scene, run, labels[n], labels[n + 1], labels[n + 2], y, labels[n + 3]);
  if (outlined.length) outline(scene.ctx, outlined, y, scene.ink.ink, 1.5);
}

function add(shapes, style, x, wide) {
  const list = shapes.get(style);
  if (list) list.push(x, wide);
  else shapes.set(style, [x, wide]);
}

const DIM = 0.16;

/** An empty picture one pixel high and as wide as the plot. */
function lineOf(scene) {
  const wide = Math.ceil(plotWidth(scene)) + 1;
  if (scene.line?.canvas.width !== wide) {
    const canvas = new OffscreenCanvas(wide, 1), ctx = canvas.getContext('2d'), image = ctx.createImageData(wide, 1);
    scene.line = { canvas, ctx, image, words: new Uint32Array(image.data.buffer), used: 0 };
  }
  return scene.line;
}

/** Draw the picture of a row as high as the row, and empty it. */
function stretch({ ctx, left }, line, y, work) {
  if (!line.used) return;
  work.shapes += line.used;
  line.ctx.putImageData(line.image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(line.canvas, left, y, line.canvas.width, ROW);
  line.words.fill(0);
  line.used = 0;
}

/** All shapes of one style together: changing the style costs more than a shape. */
function paint({ ctx, colours }, shapes, y, work) {
  for (const [style, list] of shapes) {
    ctx.fillStyle = colours.palette[style >> 1];
    ctx.globalAlpha = style & 1 ? 1 : DIM;
    work.shapes += list.length / 2;
    ctx.beginPath();
    let rounded = false;
    for (let n = 0; n < list.length; n += 2) {
      if (list[n + 1] < 5) ctx.fillRect(list[n], y, list[n + 1], ROW);
      else { ctx.roundRect(list[n], y, list[n + 1], ROW, Math.min(2.5, list[n + 1] / 4)); rounded = true; }
    }
    if (rounded) ctx.fill();
  }
  ctx.globalAlpha = 1;
}

function drawLabel(scene, run, i, x, wide, y, on) {
  const kind = run.strings[run.kind[i]];
  const short = PASSES.has(kind) && run.microbatch[i] >= 0 ? kind + run.microbatch[i] : kind;
  const room = (wide - 8) / LETTER;
  const text = [run.strings[run.name[i]], short, kind].find((one) => one.length <= room);
  if (!text) return;
  const { ctx } = scene;
  const begin = Math.max(x, scene.left);
  ctx.globalAlpha = on ? 1 : 0.35;
  ctx.fillStyle = on ? inkOn(scene.colours.palette[scene.colours.columns[run.number][i]]) : scene.ink.soft;
  ctx.textAlign = 'left';
  ctx.fillText(text, begin + 5, y + ROW / 2 + 0.5);
  ctx.globalAlpha = 1;
}

function outline(ctx, list, y, colour, thick) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = thick;
  ctx.beginPath();
  for (let n = 0; n < list.length; n += 2) {
    ctx.rect(list[n] + thick / 2, y + thick / 2, Math.max(list[n + 1] - thick, 0.5), ROW - thick);
  }
  ctx.stroke();
}

/** Hatch the time in which the device computes nothing. */
function drawBubbles(scene, run, device, y) {
  const { start, end } = device.busy;
  const from = Math.max(0, firstTime(scene, run)), to = Math.min(run.ends, timeAt(scene, run, scene.width));
  const scale = perSecond(scene, run), zero = xOf(scene, run, 0);
  const gap = (a, b) => {
    const begin = Math.max(a, from), wide = (Math.min(b, to) - begin) * scale;
    if (wide >= 1) scene.ctx.fillRect(zero + begin * scale, y, wide, ROW);
  };
  scene.ctx.fillStyle = scene.hatch;
  let i = upperBound(start, from, 0, start.length);
  let before = i === 0 ? 0 : end[i - 1];
  for (; i < start.length && before < to; i++) {
    if (start[i] > from && before < to) gap(before, start[i]);
    before = end[i];
  }
  if (before < to) gap(before, to);
}

/** A bracket over the time in which two groups run. */
function drawPairs(scene, run, device, y) {
  const { ctx, ink } = scene;
  ctx.strokeStyle = ink.mark;
  ctx.lineWidth = 2;
  ctx.beginPath();
  for (const pair of scene.pairs[run.number]) {
    if (pair.device !== device) continue;
    const x = xOf(scene, run, pair.start) + 1, end = xOf(scene, run, pair.end) - 1;
    if (end < scene.left || x > scene.width || end - x < 1) continue;
    ctx.moveTo(x, y + 4);
    ctx.lineTo(x, y - 1);
    ctx.lineTo(end, y - 1);
    ctx.lineTo(end, y + 4);
  }
  ctx.stroke();
}

/** What memory curves are drawn against: the limit, unless everything stays far below it. */
function memoryTop(scene) {
  const all = scene.runs.flatMap((run) => run.devices);
  const peak = Math.max(1, ...all.map((d) => d.memory.peak));
  const limit = Math.max(0, ...all.map((d) => d.limit ?? 0));
  return limit <= 4 * peak ? Math.max(peak, limit) : peak;
}

function drawMemory(scene, run, device, y) {
  const { ctx, ink } = scene;
  const { times, bytes: held, peak, at } = device.memory;
  const most = memoryTop(scene) * 1.06, bottom = y + MEMORY;
  const yOf = (n) => bottom - (n / most) * MEMORY;
  const from = Math.max(times[0], firstTime(scene, run)), to = Math.min(run.ends, timeAt(scene, run, scene.width));
  if (to > from) {
    const path = memoryPath(scene, run, times, held, from, to, yOf);
    ctx.beginPath();
    path.forEach(([x, top], i) => (i ? ctx.lineTo(x, top) : ctx.moveTo(x, top)));
    ctx.strokeStyle = ink.memory;
    ctx.lineWidth = 1.25;
    ctx.stroke();
    ctx.lineTo(path[path.length - 1][0], bottom);
    ctx.lineTo(path[0][0], bottom);
    ctx.fillStyle = ink.memoryFill;
    ctx.fill();
  }
  ctx.textAlign = 'left';
  if (device.limit !== null && yOf(device.limit) >= y) drawLimit(scene, device, yOf(device.limit));
  const x = xOf(scene, run, times[at]), top = yOf(peak);
  if (x < scene.left - 4 || x > scene.width + 4) return;
  ctx.fillStyle = ink.ink;
  ctx.beginPath();
  ctx.arc(x, top, 3, 0, 7);
  ctx.fill();
  const text = bytes(peak), wide = ctx.measureText(text).width;
  const begin = Math.min(Math.max(x - wide / 2, scene.left + 4), scene.width - wide - 4);
  ctx.fillText(text, begin, Math.min(top + 12, bottom - 6));
}

/** The curve in steps; of many changes on one pixel, the most that was held. */
function memoryPath(scene, run, times, held, from, to, yOf) {
  const scale = perSecond(scene, run), zero = xOf(scene, run, 0);
  let i = Math.max(0, upperBound(times, from, 0, times.length) - 1);
  let level = held[i], most = level, x = zero + from * scale, pixel = Math.floor(x);
  const path = [];
  for (i += 1; i < times.length && times[i] < to; i++) {
    const next = zero + times[i] * scale, at = Math.floor(next);
    if (at === pixel) most = Math.max(most, held[i]);
    else {
      path.push([x, yOf(most)]);
      if (at > pixel + 1) path.push([x, yOf(level)], [next, yOf(level)]);
      x = next;
      pixel = at;
      most = held[i];
    }
    level = held[i];
  }
  path.push([x, yOf(most)], [x, yOf(level)], [zero + to * scale, yOf(level)]);
  return path;
}

function drawLimit({ ctx, ink, left, width }, device, at) {
  ctx.strokeStyle = isOver(device) ? ink.over : ink.faint;
  ctx.lineWidth = 1;
  ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(left, Math.round(at) + 0.5);
  ctx.lineTo(width, Math.round(at) + 0.5);
  ctx.stroke();
  ctx.setLineDash([]);
}

// What the reader points at

function drawMarks(scene) {
  const { ctx, ink } = scene;
  const mark = (which, colour, thick, dash = []) => {
    const box = which && rectOf(scene, scene.runs[which.run], which.index);
    if (!box) return;
    ctx.setLineDash(dash);
    ctx.strokeStyle = colour;
    ctx.lineWidth = thick;
    ctx.beginPath();
    ctx.roundRect(box.x - thick / 2 - 0.5, box.y - thick / 2 - 0.5, Math.max(box.width + thick, 3), box.height + thick + 1, 3.5);
    ctx.stroke();
    ctx.setLineDash([]);
  };
  mark(scene.match, ink.mark, 2);
  mark(scene.hovered, ink.ink, 1.5);
  mark(scene.partner, ink.ink, 1.5, [4, 3]);
  mark(scene.selected, ink.ink, 2.5);
  if (scene.cursor === null) return;
  ctx.fillStyle = ink.cursor;
  ctx.fillRect(Math.round(scene.cursor), 0, 1, scene.height);
}

/** The selected range, in shares of the step. */
function drawRange(scene) {
  if (!scene.range) return;
  const x = (share) => scene.left + ((share - scene.view.from) / (scene.view.to - scene.view.from)) * plotWidth(scene);
  const from = x(scene.range.from), to = x(scene.range.to);
  scene.ctx.fillStyle = scene.ink.range;
  scene.ctx.fillRect(from, AXIS, to - from, scene.height);
  scene.ctx.fillStyle = scene.ink.accent;
  scene.ctx.fillRect(from, AXIS, 1.5, scene.height);
  scene.ctx.fillRect(to - 1.5, AXIS, 1.5, scene.height);
}

/** The colours of the canvas, which are those of the page. */
function inks() {
  const dark = isDark();
  return {
    paper: token('--paper'), panel: token('--panel'), line: token('--line'), strong: token('--line-strong'),
    ink: token('--ink'), soft: token('--ink-2'), faint: token('--ink-3'), accent: token('--accent'),
    grid: dark ? '#1c222b' : '#f0f2f5',
    mark: dark ? '#ff7ab8' : '#c2185b',
    cursor: dark ? '#ffffff55' : '#00000044',
    range: dark ? '#7db5f526' : '#0b5cad1c',
    memory: dark ? '#8fa3bd' : '#5d7390',
    memoryFill: dark ? '#8fa3bd2e' : '#5d739024',
    over: token('--removed'),
    hatch: dark ? '#566173' : '#c3cad4',
  };
}

/** Slanted lines to fill idle time with. */
function hatching(ctx, ink, ratio) {
  const size = 6, tile = document.createElement('canvas');
  tile.width = tile.height = Math.round(size * ratio);
  const to = tile.getContext('2d');
  to.scale(tile.width / size, tile.height / size);
  to.strokeStyle = ink.hatch;
  to.lineWidth = 1;
  to.beginPath();
  for (const shift of [-size, 0, size]) { to.moveTo(shift, size); to.lineTo(shift + size, 0); }
  to.stroke();
  const pattern = ctx.createPattern(tile, 'repeat');
  pattern.setTransform(new DOMMatrix().scale(size / tile.width));
  return pattern;
}
