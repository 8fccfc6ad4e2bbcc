// Where everything stands, and what stands at a point. Time runs to the right in shares of the step
// (view.from to view.to), devices run down in pixels.

const AXIS = 30, BAND = 30, ROW = 20, GAP = 3, MEMORY = 46, PAD = 7;

/** Blocks of devices under each other, and above those of each run a band with its name. */
function layoutOf(runs, collapsed, memory) {
  const blocks = [], bands = [];
  let top = AXIS;
  for (const run of runs) {
    if (runs.length > 1) { bands.push({ run: run.number, top, height: BAND }); top += BAND; }
    run.devices.forEach((device, number) => {
      const closed = collapsed.has(`${run.number}/${number}`);
      const block = { run: run.number, device: number, top, rows: [], memory: null, closed };
      top += PAD;
      const rows = block.closed ? shownWhenClosed(run, device) : device.rows;
      for (const row of rows) { block.rows.push({ row, top }); top += ROW + GAP; }
      if (!rows.length) top += ROW + GAP;
      if (memory && !block.closed && device.memory.times.length) {
        block.memory = top + 2;
        top += MEMORY + 2 + GAP;
      }
      top += PAD - GAP;
      block.height = top - block.top;
      blocks.push(block);
    });
  }
  return { blocks, bands, height: top };
}

/** Of a collapsed device, the stream that computes. */
function shownWhenClosed(run, device) {
  const row = device.rows.find((i) => run.rows[i].computes) ?? device.rows[0];
  return row === undefined ? [] : [row];
}

/** The seconds that the whole width of the step stands for. */
function horizon({ scaled, runs }, run) {
  return scaled || runs.length === 1 ? run.ends : Math.max(runs[0].ends, runs[1].ends);
}
const plotWidth = (scene) => scene.width - scene.left;
const perSecond = (scene, run) => plotWidth(scene) / ((scene.view.to - scene.view.from) * horizon(scene, run));
const firstTime = (scene, run) => scene.view.from * horizon(scene, run);
const xOf = (scene, run, t) => scene.left + (t - firstTime(scene, run)) * perSecond(scene, run);
const timeAt = (scene, run, x) => firstTime(scene, run) + (x - scene.left) / perSecond(scene, run);

/** The block at a height of the canvas, and what of it. */
function partAt(scene, y) {
  const down = y + scene.scroll;
  if (y < AXIS) return null;
  const block = scene.layout.blocks.find((one) => down >= one.top && down < one.top + one.height);
  if (!block) return null;
  const row = block.rows.find((one) => down >= one.top - GAP / 2 && down < one.top + ROW + GAP / 2);
  const memory = block.memory !== null && down >= block.memory && down < block.memory + MEMORY;
  return { block, row: row ? row.row : null, memory };
}

/** The event nearest to a point of a row, if one is within three pixels. */
function eventNear(scene, run, row, x) {
  const { first, last } = run.rows[row];
  const reach = 3 / perSecond(scene, run), t = timeAt(scene, run, x);
  let best = null, least = reach;
  for (let i = upperBound(run.end, t - reach, first, last); i < last && run.start[i] <= t + reach; i++) {
    const off = Math.max(run.start[i] - t, t - run.end[i], 0);
    if (off < least || (off === least && best !== null && run.end[i] - run.start[i] > run.end[best] - run.start[best])) {
      best = i;
      least = off;
    }
  }
  return best;
}

/** Where an event is drawn, in pixels of the canvas, or null if its row is not shown. */
function rectOf(scene, run, i) {
  const row = rowOf(run, i);
  const block = scene.layout.blocks.find((one) => one.run === run.number && one.device === run.rows[row].device);
  const at = block?.rows.find((one) => one.row === row);
  if (!at) return null;
  const x = xOf(scene, run, run.start[i]);
  return { x, y: at.top - scene.scroll, width: Math.max(xOf(scene, run, run.end[i]) - x, 1), height: ROW };
}
