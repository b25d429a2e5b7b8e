"use strict";
// A click on a column's name sorts by it, numbers by value; long tables can be searched.
const LONG = 12;
const value = (row, column) => row.cells[column].textContent.trim();
const number = text => Number(text.replace(/[≈,%\s]/g, "").match(/^[-+]?[0-9.]+(e[-+]?\d+)?/i)?.[0] ?? NaN);
for (const table of document.querySelectorAll("table")) {
  const [head, ...rows] = table.rows;
  if (rows.length < 2) continue;
  for (const [column, cell] of [...head.cells].entries()) {
    cell.tabIndex = 0;
    const sort = () => {
      const up = cell.ariaSort !== "ascending";
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.ariaSort = up ? "ascending" : "descending";
      const key = row => cell.classList.contains("n") ? number(value(row, column)) : value(row, column);
      const order = (a, b) => typeof a === "number" ? (isNaN(a) - isNaN(b)) || a - b : a.localeCompare(b);
      rows.sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)));
      table.tBodies[0].append(...rows);
    };
    cell.onclick = sort;
    cell.onkeydown = event => { if (event.key === "Enter") sort(); };
  }
  if (rows.length < LONG) continue;
  const search = Object.assign(document.createElement("input"), {type: "search", placeholder: `search ${rows.length} rows`});
  search.oninput = () => {
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase());
  };
  table.parentElement.before(search);
}
