"use strict";
// Draws the page from the JSON beside it. Charts are drawn when they come into view, and again when the theme changes.

const traces = JSON.parse(document.getElementById("data").textContent);
const POLICY_COLOURS = ["#3b76c4", "#d9822b", "#2f9e7d", "#b5509c", "#8a6d3b", "#6a5acd", "#c94f4f", "#4f9aa8", "#7a9a3a", "#9a6a9a"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const HOUR = 3600, DAY = 86400;
const drawn = new Map(); // element -> the function that draws it

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (i) => POLICY_COLOURS[i % POLICY_COLOURS.length];
const dashOf = (i) => DASHES[Math.floor(i / POLICY_COLOURS.length) % DASHES.length];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const s = Math.abs(seconds), sign = seconds < 0 ? "-" : "";
  if (s === 0) return "0 s";
  if (s < 1) return `${sign}${s.toFixed(1)} s`;
  if (s < 120) return `${sign}${s.toFixed(0)} s`;
  if (s < 2 * HOUR) return `${sign}${(s / 60).toFixed(0)} min`;
  if (s < 2 * DAY) return `${sign}${(s / HOUR).toFixed(1)} h`;
  return `${sign}${(s / DAY).toFixed(1)} d`;
}
const count = (n) => (n === null || n === undefined ? "-" : n.toLocaleString("en"));
const percent = (x) => (x === null || x === undefined ? "-" : `${(100 * x).toFixed(1)} %`);
const millis = (x) => (x === null || x === undefined ? "-" : x < 10 ? x.toFixed(2) : x.toFixed(0));

// What the table and the bars show: key, heading, how it is written, which direction is good.
const FIGURES = [
  ["finished", "finished", count, 1],
  ["deadline_met", "deadlines met", count, 1],
  ["admitted_missed", "admitted, missed", count, -1],
  ["rejected", "refused", count, -1],
  ["avg_jct_s", "mean JCT", duration, -1],
  ["p50_jct_s", "median JCT", duration, -1],
  ["p99_jct_s", "99 % JCT", duration, -1],
  ["avg_queue_s", "mean wait", duration, -1],
  ["makespan_s", "makespan", duration, -1],
  ["utilization", "devices used", percent, 1],
  ["cluster_efficiency", "efficiency", percent, 1],
  ["rescales", "rescales", count, 0],
  ["rounds", "rounds", count, 0],
  ["decision_ms_p95", "decision, 95 % (ms)", millis, -1],
  ["wall_s", "simulated in", duration, 0],
];
const BARS = ["avg_jct_s", "p99_jct_s", "avg_queue_s", "makespan_s", "utilization", "deadline_met"];

function best(trace, key, write, direction) {
  // As written, so that nothing is marked for a difference that nobody can see.
  const values = trace.policies.map((p) => p.summary[key]).filter((v) => v !== null);
  if (!direction || new Set(values.map(write)).size < 2) return null;
  return write(direction > 0 ? Math.max(...values) : Math.min(...values));
}

function summaryTable(trace) {
  const withDeadlines = trace.policies.some((p) => p.deadlines.none < p.summary.jobs);
  const shown = FIGURES.filter(([key]) => withDeadlines || !["deadline_met", "admitted_missed", "rejected"].includes(key));
  const head = make("tr", {}, make("th", {}, "policy"), ...shown.map(([, title]) => make("th", {}, title)));
  const rows = trace.policies.map((policy) =>
    make("tr", {}, make("td", {}, policy.summary.policy),
      ...shown.map(([key, , write, direction]) => {
        const text = write(policy.summary[key]);
        return make("td", text === best(trace, key, write, direction) ? { class: "best" } : {}, text);
      })));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function comparisonBars(trace) {
  const box = make("div", { class: "bars" });
  for (const [key, title, write] of FIGURES.filter(([k]) => BARS.includes(k))) {
    if (key === "deadline_met" && trace.policies.every((p) => p.deadlines.none === p.summary.jobs)) continue;
    const most = Math.max(...trace.policies.map((p) => p.summary[key] ?? 0), 1e-12);
    const bar = make("div", { class: "bar" }, make("h4", {}, title));
    trace.policies.forEach((policy, i) => {
      const value = policy.summary[key];
      const fill = make("div", { class: "fill" });
      fill.style.width = `${(72 * (value ?? 0)) / most}%`;
      fill.style.background = colourOf(i);
      bar.append(make("span", {}, policy.summary.policy), make("div", { class: "track" }, fill, make("span", { class: "figure" }, write(value))));
    });
    box.append(bar);
  }
  return box;
}

function layout(extra) {
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, tickfont: { size: 11 } };
  const narrow = window.innerWidth < 600;
  return {
    paper_bgcolor: css("--ground"), plot_bgcolor: css("--ground"),
    font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") },
    margin: { l: narrow ? 44 : 56, r: 12, t: 8, b: 44 }, showlegend: true,
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
    ...extra,
    xaxis: { ...axis, ...(extra.xaxis || {}) },
    yaxis: { ...axis, ...(extra.yaxis || {}) },
  };
}
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };

