// The comparison's page: every chart comes complete from fp8dbg/render/compare_page.py.

const DATA = JSON.parse(document.getElementById("data").textContent);

document.querySelectorAll("[data-compare]").forEach((element) => {
  show(element, () => ({ ...DATA.drawn[element.dataset.compare], overSteps: true }));
});
