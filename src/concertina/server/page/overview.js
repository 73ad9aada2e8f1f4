// The first view: slots over time, and the jobs.

import { get, now } from "./api.js";
import { bellows } from "./bellows.js";
import { chart, slotsOverTime } from "./charts.js";
import { colourOf } from "./colours.js";
import { sentence } from "./dialogs.js";
import { el, fill, keyed, text } from "./dom.js";
import { isRunning, isWaiting, known, onChange, ordered, running } from "./live.js";
import { deadline, empty, every, loading, phaseChip, progressBar } from "./parts.js";
import { plural } from "./words.js";

const GROUPS = {
  all: ["All", () => true],
  running: ["Running", isRunning],
  waiting: ["Waiting", isWaiting],
  finished: ["Finished", (job) => job.phase === "finished"],
  other: ["Refused or stopped", (job) => ["rejected", "cancelled", "failed"].includes(job.phase)],
};
const MORE = 60; // rows to begin with, and to add
const SPANS = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "1 day"]];
const chosen = { group: "all", words: "", rows: MORE, span: 3600 }; // kept while the page is open
export const FIRST_COMMAND = "concertina submit examples/digits.py --virtual 4 --deadline 10m";
// Said wherever jobs of `concertina up --demo` are shown: their speeds are not this machine's.
const PACED = "Some of these jobs are paced: each batch waits as it would for a GPU, so that a small machine is enough. What they train is real.";

/** Put the cursor into the search field, from wherever. */
export function search() {
  if (location.hash.length > 2) location.hash = "#/";
  setTimeout(() => document.getElementById("search")?.focus(), 0);
}

function matches(job) {
  const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
  const text_ = `${job.id} ${job.name} ${job.user} ${job.script}`.toLowerCase();
  return GROUPS[chosen.group][1](job) && words.every((word) => text_.includes(word));
}

export function show(main) {
  const picture = chart({ draw: slotsOverTime, tall: true });
  const legend = el("ul.legend", { "aria-label": "Who is on how many slots now" });
  const place = el("div", { "aria-live": "off" }, loading("Asking for the jobs …"));
  const paced = el("p.hint", { hidden: true }, PACED);
  fill(main,
    el("h1.unseen", {}, "Jobs"),
    el("section.card", { "aria-labelledby": "slots-title" }, el(".head", {}, el("h2", { id: "slots-title" }, "Slots over time"), spans(() => ask())), picture, legend, paced),
    el("section", { "aria-labelledby": "jobs-title" }, el("h2", { id: "jobs-title" }, "Jobs"), place));
  const list = jobList();
  const draw = () => {
    if (!known.ready) return;
    if (!known.jobs.size) {
      if (!place.querySelector(".empty")) fill(place, empty("No jobs yet", "Submit one from a terminal where the server runs, or with the form under “What if”.", FIRST_COMMAND));
    } else {
      if (!place.contains(list)) fill(place, list);
      list.update();
    }
    drawLegend(legend);
    paced.hidden = ![...known.jobs.values()].some((job) => job.script.endsWith("/live_paced.py"));
  };
  const ask = async () => picture.update({ history: await get(`cluster/history?seconds=${chosen.span}`), until_s: now() });
  const stopHistory = every(2, ask);
  const stop = onChange(draw);
  draw();
  return () => { stop(); stopHistory(); picture.end(); };
}

function spans(changed) {
  const buttons = SPANS.map(([seconds, words]) => el("button", {
    type: "button", "aria-pressed": String(seconds === chosen.span),
    on: { click: (event) => {
      chosen.span = seconds;
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget)));
      changed().catch(() => {});
    } },
  }, words));
  return el(".segments.row", { role: "group", "aria-label": "How far back" }, buttons);
}

function drawLegend(legend) {
  const jobs = running([...known.jobs.values()]).filter((job) => job.slots.length);
  keyed(legend, ordered(jobs), (job) => job.id, () => {
    const swatch = el("i", { "aria-hidden": "true" }), words = el("span");
    const item = el("li", {}, swatch, words);
    item.update = (job) => { swatch.style.background = colourOf(job.id); text(words, `${job.name} on ${job.slots.length}`); };
    return item;
  });
}

function jobList() {
  const body = el("tbody");
  const none = el("p.note", { hidden: true }, "No job matches. Esc leaves the search; “All” shows every phase.");
  const more = el("button", { type: "button", hidden: true, on: { click: () => { chosen.rows += MORE; list.update(); } } });
  const filters = filterBar(() => { chosen.rows = MORE; list.update(); });
  const head = ["Job", "Phase", "Progress", "Workers", "Deadline", "Why"].map((words) => el("th", { scope: "col" }, words));
  const beyond = el("p.note", { hidden: true });
  const list = el("div", {}, filters, el("table.jobs", {}, el("thead", {}, el("tr", {}, head)), body), none, more, beyond);
  list.update = () => {
    const jobs = [...known.jobs.values()];
    const fit = ordered(jobs.filter(matches));
    keyed(body, fit.slice(0, chosen.rows), (job) => job.id, jobRow);
    none.hidden = fit.length > 0;
    more.hidden = fit.length <= chosen.rows;
    text(more, `Show more of ${plural(fit.length, "job")}`);
    beyond.hidden = known.total <= jobs.length;
    text(beyond, `The page holds ${jobs.length.toLocaleString()} of ${plural(known.total, "job")}: all that live and the newest others. For the rest: concertina jobs --all`);
    filters.update(jobs);
  };
  return list;
}

function filterBar(changed) {
  const field = el("input", { id: "search", type: "search", placeholder: "Search  /", "aria-label": "Search jobs by name, user or script", value: chosen.words });
  field.value = chosen.words;
  field.addEventListener("input", () => { chosen.words = field.value; changed(); });
  const buttons = Object.entries(GROUPS).map(([key, [name]]) => {
    const count = el("small");
    const button = el("button", { type: "button", "data-group": key, on: { click: () => { chosen.group = key; changed(); } } }, name, count);
    button.count = count;
    return button;
  });
  const bar = el(".filters", {}, el(".segments", { role: "group", "aria-label": "Phase" }, buttons), field);
  bar.update = (jobs) => buttons.forEach((button) => {
    const group = button.dataset.group;
    button.setAttribute("aria-pressed", String(group === chosen.group));
    text(button.count, ` ${jobs.filter(GROUPS[group][1]).length}`);
  });
  return bar;
}

export function jobRow(job) {
  const link = el("a.stop", { href: `#/jobs/${encodeURIComponent(job.id)}` });
  const who = el("small");
  const parts = [phaseChip(), progressBar(), bellows(), deadline()];
  const why = el("span.why");
  const cell = (label, ...inside) => el("td", { "data-label": label }, ...inside);
  const swatch = el("i.swatch", { "aria-hidden": "true" });
  const row = el("tr", { on: { click: (event) => { if (!event.target.closest("a") && !getSelection().toString()) link.click(); } } },
    el("th", { scope: "row" }, swatch, el("span", {}, link, who)),
    cell("Phase", parts[0]), cell("Progress", parts[1]), cell("Workers", parts[2]), cell("Deadline", parts[3]), cell("Why", why));
  row.update = (now_) => {
    swatch.style.background = colourOf(now_.id);
    text(link, now_.name || now_.id);
    text(who, [now_.id !== now_.name && now_.id, now_.user].filter(Boolean).join(" · "));
    parts.forEach((part) => part.update(now_));
    text(why, sentence(now_.error && now_.phase === "failed" ? now_.error : now_.reason));
    row.dataset.phase = now_.phase;
  };
  return row;
}
