"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

// --- colours -------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
let chosen = null; // by the button; otherwise the system decides
let printing = false;

const SCALES = {
  light: {
    sequential: ["#f2f5fa", "#bcd3f6", "#7ea9ea", "#427dd7", "#1f52a8", "#0e2f6e"],
    diverging: ["#b3470b", "#ee9a5d", "#fbe3d2", "#f4f5f7", "#d3e2fa", "#6d9deb", "#1d4fa5"],
  },
  dark: {
    sequential: ["#1d2733", "#1f4377", "#2b66b8", "#4f92ea", "#93c1ff", "#dbeaff"],
    diverging: ["#ff9a52", "#b8672f", "#5a3b26", "#222c38", "#24446f", "#3f7fd8", "#9cc8ff"],
  },
};

function theme() {
  return printing ? "light" : chosen ?? (dark.matches ? "dark" : "light");
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

function scale(colours) {
  return colours.map((c, i) => [i / (colours.length - 1), c]);
}

/** The names on an axis, cut short on a small screen; where there are too many plotly chooses which to show. */
function named(axis, names) {
  if (!narrow.matches || printing || axis?.type !== "category" || names.length > 40) return axis;
  const short = (name) => (name.length > 14 ? `${name.slice(0, 7)}…${name.slice(-6)}` : name);
  return { ...axis, tickmode: "array", tickvals: names, ticktext: names.map(short) };
}

/** A figure in the page's colours. */
function themed(figure) {
  const names = (along) => [...new Set(figure.data.flatMap((trace) => trace[along]))];
  const ink = colour("--ink"), soft = colour("--soft"), grid = colour("--grid");
  const scales = SCALES[theme()];
  const traces = figure.data.map((trace) =>
    scales[trace.meta]
      ? {
          ...trace,
          colorscale: scale(scales[trace.meta]),
          colorbar: { ...trace.colorbar, tickfont: { color: soft }, title: { ...trace.colorbar.title, font: { color: soft } } },
        }
      : trace,
  );
  const axis = (one) => ({ ...one, gridcolor: grid, linecolor: grid, tickfont: { color: soft }, title: { ...one?.title, font: { color: soft } } });
  const layout = {
    ...figure.layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
    xaxis: axis(named(figure.layout.xaxis, names("x"))),
    yaxis: axis(named(figure.layout.yaxis, names("y"))),
    legend: { ...figure.layout.legend, font: { color: ink } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: colour("--accent") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--accent"), font: { color: ink } },
  };
  return [traces, layout];
}

const views = Object.fromEntries(Object.entries(data.figures).map(([key, figures]) => [key, Object.keys(figures)[0]]));

function draw(key) {
  const place = document.getElementById(`figure-${key}`);
  const [traces, layout] = themed(data.figures[key][views[key]]);
  place.style.minWidth = printing ? "0" : `${layout.meta?.least_width ?? 0}px`; // a narrower page scrolls the figure
  return Plotly.react(place, traces, { ...layout, width: place.clientWidth }, {
    displaylogo: false,
    modeBarButtons: [["toImage"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { filename: key, scale: 2 },
  });
}

function drawAll() {
  root.dataset.theme = theme();
  root.classList.toggle("printing", printing);
  return Promise.all(Object.keys(data.figures).map(draw));
}

document.getElementById("theme").addEventListener("click", () => {
  chosen = theme() === "dark" ? "light" : "dark";
  drawAll();
});
dark.addEventListener("change", drawAll);

let width = innerWidth;
addEventListener("resize", () => {
  if (printing || width === innerWidth) return; // a phone's bars come and go
  width = innerWidth;
  drawAll();
});
addEventListener("beforeprint", () => { printing = true; drawAll(); });
addEventListener("afterprint", () => { printing = false; drawAll(); });

for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    views[button.dataset.figure] = button.dataset.view;
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    draw(button.dataset.figure);
  });
}

// --- the table of tensors ----------------------------------------------------------------------------------

const [NAME, ROLE, RULE, TYPE, SHAPE, NUMEL, NORM, MERGED] = [0, 1, 2, 3, 4, 5, 6, 7];
const tensors = data.tensors;
const table = document.getElementById("tensor-table");

/** ‖Δ‖, the share kept or held and q of a tensor: of one expert, or of all together. A ledger protects nothing. */
function moved(index, which) {
  if (index < 0 || tensors.norm.length === 0) return [null, null, null];
  const q = (expert) => tensors.protected?.at(expert)[index] ?? null;
  if (which !== "all") return [tensors.norm[which][index], tensors.kept[which][index], q(which)];
  const [norm, kept] = tensors.together;
  return [norm[index], kept[index], q(-1)]; // the last expert is always among those that are shown
}

const number = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);

function cell(text, sort) {
  const td = document.createElement("td");
  td.textContent = text;
  td.dataset.sort = sort ?? "";
  return td;
}

function fill() {
  const which = document.getElementById("expert").value;
  const body = table.tBodies[0];
  body.replaceChildren(
    ...tensors.rows.map((row) => {
      const tr = document.createElement("tr");
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = row[NAME];
      const role = cell(row[ROLE], row[ROLE]);
      role.title = row[RULE];
      const [norm, kept, q] = moved(row[MERGED], which);
      const relative = norm === null || !row[NORM] ? null : norm / row[NORM];
      tr.append(
        name, role, cell(row[SHAPE], row[NUMEL]), cell(row[TYPE], row[TYPE]), cell(number(row[NORM]), row[NORM]),
        cell(number(norm), norm), cell(percent(relative), relative), cell(percent(kept), kept),
      );
      if (tensors.protected) tr.append(cell(q === null ? "–" : String(q), q));
      tr.dataset.text = `${row[NAME]} ${row[ROLE]} ${row[RULE]}`.toLowerCase();
      return tr;
    }),
  );
  const sorted = table.querySelector('th[aria-sort="ascending"], th[aria-sort="descending"]');
  if (sorted) sort(table, sorted, sorted.getAttribute("aria-sort"));
  search(document.getElementById("search"));
}

/** Show the rows that have all the words in a search box, and tell how many these are. */
function search(box) {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.getElementById(box.dataset.table).tBodies[0].rows];
  for (const row of rows) row.hidden = !words.every((word) => row.dataset.text.includes(word));
  const shown = rows.filter((row) => !row.hidden).length;
  const what = box.dataset.table.replace("-table", "s");
  document.querySelector(`output[for="${box.id}"]`).textContent = `${shown} of ${rows.length} ${what}`;
}

document.getElementById("expert").addEventListener("change", fill);
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
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not there comes last, either way
    return order * (numeric ? Number(a) - Number(b) : collator.compare(a, b));
  });
  for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
  table.classList.toggle("shuffled", column !== 0 || direction !== "ascending");
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
drawAll().then(() => { root.dataset.ready = "yes"; });
