// One job: how it goes, why it has what it has, what was decided, and what its workers print.

import { call, get, now } from "./api.js";
import { bellows } from "./bellows.js";
import { chart, overSteps, withSpeed } from "./charts.js";
import { colourOf } from "./colours.js";
import { confirm, sentence } from "./dialogs.js";
import { el, fill, set, shows, text } from "./dom.js";
import { generations } from "./generations.js";
import { known, onChange } from "./live.js";
import { logs } from "./logs.js";
import { act } from "./nodes.js";
import { deadline, empty, every, loading, phaseChip, progressBar } from "./parts.js";
import { expected } from "./queue.js";
import { away, clock, duration, ENDED, figure, plural } from "./words.js";

export function show(main, id) {
  const path = `jobs/${encodeURIComponent(id)}`;
  const back = el("p.back", {}, el("a", { href: "#/" }, "← Jobs"));
  fill(main, back, el("h1", {}, known.jobs.get(id)?.name || id), loading("Asking for the job …"));
  const stops = [];
  let page = null, job = null;
  const draw = () => {
    const listed = known.jobs.get(id);
    if (listed && job) job = { ...listed, history: longer(job.history, listed.history) };
    if (job && page) page.update(job);
  };
  const read = async () => {
    try { job = await get(path); } catch (error) {
      if (error.status === 404) fill(main, back, el("h1", {}, id), empty("There is no such job", error.message, "concertina jobs"));
      throw error;
    }
    if (!page) {
      page = parts(path, job);
      fill(main, back, page);
      stops.push(page.end);
    }
    page.update(job);
  };
  stops.push(every(4, read), onChange(draw));
  return () => stops.forEach((stop) => stop());
}

/** Lists carry the newest lines of a story only: add those that are new to what is known. */
function longer(whole, newest) {
  const last = whole.length ? whole[whole.length - 1].at_s : -1;
  return [...whole, ...newest.filter((line) => line.at_s > last)];
}