function clock(trace) {
  // Where a few long jobs run on in an empty cluster, the pictures begin with the busy part; a double click shows all.
  const shown = 1.05 * (trace.busy_until_s - trace.start_s), all = trace.end_s - trace.start_s;
  const cut = shown > 0 && 1.3 * shown < all;
  const unit = (cut ? shown : all) > 3 * DAY ? DAY : HOUR;
  const title = `${unit === DAY ? "days" : "hours"} from the first submission`;
  return {
    at: (t) => (t - trace.start_s) / unit, step: (s) => s / unit, unit: unit === DAY ? "d" : "h", cut,
    axis: { hoverformat: ".2f", title: { text: title }, range: [0, (cut ? shown : all) / unit], autorangeoptions: { minallowed: 0 } },
  };
}

function drawWaiting(trace, element) {
  const time = clock(trace);
  const series = trace.policies.map((policy, i) => ({
    x: policy.load.time_s.map(time.at), y: policy.load.waiting, customdata: policy.load.waiting_max,
    name: policy.summary.policy, mode: "lines", line: { color: colourOf(i), width: 1.5, dash: dashOf(i), shape: "hvh" },
    hovertemplate: `%{y:.1f} jobs wait on average, %{customdata} at most<extra>${policy.summary.policy}</extra>`,
  }));
  Plotly.react(element, series, layout({ hovermode: "x unified", xaxis: time.axis, yaxis: { rangemode: "tozero", title: { text: "jobs" } } }), CONFIG);
}

function drawUsed(trace, element) {
  const time = clock(trace);
  const series = trace.policies.map((policy, i) => ({
    x: policy.load.time_s.map(time.at), y: policy.load.used, name: policy.summary.policy, mode: "lines",
    line: { color: colourOf(i), width: 1.5, dash: dashOf(i), shape: "hvh" },
    hovertemplate: `%{y:.1f} devices<extra>${policy.summary.policy}</extra>`,
  }));
  const load = trace.policies[0].load;
  series.push({ x: load.time_s.map(time.at), y: load.devices, name: "there are", mode: "lines", line: { color: css("--faint"), width: 1, dash: "dot" }, hoverinfo: "skip" });
  Plotly.react(element, series, layout({ hovermode: "x unified", xaxis: time.axis, yaxis: { rangemode: "tozero", title: { text: "devices" } } }), CONFIG);
}

function drawDistribution(trace, element) {
  const series = trace.policies.map((policy, i) => ({
    x: policy.jct.jct_s.map((s) => Math.max(s, 1)), y: policy.jct.share.map((v) => 100 * v), customdata: policy.jct.jct_s.map(duration),
    name: policy.summary.policy, mode: "lines", line: { color: colourOf(i), width: 1.8, dash: dashOf(i) },
    hovertemplate: `%{y:.0f} % done within %{customdata}<extra>${policy.summary.policy}</extra>`,
  }));
  const ticks = [1, 10, 60, 600, HOUR, 6 * HOUR, DAY, 7 * DAY, 30 * DAY];
  const words = ["1 s", "10 s", "1 min", "10 min", "1 h", "6 h", "1 d", "7 d", "30 d"];
  Plotly.react(element, series, layout({
    xaxis: { type: "log", tickvals: ticks, ticktext: words, title: { text: "time from submission to completion" } },
    yaxis: { range: [0, 101], ticksuffix: " %" },
  }), CONFIG);
}

