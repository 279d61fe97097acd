// One decision, opened: the sentence, the rules with their numbers, what the policy saw, its text, and other policies.

import { get } from "./admin.js";
import { candidates } from "./candidates.js";
import { policyText } from "./policytext.js";
import { rules } from "./rules.js";
import { count, make, mover, percent, seconds, time, unended } from "./text.js";
import { WhatIf } from "./whatif.js";

export class Decision {
  constructor(onClose) {
    this.box = document.getElementById("opened");
    this.onClose = onClose;
    this.about = { what_if: [], trace_url: null };
    this.id = null;
    this.whatIf = null;
  }

  get isOpen() {
    return this.id !== null;
  }

  async open(id) {
    this.id = id;
    document.body.classList.add("reading");
    this.box.hidden = false;
    let data;
    try {
      data = await (await get(`decisions/${encodeURIComponent(id)}/account`)).json();
    } catch (error) {
      if (this.id === id) this.box.replaceChildren(this.closer(), make("p", { class: "no" }, error.message));
      return;
    }
    // Another one may have been opened meanwhile.
    if (this.id === id) this.show(data);
  }

  close() {
    if (!this.isOpen) return;
    this.id = null;
    this.box.hidden = true;
    this.box.replaceChildren();
    document.body.classList.remove("reading");
    this.onClose();
  }

  show(data) {
    this.whatIf = new WhatIf(data, this.about.what_if);
    this.box.replaceChildren(
      make(
        "div",
        { class: "head" },
        make("h3", {}, data.instance ? make("strong", {}, `${data.instance} `) : null, ...verdict(data)),
        this.closer(),
      ),
      make("p", { class: "sentence" }, data.sentence),
      this.facts(data),
      make(
        "div",
        { class: "parts" },
        make("section", { class: "why" }, make("h4", {}, "Why: the rules in order"), data.rules ? rules(data.rules) : make("p", {}, data.sentence), this.whatIf.element),
        make(
          "section",
          { class: "saw" },
          make("h4", {}, "What the policy saw"),
          data.table ? candidates(data.table) : make("p", {}, "No policy ran."),
          make("h4", {}, `${data.file || data.policy} `, make("small", {}, `${data.policy}, generation ${data.generation}`)),
          policyText(data),
        ),
      ),
    );
    this.box.scrollTop = 0;
    // On a small screen it stands below the list.
    if (matchMedia("(max-width: 1000px)").matches) this.box.scrollIntoView();
    const text = this.box.querySelector(".policy");
    const fired = text.querySelector("mark")?.parentElement;
    if (fired) text.scrollTop = fired.offsetTop - text.clientHeight / 3;
    this.whatIf.ask();
  }

  /** Its request may have ended meanwhile: then what became of it is told. */
  async ended(endings) {
    const { id } = this;
    if (!endings.some((ending) => ending.id === id)) return;
    let data;
    try {
      data = await (await get(`decisions/${encodeURIComponent(id)}/account`)).json();
    } catch {
      return; // it is no longer kept; what is shown stays
    }
    if (this.id === id) this.box.querySelector(".details")?.replaceWith(this.facts(data));
  }

  closer() {
    const button = make("button", { type: "button", title: "Close (Esc)", "aria-label": "Close the decision" }, "✕");
    button.addEventListener("click", () => this.close());
    return button;
  }

  facts(data) {
    const link = this.about.trace_url && data.is_traced
      ? make("a", { href: this.about.trace_url.replace("{trace_id}", data.trace_id), target: "_blank", rel: "noopener noreferrer" }, "trace ↗")
      : this.about.trace_url && make("small", {}, "not recorded");
    const list = [
      ["at", time(data.time_ms)],
      ["turn", data.turn === null ? "unknown" : data.turn === 0 ? "0 (first)" : String(data.turn)],
      ["prompt", `${count(data.prompt_len)} tokens (${data.tokens_source})`],
      data.est_hit ? ["expected hit", count(data.est_hit)] : null,
      data.hit ? ["hit there", `${count(data.hit.tokens)} (${percent(data.prompt_len ? data.hit.tokens / data.prompt_len : 0)})${data.hit.source ? `, by ${data.hit.source}` : ""}`] : null,
      data.usage?.cached_tokens != null ? ["really cached", count(data.usage.cached_tokens)] : null,
      ["first token", data.ttft_s === null ? (data.status === null ? unended(data) : "–") : seconds(data.ttft_s)],
      data.forecast?.ttft_s != null ? ["was expected in", `${seconds(data.forecast.ttft_s)}${data.forecast.other_ttft_s != null ? `, on ${data.forecast.other} ${seconds(data.forecast.other_ttft_s)}` : ""}`] : null,
      ["took", data.duration_s === null ? unended(data) : seconds(data.duration_s)],
      ["status", data.status === null ? unended(data) : `${data.status}${data.error_type ? ` ${data.error_type}` : ""}`],
      data.lookup_s ? ["look-ups", seconds(data.lookup_s)] : null,
      data.held_s ? ["held", seconds(data.held_s)] : null,
      data.evaluate_s ? ["decided in", seconds(data.evaluate_s)] : null,
      data.rank ? ["attempt", String(data.rank + 1)] : null,
      ["model", data.model || "–"],
    ];
    return make(
      "dl",
      { class: "details" },
      ...list.filter(Boolean).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
      make("div", {}, make("dt", {}, "decision"), make("dd", {}, copied(data.id))),
      data.trace_id ? make("div", {}, make("dt", {}, "trace"), make("dd", {}, copied(data.trace_id), " ", link)) : null,
    );
  }
}

function verdict(data) {
  const rule = data.rule ? [make("span", { class: "rule" }, data.rule)] : [];
  if (!data.instance) return [make("strong", { class: "no" }, `${data.outcome.replace("_", " ")} `), ...rule];
  const left = data.left_behind === null ? "" : `, where ${count(data.left_behind)} more cached tokens lie`;
  const moved = data.moved_from ? make("span", { class: "no" }, `; ${mover(data) ? `${mover(data)} took it away` : "moved"} from ${data.moved_from}${data.moved_by === "left out" ? ", left out" : ""}${left}`) : null;
  return [data.status === null || data.error_type ? "was chosen by rule " : "served it, by rule ", ...rule, moved];
}

/** An id, to be copied by a click. */
function copied(text) {
  const button = make("button", { type: "button", class: "copy", title: "Copy" }, text);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.dataset.copied = "copied";
    } catch {
      // Without a secure context there is no clipboard: select it instead.
      getSelection().selectAllChildren(button);
      button.dataset.copied = "selected";
    }
    setTimeout(() => delete button.dataset.copied, 1500);
  });
  return button;
}
