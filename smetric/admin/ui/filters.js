// The filters above the list. The router applies them before it samples, so that what is rare is not lost.

const WAIT_MS = 250;
/** Choices offered of one kind at most. */
const MOST = 300;

export class Filters {
  constructor(onChange) {
    this.form = document.getElementById("filters");
    this.clearer = document.getElementById("clear");
    this.onChange = onChange;
    this.timer = 0;
    this.last = "";
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.changed();
    });
    this.form.addEventListener("input", (event) => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.changed(), event.target.name === "text" ? WAIT_MS : 0);
    });
    this.form.addEventListener("reset", () => setTimeout(() => this.changed()));
  }

  get isSet() {
    return this.query() !== "";
  }

  get(name) {
    const field = this.form.elements[name];
    return field.type === "checkbox" ? field.checked : field.value;
  }

  set(name, value) {
    const field = this.form.elements[name];
    if (field.type === "checkbox") field.checked = value;
    else {
      if (field.tagName === "SELECT") add(field, value);
      field.value = value;
    }
    this.changed();
  }

  reset() {
    this.form.reset();
  }

  /** Values that may be chosen from now on. */
  offer(name, values) {
    const select = this.form.elements[name];
    for (const value of new Set(values)) {
      if (select.options.length > MOST) return;
      add(select, value);
    }
  }

  /** What is appended to the stream's query string; empty for no filter. */
  query() {
    const parts = [];
    for (const [name, value] of new FormData(this.form)) if (value.trim()) parts.push(`&${name}=${encodeURIComponent(value.trim())}`);
    return parts.join("");
  }

  changed() {
    const query = this.query();
    if (query === this.last) return;
    this.last = query;
    this.clearer.hidden = query === "";
    this.onChange();
  }
}

function add(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.add(new Option(value, value));
}
