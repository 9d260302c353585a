// Charts: templates from fp8dbg/render/figures.py, filled with figures and painted in the theme's colours.

const CONFIG = { displayModeBar: false, responsive: true };
const drawn = new Map(); // element -> function that returns its chart
const clicks = new Map(); // element -> what a press on one of its points does
let cursor = null; // the step that the reader points at, marked in every chart over steps

function palette() {
  return DATA.palettes[document.documentElement.dataset.shown];
}

function painted(value, colours) {
  if (Array.isArray(value)) return value.map((one) => painted(one, colours));
  if (ArrayBuffer.isView(value) || value === null) return value;
  if (typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, painted(one, colours)]));
  }
  if (typeof value !== "string" || !value.startsWith("--")) return value;
  const found = colours[value];
  return Array.isArray(found) ? found.map((colour, i) => [i / (found.length - 1), colour]) : found || value;
}

// As figures.draw does: each trace takes the columns that its meta names, or is left out.
function filled(template, columns) {
  const log = template.layout.yaxis.type === "log";
  const wanted = ({ meta }) => (meta.optional ? (columns[meta.y] || []).some((v) => v > 0) : meta.y in columns);
  const data = template.data.filter(wanted).map((trace) => {
    const values = Array.from(columns[trace.meta.y], (value) => (Number.isNaN(value) ? null : value));
    const floor = trace.meta.floor;
    const held = floor ? values.map((value) => (value === null ? null : Math.max(value, floor))) : values;
    const y = log ? held.map((value) => (value > 0 ? value : null)) : held;
    const mode = values.length > 100 ? "lines" : trace.mode;
    return { ...trace, mode, x: columns[trace.meta.x || "step"], y, customdata: values };
  });
  return { data, layout: withTicks(template.layout, data.flatMap((trace) => trace.y)), overSteps: true };
}

// Ticks of a logarithmic axis, as figures.log_ticks has them.
function withTicks(layout, values) {
  const positive = values.filter((value) => value > 0);
  if (layout.yaxis.type !== "log" || layout.yaxis.tickvals || !positive.length) return { ...layout };
  const [low, high] = [Math.min(...positive), Math.max(...positive)].map(Math.log10);
  const digits = high - low < 0.4 ? [] : high - low < 1 ? [1, 1.5, 2, 3, 5, 7] : high - low < 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((Math.ceil(high) - Math.floor(low)) / 5));
  const tickvals = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += every) {
    digits.forEach((digit) => tickvals.push(Number(`${digit}e${power}`)));
  }
  const near = tickvals.filter((tick) => tick >= 10 ** low / 2 && tick <= 2 * 10 ** high);
  if (!near.length) return { ...layout };
  return { ...layout, yaxis: { ...layout.yaxis, tickvals: near, ticktext: near.map(powerText) } };
}

function powerText(value) {
  if (value >= 1e-3 && value < 1e4) return String(Number(value.toPrecision(3)));
  const [digits, exponent] = value.toExponential(0).split("e");
  const raised = [...String(Number(exponent))].map((one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(one)])).join("");
  return digits === "1" ? `10${raised}` : `${digits}·10${raised}`;
}

function histogramChart(layer, tensor, step) {
  const found = histogramOf(layer, tensor, step);
  if (!found) return null;
  const template = DATA.charts.histogram;
  const x = found.counts.map((_, i) => found.exponent + i + 0.5);
  const all = found.counts.reduce((sum, count) => sum + count, 0);
  const y = found.counts.map((count) => count / all);
  const shown = { data: [{ ...template.data[0], x, y, customdata: y }], layout: { ...template.layout } };
  return { ...shaded(shown, found.range, x), step: found.step, steps: found.steps };
}

