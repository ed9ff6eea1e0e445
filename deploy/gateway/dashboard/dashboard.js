"use strict";
// Sections: formatting, requests to the gateway, parsing /metrics, the block map, tables, charts,
// polling.

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000, TIMEOUT_MS = 15000;
const WINDOW_S = 5, STALLED_S = 10;  // rates, shares and percentiles cover as much as in `longshore top`
const RANGES_S = [120, 600, 3600], MAX_SAVED = 4000;
const STATE_TEXT = {
  reserved: "the null block, or permanently reserved",
  free: "free, with no cached content",
  cached: "free and cached, until it is evicted",
  held: "held by one running request",
  shared: "held by a running request and others",
  kept: "held by requests that are not running",
  transfer: "being loaded or sent, or held by a connector",
  quarantined: "the target of a load that timed out and may still write to it",
};
const [RESERVED, FREE, CACHED, HELD] = [0, 1, 2, 3];
const WORKERS_S = 4;  // workers report once a second; a step less would make rates jump
const STATUS_TEXT = {
  401: "unknown or missing API key", 404: "unknown path or model", 408: "the body arrived too slowly",
  413: "the body is too large", 429: "a limit is reached: of live requests, or of the API key",
  503: "the server starts, or the engine is being restarted", 504: "the deadline of the request, or a silent scheduler",
  gone: "the client disconnected before the response",
};

// ---- Formatting

const grouped = new Intl.NumberFormat("en");
const count = (value) => grouped.format(Math.round(value));

function rate(value) {
  return value === null ? "–" : value < 10 ? value.toFixed(1) : count(value);
}

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 6000 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : count(value)} ${units[unit]}`;
}

function make(tag, classes = "", text = null) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text !== null) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- Requests to the gateway

class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path) {
  const key = sessionStorage.getItem("longshore-key");
  const answer = await fetch(path, {
    headers: key ? { authorization: `Bearer ${key}` } : {},
    signal: AbortSignal.timeout(TIMEOUT_MS),
    cache: "no-store",
  });
  const text = await answer.text();
  if (answer.ok) return text;
  let message = text.trim();
  try { message = JSON.parse(text).error.message; } catch { /* plain text */ }
  throw new HttpError(answer.status, message);
}

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

let engine = new URLSearchParams(location.search).get("engine"); // null: the first one
let hasSamples = false;

async function readState() {
  const query = engine === null ? "" : `?engine=${encodeURIComponent(engine)}`;
  const [text, metrics] = await Promise.all([ask(`dashboard/state${query}`), ask("metrics")]);
  const state = JSON.parse(text);
  if (!hasSamples) {
    hasSamples = true;
    engine = String(state.engine);
    await loadSamples();
  }
  state.states = new Uint8Array(await unpacked(state.states));
  state.block_ids = new Int32Array(await unpacked(state.block_ids));
  let first = 0;
  for (const holder of state.holders) {
    holder.first = first;
    first += holder.num_listed.reduce((sum, listed) => sum + listed, 0);
    holder.end = first;
    holder.total = holder.num_blocks.reduce((sum, blocks) => sum + blocks, 0);
  }
  return { state, metrics: readMetrics(metrics) };
}

// ---- Parsing /metrics: sums over all labels, histograms by bound; of this engine its scheduler,
// workers by rank, tiers by medium and transfers by type; requests by finish reason and responses by
// status

const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)/;

const PARTS = [["positions", "position", "longshore_scheduler_"], ["workers", "worker", "longshore_worker_"], ["tiers", "medium", "longshore_kv_tier_"], ["transfers", "transfer_type", "longshore_kv_offload_"]];

const COUNTED_BY = { longshore_requests_finished_total: "reason", longshore_http_responses_total: "status" };
const SCHEDULER = "longshore_scheduler_";

const labelOf = (labels, name) => new RegExp(`(?:^|,)${name}="([^"]*)"`).exec(labels)?.[1];

function readMetrics(text) {
  const sums = new Map(), buckets = new Map(), scheduler = new Map();
  const counts = { reason: new Map(), status: new Map() };
  const parts = PARTS.map(([kind, label, prefix]) => [new RegExp(`(?:^|,)${label}="([^"]+)"`), prefix, kind, new Map()]);
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line);
    if (match === null) continue;
    const [, name, labels = "", written] = match, value = Number(written);
    const bound = /(?:^|,)le="([^"]+)"/.exec(labels), part = parts.find(([label]) => label.test(labels));
    if (bound) {
      if (!buckets.has(name)) buckets.set(name, new Map());
      const le = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      buckets.get(name).set(le, (buckets.get(name).get(le) ?? 0) + value);
    } else if (part) {
      if (!labels.includes(`engine="${engine}"`)) continue;
      const [label, prefix, , found] = part, key = label.exec(labels)[1];
      if (!found.has(key)) found.set(key, new Map());
      found.get(key).set(name.replace(prefix, ""), value);
    } else {
      sums.set(name, (sums.get(name) ?? 0) + value);
      const by = COUNTED_BY[name];
      if (by && labelOf(labels, "endpoint") !== "/ready") {  // its 503 is an answer
        const key = labelOf(labels, by);
        counts[by].set(key, (counts[by].get(key) ?? 0) + value);
      } else if (name.startsWith(SCHEDULER) && labelOf(labels, "engine") === engine) {
        scheduler.set(name.slice(SCHEDULER.length), value);
      }
    }
  }
  return { sums, buckets, scheduler, counts, ...Object.fromEntries(parts.map(([, , kind, found]) => [kind, found])) };
}

