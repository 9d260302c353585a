// The heat maps: any figure, any tensor, over steps or ranks; arrows move a cell, Enter opens its tensor.

const heat = { element: document.getElementById("heat-chart"), cell: null, shown: null };

function heatSelection() {
  const value = (id) => document.getElementById(id).value;
  return {
    meaning: DATA.meanings[Number(value("heat-figure"))],
    name: value("heat-name"),
    rows: value("heat-rows"),
    across: value("heat-across"),
  };
}

function option(value, text) {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  return element;
}

// How bad a value is.
function badness(meaning, value) {
  if (Number.isNaN(value)) return -Infinity;
  return meaning.worst === "high" ? value : Math.max(8 * value, -value); // a scale too large does more harm
}

// Scales were recorded at every step, all else on sampled steps.
function heatGrid(meaning) {
  return meaning.column === "scale_delta" && EVERY.tensor.has("scale_delta") ? EVERY : GRIDS[0];
}

// For each layer, the worst of the tensors asked for, cell by cell, and which tensor that is.
function heatRows({ meaning, name, across }) {
  const cube = across === "ranks" ? RANKS : heatGrid(meaning)[meaning.of];
  const names = name === "worst" ? (meaning.of === "gemm" ? GEMMS : ROLES.slice(0, 3)) : [name];
  return DATA.layers.map((_, layer) => {
    const row = { layer, values: new Array(cube.width).fill(NaN), names: new Array(cube.width).fill(names[0]), rank: -Infinity };
    names.forEach((one) => {
      const at = cube.row(layer, one);
      if (at === undefined || !cube.has(meaning.column)) return;
      cube.values(at, meaning.column).forEach((value, i) => {
        const bad = badness(meaning, value);
        if (bad > badness(meaning, row.values[i])) [row.values[i], row.names[i]] = [value, one];
        row.rank = Math.max(row.rank, bad);
      });
    });
    return row;
  });
}

function coloured(meaning, value) {
  if (Number.isNaN(value)) return null;
  const bounded = Math.min(Math.max(value, meaning.low), meaning.high);
  return meaning.log ? Math.log10(bounded) : bounded;
}

function heatChart() {
  const selection = heatSelection();
  const { meaning } = selection;
  let rows = heatRows(selection).filter((row) => row.rank > -Infinity);
  if (selection.rows === "worst") rows = [...rows].sort((a, b) => b.rank - a.rank).slice(0, 40);
  const labels = selection.across === "ranks" ? DATA.ranks.keys.ranks.map(String) : heatGrid(meaning).labels;
  heat.shown = { meaning, rows, labels, across: selection.across };
  if (!rows.length) return null;
  const template = DATA.heat[DATA.meanings.indexOf(meaning)];
  const trace = {
    ...template.data[0],
    z: rows.map((row) => row.values.map((value) => coloured(meaning, value))),
    x: labels.map((_, i) => i),
    y: rows.map((_, i) => i),
    text: rows.map((row) => row.values.map((value, i) => heatWords(heat.shown, row, i))),
    hovertemplate: "%{text}<extra></extra>",
  };
  return { data: [trace], layout: heatLayout(template.layout, rows, labels) };
}

// Ticks at round steps (or ranks), as many as there is room for.
function heatSteps(labels, most) {
  const firsts = labels.map((label) => Number(label.split(" to ")[0]));
  const span = Math.max(1, firsts[firsts.length - 1] - firsts[0]) / most;
  const power = 10 ** Math.floor(Math.log10(span));
  const every = Math.max(1, [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= span));
  const at = (i) => Math.floor(firsts[i] / every);
  const tickvals = firsts.map((_, i) => i).filter((i) => i === 0 || at(i) !== at(i - 1));
  return { tickvals, ticktext: tickvals.map((i) => String(firsts[i])) };
}

function heatLayout(layout, rows, labels) {
  const narrow = heat.element.clientWidth < 600;
  const every = (list, most) => list.map((_, i) => i).filter((i) => i % Math.ceil(list.length / most) === 0);
  const ticks = (list, most) => ({ tickvals: every(list, most), ticktext: every(list, most).map((i) => list[i]) });
  const names = rows.map((row) => (narrow ? DATA.layers[row.layer].brief : DATA.layers[row.layer].tick));
  const height = Math.min(1500, 60 + rows.length * (rows.length > 60 ? 5 : 18));
  return {
    ...layout,
    height: Math.max(190, height),
    margin: { ...layout.margin, l: Math.min(narrow ? 112 : 330, 16 + 6.4 * Math.max(...names.map((name) => name.length))) },
    xaxis: { ...layout.xaxis, title: { ...layout.xaxis.title, text: heat.shown.across.slice(0, -1) }, ...heatSteps(labels, narrow ? 4 : 12) },
    yaxis: { ...layout.yaxis, ...ticks(names.map(plotlyText), Math.max(8, (height - 60) / 16)) },
    shapes: heat.cell ? [heatMark(heat.cell)] : [],
  };
}

