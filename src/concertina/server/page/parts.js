// Small pieces that several views show.

import { now } from "./api.js";
import { el, set, text } from "./dom.js";
import { clock, ENDED, percent, phase, slack } from "./words.js";

/** The phase as a word in a frame, and what the job is doing. */
export function phaseChip() {
  const word = el("span.chip"), more = el("small");
  const whole = el("span.phase", {}, word, more);
  whole.update = (job) => {
    const said = phase(job);
    word.dataset.phase = job.phase;
    text(word, said.word);
    text(more, said.more);
  };
  return whole;
}

export function progressBar() {
  const bar = el("progress", { max: "1" });
  const words = el("span.figure");
  const whole = el(".progress", {}, bar, words);
  whole.update = (job) => {
    const part = job.progress;
    whole.hidden = job.phase === "rejected";
    const unknown = part === null || part === undefined;
    set(bar, { "aria-label": `Progress of ${job.name}`, hidden: unknown && !job.step });
    if (unknown) bar.removeAttribute("value");
    else bar.value = part;
    if (unknown && ENDED.has(job.phase)) bar.hidden = true;
    text(words, unknown ? (job.step ? `step ${job.step.toLocaleString()}` : "") : percent(part));
    words.title = job.total_steps ? `step ${job.step} of ${job.total_steps}` : `step ${job.step}`;
  };
  return whole;
}

/** When it is due, and how that looks. */
export function deadline() {
  const due = el("span.due"), words = el("span.slack");
  const whole = el(".deadline", {}, due, words);
  whole.update = (job) => {
    const said = slack(job, now());
    const none = job.deadline_s === null || job.deadline_s === undefined;
    text(due, none ? "" : clock(job.deadline_s, now()));
    text(words, said.words);
    words.dataset.level = said.level;
  };
  return whole;
}

/** What to show where there is nothing: what it means, and what to do. */
export function empty(title, sentence, command, more = null) {
  return el(".empty", {}, el("p.title", {}, title), sentence ? el("p", {}, sentence) : null, command ? el("code.command", {}, command) : null, more);
}

export const loading = (sentence) => el("p.loading", {}, sentence);

/** Runs `work` now and then, until it is ended; never two at once. */
export function every(seconds, work) {
  let ended = false, timer = null;
  const run = async () => {
    try { if (!document.hidden) await work(); } catch { /* the header says when the server is away */ }
    if (!ended) timer = setTimeout(run, seconds * 1000);
  };
  run();
  return () => { ended = true; clearTimeout(timer); };
}