function quantile(now, before, name, share) {
  const last = now.buckets.get(`${name}_bucket`), first = before.buckets.get(`${name}_bucket`);
  if (!last || !first) return null;
  const bounds = [...last.keys()].sort((a, b) => a - b);
  const below = bounds.map((bound) => last.get(bound) - (first.get(bound) ?? 0));
  const total = below.at(-1);
  if (!(total > 0)) return null;
  const index = below.findIndex((number) => number >= share * total);
  const lower = index ? bounds[index - 1] : 0, under = index ? below[index - 1] : 0;
  if (bounds[index] === Infinity) return lower;
  return lower + (bounds[index] - lower) * ((share * total - under) / (below[index] - under));
}

// ---- The block map

const map = {
  canvas: $("map"), image: document.createElement("canvas"),
  state: null, only: null, pinned: null, hovered: null, block: null,
  columns: 0, perCell: 1, cell: 1, palette: null,
};

// Cells are squares of whole device pixels, as large as fit. If even the smallest do not fit, a cell
// stands for several blocks and shows the busiest.
function layOutMap(numBlocks) {
  const scale = window.devicePixelRatio || 1, width = Math.floor(map.canvas.clientWidth * scale);
  const tallest = Math.floor((window.innerWidth < 560 ? 420 : 540) * scale);
  let cell = Math.floor(16 * scale);
  const rowsOf = (size, cells) => Math.ceil(cells / Math.floor(width / size));
  while (cell > 1 && rowsOf(cell, numBlocks) * cell > tallest) cell--;
  map.perCell = Math.max(1, Math.ceil(numBlocks / (Math.floor(width / cell) * Math.floor(tallest / cell))));
  map.cell = cell;
  map.columns = Math.floor(width / cell);
  map.rows = rowsOf(cell, Math.ceil(numBlocks / map.perCell));
  map.image.width = map.columns;
  map.image.height = map.rows;
  map.canvas.width = width;
  map.canvas.height = map.rows * cell;
  map.canvas.style.height = `${(map.rows * cell) / scale}px`;
  map.laidOutFor = `${numBlocks} ${width} ${scale}`;
}

function readPalette() {
  const style = getComputedStyle(document.documentElement), names = Object.keys(STATE_TEXT);
  const dot = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (value, opacity = 1) => {
    dot.clearRect(0, 0, 1, 1);
    dot.globalAlpha = 1;
    dot.fillStyle = style.getPropertyValue("--panel");
    dot.fillRect(0, 0, 1, 1);
    dot.globalAlpha = opacity;
    dot.fillStyle = value;
    dot.fillRect(0, 0, 1, 1);
    return new Uint32Array(dot.getImageData(0, 0, 1, 1).data.buffer)[0];
  };
  const values = names.map((name) => style.getPropertyValue(`--${name}`));
  map.palette = {
    plain: Uint32Array.from(values, (value) => colour(value)),
    dim: Uint32Array.from(values, (value) => colour(value, 0.18)),
    panel: style.getPropertyValue("--panel"), text: style.getPropertyValue("--text"),
    series: [style.getPropertyValue("--series-1"), style.getPropertyValue("--series-2")],
    line: style.getPropertyValue("--line"),
  };
}

const holderKey = (holder) => `${holder.state} ${holder.request_id}`;

function shownHolder() {
  const key = map.hovered ?? map.pinned;
  return key === null || !map.state ? undefined : map.state.holders.find((each) => holderKey(each) === key);
}

// One byte per block, 1 if it is highlighted; null if none is.
function emphasis() {
  const { states, block_ids: ids } = map.state, holder = shownHolder();
  if (!holder && map.only === null) return null;
  const marks = new Uint8Array(states.length);
  if (holder) for (let index = holder.first; index < holder.end; index++) marks[ids[index]] = 1;
  else for (let block = 0; block < states.length; block++) marks[block] = states[block] === map.only ? 1 : 0;
  return marks;
}

function drawMap() {
  if (!map.state) return;
  const { states } = map.state, marks = emphasis(), { plain, dim } = map.palette;
  const scale = window.devicePixelRatio || 1, width = Math.floor(map.canvas.clientWidth * scale);
  if (!width) return; // the window has no size
  if (map.laidOutFor !== `${states.length} ${width} ${scale}`) layOutMap(states.length);
  const { columns, rows, cell, perCell, image } = map;
  const picture = new ImageData(columns, rows), pixels = new Uint32Array(picture.data.buffer);
  const numCells = Math.ceil(states.length / perCell);
  for (let place = 0, block = 0; place < numCells; place++) {
    let state = 0, marked = 0;
    for (const end = Math.min(block + perCell, states.length); block < end; block++) {
      if (states[block] > state) state = states[block];
      if (marks !== null && marks[block]) marked = 1;
    }
    pixels[place] = marks === null || marked ? plain[state] : dim[state];
  }
  image.getContext("2d").putImageData(picture, 0, 0);
  const context = map.canvas.getContext("2d");
  context.clearRect(0, 0, map.canvas.width, map.canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, columns * cell, rows * cell);
  if (cell >= 4) {
    context.fillStyle = map.palette.panel;
    for (let x = 1; x <= columns; x++) context.fillRect(x * cell - 1, 0, 1, rows * cell);
    for (let y = 1; y <= rows; y++) context.fillRect(0, y * cell - 1, columns * cell, 1);
  }
  if (map.block !== null) {
    const place = Math.floor(map.block / perCell), size = Math.max(cell, 5);
    context.strokeStyle = map.palette.text;
    context.lineWidth = 2;
    context.strokeRect((place % columns) * cell - 1, Math.floor(place / columns) * cell - 1, size + 1, size + 1);
  }
  map.numMarked = marks === null ? 0 : marks.reduce((sum, mark) => sum + mark, 0);
  map.canvas.dataset.marked = map.numMarked;
  describePicked();
}