// Plotly reads a little HTML in its labels: names must not speak it.
function plotlyText(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function heatWords({ meaning, labels, across }, row, i) {
  const where = plotlyText(DATA.layers[row.layer].short);
  const value = figureText(meaning.digits, row.values[i]);
  return `${where} · ${row.names[i]}<br>${across.slice(0, -1)} ${labels[i]}<br>${meaning.title}: ${value}`;
}

// A number in the few d3 formats that the page uses.
function figureText(digits, value) {
  if (Number.isNaN(value) || value === null) return "not measured";
  if (digits.endsWith("%")) return `${Number((100 * value).toPrecision(3))} %`;
  if (digits.endsWith("f")) return (digits.startsWith("+") && value >= 0 ? "+" : "") + value.toFixed(Number(digits.match(/\.(\d)/)[1]));
  return String(Number(value.toPrecision(3)));
}

function heatMark({ row, column }) {
  const box = { x0: column - 0.5, x1: column + 0.5, y0: row - 0.5, y1: row + 0.5 };
  return { type: "rect", ...box, line: { color: "--ink", width: 2 } };
}

function heatMove(row, column) {
  const { rows, labels, meaning, across } = heat.shown;
  const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));
  heat.cell = { row: clamp(row, rows.length), column: clamp(column, labels.length) };
  const at = rows[heat.cell.row];
  const value = figureText(meaning.digits, at.values[heat.cell.column]);
  const what = `${DATA.layers[at.layer].short}, ${at.names[heat.cell.column]}, ${across.slice(0, -1)} ${labels[heat.cell.column]}: ${value}`;
  document.getElementById("heat-readout").textContent = `${what}. Enter opens it below.`;
  draw(heat.element);
}

function heatOpen(row, column) {
  const { rows, across } = heat.shown;
  if (across === "steps") setCursor(heatGrid(heat.shown.meaning).buckets[column][0]);
  openTensor(rows[row].layer, rows[row].names[column]);
}

function heatKey(event) {
  if (!heat.shown) draw(heat.element);
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const { row, column } = heat.cell || { row: 0, column: 0 };
  if (event.key in moves) heatMove(row + moves[event.key][0], column + moves[event.key][1]);
  else if (event.key === "Enter" && heat.cell) heatOpen(row, column);
  else return;
  event.preventDefault();
}

// A new choice of figure, tensor or rows, in words; the chart follows.
function heatUpdate() {
  const { meaning } = heatSelection();
  heat.cell = null;
  const grid = heatGrid(meaning);
  const steps = grid === EVERY ? "steps" : "sampled steps";
  const thinned = grid.thinned > 1 ? ` Each cell is the worst of up to ${grid.thinned} ${steps}.` : "";
  document.getElementById("heat-note").textContent = meaning.note + thinned;
  document.getElementById("heat-readout").textContent = "";
}

// The tensors (or GEMMs) that a figure can be shown for.
function heatNames() {
  const select = document.getElementById("heat-name");
  const { meaning, name } = heatSelection();
  const cube = GRIDS[0][meaning.of];
  const names = (meaning.of === "gemm" ? GEMMS : ROLES).filter((one) => cube.keys[meaning.of].includes(one));
  select.replaceChildren(option("worst", meaning.of === "gemm" ? "worst GEMM" : "worst operand"));
  names.forEach((one) => select.append(option(one, one)));
  select.value = names.includes(name) ? name : "worst";
}

function startHeat() {
  const figure = document.getElementById("heat-figure");
  DATA.meanings.forEach((meaning, i) => {
    if (GRIDS[0][meaning.of].has(meaning.column)) figure.append(option(i, meaning.title));
  });
  if (!figure.options.length) return;
  figure.value = String(Math.max(0, DATA.meanings.findIndex((meaning) => meaning.column === DATA.first_figure)));
  if (RANKS) document.getElementById("heat-across").append(option("ranks", "ranks"));
  if (DATA.layers.length > 60) document.getElementById("heat-rows").value = "worst";
  heatNames();
  figure.addEventListener("change", heatNames);
  document.getElementById("heat-controls").addEventListener("change", () => {
    heatUpdate();
    draw(heat.element);
  });
  heat.element.addEventListener("keydown", heatKey);
  heatUpdate();
  clicks.set(heat.element, (point) => heatOpen(point.y, point.x));
  show(heat.element, heatChart);
}
