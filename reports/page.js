// Theme, tables, copying, printing; then everything starts.

const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.dataset.shown = theme === "auto" ? (systemDark.matches ? "dark" : "light") : theme;
  document.getElementById("theme").textContent = document.documentElement.dataset.shown === "dark" ? "Light" : "Dark";
  redraw();
}

function startTheme() {
  setTheme("auto");
  systemDark.addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.shown === "dark" ? "light" : "dark");
  });
}

// Sort a table by the column whose heading was pressed; missing values stay last.
function sortTable(button) {
  const heading = button.closest("th");
  const table = heading.closest("table");
  const column = [...heading.parentElement.children].indexOf(heading);
  const descending = heading.getAttribute("aria-sort") !== "descending";
  table.querySelectorAll("th").forEach((one) => one.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const key = (row) => {
    const { value } = row.children[column].dataset;
    return value === undefined ? row.children[column].textContent : value === "" ? null : Number(value);
  };
  const compare = (a, b) => (a === null) - (b === null) || (descending ? -1 : 1) * (a < b ? -1 : a > b ? 1 : 0);
  const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b)));
  table.tBodies[0].append(...rows);
}

async function copyText(button) {
  const source = document.getElementById(button.dataset.copies);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    window.getSelection().selectAllChildren(source); // no clipboard from a file in some browsers: Ctrl+C will do
    button.textContent = "Selected: press Ctrl+C";
  }
}

// On paper: light, every chart drawn, at the paper's width.
function startPrinting() {
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.querySelectorAll("details.finding").forEach((one) => one.setAttribute("open", ""));
    setTheme("light");
    drawn.forEach((_, element) => {
      draw(element);
      if (element.dataset.done) Plotly.relayout(element, { width: element.closest(".box") ? 320 : 680 });
    });
  });
  window.addEventListener("afterprint", () => {
    setTheme(before);
    drawn.forEach((_, element) => element.dataset.done && Plotly.relayout(element, { width: null, autosize: true }));
  });
}

function startCharts() {
  const timeline = document.getElementById("timeline-chart");
  if (timeline && DATA.timeline.data.length) {
    clicks.set(timeline, (point) => setCursor(point.x));
    show(timeline, () => ({ data: DATA.timeline.data, layout: { ...DATA.timeline.layout }, overSteps: true }));
  }
  document.querySelectorAll(".finding .chart").forEach((element) => show(element, () => chartOf(element.dataset)));
}

startTheme();
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => sortTable(button)));
document.querySelectorAll("button[data-copies]").forEach((button) => button.addEventListener("click", () => copyText(button)));
startCharts();
if (DATA.layers.length) {
  startHeat();
  startExplorer();
}
startPrinting();
if (!drawn.size) ready();