function parts(path, job) {
  const head = top(path, job);
  const facts = el("dl.facts");
  const drawFacts = shows(facts, (at, list) => fill(at, list.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  const why = answer(path);
  const story = el("ol.story");
  const drawStory = shows(story, (at, lines) => fill(at, lines.map(storyLine)));
  const charts = metrics(path, job.id);
  const log = logs(path);
  const page = el(".jobpage", {}, head, why,
    el(".two", {}, el("section.card", { "aria-label": "Figures" }, el("h2", {}, "Now"), facts), el("section.card", {}, el("h2", {}, "Story"), story)),
    charts, log);
  page.update = (now_) => {
    head.update(now_);
    why.update(now_);
    drawFacts(factsOf(now_));
    drawStory(storyOf(now_));
    charts.update(now_);
    log.update(now_);
  };
  page.end = () => { why.end(); charts.end(); log.end(); };
  return page;
}

function top(path, job) {
  const title = el("h1", {}, job.name || job.id);
  const pieces = [phaseChip(), bellows(), progressBar(), deadline()];
  const reason = el("p.reason", { id: "reason" });
  const resize = el("button", { type: "button", id: "resize", on: { click: () => askSize(path, last) } }, "Resize");
  const cancel = el("button.danger", { type: "button", id: "cancel", on: { click: () => askCancel(path, last) } }, "Cancel");
  const buttons = el(".buttons", {}, resize, cancel);
  let last = job;
  const whole = el("header.jobtop.card", {},
    el(".head", {}, title, pieces[0], buttons), el(".meters", {}, pieces[1], pieces[2], pieces[3]), reason);
  whole.update = (now_) => {
    last = now_;
    whole.style.setProperty("--job", colourOf(now_.id));
    text(title, now_.name || now_.id);
    pieces.forEach((piece) => piece.update(now_));
    text(reason, sentence(now_.phase === "failed" && now_.error ? now_.error : now_.reason));
    set(buttons, { hidden: ENDED.has(now_.phase) });
  };
  return whole;
}

async function askCancel(path, job) {
  const yes = await confirm({
    title: `Cancel ${job.name}?`, yes: "Cancel the job", danger: true,
    sentence: `It stops at once${job.checkpoint_step ? `; its newest checkpoint (step ${job.checkpoint_step}) stays` : ""}. This can not be undone.`,
  });
  const said = (answer) => `${answer.name}: ${sentence(answer.reason)}`;
  if (yes) await act(path, undefined, { method: (at) => call(at, { method: "DELETE" }), said });
}

async function askSize(path, job) {
  const most = Math.min(job.max_workers || job.virtual, job.virtual);
  const field = el("input", { id: "workers", type: "number", min: "0", max: String(most), required: true });
  field.value = job.pinned || job.workers || 1;
  const inside = el(".field", {}, el("label", { for: "workers" }, "Workers"), field,
    el("p.hint", {}, `From ${job.min_workers} to ${most}; 0 leaves it to the policy again. The result is the same at any size.`));
  const wanted = await confirm({ title: `Resize ${job.name}`, yes: "Resize", inside, read: () => Number(field.value) });
  const said = (answer) => `${answer.name}: ${answer.pinned ? `${plural(answer.pinned, "worker")} from now on, as you asked.` : "as many workers as the policy likes."}`;
  if (wanted !== null) await act(`${path}/resize`, { workers: wanted }, { said });
}

/** Why it has what it has, and when it ends: asked anew now and then while the job lives. */
function answer(path) {
  const why = el("p.why"), when = el("p.when");
  const whole = el("section.card.answer", { "aria-label": "Why and when", hidden: true }, el("h2", {}, "Why, and when"), why, when);
  let live = true;
  const stop = every(10, async () => {
    if (!live) return;
    const said = await get(`${path}/why`);
    text(why, sentence(said.why));
    text(when, expected(said));
    whole.hidden = !said.why;
  });
  whole.update = (job) => {
    live = !ENDED.has(job.phase);
    if (!live) whole.hidden = true;
  };
  whole.end = stop;
  return whole;
}

function factsOf(job) {
  const t = now(), live = !ENDED.has(job.phase);
  const of = job.total_steps ? ` of ${job.total_steps.toLocaleString()}` : "";
  const rows = [
    ["step", `${job.step.toLocaleString()}${of}`],
    live && ["speed", job.steps_per_s ? `${figure(job.steps_per_s)} steps/s` : "not measured yet"],
    live && ["ends at this speed", job.eta_s ? `${clock(job.eta_s, t)} (${away(job.eta_s, t)})` : "not known yet"],
    job.promised_s && ["promised", clock(job.promised_s, t)],
    job.earliest_s && ["earliest that can be promised", `${clock(job.earliest_s, t)} (${away(job.earliest_s, t)})`],
    ["slots", job.slots.length ? job.slots.join(", ") : "none"],
    job.pinned > 0 && ["size asked for", plural(job.pinned, "worker")],
    ...Object.entries(job.values || {}).slice(0, 6).map(([name, value]) => [name, value === null ? "not a number" : figure(value)]),
    ["virtual workers", `${job.virtual} (${job.scaling}, ${job.level})`],
    job.checkpoint_step > 0 && ["newest checkpoint", `step ${job.checkpoint_step.toLocaleString()}`],
    ["slot time used", duration(job.service_s)],
    ["submitted", `${clock(job.submitted_s, t, true)} by ${job.user}`],
    job.first_start_s && ["first start", clock(job.first_start_s, t, true)],
    job.ended_s && ["ended", clock(job.ended_s, t, true)],
    job.exit !== null && job.exit !== undefined && ["exit", String(job.exit)],
    job.failures > 0 && ["failures", String(job.failures)],
    ["script", [job.script, ...job.args].join(" ")],
  ];
  return rows.filter(Boolean);
}

const storyOf = (job) => [...job.history].reverse().map((line, i, all) => [line.at_s, line.workers, line.reason, line.step, line.workers - (all[i + 1]?.workers ?? 0)]);

function storyLine([at, workers, reason, step, by]) {
  const sign = by > 0 ? "▲" : by < 0 ? "▼" : "·";
  const level = by > 0 ? "grew" : by < 0 ? "shrank" : "same";
  return el("li", { "data-move": level },
    el("span.sign", { "aria-hidden": "true" }, sign),
    el("div", {}, el("p", {}, sentence(reason)), el("small", {}, `${clock(at, now(), true)}, ${plural(workers, "worker")}${step ? `, step ${step.toLocaleString()}` : ""}`)));
}

/** Loss and whatever else the script logs, throughput, and the generations. */
function metrics(path, id) {
  const speed = chart({ caption: "Throughput", draw: overSteps });
  const grid = el(".charts", {}, speed);
  const table = generations();
  const logged = new Map();
  let live = true, complete = false, data = null;
  const whole = el(".measured", {}, el("section.card", { "aria-label": "Charts" }, grid), table);
  const marks = () => data.generations.slice(1).map(({ step, workers }) => ({ step, workers }));
  const draw = () => {
    const colour = colourOf(id);
    const names = [...new Set(data.points.flatMap((point) => Object.keys(point.values)))].slice(0, 4);
    for (const name of names) {
      if (logged.has(name)) continue;
      const figure_ = chart({ caption: name === "loss" ? "Loss" : name, draw: overSteps });
      logged.set(name, figure_);
      if (name === "loss") grid.prepend(figure_); else grid.append(figure_);
    }
    for (const [name, figure_] of logged) figure_.update({ points: data.points, valueOf: (point) => point.values[name], colour, marks: marks() });
    speed.update({ points: withSpeed(data.points, data.generations), valueOf: (point) => point.speed, unit: "steps/s", colour, marks: marks() });
    table.update(data.generations);
  };
  const stop = every(3, async () => {
    if (complete && !live) return;
    data = await get(`${path}/metrics`);
    complete = !live && data.complete;
    draw();
  });
  whole.update = (job) => { live = !ENDED.has(job.phase); };
  whole.end = () => { stop(); speed.end(); for (const figure_ of logged.values()) figure_.end(); };
  return whole;
}
