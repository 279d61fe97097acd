// Puts the page together: the feed fills the parts, the filters choose what the feed sends, keys go everywhere.

import { Decision } from "./decision.js";
import { Feed } from "./feed.js";
import { Filters } from "./filters.js";
import { Fleet } from "./fleet.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { listen } from "./keys.js";
import { List } from "./list.js";
import { onTheme } from "./palette.js";
import { Series } from "./series.js";
import { count, percent, put, seconds } from "./text.js";

const byId = (id) => document.getElementById(id);

const history = new History();
const series = new Series(history);
const filters = new Filters(() => reopen());
const fleet = new Fleet((id) => filters.set("instance", id));
const heatMap = new HeatMap(history, (id) => filters.set("instance", id));
const decision = new Decision(() => list.close());
const list = new List((id) => decision.open(id), held);
let isDirty = false;
let matched = 0;
let shown = 0;

const feed = new Feed({
  begin: () => list.add([]),
  link: (text, isUp) => {
    put(byId("link"), text);
    byId("link").classList.toggle("up", isUp);
  },
  history: (data) => history.replace(data),
  state: (state) => {
    history.add(state);
    fleet.show(state, history.hottest);
    filters.offer("instance", fleet.ids);
    header(state);
    decision.about = state;
    put(byId("stream-note"), matched > shown ? `${shown} of ${matched}/s shown` : "");
    matched = shown = 0;
    redraw();
  },
  decisions: (data) => {
    matched += data.matched;
    shown += data.rows.length;
    filters.offer("rule", data.rows.map((row) => row.rule).filter(Boolean));
    list.add(data.rows);
  },
  ended: (data) => {
    list.end(data);
    decision.ended(data);
  },
});

function reopen() {
  list.clear(filters.isSet ? "No decision fits the filter yet." : "No decision yet.");
  fleet.pick(filters.get("instance"));
  feed.open(filters.query());
}

/** Canvases are drawn once a frame at most, and not while the page is hidden. */
function redraw() {
  if (isDirty) return;
  isDirty = true;
  requestAnimationFrame(() => {
    isDirty = false;
    series.draw();
    heatMap.draw(fleet.ids, history.hottest);
  });
}

function header(state) {
  const total = state.instances.length;
  put(byId("version"), state.version);
  put(byId("policy"), state.policies.slice(0, 2).map((one) => `${state.policies.length > 1 ? `${one.route}: ` : ""}${one.name}@${one.hash} generation ${one.generation}`).join(", ") + (state.policies.length > 2 ? ` and ${state.policies.length - 2} more` : ""));
  byId("policy").title = state.policies.map((one) => one.kept_because ?? "").filter(Boolean).join("\n");
  byId("policy").classList.toggle("no", state.policies.some((one) => one.kept_because));
  put(byId("up"), `${state.up}/${total}`);
  byId("up").classList.toggle("no", state.up < total);
  put(byId("rate"), count(state.rate));
  put(byId("evaluate"), seconds(state.evaluate_p99_s));
  put(byId("rejected"), percent(state.outcomes.rejected ?? 0, 1));
  byId("rejected").classList.toggle("no", (state.outcomes.rejected ?? 0) > 0);
  const shadows = Object.entries(state.shadows).map(([name, share]) => `${name} ${percent(share)}`);
  put(byId("shadows"), shadows.join(", "));
  byId("shadows").parentElement.hidden = !shadows.length;
  put(byId("fleet-note"), total > 16 ? String(total) : "");
  document.title = `SMetric: ${count(state.rate)} decisions/s, ${state.up}/${total} up`;
}

function held(isHeld, waiting) {
  const button = byId("pause");
  button.setAttribute("aria-pressed", String(isHeld));
  put(button, isHeld ? (waiting ? `Go on (${waiting} newer)` : "Go on") : "Pause");
}

byId("pause").addEventListener("click", () => list.pause(!list.isHeld));
byId("help-button").addEventListener("click", () => byId("help").showModal());
listen({ list, filters, decision });
onTheme(redraw);
new ResizeObserver(redraw).observe(document.body);
reopen();
