// The rules of a policy in order: which fired, and which guards held, failed or were not evaluated, with both sides.

import { make } from "./text.js";

const MARKS = { true: ["✓", "yes", "held"], false: ["✗", "no", "failed"], null: ["·", "idle", "not evaluated"] };

export function rules(found) {
  return make("ol", { class: "rules" }, ...found.map(rule));
}

function rule(one) {
  const isAlways = one.fired && one.guards && !one.guards.length;
  return make(
    "li",
    { class: one.fired ? "fired" : one.result === "not reached" ? "idle" : "" },
    make("span", { class: "name" }, one.fired ? "→ " : "", one.label),
    make("span", { class: "result" }, isAlways ? "always" : one.result),
    one.guards?.length ? make("ul", {}, ...one.guards.map(guard)) : null,
  );
}

function guard(one) {
  const [sign, kind, said] = MARKS[one.held];
  const numbers = one.numbers ? make("span", { class: "numbers" }, ` ${one.numbers}`) : null;
  return make("li", { class: kind }, make("span", { role: "img", "aria-label": said }, sign), ` ${one.guard}`, numbers);
}
