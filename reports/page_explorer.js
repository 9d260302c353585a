// The tensor explorer: any layer, any tensor. The address names what is shown (#t/<layer>/<tensor>), so links work.

const MOST_LISTED = 200;
const TENSOR_CHARTS = ["lost", "scales", "histogram", "noise", "magnitudes", "outliers", "gain", "nonfinite"];
const RESULT_CHARTS = ["histogram", "magnitudes", "outliers", "nonfinite"];
const explorer = { layer: null, tensor: null, histogramStep: null };

function node(name, attributes = {}, text = null) {
  const element = document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  if (text !== null) element.textContent = text;
  return element;
}

function tensorsOf(layer) {
  return ROLES.filter((role) => GRIDS[0].tensor.row(layer, role) !== undefined);
}

function gemmsOf(layer) {
  return GEMMS.filter((gemm) => GRIDS[0].gemm.row(layer, gemm) !== undefined);
}

function listLayers() {
  const words = document.getElementById("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = DATA.layers.map((_, i) => i).filter((i) => words.every((word) => DATA.layers[i].title.toLowerCase().includes(word)));
  const items = matches.slice(0, MOST_LISTED).map((i) => {
    const item = node("li");
    const link = node("a", { href: `#t/${i}/${tensorsOf(i)[0] || "input"}`, title: DATA.layers[i].title }, DATA.layers[i].short);
    if (i === explorer.layer) link.setAttribute("aria-current", "true");
    if (DATA.layers[i].severity) link.prepend(node("span", { class: `dot ${DATA.layers[i].severity}`, title: "has findings" }));
    item.append(link);
    return item;
  });
  document.getElementById("layer-list").replaceChildren(...items);
  const more = matches.length - items.length;
  const count = `${matches.length} of ${DATA.layers.length} layers`;
  document.getElementById("find-count").textContent = more > 0 ? `${count}; the first ${items.length} are listed` : count;
}

function tabs() {
  const links = tensorsOf(explorer.layer).map((tensor) => {
    const link = node("a", { href: `#t/${explorer.layer}/${tensor}`, class: "tab" }, tensor);
    if (tensor === explorer.tensor) link.setAttribute("aria-current", "true");
    return link;
  });
  document.getElementById("tensor-tabs").replaceChildren(...links);
}

function facts() {
  const { grid } = seriesOf("tensor", explorer.layer, explorer.tensor);
  const row = grid.tensor.row(explorer.layer, explorer.tensor);
  const key = (name) => (row === undefined ? null : grid.tensor.keys[name][row]);
  const recipe = key("recipe") && (key("what_if") ? `${key("recipe")} (compared with, not in force)` : key("recipe"));
  const shown = [key("format"), recipe, key("granularity") && `one scale per ${key("granularity")}`, key("shape"), key("dtype"), key("host")];
  const thinned = grid.thinned > 1 ? [`each point is the worst of up to ${grid.thinned} sampled steps`] : [];
  document.getElementById("explorer-facts").textContent = [...shown, ...thinned].filter(Boolean).join(" · ");
}

function box(title, chart, make) {
  const figure = node("figure", { class: "box" });
  figure.append(node("figcaption", {}, title));
  const element = node("div", { class: "chart", role: "img", "data-chart": chart, "aria-label": `${title}, ${DATA.layers[explorer.layer].short}, ${explorer.tensor}` });
  figure.append(element);
  show(element, make);
  return figure;
}

function histogramBox() {
  const { layer, tensor } = explorer;
  const figure = box(DATA.titles.histogram, "histogram", () => histogramChart(layer, tensor, explorer.histogramStep));
  const found = histogramOf(layer, tensor, explorer.histogramStep);
  if (!found) return figure;
  const choice = node("select", { "aria-label": "step of the histogram" });
  found.steps.forEach((step) => choice.append(option(step, `step ${step}`)));
  choice.value = String(found.step);
  choice.addEventListener("change", () => {
    explorer.histogramStep = Number(choice.value);
    draw(figure.querySelector(".chart"));
  });
  figure.querySelector("figcaption").append(" ", choice);
  return figure;
}

function chartBoxes() {
  const { layer, tensor } = explorer;
  const { columns } = seriesOf("tensor", layer, tensor);
  const wanted = ROLES.indexOf(tensor) < 3 ? TENSOR_CHARTS : RESULT_CHARTS;
  const some = (name) => DATA.charts[name].data.some((trace) => trace.meta.y in columns);
  return wanted.filter((name) => name === "histogram" || some(name)).filter((name) => name !== "nonfinite" || columns.nonfinite_ratio.some((v) => v > 0))
    .map((name) => (name === "histogram" ? histogramBox() : box(DATA.titles[name], name, () => lineChart(name, columns))));
}

function gemmBoxes() {
  const { layer } = explorer;
  return gemmsOf(layer).map((gemm) => box(DATA.titles[gemm], gemm, () => lineChart(gemm, seriesOf("gemm", layer, gemm).columns)));
}

function showTensor(layer, tensor) {
  Object.assign(explorer, { layer, tensor, histogramStep: cursor });
  const title = document.getElementById("explorer-title");
  title.textContent = DATA.layers[layer].short;
  title.title = DATA.layers[layer].title;
  drawn.forEach((_, element) => {
    if (element.closest("#explorer")) drawn.delete(element);
  });
  tabs();
  facts();
  document.getElementById("explorer-charts").replaceChildren(...chartBoxes());
  const gemms = gemmBoxes();
  document.getElementById("gemm-charts").replaceChildren(...gemms);
  document.getElementById("gemm-heading").hidden = !gemms.length;
  listLayers();
}

function openTensor(layer, name) {
  const address = `#t/${layer}/${name}`;
  if (window.location.hash === address) followAddress();
  else window.location.hash = address;
}

// Show what the address names, and move there: this is where every link of the page to a tensor arrives.
function followAddress() {
  const [, layer, name] = window.location.hash.match(/^#t\/(\d+)\/(\w+)$/) || [];
  if (name === undefined || !DATA.layers[layer]) return;
  const gemm = GEMMS.includes(name);
  const tensors = tensorsOf(Number(layer));
  const operand = { fprop: "input", dgrad: "grad_output", wgrad: "grad_output" }[name];
  const tensor = tensors.includes(operand || name) ? operand || name : tensors[0] || "input";
  showTensor(Number(layer), tensor);
  const heading = document.getElementById(gemm ? "gemm-heading" : "explorer-title");
  heading.scrollIntoView({ block: "start" });
  heading.focus({ preventScroll: true });
}

function startExplorer() {
  const find = document.getElementById("find");
  find.addEventListener("input", listLayers);
  find.addEventListener("keydown", (event) => {
    const first = document.querySelector("#layer-list a");
    if (event.key === "ArrowDown" && first) first.focus();
    else if (event.key === "Enter" && first) first.click();
    else return;
    event.preventDefault();
  });
  document.getElementById("layer-list").addEventListener("keydown", (event) => {
    const links = [...document.querySelectorAll("#layer-list a")];
    const at = links.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (to === undefined) return;
    (links[to] || find).focus();
    event.preventDefault();
  });
  window.addEventListener("hashchange", followAddress);
  const [layer, tensor] = DATA.first_tensor || [0, "input"];
  showTensor(layer, tensor);
  followAddress();
}