function drawDeadlines(trace, element) {
  const names = trace.policies.map((p) => p.summary.policy);
  element.style.height = `${Math.max(220, 30 * names.length + 110)}px`;
  const series = [["met", "met", "--met"], ["late", "finished late", "--late"], ["rejected", "refused", "--rejected"], ["unfinished", "not finished", "--unfinished"]]
    .map(([key, name, colour]) => ({ key, name, colour, values: trace.policies.map((p) => p.deadlines[key]) }))
    .filter((part) => part.values.some((v) => v > 0))
    .map((part) => ({
      type: "bar", orientation: "h", y: names, x: part.values, name: part.name, marker: { color: css(part.colour) },
      text: part.values.map((v) => (v ? count(v) : "")), textposition: "inside", insidetextanchor: "middle", textangle: 0,
      hovertemplate: `%{x} ${part.name}<extra>%{y}</extra>`,
    }));
  Plotly.react(element, series, layout({
    barmode: "stack", bargap: 0.35, xaxis: { title: { text: "jobs with a deadline" } },
    yaxis: { autorange: "reversed", automargin: true, type: "category" },
  }), CONFIG);
}

async function decode(grid) {
  if (!grid.jobs) {
    const packed = Uint8Array.from(atob(grid.cells), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = { buffer: await new Response(stream).arrayBuffer() };
    grid.jobs = grid.bytes === 2 ? new Int16Array(bytes.buffer) : new Int32Array(bytes.buffer);
  }
  return grid.jobs;
}

function jobScale(n) {
  const dark = document.documentElement.dataset.theme === "dark";
  const scale = [];
  for (let i = 0; i < n; i++) {
    const colour = `hsl(${(i * 360) / n}, ${48 + 12 * (i % 2)}%, ${(dark ? 44 : 58) + 9 * ((i % 3) - 1)}%)`;
    scale.push([i / n, colour], [(i + 1) / n, colour]);
  }
  return scale;
}

async function drawDevices(trace, element, chosen) {
  const grid = trace.policies[chosen].grid;
  const time = clock(trace), cells = await decode(grid), n = trace.colours;
  const z = [], names = [];
  for (let r = 0; r < grid.rows; r++) {
    const zs = new Array(grid.columns), ns = new Array(grid.columns);
    for (let c = 0; c < grid.columns; c++) {
      const job = cells[r * grid.columns + c];
      zs[c] = job < 0 ? null : (job * 7) % n;
      ns[c] = job < 0 ? "idle" : trace.jobs[job];
    }
    z.push(zs);
    names.push(ns);
  }
  const every = Math.max(1, Math.ceil(grid.rows / 16));
  const ticks = grid.labels.map((_, i) => i).filter((i) => i % every === 0);
  const series = [{
    type: "heatmap", z, customdata: names, x0: time.at(grid.start_s + grid.step_s / 2), dx: time.step(grid.step_s), y0: 0, dy: 1,
    colorscale: jobScale(n), zmin: -0.5, zmax: n - 0.5, showscale: false, hoverongaps: false,
    hovertemplate: `%{customdata}<br>%{x:.2f} ${time.unit}<extra></extra>`,
  }];
  Plotly.react(element, series, layout({
    showlegend: false, plot_bgcolor: css("--idle"), xaxis: { ...time.axis, showgrid: false },
    yaxis: { tickvals: ticks, ticktext: ticks.map((i) => grid.labels[i].split(" ")[0]), autorange: "reversed", showgrid: false, automargin: true },
  }), CONFIG);
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || drawn.has(entry.target)) continue;
    drawn.set(entry.target, entry.target.draw);
    entry.target.draw();
  }
}, { rootMargin: "300px" });

function chart(title, words, draw, { wide = false, kind = "", tools = [] } = {}) {
  const plot = make("div", { class: `plot ${kind}`, role: "img", "aria-label": `${title}. ${words}` });
  plot.draw = () => draw(plot);
  watcher.observe(plot);
  return make("figure", wide ? { class: "wide" } : {}, make("div", { class: "head" }, make("h3", {}, title), ...tools), make("figcaption", {}, words), plot);
}

