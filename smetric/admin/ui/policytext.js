// The policy's text with the lines that fired marked, and those that were passed over.

import { make } from "./text.js";

export function policyText(data) {
  const lines = data.text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  const kinds = new Map();
  for (const rule of data.rules ?? []) {
    if (rule.result === "not reached") continue;
    for (let line = rule.lines[0]; line <= rule.lines[1]; line++) kinds.set(line, rule.fired ? "fired" : "passed");
  }
  const shown = lines.map((line, i) => {
    const kind = kinds.get(i + 1);
    const text = line.trimStart().startsWith("#") ? make("i", {}, line) : kind === "fired" ? make("mark", {}, line) : line;
    return make("li", { class: kind ?? "" }, text || " ");
  });
  return make("ol", { class: "policy", tabindex: "0", "aria-label": "Text of the policy, scrollable" }, ...shown);
}
