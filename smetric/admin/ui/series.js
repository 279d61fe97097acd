// Small lines over the last ten minutes: what the router as a whole does.

import { sized } from "./canvas.js";
import { lines } from "./palette.js";
import { count, make, percent, put, seconds } from "./text.js";

const ratio = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(2)} ×`);

const CHARTS = [
  { title: "Decisions a second", names: ["rate"], labels: [""], say: count },
  { title: "Time to first token", names: ["ttft_p50_s", "ttft_p99_s"], labels: ["p50", "p99"], say: seconds },
  { title: "Imbalance", hint: "Most requests on one instance, by the mean", names: ["imbalance"], labels: ["max / mean"], say: ratio, least: 1 },
  { title: "Cache hits", hint: "Tokens believed cached when deciding, and tokens that were; of the prompts for which both are known", names: ["predicted", "actual"], labels: ["predicted", "actual"], say: percent, most: 1 },
  { title: "Age of load figures", hint: "The oldest of all instances' last reports", names: ["age_s"], labels: ["oldest"], say: seconds },
];

export class Series {
  constructor(history) {
    this.history = history;
    this.charts = CHARTS.map((chart) => {
      const canvas = make("canvas", { role: "img" });
      const values = chart.names.map((_, i) => make("b", { class: i ? "second" : "first" }));
      const said = make("p", {}, ...chart.labels.flatMap((label, i) => [label && make("span", {}, label), values[i]]));
      const box = make("figure", { title: chart.hint }, make("figcaption", {}, chart.title), said, canvas);
      document.getElementById("series").append(box);
      return { ...chart, canvas, values };
    });
  }

  draw() {
    for (const chart of this.charts) {
      const all = chart.names.map((name) => this.history.series[name] ?? []);
      chart.values.forEach((value, i) => put(value, chart.say(all[i].at(-1))));
      chart.canvas.setAttribute("aria-label", `${chart.title}: ${chart.names.map((_, i) => `${chart.labels[i]} ${chart.say(all[i].at(-1))}`).join(", ")}`);
      const area = sized(chart.canvas);
      if (area) plot(area, all, chart);
    }
  }
}

function plot({ context, width, height }, all, chart) {
  const known = all.flat().filter((value) => value !== null && value !== undefined);
  const colours = lines();
  context.fillStyle = colours.grid;
  context.fillRect(0, height - 1, width, 1);
  if (!known.length) return;
  const least = chart.least ?? 0;
  const most = Math.max(chart.most ?? 0, least + 1e-9, largest(known) * 1.05);
  all.forEach((values, line) => {
    const step = width / Math.max(60, values.length - 1);
    const left = width - step * (values.length - 1);
    context.strokeStyle = line ? colours.second : colours.first;
    context.lineWidth = 1.5;
    context.beginPath();
    let isDrawing = false;
    values.forEach((value, i) => {
      if (value === null || value === undefined) {
        isDrawing = false;
        return;
      }
      const y = height - 2 - (Math.min(1, Math.max(0, (value - least) / (most - least))) * (height - 4));
      context[isDrawing ? "lineTo" : "moveTo"](left + i * step, y);
      isDrawing = true;
    });
    context.stroke();
  });
}

/** The largest value; a line may be longer than `Math.max` takes arguments. */
function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}
