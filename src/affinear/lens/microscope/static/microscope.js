// The microscope's page. Every number comes from the server, which asks affinear; here they are only drawn.

const NAMES = { softmax: "softmax", linear: "linear", inline: "InLine", nala: "NaLa", mala: "MALA" };
// N times the weight of a key: s is the key's score, z the mean of all scores.
const RULES = {
  softmax: ["N w = eˢ / mean eˢ", "s = q·k / √D"],
  linear: ["N w = s / z", "s = φ(q)·φ(k) / √D"],
  inline: ["N w = 1 + s − z", "s = q·k / √D"],
  nala: ["N w = s / z", "s = ψ(q)·ψ′(k)"],
  mala: ["N w = (1 + 1/z) s − z", "s = φ(q)·φ(k) / √D"],
};
// The colours of affinear.lens.figures.SIGNED: zero is the pale middle.
const SIGNED = [[11, 60, 117], [33, 102, 172], [230, 232, 236], [194, 65, 12], [122, 36, 5]];
const UPLOAD_LIMIT = 16 * 2 ** 20;
const STEP = 0.0625;
const HINT = "s: score of a key; z: mean score; φ: elu + 1; ψ: powers by norm and sign; moved: half of Σ|change| since × 1. Point at a map to read a key’s weights.";

const $ = (id) => document.getElementById(id);
const stage = $("stage");
const slider = $("loudness");

const state = {
  mechanisms: [], network: null, samples: [], image: "", source: "raw", layers: [], layer: null, head: 0, window: 0,
  row: 0, column: 0, extent: 200, rows: null, curves: null,
};

// ---- asking the server -------------------------------------------------------------------------------------------

let pending = 0;
let slowTimer = 0;

async function ask(address, options = {}, what = "Computing …") {
  pending += 1;
  busy(what);
  try {
    const answer = await fetch(address, options);
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    return content;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw error instanceof TypeError ? new Error("The microscope does not answer; is `affinear lens` still running?") : error;
  } finally {
    pending -= 1;
    if (!pending) idle();
  }
}

function busy(what) {
  document.body.dataset.state = document.body.dataset.state === "starting" ? "starting" : "busy";
  if (slowTimer) return;
  slowTimer = setTimeout(() => { $("status-text").textContent = what; document.body.classList.add("slow"); }, 180);
}

function idle() {
  clearTimeout(slowTimer);
  slowTimer = 0;
  document.body.classList.remove("slow");
  document.body.dataset.state = state.rows && state.curves ? "ready" : "starting";
  $("status-text").textContent = "Up to date";
}

function complain(error) {
  if (error.name === "AbortError") return;
  $("trouble-text").textContent = error.message;
  $("trouble").hidden = false;
}

function question(extra = {}) {
  const cells = state.layer.grid[1];
  return new URLSearchParams({
    image: state.image, source: state.source, layer: state.layer.number, head: state.head, window: state.window,
    patch: state.row * cells + state.column, ...extra,
  });
}

// One question about rows at a time: while it is under way, only the newest wish is remembered.
let asking = false;
let again = false;

async function refreshRows() {
  if (asking) { again = true; return; }
  asking = true;
  try {
    do {
      again = false;
      const rows = await ask(`/api/rows?${question({ factor: factor() })}`);
      if (!again) { state.rows = rows; drawRows(); }
    } while (again);
  } catch (error) {
    complain(error);
  } finally {
    asking = false;
    if (!pending) idle();
  }
}

let curvesAbort = null;

async function refreshCurves() {
  curvesAbort?.abort();
  curvesAbort = new AbortController();
  try {
    state.curves = await ask(`/api/curves?${question()}`, { signal: curvesAbort.signal });
    state.extent = rounded(Math.max(state.curves.extent, 100));
    drawScale();
    drawCurves();
    drawRows();
    if (!pending) idle();
  } catch (error) {
    complain(error);
  }
}

function refresh() {
  probe(null, null); // its numbers are of another query
  placeMarks();
  refreshRows();
  refreshCurves();
}