// Shade what the format cannot hold under the scale in force.
function shaded(chart, range, x) {
  if (!range) return chart;
  const low = Math.min(x[0] - 1.5, range.underflow - 3);
  const high = Math.max(x[x.length - 1] + 1.5, range.saturated + 3);
  const zone = (x0, x1, fillcolor) => ({
    type: "rect", yref: "paper", y0: 0, y1: 1, x0, x1, fillcolor, line: { width: 0 }, layer: "below",
  });
  const word = (text, from, to) => ({
    text, x: (from + to) / 2, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, font: { size: 11 },
  });
  chart.layout.shapes = [
    zone(low, range.underflow, "--shade-lost"),
    zone(range.underflow, range.subnormal, "--shade-subnormal"),
    zone(range.saturated, high, "--shade-clipped"),
  ];
  chart.layout.annotations = [word("becomes 0", low, range.underflow), word("clips", range.saturated, high)];
  chart.layout.xaxis = { ...chart.layout.xaxis, range: [low, high] };
  return chart;
}

function withCursor(chart) {
  if (cursor === null || !chart.overSteps) return chart;
  const line = { type: "line", x0: cursor, x1: cursor, yref: "paper", y0: 0, y1: 1, line: { color: "--ink", width: 1 } };
  return { ...chart, layout: { ...chart.layout, shapes: [...(chart.layout.shapes || []), line] } };
}

function draw(element) {
  const chart = drawn.get(element)();
  if (!chart || !chart.data.length) {
    Plotly.purge(element);
    element.classList.add("empty");
    element.textContent = element.dataset.without || "Not recorded for this tensor under the recipe that the page draws.";
    return;
  }
  if (element.classList.contains("empty")) element.textContent = "";
  element.classList.remove("empty");
  const { data, layout } = painted(withCursor(chart), palette());
  Plotly.react(element, data, layout, CONFIG);
  if (clicks.has(element)) {
    element.removeAllListeners("plotly_click");
    element.on("plotly_click", ({ points }) => clicks.get(element)(points[0]));
  }
  element.dataset.done = "yes";
}

// Drawing is most of what opening costs: only what is on the screen, or nearly, is drawn.
const watcher = new IntersectionObserver(
  (entries) => {
    entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      watcher.unobserve(entry.target);
      draw(entry.target);
    });
    ready();
  },
  { rootMargin: "200px" },
);

// The page is ready when what is on the screen is drawn.
function ready() {
  document.documentElement.dataset.ready = "yes";
}

// Show a chart in an element once it comes near the screen; `make` is asked again whenever theme or cursor change.
function show(element, make) {
  drawn.set(element, make);
  if (element.dataset.done) draw(element);
  else watcher.observe(element);
}

function redraw() {
  drawn.forEach((_, element) => {
    if (element.dataset.done && element.isConnected) draw(element);
  });
}

function setCursor(step) {
  cursor = step;
  redraw();
}

// The recipe whose figures the page draws where it is not in force, but only compared with.
function drawnRecipe(layer, tensor) {
  const { tensor: cube } = GRIDS[0];
  return cube.keys.what_if[cube.row(layer, tensor)];
}

// Scales are drawn at every step where they were recorded so: a jump between sampled steps must show.
function lineChart(chart, columns) {
  if (chart !== "scales" || !columns.scale_every) return filled(DATA.charts[chart], columns);
  const { every_step: step, scale_every: scale, scale_current_every: wanted } = columns;
  return filled(DATA.charts.scales, wanted ? { step, scale, scale_current: wanted } : { step, scale });
}

// A chart that an element of the page asks for by data-chart, data-layer and data-tensor.
function chartOf({ chart, layer, tensor, step, recipe }) {
  if (recipe && drawnRecipe(Number(layer), tensor) !== recipe) return null;
  if (chart === "histogram") return histogramChart(Number(layer), tensor, step === undefined ? cursor : Number(step));
  const kind = GEMMS.includes(chart) ? "gemm" : "tensor";
  return lineChart(chart, seriesOf(kind, Number(layer), kind === "gemm" ? chart : tensor).columns);
}
