// What both pages share: elements, figures as people read them, palettes, the theme, keys.
// All scripts of a page stand in one module, one after another.

const byId = (id) => document.getElementById(id);

/** The data of the page, which stand beside the script as JSON. */
const readData = () => JSON.parse(byId('data').textContent);

/** An element. Children that are strings become text, never markup: names are the user's. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** A list of names and their figures; those without one are left out. */
function pairs(items) {
  const known = items.filter(([, figure]) => figure !== null && figure !== '');
  return el('dl', { class: 'pairs' }, known.map(([name, figure]) => [el('dt', {}, name), el('dd', {}, figure)]));
}

/** At most `most` of the items as a list, and how many more there are. */
function shortList(items, most, make) {
  const shown = items.slice(0, most).map((item) => el('li', {}, make(item)));
  const left = items.length - shown.length;
  if (left > 0) shown.push(el('li', { class: 'quiet' }, `and ${count(left)} more`));
  return el('ul', { class: 'list' }, shown);
}

// Figures

const THOUSANDS = new Intl.NumberFormat('en-US');
const count = (n) => THOUSANDS.format(n);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

/** Three digits or so, and no exponent. */
function digits(x) {
  const size = Math.abs(x);
  if (size === 0) return '0';
  return x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

const TIMES = [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs'], [1e-9, 'ns']];

function duration(seconds) {
  const [unit, name] = TIMES.find(([unit]) => Math.abs(seconds) >= unit * 0.9999) ?? TIMES[3];
  return seconds === 0 ? '0 s' : `${digits(seconds / unit)} ${name}`;
}

const SIZES = [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']];

function bytes(n) {
  const size = SIZES.find(([unit]) => Math.abs(n) >= unit);
  return size ? `${digits(n / size[0])} ${size[1]}` : `${count(n)} B`;
}

/** With the prefix of a thousandfold, "1.23 TFLOP". */
function si(n, unit) {
  const prefixes = ['', 'k', 'M', 'G', 'T', 'P', 'E'];
  let step = 0;
  while (Math.abs(n) >= 1000 && step < prefixes.length - 1) { n /= 1000; step += 1; }
  return `${step ? digits(n) : count(n)} ${prefixes[step]}${unit}`;
}

const signed = (x, text) => (x > 0 ? '+' : x < 0 ? '−' : '±') + text(Math.abs(x));

/** "PP 2" before "PP 10". */
const natural = (a, b) => String(a).localeCompare(String(b), 'en', { numeric: true });

// Colours

// From the palettes of Okabe and Ito and of Paul Tol, which the colour-blind can tell apart;
// passes take the strongest ones, and no colour stands without a label or a legend.
const KIND_COLOURS = {
  F: '#2e72b8', B: '#1b9e77', BI: '#74c3ea', BW: '#e8a61c',
  send: '#c77bab', recv: '#8e3563', all_to_all: '#a64ca6',
  all_reduce: '#d55e00', reduce_scatter: '#e8d94a', all_gather: '#98972e',
  transfer: '#c77bab', update: '#7b8794', add: '#1b7a9e',
};
const KINDS = Object.keys(KIND_COLOURS);
const rank = (kind) => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);
const QUALITATIVE = [
  '#4477aa', '#ee8866', '#44aa99', '#ddcc77', '#aa4499', '#88ccee', '#999933', '#cc6677',
  '#77aadd', '#b0b7c0',
];
// "Cividis": even steps of lightness, alike to every eye.
const SEQUENTIAL = ['#2c5190', '#43557f', '#575c6d', '#707173', '#8a8678', '#a69d75', '#c4b56c', '#e4cf5b', '#fdea45'];
const OTHER = '#9aa3af';

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** A colour as pixels hold it, without its opacity: blue, green, red from the top. */
const wordOf = (hex) => channels(hex).reduceRight((word, channel) => (word << 8) | channel, 0);

/** A colour of the sequential palette for a share from 0 to 1. */
function sequential(share) {
  const place = Math.min(Math.max(share, 0), 1) * (SEQUENTIAL.length - 1);
  const low = Math.min(Math.floor(place), SEQUENTIAL.length - 2);
  const from = channels(SEQUENTIAL[low]);
  const to = channels(SEQUENTIAL[low + 1]);
  const mixed = from.map((c, i) => Math.round(c + (to[i] - c) * (place - low)));
  return '#' + mixed.map((c) => c.toString(16).padStart(2, '0')).join('');
}

/** Black or white, whichever reads better on a colour. */
function inkOn(hex) {
  const [r, g, b] = channels(hex).map((c) => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? '#0d1117' : '#ffffff';
}

/** For distinct names, in order, a colour each: few get colours of their own, many a scale. */
function coloursOf(names, ordered) {
  const scale = ordered || names.length > QUALITATIVE.length;
  const last = Math.max(names.length - 1, 1);
  return names.map((_, i) => (scale ? sequential(i / last) : QUALITATIVE[i]));
}

// The theme: the system's, until the button chooses

function startTheme(button, changed) {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const show = (dark) => {
    document.documentElement.dataset.theme = dark ? 'dark' : 'light';
    button.setAttribute('aria-pressed', String(dark));
    changed();
  };
  let chosen = false;
  button.addEventListener('click', () => { chosen = true; show(!isDark()); });
  system.addEventListener('change', () => { if (!chosen) show(system.matches); });
  show(system.matches);
}

const isDark = () => document.documentElement.dataset.theme === 'dark';
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Keys

/** Fill the help dialog with keys, rows of [keys, what they do]. */
function fillHelp(dialog, rows) {
  const list = rows.map(([keys, what]) =>
    el('div', {}, el('dt', {}, keys.split(' ').map((key) => el('kbd', {}, key))), el('dd', {}, what)));
  dialog.prepend(el('h2', { id: 'help-title' }, 'Keys and mouse'), el('dl', { class: 'keys' }, list));
}

/** Call `actions[key]` for keys that are not meant for a field or for the browser. */
function bindKeys(actions) {
  document.addEventListener('keydown', (event) => {
    const typing = event.target.closest('input, select, textarea, dialog');
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const action = actions[event.key];
    if (action && action(event) !== false) event.preventDefault();
  });
}

/** How many matches a search has, and which of them is visited. */
function foundText({ matches, current, query }) {
  if (!query.trim()) return '';
  return current < 0 ? `${count(matches.length)} found` : `${count(current + 1)} of ${count(matches.length)}`;
}

/** Say something to those who listen and do not see. */
function announce(text) {
  byId('live').textContent = text;
}

const pressed = (button) => button.getAttribute('aria-pressed') === 'true';
