// Pictures, drawn by plotly.js out of the installed package. Loaded when the first picture comes into view.

import { calmly, el } from "./dom.js";
import { colourOf } from "./colours.js";

const LABEL_PX = 14; // a figure over a mark takes so much room
const TRIES_MS = [0, 1500, 5000]; // a request may be lost on the way
let loading = null;
function plotly() {
  loading ||= (async () => {
    for (const wait of TRIES_MS) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      if (await load()) return window.Plotly;
    }
    throw new Error("plotly is not there");
  })();
  return loading;
}

function load() {
  return new Promise((resolve) => {
    const script = el("script", { src: "static/plotly.min.js" });
    script.addEventListener("load", () => resolve(Boolean(window.Plotly)));
    script.addEventListener("error", () => { script.remove(); resolve(false); });
    document.head.append(script);
  });
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false, showTips: false };

function layout(more) {
  const ink = css("--faint"), line = css("--line");
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, fixedrange: true, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 36, r: 10, t: 8, b: 30 }, showlegend: false, dragmode: false, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--raised"), bordercolor: line, font: { color: css("--ink") } },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

/**
 * A figure with a caption. `draw(data, width)` gives {traces, layout}, or a sentence when there is nothing to draw yet.
 * `update(data)` redraws it, calmly; `end()` lets it go.
 */
export function chart({ caption, draw, tall = false }) {
  const plot = el(tall ? ".plot.tall" : ".plot", { "aria-hidden": "true" });
  const note = el("p.note", {}, "Drawing …");
  const figure = el("figure", {}, caption ? el("figcaption", {}, caption) : null, note, plot);
  let data = null, seen = false, ended = false, library = null;

  const paint = calmly(() => {
    if (!seen || ended || data === null || !library) return;
    const drawing = draw(data, figure.clientWidth);
    const empty = typeof drawing === "string";
    note.hidden = !empty;
    plot.hidden = empty;
    if (empty) note.textContent = drawing;
    else library.react(plot, drawing.traces, layout(drawing.layout || {}), CONFIG);
  }, 700);

  const watcher = new IntersectionObserver(async ([entry]) => {
    if (!entry.isIntersecting) return;
    seen = true;
    watcher.disconnect();
    try { library = await plotly(); } catch {
      loading = null; // the next picture may have more luck
      note.textContent = "No picture: plotly is missing where the server runs. Try there: pip install 'concertina[cluster]'";
      plot.hidden = true;
    }
    paint();
  }, { rootMargin: "200px" });
  watcher.observe(figure);
  addEventListener("themechange", paint);

  figure.update = (value) => { data = value; paint(); };
  figure.end = () => {
    ended = true;
    watcher.disconnect();
    removeEventListener("themechange", paint);
    if (library) library.purge(plot);
  };
  return figure;
}

const time = (at) => new Date(at * 1000);

/** What GET /cluster/history answers, up to `until_s` -> stacked steps, one colour per job. */
export function slotsOverTime({ history, until_s }, width) {
  const { series, slots } = history;
  const first = Math.min(...series.flatMap((one) => one.points.map(([at]) => at)));
  if (!Number.isFinite(first)) return "Nothing has run in this time; the next job will begin the picture.";
  const end = Math.max(until_s, history.to_s);
  const from_s = Math.max(history.from_s, first - 0.02 * (end - first)); // a young cluster fills the picture too
  const times = [...new Set([from_s, end, ...series.flatMap((one) => one.points.map(([at]) => at))])].filter((at) => at >= from_s).sort((a, b) => a - b);
  const x = times.map(time);
  const traces = series.map((one) => ({
    x, y: stepsAt(one.points, times), name: one.name, stackgroup: "slots", mode: "lines", hovertemplate: "%{y}",
    line: { shape: "hv", width: 0, color: colourOf(one.job || one.name) }, fillcolor: `${colourOf(one.job || one.name)}e0`,
  }));
  traces.push({
    x, y: times.map(() => slots), name: "slots in all", mode: "lines", hoverinfo: "skip",
    line: { width: 1.5, dash: "dot", color: css("--faint") },
  });
  const length = end - from_s;
  const tickformat = length < 600 ? "%H:%M:%S" : length < 90000 ? "%H:%M" : "%d %b %H:%M";
  return {
    traces,
    layout: { xaxis: { type: "date", range: [time(from_s), time(end)], tickformat, nticks: Math.max(3, Math.round(width / 130)), tickangle: 0, hoverformat: "%H:%M:%S" }, yaxis: { range: [0, slots * 1.06], dtick: Math.max(1, Math.ceil(slots / 6)), title: { text: "slots" } } },
  };
}

/** [(when, workers from then on)] read at each of `times`, both in order. */
function stepsAt(points, times) {
  let next = 0, value = 0;
  return times.map((at) => {
    while (next < points.length && points[next][0] <= at) value = points[next++][1];
    return value;
  });
}

/** Points with `speed`: steps/s over the last few points of the same generation, so that one quick step is no tower. */
export function withSpeed(points, generations) {
  const window_ = Math.max(8, Math.round(points.length / 40));
  const begins = generations.map((one) => one.step);
  let first = 0;
  return points.map((point, i) => {
    if (i && begins.some((step) => points[i - 1].step < step + 1 && step + 1 <= point.step)) first = i;
    const from = points[Math.max(first, i - window_)];
    const seconds = point.at_s - from.at_s;
    return { ...point, speed: i - first >= 2 && seconds > 0 ? (point.step - from.step) / seconds : null };
  });
}

/** The marks whose figures fit: of those that stand too close to each other the last one, which is what held. */
function readable(marks, points, width) {
  const last = Math.max(points[points.length - 1].step, 1);
  return marks.filter((mark, i) => i + 1 === marks.length || ((marks[i + 1].step - mark.step) / last) * width >= LABEL_PX);
}

/** One value over the steps; `marks` are steps at which the number of workers changed. */
export function overSteps({ points, valueOf, unit, colour, marks = [] }, width) {
  const there = points.filter((point) => Number.isFinite(valueOf(point)));
  if (there.length < 2) return "Nothing to draw yet; the first points come after a few steps.";
  const line = css("--edge");
  return {
    traces: [{
      x: there.map((point) => point.step), y: there.map(valueOf), mode: "lines",
      line: { width: 2, color: colour, shape: "linear" }, connectgaps: true, hovertemplate: `%{y:.4~g} ${unit || ""}<extra></extra>`,
    }],
    layout: {
      hovermode: "x", xaxis: { title: { text: "step" }, rangemode: "tozero", nticks: Math.max(3, Math.round(width / 80)) },
      yaxis: { rangemode: unit === "steps/s" ? "tozero" : "normal", title: unit ? { text: unit } : undefined },
      shapes: marks.map((mark) => ({ type: "line", x0: mark.step, x1: mark.step, yref: "paper", y0: 0, y1: 1, line: { color: line, width: 1, dash: "dot" } })),
      annotations: readable(marks, there, width).map((mark) => ({
        x: mark.step, yref: "paper", y: 1, yanchor: "bottom", text: `${mark.workers}`, showarrow: false, font: { size: 10, color: css("--faint") },
      })),
      margin: { l: 44, r: 10, t: 16, b: 36 },
    },
  };
}
