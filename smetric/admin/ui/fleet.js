// The table of instances, heated by load. Its rows are made once and then only changed.

import { heat } from "./palette.js";
import { count, make, percent, put, seconds } from "./text.js";

const STALE_S = 3;

export class Fleet {
  constructor(onPick) {
    this.body = document.querySelector("#fleet tbody");
    this.rows = new Map();
    this.onPick = onPick;
    this.picked = "";
  }

  /** Ids in the order shown. */
  get ids() {
    return [...this.rows.keys()];
  }

  /** `most`: the load that is drawn hottest. */
  show(state, most) {
    const present = new Set(state.instances.map((row) => row.id));
    for (const [id, row] of this.rows) {
      if (present.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    for (const one of state.instances) this.fill(this.rows.get(one.id) ?? this.add(one.id), one, most);
  }

  add(id) {
    const name = make("button", { type: "button", title: `Only decisions that chose ${id}` }, id);
    name.addEventListener("click", () => this.onPick(this.picked === id ? "" : id));
    const bar = make("span", { class: "fill" });
    const load = make("span", { class: "load" });
    const cells = Array.from({ length: 6 }, () => make("td", { class: "n" }));
    const state = make("em");
    const element = make("tr", {}, make("th", { scope: "row" }, name, state), make("td", { class: "wide" }, make("div", {}, make("span", { class: "bar" }, bar), load)), ...cells);
    this.body.append(element);
    const row = { element, name, bar, load, cells, state };
    this.rows.set(id, row);
    return row;
  }

  fill(row, one, most) {
    const share = one.requests / most;
    row.bar.style.width = `${Math.min(1, share) * 100}%`;
    row.bar.style.background = heat(0.25 + 0.75 * share);
    put(row.load, count(one.requests));
    const texts = [count(one.running), count(one.waiting), percent(one.kv_usage), percent(one.hit_rate), seconds(one.age_s), count(one.rate)];
    texts.forEach((text, i) => put(row.cells[i], text));
    row.cells[4].classList.toggle("no", one.age_s === null || one.age_s > STALE_S);
    put(row.state, one.state === "well" ? "" : one.state);
    row.element.classList.toggle("out", one.state !== "well" && one.state !== "warming");
  }

  pick(id) {
    this.picked = id;
    for (const [each, row] of this.rows) {
      row.element.classList.toggle("picked", each === id);
      row.name.setAttribute("aria-pressed", String(each === id));
    }
  }
}
