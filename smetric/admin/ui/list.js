// The list of decisions, newest first: bounded, its rows are used again, and it goes with the arrow keys.

import { count, make, mover, percent, put, seconds, time, unended } from "./text.js";

/** Rows in the page, and decisions that wait while it is paused. */
const MOST = 200;
/** Characters of the columns that are as wide as the longest that they have shown: at first, and at most. */
const WIDTHS = { who: [6, 15], rule: [6, 12] };

export class List {
  constructor(onOpen, onHold) {
    this.box = document.getElementById("list");
    this.empty = document.getElementById("list-empty");
    this.onOpen = onOpen;
    this.onHold = onHold;
    /** Decisions shown, newest first, each with its row. */
    this.shown = [];
    this.byId = new Map();
    /** Decisions that wait, oldest first, by id. */
    this.waiting = new Map();
    this.missed = 0;
    /** Whether the list stands still: a decision is open, or it is paused. */
    this.isRead = false;
    this.isPaused = false;
    this.selected = null;
    this.opened = null;
    this.made = 0;
    this.widths = Object.fromEntries(Object.entries(WIDTHS).map(([name, [least]]) => [name, least]));
    for (const name of Object.keys(WIDTHS)) this.widen(name, "");
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      const found = row && this.shown.find((one) => one.row.element === row);
      if (found) this.open(found);
    });
  }

  /** More decisions, oldest first. */
  add(decisions) {
    // After a break some come again, with how they have ended meanwhile.
    let fresh = [];
    for (const data of decisions) {
      const one = this.byId.get(data.id);
      if (one) this.fill(Object.assign(one, { data }));
      else fresh.push(data);
    }
    if (this.isHeld) {
      for (const data of fresh) this.waiting.set(data.id, data);
      for (const id of this.waiting.keys()) {
        if (this.waiting.size <= MOST) break;
        this.waiting.delete(id);
        this.missed++;
      }
      this.onHold(true, this.waiting.size + this.missed);
      return;
    }
    fresh = fresh.slice(-MOST);
    if (!fresh.length) return;
    const newest = this.shown[0]?.data.time_ms ?? 0;
    const rows = document.createDocumentFragment();
    const used = [];
    while (this.shown.length && this.shown.length + fresh.length > MOST) used.push(this.drop());
    for (const data of fresh) {
      const one = { data, row: used.pop() ?? this.make() };
      this.shown.unshift(one);
      this.byId.set(data.id, one);
      this.fill(one);
      rows.prepend(one.row.element);
    }
    this.box.prepend(rows);
    this.empty.hidden = true;
    if (fresh[0].time_ms < newest) this.sort();
  }

  /** After a break come some, too, that were passed over before. */
  sort() {
    this.shown.sort((one, other) => other.data.time_ms - one.data.time_ms);
    this.box.append(...this.shown.map((one) => one.row.element));
  }

  drop() {
    const last = this.shown.pop();
    this.byId.delete(last.data.id);
    if (this.selected === last.data.id) this.select(null);
    return last.row;
  }

  /** Requests of decisions shown before have ended. */
  end(endings) {
    for (const ending of endings) {
      const one = this.byId.get(ending.id);
      const data = one?.data ?? this.waiting.get(ending.id);
      if (data) Object.assign(data, ending);
      if (one) this.fill(one);
    }
  }

  /** Begin anew, as another filter does. */
  clear(why) {
    for (const { row } of this.shown) row.element.remove();
    this.shown = [];
    this.byId.clear();
    this.waiting.clear();
    this.missed = 0;
    this.select(null);
    this.isRead = false;
    this.held();
    put(this.empty, why);
    this.empty.hidden = false;
  }

  get isHeld() {
    return this.isRead || this.isPaused;
  }

  /** Go on, or stand still. */
  pause(isPaused) {
    this.isPaused = isPaused;
    if (!isPaused) this.isRead = false;
    this.held();
  }

  /** Somebody begins to read, or has read. */
  read(isRead) {
    if (this.isRead === isRead) return;
    this.isRead = isRead;
    this.held();
  }

  held() {
    if (!this.isHeld) {
      const waiting = [...this.waiting.values()];
      this.waiting.clear();
      this.missed = 0;
      this.add(waiting);
    }
    this.onHold(this.isHeld, this.waiting.size + this.missed);
  }

  make() {
    const cells = Object.fromEntries(["at", "who", "rule", "about", "hit", "why", "end"].map((name) => [name, make("span", { class: name })]));
    const element = make("div", { class: "row", role: "option", id: `row-${this.made++}`, "aria-selected": "false" }, ...Object.values(cells));
    return { element, cells };
  }

  fill({ data, row: { element, cells } }) {
    put(cells.at, time(data.time_ms));
    const who = data.instance ?? data.outcome.replace("_", " ");
    const rule = data.rule ?? data.outcome;
    put(cells.who, who);
    put(cells.rule, rule);
    this.widen("who", who);
    this.widen("rule", rule);
    put(cells.about, `${data.turn === null ? "" : data.turn === 0 ? "first turn, " : `turn ${data.turn}, `}${count(data.prompt_len)} tokens`);
    put(cells.hit, data.hit === null ? "" : `hit ${count(data.hit)}`);
    const reasons = [
      data.moved_from ? `${mover(data) && `✗ ${mover(data)}, `}moved from ${data.moved_from}${data.moved_by === "left out" ? ", left out" : ""}` : data.failed_guard ? `✗ ${data.failed_guard}` : "",
      ...data.shadows.filter((one) => one.agrees === false).map((one) => `${one.policy}: ${one.choice}`),
    ];
    put(cells.why, reasons.filter(Boolean).join(" · "));
    cells.why.classList.toggle("no", Boolean(data.moved_from));
    cells.why.title = data.sentence;
    const failed = data.error_type || (data.status !== null && data.status >= 400);
    put(cells.end, data.status === null ? unended(data) : failed ? `${data.status} ${data.error_type ?? ""}` : `TTFT ${seconds(data.ttft_s)}`);
    cells.end.classList.toggle("no", Boolean(failed));
    element.dataset.outcome = data.outcome;
    element.classList.toggle("close", data.margin !== null && data.margin <= 0.05);
    element.title = data.margin === null ? data.sentence : `${data.sentence} (margin ${percent(data.margin, 1)})`;
    this.mark(element, data.id);
  }

  widen(name, text) {
    this.widths[name] = Math.max(this.widths[name], Math.min(text.length, WIDTHS[name][1]));
    this.box.style.setProperty(`--${name}`, this.widths[name]);
  }

  mark(element, id) {
    element.setAttribute("aria-selected", String(id === this.selected));
    element.classList.toggle("opened-row", id === this.opened);
  }

  select(id) {
    this.selected = id;
    for (const { data, row } of this.shown) this.mark(row.element, data.id);
    const one = this.byId.get(id);
    if (one) {
      this.box.setAttribute("aria-activedescendant", one.row.element.id);
      one.row.element.scrollIntoView({ block: "nearest" });
    } else {
      this.box.removeAttribute("aria-activedescendant");
    }
  }

  /** Go *by* rows; reading holds the list. */
  move(by) {
    if (!this.shown.length) return;
    this.read(true);
    const at = this.shown.findIndex((one) => one.data.id === this.selected);
    const next = at < 0 ? 0 : Math.max(0, Math.min(this.shown.length - 1, at + by));
    this.select(this.shown[next].data.id);
    if (this.opened) this.open(this.shown[next]);
  }

  openSelected() {
    const one = this.byId.get(this.selected) ?? this.shown[0];
    if (one) this.open(one);
  }

  open(one) {
    this.read(true);
    this.opened = one.data.id;
    this.select(one.data.id);
    this.onOpen(one.data.id);
  }

  close() {
    this.opened = null;
    this.select(this.selected);
    this.read(false);
  }
}
