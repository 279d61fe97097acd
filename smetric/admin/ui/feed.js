// The stream of server-sent events, read with fetch because EventSource cannot send a token. Comes back by itself.

import { get } from "./admin.js";

const LONGEST_WAIT_MS = 10000;
/** The router says how it is each second: where nothing comes for so long, it or what is between has stopped. */
const LONGEST_SILENCE_MS = 5000;

/** Calls `on[event](data)` for each event, and `on.link(text, isUp)` as the connection comes and goes. */
export class Feed {
  constructor(on) {
    this.on = on;
    this.query = "";
    this.hasHistory = false;
    this.failures = 0;
    this.abort = null;
    this.timer = 0;
  }

  /** Read the stream from now on with these filters. */
  open(query) {
    this.query = query;
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.read(this.abort);
  }

  async read(abort) {
    let why = "the router has gone";
    try {
      const history = this.hasHistory ? "0" : "1";
      const answer = await get(`decisions/stream?history=${history}${this.query}`, abort.signal);
      this.failures = 0;
      this.on.link("live", true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const giveUp = () => {
        why = "the router says nothing";
        reader.cancel();
      };
      let rest = "";
      for (;;) {
        this.timer = setTimeout(giveUp, LONGEST_SILENCE_MS);
        const { value, done } = await reader.read();
        if (abort.signal.aborted) return;
        clearTimeout(this.timer);
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) why = this.take(event) ?? why;
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error.status) why = error.message;
    }
    if (abort.signal.aborted) return;
    clearTimeout(this.timer);
    // After a break the history has a gap, so it is asked for again.
    this.hasHistory = false;
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** this.failures++);
    this.on.link(`${why}; trying again`, false);
    this.timer = setTimeout(() => this.open(this.query), wait);
  }

  take(event) {
    const end = event.indexOf("\n");
    const name = event.slice("event: ".length, end);
    const data = JSON.parse(event.slice(end + 1 + "data: ".length));
    if (name === "over") return data.why === "slow" ? "this page was too slow" : "the router is ending";
    if (name === "history") this.hasHistory = true;
    this.on[name]?.(data);
    return undefined;
  }
}
