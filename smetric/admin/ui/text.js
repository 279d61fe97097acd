// How values are written, and elements made. Everything that comes from outside becomes text, never markup.

/** An element; `attributes` with a null value are left out, `children` are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Put `text` into an element unless it stands there already. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)} %`;
}

/** Seconds in the unit that suits them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  // Each bound is where rounding would reach the next unit.
  if (value < 0.0009995) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return value < 599.5 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

/** The guard that took a later turn elsewhere; empty where none did. */
export function mover(data) {
  return ["not picked", "left out"].includes(data.moved_by) ? "" : data.moved_by;
}

/** What stands for the end of a decision that has none: its request goes on, or was decided again. */
export function unended(data) {
  return data.followed_by ? "tried again" : "…";
}

/** Local time of day with milliseconds. */
export function time(ms) {
  const at = new Date(ms);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}