function holdersOf(block) {
  const { holders, block_ids: ids } = map.state, found = [];
  for (let at = ids.indexOf(block); at >= 0; at = ids.indexOf(block, at + 1)) {
    const holder = holders.find((each) => each.first <= at && at < each.end);
    if (!found.includes(holder)) found.push(holder);
  }
  return found;
}

function describePicked() {
  const { state, block } = map, holder = shownHolder();
  let text = "Point at a block to see its holders, or at a request to see its blocks.";
  if (holder) {
    const listed = holder.end - holder.first;
    const part = listed < holder.total ? `its last ${count(listed)} of ` : "";
    text = `${holder.request_id || "a connector"}: ${part}${count(holder.total)} blocks are highlighted.`;
  } else if (map.only !== null) {
    const name = state.state_names[map.only];
    text = `${name}: ${STATE_TEXT[name]}.`;
  }
  if (block !== null && block < state.states.length) {
    const name = state.state_names[state.states[block]], found = holdersOf(block);
    const who = found.slice(0, 4).map((each) => each.request_id || "a connector").join(", ");
    const more = found.length > 4 ? ` and ${found.length - 4} more` : "";
    const unlisted = state.states[block] >= HELD ? "; its holder is not listed" : "";
    text = `Block ${count(block)}: ${name} (${STATE_TEXT[name]})${who ? `, by ${who}${more}` : unlisted}.`;
  }
  setText($("picked"), text);
}

function blockAt(event) {
  const box = map.canvas.getBoundingClientRect(), scale = map.canvas.width / box.width;
  const column = Math.floor(((event.clientX - box.left) * scale) / map.cell);
  const row = Math.floor(((event.clientY - box.top) * scale) / map.cell);
  const block = (row * map.columns + column) * map.perCell;
  return column >= map.columns || block >= map.state.states.length ? null : block;
}

function pin(key) {
  map.pinned = map.pinned === key ? null : key;
  showSelection();
}

function pinHolderOf(block) {
  const [first] = block === null ? [] : holdersOf(block);
  if (first) pin(holderKey(first));
}

function showSelection() {
  for (const [key, row] of holderRows) row.setAttribute("aria-selected", String(key === map.pinned));
  drawMap();
}

map.canvas.addEventListener("mousemove", (event) => {
  if (!map.state) return;
  const block = blockAt(event);
  if (block !== map.block) { map.block = block; drawMap(); }
});
map.canvas.addEventListener("mouseleave", () => { map.block = null; drawMap(); });
map.canvas.addEventListener("click", (event) => { if (map.state) pinHolderOf(blockAt(event)); });
map.canvas.addEventListener("keydown", (event) => {
  const line = map.columns * map.perCell;
  const step = { ArrowLeft: -map.perCell, ArrowRight: map.perCell, ArrowUp: -line, ArrowDown: line }[event.key];
  if (!map.state || (step === undefined && event.key !== "Enter")) return;
  event.preventDefault();
  if (step === undefined) pinHolderOf(map.block);
  else map.block = Math.min(Math.max((map.block ?? -step) + step, 0), map.state.states.length - 1);
  drawMap();
});
map.canvas.addEventListener("blur", () => { map.block = null; drawMap(); });
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  map.only = map.pinned = map.hovered = map.block = null;
  for (const button of $("legend").children) button.setAttribute("aria-pressed", "false");
  showSelection();
});

function showLegend(state) {
  const counts = new Array(state.state_names.length).fill(0);
  for (const each of state.states) counts[each]++;
  state.counts = counts;
  if (!$("legend").children.length) {
    state.state_names.forEach((name, index) => {
      const button = make("button");
      button.type = "button";
      button.title = STATE_TEXT[name];
      button.dataset.state = name;
      button.setAttribute("aria-pressed", "false");
      button.append(make("span", `swatch s${index}`), make("span", "", name), make("span", "num"));
      button.addEventListener("click", () => {
        map.only = map.only === index ? null : index;
        for (const [other, each] of [...$("legend").children].entries()) {
          each.setAttribute("aria-pressed", String(other === map.only));
        }
        drawMap();
      });
      $("legend").append(button);
    });
  }
  counts.forEach((number, index) => setText($("legend").children[index].lastChild, count(number)));
  const said = state.state_names.map((name, index) => `${count(counts[index])} ${name}`).join(", ");
  map.canvas.setAttribute("aria-label", `Map of all KV blocks: ${said}`);
}

