// Draws the charts over training steps with uPlot, of one run or of several, from the JSON of the page. Without it the table is read.
"use strict";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 4]];
const HEIGHT = 210;
const PRESS_TWICE_MILLISECONDS = 350;
const box = document.querySelector("[data-plots]");
// The steps that the answer holds are a part of the run's.
const isPart = /[?&]training_(min|max)=[0-9]/.test(box?.dataset.plots ?? "");

// "lost/sampled" is a share, "gap.p99" a field of an object. A kind of finding that a step lacks counts 0.
function valueAt(line, path) {
  const [top, bottom] = path.split("/");
  const [name, field] = top.split(".");
  const held = line[name];
  const found = field === undefined ? held : held === null ? null : (held[field] ?? (name === "findings" ? 0 : null));
  if (bottom === undefined || found === null) return found;
  return line[bottom] ? found / line[bottom] : null;
}

function words(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function colourOf(number) {
  const probe = document.createElement("span");
  probe.className = number ? `line-${((number - 1) % 6) + 1}` : "";
  box.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function axis(of) {
  const ink = colourOf(3);
  return { stroke: ink, grid: { stroke: ink, width: 0.3 }, ticks: { show: false }, font: "12px system-ui, sans-serif", ...of };
}

// Room above and below the lines. Lines that are 0 everywhere lie on an axis up to 1.
function rangeOf(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

// The steps between two of the axis, as the address says them. The table and a shared link follow on the next load.
function keepRange(low, high, steps) {
  const address = new URL(location.href);
  const whole = low <= steps[0] && high >= steps.at(-1);
  for (const [name, value] of [["training_min", Math.ceil(low)], ["training_max", Math.floor(high)]]) {
    if (whole) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  history.replaceState(history.state, "", address);
}

// The lines of a chart by name: figures of one run, or one figure of several runs, which the answer holds as columns.
function linesOf(place, answer) {
  if (place.dataset.chart !== undefined) {
    const chart = answer.overlay.charts.find((one) => one.id === place.dataset.chart);
    return answer.overlay.names.map((name, n) => [name, chart.values[n]]);
  }
  const lines = answer.by === "version" ? answer.versions : answer.steps;
  return place.dataset.lines.split("|").map((text) => {
    const cut = text.lastIndexOf("=");
    return [text.slice(0, cut), lines.map((line) => valueAt(line, text.slice(cut + 1)))];
  });
}

// The trajectories of a point, as the list of the run filters them.
function filterOf(answer, steps, idx) {
  if (answer.by !== "version") return { training_min: steps[idx], training_max: steps[idx] };
  const { version, first, last } = answer.versions[idx];
  return first === null ? { policy: version } : { policy: version, from: first, to: last };
}

// All steps again. Where the page was asked for some of them, it has no others, so it is asked for all.
function showAll() {
  const address = new URL(location.href);
  for (const name of ["training_min", "training_max"]) address.searchParams.delete(name);
  location.assign(address);
}

function draw(place, answer, steps, shared) {
  const series = linesOf(place, answer);
  // A version has a place on the axis, and its name is written there.
  const names = answer.by === "version" ? answer.versions.map((line) => line.version) : null;
  const named = (value) => (names === null ? words(value) : (names[value] ?? "–"));
  const data = [steps, ...series.map(([, values]) => values)];
  place.replaceChildren();
  place.classList.add("drawn");
  const plot = new uPlot(
    {
      width: place.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false }, y: { range: rangeOf } },
      cursor: { sync: { key: "training" }, drag: { x: true, y: false }, points: { size: 7 } },
      legend: { live: true, markers: { dash: (_, n) => ["solid", "dashed", "dotted", "double"][(n - 1) % 4] } },
      axes: [
        axis(names === null ? { size: 28 } : { size: 28, values: (_, ticks) => ticks.map((tick) => names[tick] ?? "") }),
        axis({ size: 60, values: (_, ticks) => ticks.map(words) }),
      ],
      series: [
        { label: names === null ? "step" : "version", value: (_, value) => named(value) },
        ...series.map(([label], n) => ({
          label,
          stroke: colourOf(n + 1),
          width: 1.6,
          dash: DASHES[n % DASHES.length],
          points: { show: steps.length <= 60, size: 5 },
          value: (_, value) => words(value),
          // Runs need not have the same steps: a line goes on over the steps of the others.
          spanGaps: place.dataset.chart !== undefined,
        })),
      ],
      hooks: {
        setScale: [
          (self, key) => {
            const { min, max } = self.scales.x;
            if (key !== "x" || shared.busy || min === null) return;
            shared.busy = true;
            for (const other of shared.plots) if (other !== self) other.setScale("x", { min, max });
            shared.busy = false;
            if (shared.ready && names === null) keepRange(min, max, steps);
          },
        ],
      },
    },
    data,
    place,
  );
  plot.over.addEventListener("click", ({ detail }) => {
    const { idx } = plot.cursor;
    clearTimeout(shared.leaving);
    if (idx === null || idx === undefined || plot.select.width > 0 || box.dataset.list === undefined) return;
    if (detail > 1) return; // the second press of two
    const address = `${box.dataset.list}?${new URLSearchParams(filterOf(answer, steps, idx))}`;
    shared.leaving = setTimeout(() => location.assign(address), PRESS_TWICE_MILLISECONDS);
  });
  plot.over.addEventListener("dblclick", () => {
    clearTimeout(shared.leaving);
    if (isPart) showAll();
  });
  return plot;
}

async function start() {
  if (!box || typeof uPlot === "undefined") return;
  const reply = await fetch(box.dataset.plots, { headers: { Accept: "application/json" } });
  if (!reply.ok) return;
  const answer = await reply.json();
  const steps =
    answer.overlay?.steps ??
    (answer.by === "version" ? answer.versions.map((_, n) => n) : answer.steps.map((line) => line.training_step));
  const places = [...box.querySelectorAll(".plot")];
  const redraw = () => {
    const shared = { plots: [], busy: false, ready: false, leaving: 0 };
    for (const place of places) shared.plots.push(draw(place, answer, steps, shared));
    shared.ready = true;
    return shared;
  };
  let shared = redraw();
  document.querySelector(".plot-help").hidden = false;
  new ResizeObserver(() => {
    for (const [n, plot] of shared.plots.entries()) {
      if (plot.width !== places[n].clientWidth) plot.setSize({ width: places[n].clientWidth, height: HEIGHT });
    }
  }).observe(box);
  // Colours are painted, so another theme needs another painting.
  const again = () => {
    for (const plot of shared.plots) plot.destroy();
    shared = redraw();
  };
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
}

start();
