"use strict";
// Without this script everything is still there: it sorts tables and shows tooltips at the pointer.

// Sorting: a click, Enter or Space on a column's heading; a second one turns the order round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const first = heading.classList.contains("text") ? "ascending" : "descending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = heading.getAttribute("aria-sort") === first ? other : first;
    for (const cell of heading.parentNode.cells) cell.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const numbers = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      return numbers ? x - y : x.localeCompare(y);
    };
    const rows = [...body.rows].sort(compare);
    if (order === "descending") rows.reverse();
    body.append(...rows);
  });
}

// Tooltips: on hover and on focus, closed by Escape.
const tooltip = document.getElementById("tooltip");
let shownFor = null;

function show(element, x, y) {
  shownFor = element;
  tooltip.textContent = element.dataset.tip;
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const left = Math.min(Math.max(x + 12, 8), window.innerWidth - box.width - 8);
  const below = y + 16 + box.height < window.innerHeight;
  tooltip.style.left = Math.max(left, 8) + "px";
  tooltip.style.top = Math.max(below ? y + 16 : y - box.height - 10, 8) + "px";
}

function hide() {
  shownFor = null;
  tooltip.hidden = true;
}

for (const element of document.querySelectorAll("[data-tip]")) {
  // The browser's own tooltip, which serves where there is no script, would come on top.
  element.querySelector(":scope > title")?.remove();
  element.removeAttribute("title");
  element.addEventListener("mousemove", (event) => show(element, event.clientX, event.clientY));
  element.addEventListener("mouseleave", hide);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    show(element, box.left, box.bottom - 12);
  });
  element.addEventListener("blur", hide);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && shownFor) hide();
});
document.addEventListener("scroll", hide, true);

// Paper: folded parts are printed too, and folded again afterward.
window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    window.addEventListener("afterprint", () => (part.open = false), { once: true });
  }
});
