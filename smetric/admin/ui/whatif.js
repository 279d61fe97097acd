// "What would policy X have chosen?": asks the router to evaluate another policy on what this decision saw.

import { get } from "./admin.js";
import { rules } from "./rules.js";
import { make, seconds } from "./text.js";

const KEY = "smetric.what-if";

export class WhatIf {
  constructor(data, names) {
    this.data = data;
    // What is known already needs no asking.
    const known = [data.policy.split("@")[0], ...data.shadows.map((one) => one.policy)];
    const chosen = sessionStorage.getItem(KEY) ?? ["bailian", "load_only", "lmetric"].find((name) => !known.includes(name));
    this.select = make("select", { "aria-label": "Other policy" }, ...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) this.select.value = chosen;
    this.answer = make("div", { class: "answer", role: "status" });
    this.element = make("div", { class: "what-if" }, ...data.shadows.map(shadow), make("h4", {}, "What would ", this.select, " have chosen?"), this.answer);
    this.element.hidden = !names.length || !data.table;
    this.select.addEventListener("change", () => {
      sessionStorage.setItem(KEY, this.select.value);
      this.ask();
    });
  }

  focus() {
    this.select.focus();
  }

  async ask() {
    const name = this.select.value;
    if (this.element.hidden || !name) return;
    let found;
    try {
      found = await (await get(`decisions/${encodeURIComponent(this.data.id)}/what-if?policy=${encodeURIComponent(name)}`)).json();
    } catch (error) {
      found = { answerable: false, why: error.message };
    }
    if (this.select.value === name) this.show(found);
  }

  show(found) {
    if (!found.answerable) {
      this.answer.replaceChildren(make("p", { class: "idle" }, make("strong", {}, found.why)));
      return;
    }
    const who = found.instance ?? found.outcome;
    const same = found.agrees;
    const lag = found.lag_s === null ? null : make("p", { class: "note" }, `It rests on what was looked up ${seconds(found.lag_s)} after the decision.`);
    this.answer.replaceChildren(
      make("p", {}, make("strong", { class: same ? "yes" : "other" }, same ? `the same: ${who}` : who), " ", make("span", {}, found.sentence)),
      ...(found.rules.length > 1 || found.rules[0]?.guards?.length ? [rules(found.rules)] : []),
      ...(lag ? [lag] : []),
    );
  }
}

/** What a policy in shadow had decided on this very request. */
function shadow(one) {
  const kind = one.agrees === null ? "idle" : one.agrees ? "yes" : "other";
  return make("p", { class: "shadow" }, "In shadow, ", make("b", {}, one.policy), one.agrees === null ? ": " : " would have chosen ", make("strong", { class: kind }, one.choice), one.agrees === null ? null : make("span", { class: "idle" }, ` ${one.sentence}`));
}