async function refreshLayers() {
  const what = state.source === "network" ? `Running ${state.network.name} on the image …` : "Computing …";
  const { image, source } = state;
  try {
    const { layers } = await ask(`/api/layers?${new URLSearchParams({ image, source })}`, {}, what);
    if (image !== state.image || source !== state.source) return;
    state.layers = layers;
    fillLayers();
    chooseLayer(layers.find((layer) => layer.name === state.layer?.name) ?? layers[0]);
  } catch (error) {
    complain(error);
    if (source === "network" && !state.layer) { // nothing to look at in it: show what there is
      state.source = $("source").value = "raw";
      await refreshLayers();
    }
  }
}

// ---- choosing ----------------------------------------------------------------------------------------------------

function factor() { return 2 ** Number(slider.value); }

function chooseImage(id) {
  probe(null, null);
  state.image = id;
  $("trouble").hidden = true;
  $("picture").src = `/api/image?id=${encodeURIComponent(id)}`;
  for (const button of $("samples").children) button.setAttribute("aria-pressed", String(button.dataset.id === id));
  const sample = state.samples.find((one) => one.name === id);
  $("credit").textContent = sample ? `Image: ${sample.title}, ${sample.credit}` : "Image: yours; it stays in this program's memory.";
  return refreshLayers();
}

function chooseLayer(layer) {
  const before = state.layer?.grid ?? layer.grid;
  const [rows, columns] = layer.grid;
  state.row = Math.min(rows - 1, Math.floor(((state.row + 0.5) * rows) / before[0]));
  state.column = Math.min(columns - 1, Math.floor(((state.column + 0.5) * columns) / before[1]));
  state.layer = layer;
  state.head = Math.min(state.head, layer.heads - 1);
  state.window = Math.min(state.window, layer.windows - 1);
  $("layer").value = layer.number;
  options($("head"), layer.heads, (n) => `${n + 1} of ${layer.heads}`, state.head);
  options($("window"), layer.windows, (n) => `${n + 1} of ${layer.windows}`, state.window);
  $("layer-label").hidden = state.source === "raw";
  $("head-label").hidden = layer.heads < 2;
  $("window-label").hidden = layer.windows < 2;
  stage.classList.toggle("window", layer.windows > 1);
  stage.classList.toggle("fine", Math.max(rows, columns) > 28);
  document.documentElement.style.setProperty("--rows", rows);
  document.documentElement.style.setProperty("--columns", columns);
  $("about").textContent = about(layer);
  for (const name of state.mechanisms) $(`map-${name}`).querySelector(".own").hidden = layer.mechanism !== name;
  refresh();
}

function about(layer) {
  if (state.source === "raw") {
    const more = state.network ? "" : " To look into a network, start affinear lens --model mavit_tiny.";
    return `Sixteen fixed numbers for each of 14 × 14 patches (colours, their spread, edges), the same as query and key: maps show similarity, nothing is learned.${more}`;
  }
  const weights = state.network.weights ? `weights of ${state.network.weights}` : "fresh random weights: you see the architecture, nothing learned";
  const turned = layer.rotary ? " Positions turn its queries and keys: then N w = 1 + g(z) (s − mean s), with z from before the turn, and linear weights, too, may be negative." : "";
  const loose = layer.mechanism.endsWith("_released") && layer.rotary ? ", whose rows do not sum to one" : "";
  const shown = layer.windows > 1 ? " Tokens of one window; where it lies in the image is not shown." : "";
  return `${state.network.name}, ${weights}.${turned}${shown} The layer’s own mechanism is ${NAMES[layer.mechanism] ?? layer.mechanism}${loose}; here all five see its queries and keys.`;
}

function choosePatch(row, column) {
  const [rows, columns] = state.layer.grid;
  const next = [clamp(row, 0, rows - 1), clamp(column, 0, columns - 1)];
  if (next[0] === state.row && next[1] === state.column) return;
  [state.row, state.column] = next;
  refresh();
}

