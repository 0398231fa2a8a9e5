"use strict";
const tensors = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

// --- colours -------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // by the button; otherwise the system decides
let printing = false;

function applyTheme() {
  root.dataset.theme = printing ? "light" : chosen ?? (dark.matches ? "dark" : "light");
}

document.getElementById("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
dark.addEventListener("change", applyTheme);
addEventListener("beforeprint", () => { printing = true; applyTheme(); });
addEventListener("afterprint", () => { printing = false; applyTheme(); });

// --- the table of tensors ----------------------------------------------------------------------------------

const [NAME, ROLE, RULE, TYPE, SHAPE, NUMEL, NORM, DELTA, KEPT] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const table = document.getElementById("tensor-table");

const number = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);

function cell(text, sort) {
  const td = document.createElement("td");
  td.textContent = text;
  td.dataset.sort = sort ?? "";
  return td;
}

function fill() {
  const body = table.tBodies[0];
  body.replaceChildren(
    ...tensors.map((row) => {
      const tr = document.createElement("tr");
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = row[NAME];
      const role = cell(row[ROLE], row[ROLE]);
      role.title = row[RULE];
      const relative = row[DELTA] === null || !row[NORM] ? null : row[DELTA] / row[NORM];
      tr.append(
        name, role, cell(row[SHAPE], row[NUMEL]), cell(row[TYPE], row[TYPE]), cell(number(row[NORM]), row[NORM]),
        cell(number(row[DELTA]), row[DELTA]), cell(percent(relative), relative), cell(percent(row[KEPT]), row[KEPT]),
      );
      tr.dataset.text = `${row[NAME]} ${row[ROLE]} ${row[RULE]}`.toLowerCase();
      return tr;
    }),
  );
}

/** Show the rows that contain all words in a search box, and count them. */
function search(box) {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.getElementById(box.dataset.table).tBodies[0].rows];
  for (const row of rows) row.hidden = !words.every((word) => row.dataset.text.includes(word));
  const shown = rows.filter((row) => !row.hidden).length;
  const what = box.dataset.table.replace("-table", "s");
  document.querySelector(`output[for="${box.id}"]`).textContent = `${shown} of ${rows.length} ${what}`;
}

for (const box of document.querySelectorAll("[data-table]")) {
  box.addEventListener("input", () => search(box));
}

// --- sorting -----------------------------------------------------------------------------------------------

const collator = new Intl.Collator("en", { numeric: true });

function sort(table, header, direction) {
  const column = header.cellIndex;
  const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const order = direction === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
  const numeric = rows.every(([v]) => v === "" || Number.isFinite(Number(v)));
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // missing values come last in both directions
    return order * (numeric ? Number(a) - Number(b) : collator.compare(a, b));
  });
  for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const button of document.querySelectorAll("table.sortable thead button")) {
  const header = button.closest("th");
  button.addEventListener("click", () =>
    sort(header.closest("table"), header, header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending"),
  );
}

fill();
for (const box of document.querySelectorAll("[data-table]")) search(box);
applyTheme();
root.dataset.ready = "yes";
