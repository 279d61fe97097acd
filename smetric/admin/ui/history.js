// The last ten minutes as the page keeps them: loads by instance and the router's series, second by second, bounded.

const MOST = 600;
/** Loads below this are never drawn as hot: a few requests are nothing to an engine. */
const LEAST_HOT = 8;

export class History {
  constructor() {
    this.times = [];
    this.loads = new Map();
    this.series = {};
  }

  /** All of it, as the router remembers it. */
  replace(data) {
    this.times = data.times_ms;
    this.loads = new Map(Object.entries(data.loads));
    this.series = data.series;
  }

  /** The load that is drawn hottest: the largest there was. */
  get hottest() {
    let most = LEAST_HOT;
    for (const loads of this.loads.values()) for (const load of loads) if (load > most) most = load;
    return most;
  }

  /** One second more. */
  add(state) {
    if (this.times.at(-1) === state.time_ms) return;
    const gone = Math.max(0, this.times.length + 1 - MOST);
    this.times.push(state.time_ms);
    this.times.splice(0, gone);
    const present = new Set();
    for (const row of state.instances) {
      present.add(row.id);
      let loads = this.loads.get(row.id);
      if (!loads) this.loads.set(row.id, (loads = new Array(this.times.length - 1 + gone).fill(null)));
      loads.push(row.requests);
      loads.splice(0, gone);
    }
    for (const id of this.loads.keys()) if (!present.has(id)) this.loads.delete(id);
    for (const [name, values] of Object.entries(this.series)) {
      values.push(state[name]);
      values.splice(0, gone);
    }
  }
}
