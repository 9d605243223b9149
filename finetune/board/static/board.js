// What a page does besides htmx: curves, copying, and ticks that outlast an update.
"use strict";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = new Intl.NumberFormat("en", {maximumSignificantDigits: 5, notation: "standard"});
const large = new Intl.NumberFormat("en", {maximumSignificantDigits: 3, notation: "compact"});
const SCALES = {memory: [2 ** 20, " MiB"], mfu: [0.01, " %"]};
const brief = new Intl.NumberFormat("en", {maximumSignificantDigits: 3});
const show = (key, value, format = number) => {
  if (value == null) return "";
  const [unit, suffix] = SCALES[key] ?? [1, ""];
  const scaled = value / unit, size = Math.abs(scaled);
  if (size >= 1e4) return large.format(scaled) + suffix;
  return (size && size < 1e-3 ? scaled.toExponential(2) : format.format(scaled)) + suffix;
};

// --- curves ----------------------------------------------------------------------------------------

const WHOLE = Array.from({length: 40}, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));
const charts = document.getElementById("charts");
const plots = new Map();
let known = null;

async function update() {
  if (!charts || update.busy) { update.again = true; return; }
  update.busy = true;
  try {
    const since = known ? Math.max(0, known.step.length - 1) : 0;
    const query = new URLSearchParams({run: charts.dataset.run, since});
    const answer = await fetch(`/curves.json?${query}`);
    if (!answer.ok) return;
    let more = await answer.json();
    if (known && (more.width !== known.width || more.rows < known.rows || !more.step.length)) {
      known = null;  // buckets were merged, or the run began again
      update.again = more.step.length > 0 || since > 0;
      return;
    }
    join(more, since);
    draw();
    const text = known.width > 1
      ? `${known.rows.toLocaleString("en")} steps: each point is the mean of ${known.width}, in the band from their minimum to their maximum.` : "";
    document.getElementById("resolution").textContent = (more.whole ? "" : "The file is being read. ") + text;
    update.again = update.again || !more.whole;
  } finally {
    update.busy = false;
    if (update.again) { update.again = false; setTimeout(update, 50); }
  }
}

function join(more, since) {
  if (!known) { known = more; return; }
  for (const name of ["step", "hours", "tokens"]) known[name] = known[name].slice(0, since).concat(more[name]);
  for (const [name, curve] of Object.entries(more.curves)) {
    const old = known.curves[name];
    if (!old) { known = null; update.again = true; return; }
    for (const part of ["low", "mean", "high"]) old[part] = old[part].slice(0, since).concat(curve[part]);
  }
  Object.assign(known, {width: more.width, rows: more.rows, evaluations: more.evaluations, saved: more.saved, best: more.best});
}

function measured(name) {
  // Evaluations at the places of the nearest buckets at or after their steps.
  const values = new Array(known.step.length).fill(null);
  let at = 0, any = false;
  for (const each of known.evaluations) {
    if (typeof each[name] !== "number") continue;
    while (at < known.step.length - 1 && known.step[at] < each.step) at++;
    if (known.step.length) { values[at] = each[name]; any = true; }
  }
  return any ? values : null;
}

function draw() {
  if (!known) return;
  for (const [name, curve] of Object.entries(known.curves)) {
    const title = known.names[name] ?? name;
    let figure = charts.querySelector(`[data-curve="${CSS.escape(title)}"]`);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.curve = title;
      const caption = document.createElement("figcaption");
      caption.textContent = title;
      const drawn = document.createElement("div");
      drawn.className = "drawn";
      figure.append(caption, drawn);
      charts.append(figure);
    }
    const points = measured(name);
    const data = [known[charts.dataset.x], curve.low, curve.high, curve.mean, ...(points ? [points] : [])];
    const plot = plots.get(name);
    if (plot && plot.series.length === data.length) plot.setData(data);
    else {
      plot?.destroy();
      plots.set(name, build(name, figure, data));
    }
  }
}