// ---- Tables

const holderRows = new Map();

function makeHolderRow(key) {
  const row = make("tr");
  row.tabIndex = 0;
  row.dataset.key = key;
  row.setAttribute("aria-selected", "false");
  const first = make("td"), name = make("div", "name"), bar = make("div", "bar");
  name.append(make("span", "swatch"), make("bdi", "mono"));
  bar.append(make("div"));
  first.append(name, bar);
  row.append(first, make("td", "num"), make("td", "num"), make("td", "num"));
  const light = (value) => () => { map.hovered = value; drawMap(); };
  row.addEventListener("mouseenter", light(key));
  row.addEventListener("mouseleave", light(null));
  row.addEventListener("focus", light(key));
  row.addEventListener("blur", light(null));
  row.addEventListener("click", () => pin(key));
  row.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pin(key);
  });
  return row;
}

function showHolders(state) {
  const gone = new Set(holderRows.keys()), body = $("holders");
  state.holders.forEach((holder, place) => {
    const key = holderKey(holder);
    gone.delete(key);
    if (!holderRows.has(key)) holderRows.set(key, makeHolderRow(key));
    const row = holderRows.get(key), [first, tokens, blocks, age] = row.children;
    const [name, bar] = first.children, done = holder.num_computed_tokens, all = holder.num_tokens;
    const stateName = state.state_names[holder.state];
    name.firstChild.className = `swatch s${holder.state}`;
    setText(name.lastChild, holder.request_id || "a connector");
    first.title = `${holder.request_id}\n${STATE_TEXT[stateName]}`
      + (holder.row >= 0 ? `, row ${holder.row}` : "")
      + (all ? `\n${count(holder.num_prompt_tokens)} prompt tokens, ${count(holder.num_cached_tokens)} of them cached`
        + `\n${count(done)} of ${count(all)} tokens computed, preempted ${holder.num_preemptions} times` : "");
    bar.firstChild.style.width = `${all ? Math.min(100, (100 * done) / all) : 0}%`;
    setText(tokens, all ? count(all) : "–");
    setText(blocks, count(holder.total));
    setText(age, all ? seconds(holder.age_s) : "–");
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  for (const key of gone) {
    holderRows.get(key).remove();
    holderRows.delete(key);
    if (map.hovered === key) map.hovered = null;
    if (map.pinned === key) map.pinned = null;
  }
  const running = state.holders.filter((holder) => holder.state === HELD).length;
  const unlisted = state.report.num_running - running;
  setText($("holders-count"), `${count(state.report.num_running)} running`
    + (unlisted > 0 ? `, the oldest ${count(running)} listed` : ""));
  $("holders-none").hidden = state.holders.length > 0;
}

// Rows of plain cells: [[text, [text, title], ...], ...].
function fill(body, rows, isNumeric) {
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((texts, index) => {
    const row = body.children[index] ?? body.appendChild(make("tr"));
    while (row.children.length > texts.length) row.lastChild.remove();
    texts.map((text) => [text].flat()).forEach(([text, title = ""], column) => {
      const cell = row.children[column] ?? row.appendChild(make("td", isNumeric(column) ? "num" : ""));
      setText(cell, text);
      cell.title = title;
    });
  });
}

function showWaiting(report) {
  const body = $("waiting"), rows = report.waiting;
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((waiting, index) => {
    let row = body.children[index];
    if (!row) {
      row = body.appendChild(make("tr"));
      const cell = row.appendChild(make("td"));
      const name = make("div", "mono");
      name.append(make("bdi"));
      cell.append(name, make("div", "why"));
      row.append(make("td", "num"));
    }
    const [cell, since] = row.children;
    setText(cell.firstChild.firstChild, waiting.request_id);
    cell.title = `${waiting.request_id}\n${count(waiting.num_tokens)} tokens, preempted ${waiting.num_preemptions} times`;
    setText(cell.lastChild, waiting.waits_for);
    setText(since, seconds(waiting.waited_s));
  });
  const more = report.num_waiting - rows.length;
  setText($("waiting-count"), count(report.num_waiting) + (more > 0 ? `, ${count(rows.length)} listed` : ""));
  $("waiting-none").hidden = report.num_waiting > 0;
}

function showPlaces(state, metrics) {
  const { counts, groups } = state, total = state.states.length;
  const unused = counts[FREE] + counts[CACHED];
  const share = (number) => [count(number), `${percent(number / Math.max(total - counts[RESERVED], 1))} of the usable blocks`];
  const size = bytes(total * Math.max(0, ...groups.map((group) => group.block_bytes)));
  fill($("tiers"), [[
    ["device", "each worker has this many blocks"], count(total), share(total - unused - counts[RESERVED]),
    share(counts[CACHED]), share(counts[FREE]), size,
  ]], (column) => column > 0);
  fill($("groups"), groups.map((group) => [
    group.kind, count(group.num_layers), count(group.block_size), count(group.block_bytes), count(group.num_blocks),
  ]), (column) => column > 0);
  const before = [...samples].reverse().find((sample) => sample.metrics && sample.s < samples.at(-1).s - WORKERS_S);
  showWorkers(metrics.workers, before);
  showOffload(metrics, before);
}

const MEDIA = { GPU: "device", CPU: "host memory", DISK: "disk", STORAGE: "store" };

function showOffload({ tiers, transfers }, before) {
  $("offload-panel").hidden = tiers.size + transfers.size === 0;
  const isNumber = (column) => column > 0;
  fill($("offload-tiers"), [...tiers].map(([medium, now]) => {
    const stored = now.get("blocks") ?? 0, capacity = now.get("capacity_blocks") ?? 0;
    return [
      MEDIA[medium] ?? medium, count(stored), capacity ? count(capacity) : "–", capacity ? percent(stored / capacity) : "–",
      count(now.get("hit_tokens_total") ?? 0), count(now.get("dropped_blocks_total") ?? 0),
    ];
  }), isNumber);
  const elapsed = before ? samples.at(-1).s - before.s : 1;
  fill($("transfers"), [...transfers].map(([type, now]) => {
    const value = (name) => now.get(name) ?? 0, total = value("bytes_total"), took = value("seconds_total");
    const added = before ? Math.max(total - (before.metrics.transfers.get(type)?.get("bytes_total") ?? 0), 0) : 0;
    const failed = value("failed_blocks_total"), corrupt = value("corrupt_blocks_total");
    return [
      type.split("_to_").map((medium) => MEDIA[medium] ?? medium).join(" → "), added ? `${bytes(added / elapsed)}/s` : "–",
      took ? `${(total / took / 1e9).toFixed(2)} GB/s` : "–", bytes(total), count(value("queued_blocks")),
      [count(failed + corrupt), `${count(corrupt)} of them did not match their checksums`],
    ];
  }), isNumber);
}

function showWorkers(workers, before) {
  $("workers-panel").hidden = workers.size === 0;
  const rows = [...workers].sort(([a], [b]) => Number(a) - Number(b)).map(([number, now]) => {
    const then = before?.metrics.workers.get(number);
    const added = (name) => (then ? Math.max(now.get(name) - then.get(name), 0) : 0);
    const elapsed = then ? samples.at(-1).s - before.s : 1, steps = added("step_seconds_count");
    const longest = now.get("longest_step_seconds");
    return [
      number, steps ? grouped.format(Math.round(steps / elapsed)) : "–",
      steps ? seconds(added("step_seconds_sum") / steps) : "–", longest ? seconds(longest) : "–",
      percent(Math.min(added("step_seconds_sum") / elapsed, 1)),
      grouped.format(Math.round(added("step_tokens_sum") / elapsed)),
      bytes(now.get("device_memory_bytes") || now.get("resident_memory_bytes") || 0),
    ];
  });
  fill($("workers"), rows, (column) => column > 0);
}

// ---- Charts: the polls of the chosen range. Their values are kept for a reload of the page.

const samples = [];
const SAVED_AS = "longshore-samples";
const metric = (name) => (sample) => sample.metrics.sums.get(name) ?? 0;
const ofScheduler = (name) => (sample) => sample.metrics.scheduler.get(name) ?? 0;
const finished = (...reasons) => (sample) => total(sample.metrics.counts.reason, (reason) => reasons.includes(reason));
const answered = (test) => (sample) => total(sample.metrics.counts.status, (status) => test(Number(status)));
const isRejection = (status) => [401, 408, 413, 414, 429, 431, 503].includes(status);
const isError = (status) => status >= 500 && !isRejection(status);

function total(counts, test) {
  let sum = 0;
  for (const [key, value] of counts) if (test(key)) sum += value;
  return sum;
}

function per(read) {
  return (now, before) => {
    const difference = read(now) - read(before);
    return before === now || difference < 0 ? null : difference / (now.s - before.s);
  };
}

function share(part, whole) {
  return (now, before) => {
    const asked = whole(now) - whole(before);
    return asked > 0 ? (part(now) - part(before)) / asked : null;
  };
}

function latency(name, part) {
  return (now, before) => quantile(now.metrics, before.metrics, `longshore_${name}_seconds`, part);
}

// title, how a value is written, [name, value of (now, WINDOW_S ago)] ..., least top, whether it is of
// all engines: the gateway measures these, and not by engine
const CHARTS = [
  ["KV blocks in use", percent, [["", (now) => now.state.report.kv_usage]], 1],
  ["Requests", count, [["running", (now) => now.state.report.num_running], ["waiting", (now) => now.state.report.num_waiting]], 4],
  ["Tokens out / s", rate, [["", per(metric("longshore_generated_tokens_total"))]], 1, true],
  ["Tokens in / s", rate, [["", per(ofScheduler("prompt_tokens_total"))]], 1],
  ["First token", seconds, [["p50", latency("time_to_first_token", 0.5)], ["p99", latency("time_to_first_token", 0.99)]], 0.001, true],
  ["Between tokens", seconds, [["p50", latency("inter_token_latency", 0.5)], ["p99", latency("inter_token_latency", 0.99)]], 0.001, true],
  ["Steps / s", rate, [["", per((sample) => sample.state.num_steps)]], 1],
  ["Prefix hits", percent, [["", share(ofScheduler("prefix_hit_tokens_total"), ofScheduler("prefix_queried_tokens_total"))]], 1],
  ["Finished / s", rate, [["stop", per(finished("stop", "repetition"))], ["length", per(finished("length"))]], 1, true],
  ["Ended early / s", rate, [["abort", per(finished("abort"))], ["error", per(finished("error"))]], 1, true],
  ["Rejected / s", rate, [["429", per(answered((status) => status === 429))], ["others", per(answered((status) => status !== 429 && isRejection(status)))]], 1, true],
  ["HTTP errors / s", rate, [["4xx", per(answered((status) => status >= 400 && status < 500 && !isRejection(status)))], ["5xx", per(answered(isError))]], 1, true],
];
const SCALE_PX = 44;  // room for the labels of the vertical axis, as wide as the padding of .axis
const charts = CHARTS.map(([title, write, series, least, isOfAll = false], index) => {
  const box = make("div", "chart"), head = make("div", "head"), values = make("div", "values");
  const top = make("span", "top num"), canvas = make("canvas"), axis = make("div", "axis");
  const heading = make("h2", "", title);
  if (isOfAll) heading.append(" ", make("span", "scope", "all engines"));
  head.append(heading, top);
  const numbers = series.map(([name]) => {
    const span = make("span"), number = make("b", "", "–");
    if (series.length > 1) span.append(make("i"));
    span.append(number, make("small", "", name));
    values.append(span);
    return number;
  });
  axis.append(make("span"), make("span"), make("span"));
  canvas.setAttribute("role", "img");
  canvas.addEventListener("mousemove", (event) => {
    const area = canvas.getBoundingClientRect();
    pointAt(Math.max(0, (event.clientX - area.left - SCALE_PX) / (area.width - SCALE_PX)));
  });
  canvas.addEventListener("mouseleave", () => pointAt(null));
  box.append(head, values, canvas, axis);
  box.dataset.chart = index;
  $("charts").append(box);
  return { title, write, series, least, top, canvas, numbers, axis };
});
let rangeS = RANGES_S[0], pointed = null;  // pointed: 0 to 1, from the left of a chart

function takeSample(state, metrics) {
  const now = { s: (performance.timeOrigin + performance.now()) / 1000, state, metrics };
  samples.push(now);
  while (samples[0].s < now.s - RANGES_S.at(-1)) samples.shift();
  const before = samples.find((sample) => sample.metrics && sample.s >= now.s - WINDOW_S - 0.2);
  now.values = charts.map((chart) => chart.series.map(([, value]) => value(now, before)));
  // Keep the block states of the latest samples only: there may be a million blocks.
  now.state = { ...state, states: null, block_ids: null, holders: null };
  for (let index = samples.length - 1; index >= 0 && samples[index].metrics; index--) {
    if (samples[index].s < now.s - 2 * WINDOW_S) samples[index].metrics = samples[index].state = null;
  }
}

function pointAt(place) {
  pointed = place;
  drawCharts();
}

function clock(s, isLong) {
  return new Date(s * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", ...(isLong ? {} : { second: "2-digit" }) });
}

// The labels of the vertical axis, from its top to its bottom, with a line at each.
function drawScale(context, labels, scale) {
  const { width, height } = context.canvas, size = 9 * scale;
  context.canvas.dataset.scale = labels.join();
  context.font = `${size}px system-ui, sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  labels.forEach((label, place) => {
    const y = place * (height - 1) / (labels.length - 1);
    context.fillStyle = map.palette.line;
    context.fillRect(SCALE_PX * scale, Math.floor(y), width, 1);
    context.fillStyle = map.palette.text;
    context.globalAlpha = 0.6;
    context.fillText(label, (SCALE_PX - 4) * scale, Math.min(Math.max(y, size / 2 + 1), height - size / 2 - 1));
    context.globalAlpha = 1;
  });
}

function drawCharts() {
  if (!samples.length) return;
  const end = samples.at(-1).s, scale = window.devicePixelRatio || 1;
  const shown = samples.filter((sample) => sample.s >= end - rangeS);
  const at = pointed === null ? end : end - rangeS * (1 - pointed);
  const near = shown.reduce((best, sample) => (Math.abs(sample.s - at) < Math.abs(best.s - at) ? sample : best));
  charts.forEach(({ title, write, series, least, top, canvas, numbers, axis }, index) => {
    const width = Math.floor(canvas.clientWidth * scale), height = Math.floor(canvas.clientHeight * scale);
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d"), left = SCALE_PX * scale;
    const placeOf = (sample) => left + (width - left) * (1 - (end - sample.s) / rangeS);
    let highest = least, isEmpty = true;
    for (const sample of shown) {
      for (const value of sample.values[index]) {
        if (value === null) continue;
        isEmpty = false;
        if (value > highest) highest = value;
      }
    }
    context.clearRect(0, 0, width, height);
    context.fillStyle = map.palette.line;
    context.fillRect(0, height - 1, width, 1);
    for (const part of [0, 0.5]) context.fillRect(Math.round(left + (width - left) * part), 0, 1, height);
    context.lineWidth = 1.75 * scale;
    context.lineJoin = "round";
    for (let line = series.length - 1; line >= 0; line--) {
      context.strokeStyle = map.palette.series[line];
      context.setLineDash(line ? [5 * scale, 3 * scale] : []);
      context.beginPath();
      let last = null;
      for (const sample of shown) {
        const value = sample.values[index][line];
        const x = placeOf(sample), y = height - 2 - (value / highest) * (height - 4 * scale);
        const goesOn = last !== null && sample.s - last < 2 * WINDOW_S;
        if (value !== null) goesOn ? context.lineTo(x, y) : context.moveTo(x, y);
        last = value === null ? null : sample.s;
      }
      context.stroke();
      setText(numbers[line], write(near.values[index][line]));
    }
    if (pointed !== null) {
      context.fillStyle = map.palette.text;
      context.fillRect(Math.round(placeOf(near)), 0, 1, height);
    }
    drawScale(context, isEmpty ? [] : [highest, highest / 2, 0].map(write), scale);
    const told = series.map(([name], line) => `${name} ${numbers[line].textContent}`.trim()).join(", ");
    canvas.setAttribute("aria-label", `${title}: ${told}${isEmpty ? "" : `; the axis ends at ${write(highest)}`}`);
    setText(top, pointed === null ? (isEmpty ? "" : `to ${write(highest)}`) : clock(near.s));
    [end - rangeS, end - rangeS / 2, end].forEach((s, tick) => setText(axis.children[tick], clock(s, rangeS > 600)));
  });
}

function setRange(s) {
  rangeS = s;
  const query = new URLSearchParams(location.search);
  if (s === RANGES_S[0]) query.delete("range");
  else query.set("range", s);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
  for (const button of $("ranges").children) button.setAttribute("aria-pressed", String(Number(button.dataset.range) === s));
  $("charts").setAttribute("aria-label", `Last ${s / 60} minutes`);
  drawCharts();
}

for (const s of RANGES_S) {
  const button = make("button", "", s < 3600 ? `${s / 60} min` : `${s / 3600} h`);
  button.type = "button";
  button.dataset.range = s;
  button.title = "Show this range in the charts";
  button.addEventListener("click", () => setRange(s));
  $("ranges").append(button);
}

// Only numbers: a sample is [time, values of each chart].
function saveSamples() {
  const kept = samples.slice(-MAX_SAVED).map((sample) => [Math.round(sample.s * 10) / 10, sample.values.map(
    (values) => values.map((value) => (value === null ? null : Number(value.toPrecision(4)))))]);
  try { sessionStorage.setItem(SAVED_AS, JSON.stringify({ engine, kept })); } catch { /* no room: start anew */ }
}

// What the server has of the last hour, and from where it is denser what this page had before a reload.
async function loadSamples() {
  const isWhole = ([, values]) => values.length === CHARTS.length;
  let kept = [], points = [];
  try {
    const saved = JSON.parse(sessionStorage.getItem(SAVED_AS));
    if (saved?.engine === engine) kept = saved.kept.filter(isWhole);
  } catch { /* written by another version */ }
  try {
    const { times, values } = JSON.parse(await ask(`dashboard/history?engine=${encodeURIComponent(engine)}`));
    points = times.map((s, index) => [s, values[index]]).filter(isWhole);
  } catch { /* the page begins without */ }
  const isNew = ([s]) => !kept.some(([own]) => Math.abs(own - s) < WINDOW_S);
  const all = [...points.filter(isNew), ...kept].sort(([a], [b]) => a - b);
  samples.unshift(...all.map(([s, values]) => ({ s, values, state: null, metrics: null })));
}

// ---- Responses and ends of requests, since the start of the gateways

function showEnds({ counts, scheduler, positions }) {
  const isNumber = (column) => column > 0, byName = ([a], [b]) => a.localeCompare(b);
  fill($("reasons"), [...counts.reason].sort(byName).map(([reason, number]) => [reason, count(number)]), isNumber);
  fill($("statuses"), [...counts.status].sort(byName).map(([status, number]) => [
    [status, STATUS_TEXT[status] ?? ""], count(number),
  ]), isNumber);
  const value = (name) => scheduler.get(`${name}_tokens_total`) ?? 0, queried = value("prefix_queried");
  fill($("prefixes"), [
    ["all", count(value("prompt"))], ["looked up", count(queried)], ["found", count(value("prefix_hit"))],
    ["hits", queried ? `${(100 * value("prefix_hit") / queried).toFixed(1)} %` : "–"],
  ], isNumber);
  const rows = scheduler.get("drafted_rows_total"), drafts = scheduler.get("draft_tokens_total");
  const ofRows = (part, whole) => `${(100 * part / whole).toFixed(1)} %`;
  $("drafts-part").hidden = !drafts;
  const byPosition = [...positions].sort(([a], [b]) => a - b)
    .map(([position, each]) => [Number(position) + 1, each.get("accepted_by_position_total")])
    .filter(([, accepted]) => accepted > 0);
  fill($("drafts"), drafts ? [
    ["all", `${count(drafts)}, ${ofRows(scheduler.get("accepted_draft_tokens_total"), drafts)}`],
    ...byPosition.slice(0, 8).map(([position, accepted]) => [`no. ${position}`, ofRows(accepted, rows)]),
  ] : [], isNumber);
  $("states-part").hidden = !scheduler.get("states_kept_total");  // a model without states keeps none
  fill($("states"), [
    ["now", "kept_states"], ["blocks", "kept_state_blocks"],
    ...["kept", "found", "evicted"].map((name) => [name, `states_${name}_total`]),
  ].map(([label, name]) => [label, count(scheduler.get(name) ?? 0)]), isNumber);
}

// ---- Polling

let isFrozen = false, isAsking = false, lastMessage = "", timer = 0;

function say(kind, word, detail) {
  $("status").dataset.kind = $("detail").dataset.kind = kind;
  setText($("status"), word);
  setText($("detail"), detail);
  $("all").classList.toggle("stale", kind === "bad" || word === "locked" || word === "starting");
}

function showState({ state, metrics }) {
  const { report } = state;
  map.state = state;
  showLegend(state);
  takeSample(state, metrics);
  setText($("model"), state.model);
  setText($("engine"), report.engine_id);
  showEngines(state.engines.map(String));
  document.title = `${percent(report.kv_usage)} · ${state.model} · Longshore`;
  const sizes = state.groups.map((group) => group.block_size).join(", ");
  const several = map.perCell > 1 ? `, ${map.perCell} to a point` : "";
  showHolders(state);
  showWaiting(report);
  showPlaces(state, metrics);
  showEnds(metrics);
  drawMap();
  setText($("map-size"), `${count(state.states.length)} of ${sizes} tokens${several}`);
  drawCharts();
  const busy = report.num_running + report.num_waiting > 0;
  const detail = `${count(report.num_running)} running, ${count(report.num_waiting)} waiting, `
    + `${report.steps_in_flight} steps in flight, ${count(state.num_steps)} steps and `
    + `${count(state.num_preemptions)} preemptions so far`;
  if (state.restarting) say("wait", "restarting", `${detail}; the engine is being restarted: ${state.restarting}`);
  else if (report.pause !== "unpaused") say("warn", "paused", `${detail}; the engine has been paused (${report.pause}).`);
  else if (busy && report.idle_s > STALLED_S) say("bad", "stalled", `No request has advanced for ${seconds(report.idle_s)}; ${detail}.`);
  else if (busy) say("good", "serving", `${detail}.`);
  else say("wait", "idle", `No requests; ${count(state.num_steps)} steps and ${count(state.num_preemptions)} preemptions so far.`);
  $("all").dataset.polls = Number($("all").dataset.polls ?? 0) + 1;
}

function showEngines(numbers) {
  $("engines").hidden = numbers.length < 2;
  for (const scope of document.getElementsByClassName("scope")) scope.hidden = numbers.length < 2;
  if (Array.from($("choose").children, (option) => option.value).join() === numbers.join()) return;
  $("choose").replaceChildren(...numbers.map((number) => new Option(`engine ${number}`, number)));
  $("choose").value = engine;
}

async function showProblem(error) {
  if (!(error instanceof HttpError)) {
    const last = lastMessage ? ` Its last message: ${lastMessage}` : " Retrying every second.";
    return say("bad", "unreachable", `The gateway does not answer (${error.message}).${last}`);
  }
  if (error.status === 401) {
    if (sessionStorage.getItem("longshore-key")) {
      sessionStorage.removeItem("longshore-key");
      setText($("refused"), "Unknown API key.");
    }
    $("unlock").hidden = false;
    $("key").focus();
    return say("wait", "locked", "Enter an API key to see the data.");
  }
  if (error.status === 504) return say("bad", "silent", error.message);
  lastMessage = error.message;
  if (error.status !== 503) return say("bad", "error", error.message);
  if (/is being restarted/.test(error.message)) return say("wait", "restarting", error.message);
  const reason = await ask("ready").catch((error) => error.message);
  const isStarting = /still starting/.test(reason) || reason.trim() === "ready";
  say(isStarting ? "wait" : "bad", isStarting ? "starting" : "gone", isStarting ? reason : error.message);
}

async function poll() {
  clearTimeout(timer);
  if (isAsking || isFrozen || document.hidden || !$("unlock").hidden) return;
  isAsking = true;
  try {
    const answer = await readState();
    if (!isFrozen) showState(answer);
  } catch (error) {
    await showProblem(error);
  } finally {
    isAsking = false;
    timer = setTimeout(poll, PERIOD_MS);
  }
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("longshore-key", $("key").value.trim());
  $("key").value = "";
  $("unlock").hidden = true;
  $("map").focus();
  poll();
});
$("freeze").addEventListener("click", () => {
  isFrozen = !isFrozen;
  $("freeze").setAttribute("aria-pressed", String(isFrozen));
  if (isFrozen) say("warn", "frozen", "Updates are stopped; the server continues.");
  else poll();
});
$("choose").addEventListener("change", () => {
  const query = new URLSearchParams(location.search);
  query.set("engine", $("choose").value);
  location.search = `?${query}`;
});
addEventListener("pagehide", saveSamples);
document.addEventListener("visibilitychange", poll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readPalette();
  drawMap();
  drawCharts();
});
new ResizeObserver(() => { drawMap(); drawCharts(); }).observe(document.body);

readPalette();
setRange(RANGES_S.find((s) => String(s) === new URLSearchParams(location.search).get("range")) ?? RANGES_S[0]);
poll();
