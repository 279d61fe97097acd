// Time × instance: how many requests each instance had, second by second, as the paper draws it.

import { sized } from "./canvas.js";
import { heat, lines } from "./palette.js";
import { count, put, time } from "./text.js";

export class HeatMap {
  constructor(history, onPick) {
    this.history = history;
    this.canvas = document.getElementById("heat");
    this.tip = document.getElementById("heat-tip");
    this.ids = [];
    this.at = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", () => this.at && onPick(this.at.id));
  }

  /** Draw all of it anew: some ten thousand cells, a few milliseconds. */
  draw(ids, most) {
    this.ids = ids;
    this.canvas.style.height = `${Math.max(96, Math.min(ids.length * 14, 320))}px`;
    const area = sized(this.canvas);
    const { times, loads } = this.history;
    if (!area || !ids.length || !times.length) return;
    const { context, width, height } = area;
    const across = width / Math.max(times.length, 60);
    const down = height / ids.length;
    const left = width - across * times.length;
    const gap = down > 6 ? 1 : 0;
    context.fillStyle = lines().gone;
    context.fillRect(0, 0, width, height);
    ids.forEach((id, row) => {
      const cells = loads.get(id) ?? [];
      // Neighbours of the same colour are one rectangle.
      let from = 0;
      let colour = null;
      for (let column = 0; column <= cells.length; column++) {
        const load = cells[column];
        const next = column === cells.length || load === null || load === undefined ? null : heat(load / most);
        if (next === colour) continue;
        if (colour !== null) {
          context.fillStyle = colour;
          const x = Math.floor(left + from * across);
          context.fillRect(x, row * down, Math.ceil(left + column * across) - x, down - gap);
        }
        from = column;
        colour = next;
      }
    });
    Object.assign(this, { across, down, left });
    put(document.getElementById("heat-from"), ago(times.at(-1) - times[0]));
    put(document.getElementById("heat-most"), count(most));
    this.canvas.setAttribute("aria-label", `Heat map: requests of ${ids.length} instances over ${ago(times.at(-1) - times[0])}; at most ${count(most)}`);
    this.drawScale();
  }

  drawScale() {
    const canvas = document.getElementById("heat-scale");
    const context = canvas.getContext("2d");
    for (let x = 0; x < canvas.width; x++) {
      context.fillStyle = heat(x / (canvas.width - 1));
      context.fillRect(x, 0, 1, canvas.height);
    }
  }

  point(event) {
    const column = Math.floor((event.offsetX - this.left) / this.across);
    const id = this.ids[Math.floor(event.offsetY / this.down)];
    const load = this.history.loads.get(id)?.[column];
    if (load === null || load === undefined) return this.leave();
    this.at = { id };
    put(this.tip, `${id}: ${count(load)} requests at ${time(this.history.times[column]).slice(0, 8)}`);
    this.tip.hidden = false;
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
    this.tip.style.top = `${event.offsetY - 30}px`;
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
  }
}

function ago(ms) {
  return ms < 90000 ? `${Math.round(ms / 1000)} s ago` : `${Math.round(ms / 60000)} min ago`;
}