function build(name, figure, data) {
  const wide = figure.classList.contains("wide");
  const blue = color("--blue"), orange = color("--orange"), soft = color("--soft"), line = color("--line");
  const value = (_, v) => show(name, v);
  const bandless = {stroke: "transparent", width: 0, points: {show: false}};
  const axis = {stroke: soft, grid: {stroke: line, width: 1}, ticks: {show: false}, font: "12px system-ui"};
  const drawn = figure.querySelector(".drawn");
  drawn.replaceChildren();
  const options = {
    width: drawn.clientWidth, height: wide ? 300 : 190,
    cursor: {sync: {key: "run"}, points: {size: 6}},
    scales: {x: {time: false}, y: {range: (plot, low, high) => range(data, low, high)}},
    axes: [{...axis, ...(charts.dataset.x === "hours" ? {} : {incrs: WHOLE}), values: (_, all) => all.map((v) => large.format(v))}, {...axis, size: 66, values: (_, all) => all.map((v) => show(name, v, brief))}],
    series: [
      {label: charts.dataset.x, value: (_, v) => (v == null ? "" : number.format(v))},
      {...bandless, label: "min", value}, {...bandless, label: "max", value},
      {label: known.width > 1 ? "mean" : "value", stroke: blue, width: 1.6, value, points: {show: false}},
      {label: "evaluation", stroke: orange, width: 1.4, value, spanGaps: true, points: {show: true, size: 6, fill: orange}},
    ].slice(0, data.length),
    bands: [{series: [2, 1], fill: blue + "30"}],
    hooks: {draw: [(plot) => marks(plot, name)]},
  };
  if (known.width === 1) options.series[1].show = options.series[2].show = false;
  return new uPlot(options, data, drawn);
}

function range(data, low, high) {
  if (low == null || high == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function marks(plot, name) {
  // Checkpoints as ticks below the curve of the loss; that of the best evaluation is taller.
  if (name !== "loss" || charts.dataset.x !== "step") return;
  const {ctx, bbox} = plot;
  ctx.save();
  for (const step of known.saved) {
    const x = plot.valToPos(step, "x", true), best = step === known.best;
    ctx.fillStyle = color(best ? "--orange" : "--soft");
    ctx.fillRect(x - devicePixelRatio, bbox.top + bbox.height - (best ? 16 : 8) * devicePixelRatio, 2 * devicePixelRatio, (best ? 16 : 8) * devicePixelRatio);
  }
  ctx.restore();
}

if (charts) {
  update();
  new ResizeObserver(() => {
    for (const plot of plots.values()) {
      const width = plot.root.parentElement.clientWidth;
      if (width && width !== plot.width) plot.setSize({width, height: plot.height});
    }
  }).observe(charts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    draw();
  });
}

// --- updates ---------------------------------------------------------------------------------------

let ticked = [], opened = [];
document.addEventListener("htmx:beforeSwap", (event) => {
  ticked = [...document.querySelectorAll("#list input:checked")].map((box) => box.value);
});
document.addEventListener("htmx:afterSwap", (event) => {
  for (const box of document.querySelectorAll("#list input[type=checkbox]")) box.checked = ticked.includes(box.value);
});
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  // Somebody reads or uses a part of the page: it is not replaced under the pointer or the keyboard.
  const part = event.target;
  if (part.contains?.(document.activeElement) || part.querySelector?.("details[open]")) event.preventDefault();
});
document.addEventListener("htmx:sseMessage", (event) => {
  if (event.target.id === "rows") update();
  if (event.target.id === "log" && !event.target.matches(":hover")) event.target.scrollTop = event.target.scrollHeight;
});

document.addEventListener("click", async (event) => {
  const code = event.target.closest(".copy");
  if (!code) return;
  await navigator.clipboard?.writeText(code.textContent);
  code.classList.add("copied");
  setTimeout(() => code.classList.remove("copied"), 900);
});