async function upload(file) {
  if (!file) return;
  $("trouble").hidden = true;
  try {
    if (file.size > UPLOAD_LIMIT) throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MB, expected at most 16; make it smaller.`);
    const headers = { "Content-Type": "application/octet-stream" };
    const { id } = await ask("/api/image", { method: "POST", body: file, headers }, "Reading the image …");
    await chooseImage(id);
  } catch (error) {
    complain(error);
  }
}

function setLoudness(value) {
  slider.value = clamp(Math.round(value / STEP) * STEP, -4, 4);
  loudnessMoved();
}

function loudnessMoved() {
  $("factor").textContent = `× ${written(factor())}`;
  slider.setAttribute("aria-valuetext", `times ${written(factor())}`);
  $("reset").disabled = Number(slider.value) === 0;
  probe(null, null);
  drawNow();
  refreshRows();
}

// ---- numbers as text ---------------------------------------------------------------------------------------------

function clamp(x, low, high) { return Math.min(high, Math.max(low, x)); }

function rounded(x) { // up to 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= x * 0.9999);
}

function minus(text) { return text.replace("-", "−"); }

function written(x) { // a factor: fractions where they are exact
  const power = Math.log2(x);
  if (Number.isInteger(power)) return power < 0 ? `1/${2 ** -power}` : `${2 ** power}`;
  return x.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

function raised(exponent) { return [...minus(String(exponent))].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join(""); }

function short(x) { // three digits, powers of ten where they are needed
  if (x === null || x === undefined) return "∞";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) {
    const [digits, exponent] = x.toExponential(1).split("e");
    return `${minus(digits)} × 10${raised(Number(exponent))}`;
  }
  return minus(size >= 1000 ? x.toFixed(0) : size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : x.toFixed(2));
}

function put(element, text, value) { // the shown text, and the whole number behind it
  element.textContent = text;
  if (value !== undefined && value !== null) { element.dataset.value = value; element.title = String(value); }
}

// ---- drawing -----------------------------------------------------------------------------------------------------

// Where a multiple of the uniform weight lies on the scale, −1 to 1: as its cube root.
function place(multiple) {
  return clamp(Math.cbrt(multiple / state.extent), -1, 1);
}

function colour(at) {
  const along = (clamp(at, -1, 1) + 1) * 2;
  const left = Math.min(3, Math.floor(along));
  return SIGNED[left].map((from, i) => Math.round(from + (along - left) * (SIGNED[left + 1][i] - from)));
}

function paint(canvas, columns, rows, at) {
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  for (let i = 0; i < rows * columns; i += 1) image.data.set([...colour(at(i)), 255], 4 * i);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function drawRows() {
  if (!state.rows) return;
  const { uniform, prefix, mechanisms } = state.rows;
  const [rows, columns] = state.layer.grid;
  if (mechanisms.mala.row.length !== prefix + rows * columns) return; // of a layer that was left meanwhile
  for (const name of state.mechanisms) {
    const found = mechanisms[name];
    const card = $(`map-${name}`);
    const canvas = card.querySelector("canvas");
    paint(canvas, columns, rows, (i) => place(found.row[prefix + i] / uniform));
    const signed = found.negative > 5e-7;
    canvas.setAttribute("aria-label", `${NAMES[name]}: largest weight ${short(found.largest / uniform)} times uniform, ${signed ? `negative weights add up to ${short(found.negative)}` : "nothing below zero"}`);
    put(card.querySelector(".largest"), `${short(found.largest / uniform)} ×`, found.largest);
    put(card.querySelector(".negative"), signed ? `−${short(found.negative)}` : "none", found.negative);
    card.querySelector(".negative").classList.toggle("below", signed);
    put(card.querySelector(".entropy"), found.entropy.toFixed(3), found.entropy);
    put(card.querySelector(".moved"), found.moved < 5e-4 ? "0.000" : found.moved.toFixed(3), found.moved);
    const token = card.querySelectorAll(".token");
    for (const part of token) part.hidden = !prefix;
    if (prefix) put(token[1], `${short(found.row[0] / uniform)} ×`, found.row[0]);
  }
  drawSums();
  drawNow();
  announce();
}

function drawScale() {
  const { uniform } = state.rows ?? { uniform: 1 / (state.layer.grid[0] * state.layer.grid[1]) };
  paint($("scale"), 512, 1, (i) => (2 * (i + 0.5)) / 512 - 1);
  const inner = [1, 10, 100, 1000].filter((tick) => tick < state.extent * 0.3);
  const ticks = [-state.extent, ...inner.map((t) => -t).reverse(), 0, ...inner, state.extent];
  $("scale-ticks").replaceChildren(...ticks.map((tick) => {
    const mark = make("span", {}, minus(String(tick)));
    mark.style.setProperty("--at", `${50 + 50 * place(tick)}%`);
    return mark;
  }));
  $("scale-text").textContent = `Multiples of the uniform weight 1/${Math.round(1 / uniform)}: one scale for all five maps and every loudness, spaced by cube roots. Zero is pale; what is blue is below it.`;
}

function drawSums() {
  const found = state.mechanisms.map((name) => state.rows.mechanisms[name]);
  const most = Math.max(...found.map((one) => one.sum + one.negative), 1.25);
  state.mechanisms.forEach((name, i) => {
    const line = $(`sum-${name}`);
    const above = found[i].sum + found[i].negative;
    const bar = line.querySelector(".balance");
    bar.style.setProperty("--one", `${100 / most}%`);
    line.querySelector(".plus").style.setProperty("--width", `${(100 * above) / most}%`);
    line.querySelector(".minus").style.setProperty("--width", `${(100 * found[i].negative) / most}%`);
    line.querySelector(".minus").style.setProperty("--left", `${(100 * (above - found[i].negative)) / most}%`);
    put(line.querySelector(".above"), above.toFixed(3), above);
    put(line.querySelector(".beneath"), found[i].negative > 5e-7 ? `−${found[i].negative.toFixed(3)}` : "0", found[i].negative);
    put(line.querySelector(".sum"), found[i].sum.toFixed(6), found[i].sum);
    const off = Math.abs(found[i].sum - 1);
    put(line.querySelector(".off"), off ? short(off) : "0", off);
  });
}

const BOX = { left: 50, right: 450, top: 12, bottom: 222 };
const RATIO_LIMIT = 1e4;

function across(power) { return BOX.left + ((power + 4) / 8) * (BOX.right - BOX.left); }

function entropyY(entropy) {
  const most = state.curves.uniform_entropy * 1.04;
  return BOX.bottom - (clamp(entropy, 0, most) / most) * (BOX.bottom - BOX.top);
}

function ratioY(ratio) { // linear between −1 and 1, logarithmic beyond, cut at 10⁴
  const size = Math.min(Math.abs(ratio), RATIO_LIMIT);
  const depth = (size <= 1 ? size : 1 + Math.log10(size)) / 5;
  return (BOX.top + BOX.bottom) / 2 - (Math.sign(ratio) * depth * (BOX.bottom - BOX.top)) / 2;
}

function drawCurves() {
  const powers = state.curves.factors.map(Math.log2);
  const of = (name) => state.curves.mechanisms[name];
  const floors = [0, 1, 2, 3, 4, 5, 6, 7, 8].filter((tick) => tick <= state.curves.uniform_entropy);
  const entropy = [
    ...axes(floors.map((tick) => [entropyY(tick), String(tick)])),
    shape("line", { class: "even", x1: BOX.left, x2: BOX.right, y1: entropyY(state.curves.uniform_entropy), y2: entropyY(state.curves.uniform_entropy) }),
    ...state.mechanisms.map((name) => path(name, [of(name).entropy.map((y, i) => [across(powers[i]), entropyY(y)])])),
  ];
  fillChart("entropy", entropy);
  const ticks = [-1e4, -100, -1, 1, 100, 1e4].map((tick) => [ratioY(tick), Math.abs(tick) === 1e4 ? (tick < 0 ? "≤ −10⁴" : "≥ 10⁴") : minus(String(tick))]);
  const ratio = [
    ...axes(ticks),
    shape("line", { class: "even", x1: BOX.left, x2: BOX.right, y1: ratioY(0), y2: ratioY(0) }),
    ...state.mechanisms.map((name) => path(name, pieces(state.curves.factors, of(name)))),
    ...pole(of("mala").pole),
  ];
  fillChart("ratio", ratio);
  $("ratio-text").textContent = ratioText();
}

// A ratio that passes through its pole leaves at the top and comes back from below.
function pieces(factors, curve) {
  const points = [...factors.map((factor, i) => [factor, curve.ratio[i]]), ...curve.near].filter(([, ratio]) => ratio !== null);
  points.sort((one, other) => one[0] - other[0]);
  const found = [[]];
  points.forEach(([factor, ratio], i) => {
    const before = points[i - 1];
    if (before && before[1] > 0 && ratio < 0) {
      const x = across(Math.log2(curve.pole ?? Math.sqrt(factor * before[0])));
      found.at(-1).push([x, ratioY(RATIO_LIMIT)]);
      found.push([[x, ratioY(-RATIO_LIMIT)]]);
    }
    found.at(-1).push([across(Math.log2(factor)), ratioY(ratio)]);
  });
  return found;
}

function pole(at) {
  if (at === null || at < 1 / 16 || at > 16) return [];
  const x = across(Math.log2(at));
  const end = x > 330;
  return [
    shape("line", { class: "pole", x1: x, x2: x, y1: BOX.top, y2: BOX.bottom }),
    shape("text", { class: "pole-name", x: x + (end ? -6 : 6), y: BOX.bottom - 8, "text-anchor": end ? "end" : "start" }, `MALA’s pole × ${short(at)}`),
  ];
}

function ratioText() {
  const { scaled, mechanisms } = state.curves;
  if (scaled !== "features") return "Of each mechanism’s own row at × 1. Positions turn here, or keys are masked: so the query itself is multiplied, and no pole has a closed form.";
  const at = mechanisms.mala.pole;
  const where = at === null ? "the median key’s weight never reaches zero in MALA." : `in MALA the median key’s weight passes zero at × ${short(at)}${at < 1 / 16 || at > 16 ? ", off the chart" : ""}.`;
  return `Of each mechanism’s own row at × 1. Here the features φ(q) are multiplied, not q: linear and NaLa stand still, and ${where}`;
}

function axes(rows) {
  const columns = [[-4, "1/16"], [-2, "1/4"], [0, "× 1"], [2, "4"], [4, "16"]];
  return [
    ...rows.flatMap(([y, text]) => [shape("line", { class: "axis", x1: BOX.left, x2: BOX.right, y1: y, y2: y }), shape("text", { x: BOX.left - 7, y: y + 4, "text-anchor": "end" }, text)]),
    ...columns.map(([power, text]) => shape("text", { x: across(power), y: BOX.bottom + 19, "text-anchor": "middle" }, text)),
  ];
}

function path(name, lines) {
  const d = lines.filter((line) => line.length).map((line) => `M${line.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`).join("");
  return shape("path", { class: `curve ${name}`, d });
}

function fillChart(id, shapes) {
  const now = shape("line", { class: "now", y1: BOX.top, y2: BOX.bottom });
  const dots = state.mechanisms.map((name) => shape("circle", { class: `dot ${name}`, r: 4.5 }));
  $(id).querySelector("svg").replaceChildren(...shapes, now, ...dots);
  drawNow();
}

// Everything that says where on the curves the slider is.
function drawNow() {
  const x = across(Number(slider.value));
  for (const id of ["entropy", "ratio"]) {
    const now = $(id).querySelector(".now");
    now?.setAttribute("x1", x);
    now?.setAttribute("x2", x);
    if (!state.rows || !state.curves) continue;
    const there = across(Math.log2(state.rows.factor));
    for (const name of state.mechanisms) {
      const value = state.rows.mechanisms[name][id];
      const dot = $(id).querySelector(`.dot.${name}`);
      dot?.setAttribute("cx", there);
      dot?.setAttribute("cy", id === "entropy" ? entropyY(value) : ratioY(value ?? Infinity));
      put($(`${id}-${name}`), id === "entropy" ? value.toFixed(3) : short(value), value);
    }
  }
}

function placeMarks() {
  const root = document.documentElement.style;
  root.setProperty("--row", state.row);
  root.setProperty("--column", state.column);
  const [rows, columns] = state.layer.grid;
  $("where").textContent = `Row ${state.row + 1}, column ${state.column + 1}`;
  stage.setAttribute("aria-label", `Image of ${rows} by ${columns} patches. Arrow keys move the patch.`);
}

let announcing = 0;

function announce() {
  clearTimeout(announcing);
  announcing = setTimeout(() => {
    const uniform = state.rows.uniform;
    const parts = state.mechanisms.map((name) => `${NAMES[name]} ${short(state.rows.mechanisms[name].largest / uniform)}`);
    $("live").textContent = `Row ${state.row + 1}, column ${state.column + 1}, query times ${written(factor())}. Largest weight in multiples of uniform: ${parts.join(", ")}.`;
  }, 500);
}

function probe(row, column) {
  const marks = document.querySelectorAll(".probe-mark");
  for (const mark of marks) {
    mark.hidden = row === null;
    mark.style.setProperty("--row", row);
    mark.style.setProperty("--column", column);
  }
  $("probe").textContent = HINT;
  if (row === null || !state.rows) return;
  const { uniform, prefix, mechanisms } = state.rows;
  const key = prefix + row * state.layer.grid[1] + column;
  const parts = state.mechanisms.flatMap((name) => [` · ${NAMES[name]} `, make("b", {}, `${short(mechanisms[name].row[key] / uniform)} ×`)]);
  $("probe").replaceChildren(`Key in row ${row + 1}, column ${column + 1}`, ...parts);
}

// ---- building the page -------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function shape(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function options(select, count, text, chosen) {
  select.replaceChildren(...Array.from({ length: count }, (_, n) => make("option", { value: n }, text(n))));
  select.value = chosen;
}

function fillLayers() {
  $("layer").replaceChildren(...state.layers.map((layer) => make("option", { value: layer.number }, `${layer.name} · ${layer.grid.join(" × ")} · ${layer.mechanism}`)));
}

function card(name) {
  const map = make("div", { class: "map" }, make("canvas", { role: "img", "aria-label": NAMES[name] }), make("div", { class: "mark probe-mark", hidden: "" }), make("div", { class: "mark chosen" }));
  const own = make("span", { class: "own", hidden: "", title: "The mechanism of this layer" }, "its own");
  const numbers = make("dl", {},
    make("dt", { title: "The largest weight, in multiples of the uniform one" }, "largest"), make("dd", { class: "largest" }),
    make("dt", { title: "The sum of all weights below zero" }, "below zero"), make("dd", { class: "negative" }),
    make("dt", { title: "In nats, of |w| / Σ|w|" }, "entropy"), make("dd", { class: "entropy" }),
    make("dt", { title: "How far the row is from the one at × 1: half of Σ|difference|" }, "moved"), make("dd", { class: "moved" }),
    make("dt", { class: "token", hidden: "" }, "class token"), make("dd", { class: "token", hidden: "" }));
  const title = make("h2", {}, make("span", { class: "swatch" }), NAMES[name], own);
  watchMap(map);
  return make("article", { class: `card ${name}`, id: `map-${name}` }, title, map, numbers, make("p", { class: "rule" }, make("b", {}, RULES[name][0]), make("br"), RULES[name][1]));
}

function sumLine(name) {
  const bar = make("div", { class: "balance", "aria-hidden": "true" }, make("i", { class: "plus" }), make("i", { class: "minus" }), make("i", { class: "one" }));
  return make("tr", { id: `sum-${name}`, class: name },
    make("th", { scope: "row" }, make("span", { class: "swatch" }), NAMES[name]), make("td", { class: "wide" }, bar),
    make("td", { class: "above" }), make("td", { class: "beneath" }), make("td", {}, make("b", { class: "sum" })), make("td", { class: "off" }));
}

function cellAt(element, event) {
  const box = element.getBoundingClientRect();
  const [rows, columns] = state.layer.grid;
  const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
  const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
  return [clamp(row, 0, rows - 1), clamp(column, 0, columns - 1)];
}

function watchMap(element) {
  element.addEventListener("click", (event) => state.layer && choosePatch(...cellAt(element, event)));
  element.addEventListener("pointermove", (event) => state.layer && probe(...cellAt(element, event)));
  element.addEventListener("pointerleave", () => probe(null, null));
}

function watchChart(id) {
  const svg = $(id).querySelector("svg");
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 460;
    setLoudness(((x - BOX.left) / (BOX.right - BOX.left)) * 8 - 4);
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); move(event); });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
}

function watchKeys() {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -99], End: [0, 99], PageUp: [-99, 0], PageDown: [99, 0] };
  stage.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move || !state.layer || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choosePatch(state.row + move[0], state.column + move[1]);
  });
}

function watchDrops() {
  const over = (shown) => (event) => { event.preventDefault(); $("drop").hidden = !shown; };
  addEventListener("dragover", over(true));
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
  addEventListener("drop", (event) => { over(false)(event); upload(event.dataTransfer.files[0]); });
  addEventListener("paste", (event) => upload(event.clipboardData?.files[0]));
  $("file").addEventListener("change", (event) => { upload(event.target.files[0]); event.target.value = ""; });
}

function watch() {
  watchMap(stage);
  watchKeys();
  watchDrops();
  watchChart("entropy");
  watchChart("ratio");
  slider.addEventListener("input", loudnessMoved);
  $("reset").addEventListener("click", () => { setLoudness(0); slider.focus(); });
  $("trouble-close").addEventListener("click", () => { $("trouble").hidden = true; });
  $("source").addEventListener("change", (event) => { state.source = event.target.value; refreshLayers(); });
  $("layer").addEventListener("change", (event) => chooseLayer(state.layers.find((layer) => layer.number === Number(event.target.value))));
  $("head").addEventListener("change", (event) => { state.head = Number(event.target.value); refresh(); });
  $("window").addEventListener("change", (event) => { state.window = Number(event.target.value); refresh(); });
}

async function start() {
  const begun = await ask("/api/start", {}, "Starting …");
  state.mechanisms = begun.mechanisms;
  state.network = begun.network;
  state.samples = begun.samples;
  $("maps").append(...begun.mechanisms.map(card));
  $("sums").append(...begun.mechanisms.map(sumLine));
  for (const id of ["entropy", "ratio"]) {
    $(id).querySelector(".values").append(...begun.mechanisms.map((name) => make("li", { class: name }, make("span", { class: "swatch" }), NAMES[name], make("b", { id: `${id}-${name}` }))));
  }
  $("samples").append(...begun.samples.map((sample) => {
    const button = make("button", { type: "button", "aria-label": `${sample.title}, ${sample.credit}`, title: sample.title, "aria-pressed": "false" }, make("img", { src: `/api/image?id=${sample.name}`, alt: "" }));
    button.dataset.id = sample.name;
    button.addEventListener("click", () => chooseImage(sample.name));
    return button;
  }));
  $("source").append(make("option", { value: "raw" }, "Raw patches"));
  if (begun.network) $("source").append(make("option", { value: "network" }, `Network: ${begun.network.name}`));
  state.source = $("source").value = begun.network ? "network" : "raw"; // who names a network wants to see it
  [state.row, state.column] = [5, 5];
  watch();
  probe(null, null);
  $("reset").disabled = true;
  await chooseImage(begun.samples[0].name);
}

start().catch(complain);