function worstTable(trace, policy) {
  const head = ["job", "devices asked", "waited", "JCT", "after deadline", "rescales", "last word"];
  const rows = policy.worst.map((job) => make("tr", {},
    make("td", {}, job.job), make("td", {}, count(job.gpus)), make("td", {}, duration(job.queue_s)), make("td", {}, duration(job.jct_s)),
    make("td", {}, job.late_s === null ? "-" : job.late_s > 0 ? duration(job.late_s) : "in time"), make("td", {}, count(job.rescales)), make("td", { class: "words" }, job.reason)));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((h) => make("th", h === "last word" ? { class: "words" } : {}, h)))), make("tbody", {}, ...rows)));
}

function section(trace, index) {
  const box = make("section", { id: `trace-${index}` }, make("h2", {}, trace.name),
    make("p", {}, `${count(trace.policies[0].summary.jobs)} jobs on ${trace.cluster} in ${count(trace.nodes)} nodes`));
  for (const note of trace.notes) box.append(make("p", { class: "notes" }, note));
  box.append(summaryTable(trace), ...(trace.policies.length > 1 ? [make("h3", {}, "Side by side"), comparisonBars(trace)] : []));
  const charts = make("div", { class: "charts" });
  const withGrid = trace.policies.map((p, i) => [p, i]).filter(([p]) => p.grid);
  if (withGrid.length) {
    const select = make("select", { "aria-label": "Policy shown" }, ...withGrid.map(([p, i]) => make("option", { value: i }, p.summary.policy)));
    const share = withGrid[0][0].grid.devices_per_row;
    const words = `One row is ${share === 1 ? "one device" : `${share} devices`}, one colour is one job (${trace.colours} colours take turns); the ground is idle. Point at a spot for the job, drag to look closer.`
      + (clock(trace).cut ? " The long tail is cut off: double-click to see all." : "");
    const figure = chart("Devices over time", words, (plot) => drawDevices(trace, plot, Number(select.value)), { wide: true, kind: "devices", tools: [select] });
    select.addEventListener("change", () => figure.querySelector(".plot").draw());
    charts.append(figure);
  }
  if (trace.policies.some((p) => p.load.time_s.length)) {
    const waited = trace.policies.some((p) => p.load.waiting_max.some((most) => most > 0));
    charts.append(chart("Waiting jobs", waited ? "Jobs without any device, mean of each stretch of time." : "No job ever was without a device.", (plot) => drawWaiting(trace, plot)),
      chart("Devices in use", "Mean of each stretch of time.", (plot) => drawUsed(trace, plot)));
  }
  charts.append(chart("Completion times", "Share of the finished jobs that were done within that time.", (plot) => drawDistribution(trace, plot)));
  if (trace.policies.some((p) => p.deadlines.none < p.summary.jobs)) {
    charts.append(chart("Deadlines", "What became of the jobs that had one.", (plot) => drawDeadlines(trace, plot)));
  }
  box.append(charts);
  for (const policy of trace.policies) {
    const more = make("details", {}, make("summary", {}, `${policy.summary.policy}: the jobs that waited longest`));
    more.addEventListener("toggle", () => { if (more.open && more.children.length === 1) more.append(worstTable(trace, policy)); });
    box.append(more);
  }
  return box;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const draw of drawn.values()) draw();
}

const preference = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(preference.matches ? "dark" : "light");
preference.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

const policies = new Set(traces.flatMap((t) => t.policies.map((p) => p.summary.policy)));
document.getElementById("lead").textContent = `${traces.length} ${traces.length === 1 ? "trace" : "traces"}, ${policies.size} ${policies.size === 1 ? "policy" : "policies"}: ${[...policies].join(", ")}`;
if (traces.length > 1) {
  document.getElementById("contents").append(...traces.map((t, i) => make("a", { href: `#trace-${i}` }, t.name)));
}
document.getElementById("traces").append(...traces.map(section), make("footer"));
