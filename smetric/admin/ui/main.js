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
import { count, make, percent, put, seconds } from "./text.js";

/** Policies named in the header at most. */
const POLICIES = 3;

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
let policiesTold = "";

const feed = new Feed({
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
  policies(state.policies);
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

/** Those that act; first those that are not what their files say, with the reason. */
function policies(all) {
  const told = JSON.stringify(all);
  if (told === policiesTold) return;
  policiesTold = told;
  const shown = all.toSorted((one, other) => Number(other.kept_because !== null) - Number(one.kept_because !== null)).slice(0, POLICIES);
  const rest = all.length - shown.length;
  const items = shown.map((one) => {
    const route = all.length > 1 ? `${one.route}: ` : "";
    const why = one.kept_because === null ? "" : ` (not its file: ${one.kept_because.split("\n", 1)[0]})`;
    return make("span", { class: why && "no", title: one.kept_because }, `${route}${one.name}@${one.hash} generation ${one.generation}${why}`);
  });
  byId("policies").replaceChildren(...items, ...(rest ? [make("small", {}, `and ${rest} more`)] : []));
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
