// The table of a decision as its policy saw it: value, age and source of every cell, and the chosen instance.

import { make, seconds } from "./text.js";

export function candidates(table) {
  const columns = table.columns;
  const hasScore = table.score && !columns.some((column) => column.name === table.score);
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "instance"),
    ...columns.map((column, i) => make("th", { scope: "col", class: "n", title: `${column.doc} ${column.staleness}` }, column.name, make("small", {}, columnNote(table, i)))),
    hasScore ? make("th", { scope: "col", class: "n" }, table.score, make("small", {}, `${table.direction === "max" ? "highest" : "lowest"} wins`)) : null,
    make("th", { scope: "col" }, ""),
  );
  const body = table.rows.map((row) =>
    make(
      "tr",
      { class: row.chosen ? "chosen" : row.left_out_by ? "out" : "" },
      make("th", { scope: "row" }, row.id),
      ...row.cells.map(cell),
      hasScore ? make("td", { class: "n" }, row.score ?? "") : null,
      make("td", { class: "mark" }, ...marks(row)),
    ),
  );
  return make(
    "div",
    { class: "scroll", tabindex: "0", "aria-label": "Candidates, scrollable" },
    make("table", { class: "candidates" }, make("thead", {}, head), make("tbody", {}, ...body)),
    table.more ? make("p", { class: "note" }, `… and ${table.more} more`) : null,
  );
}

function cell(one) {
  const text = one.unknown ? `? ${one.value}` : one.value;
  const notes = [one.age_s === undefined ? null : `${seconds(one.age_s)} old`, one.source].filter(Boolean);
  return make("td", { class: one.unknown ? "n unknown" : "n", title: one.unknown ? "unknown; the policy used this value instead" : null }, text, notes.length ? make("small", {}, notes.join(", ")) : null);
}

/** How old a column is as a whole. */
function columnNote(table, i) {
  const ages = table.rows.map((row) => row.cells[i].age_s).filter((age) => age !== undefined);
  if (!ages.length) return table.columns[i].unit;
  const [least, most] = [Math.min(...ages), Math.max(...ages)].map(seconds);
  return least === most ? `${least} old` : `${least} to ${most} old`;
}

function marks(row) {
  return [
    row.chosen ? make("span", { class: "yes" }, "← chosen") : null,
    row.left ? make("span", { class: "no" }, "moved from here") : null,
    row.left_out_by ? make("span", { class: "idle" }, `✗ ${row.left_out_by}`) : null,
  ];
}
