// Colours of load, and of lines, for the theme in force.

const STOPS = {
  light: ["#eef3f9", "#bdd7ee", "#6fb1dd", "#2f7fc1", "#8a3f9e", "#c2185b"],
  dark: ["#18212e", "#1d4a72", "#2b7fb8", "#59b6c9", "#f2c14e", "#ff7a59"],
};
const LINES = {
  light: { first: "#1668c7", second: "#b4540a", grid: "#d8dee7", gone: "#f6f8fa" },
  dark: { first: "#5aa4f5", second: "#f2a65a", grid: "#343c48", gone: "#12161c" },
};
const STEPS = 64;
const query = matchMedia("(prefers-color-scheme: dark)");
let ramps = null;

function mix(from, to, share) {
  const parts = [1, 3, 5].map((at) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(a + (b - a) * share).toString(16).padStart(2, "0");
  });
  return `#${parts.join("")}`;
}

function ramp(stops) {
  return Array.from({ length: STEPS }, (_, i) => {
    const place = (i / (STEPS - 1)) * (stops.length - 1);
    const at = Math.min(stops.length - 2, Math.floor(place));
    return mix(stops[at], stops[at + 1], place - at);
  });
}

/** The colour of a load, 0 to 1. */
export function heat(share) {
  ramps ??= { light: ramp(STOPS.light), dark: ramp(STOPS.dark) };
  const steps = ramps[query.matches ? "dark" : "light"];
  return steps[Math.max(0, Math.min(STEPS - 1, Math.round(share * (STEPS - 1))))];
}

/** Colours of lines by use. */
export function lines() {
  return LINES[query.matches ? "dark" : "light"];
}

/** Call `draw` when the theme changes. */
export function onTheme(draw) {
  query.addEventListener("change", draw);
}
