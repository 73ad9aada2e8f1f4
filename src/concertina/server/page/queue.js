// Who waits, why, and until when.

import { get, now } from "./api.js";
import { colourOf } from "./colours.js";
import { sentence } from "./dialogs.js";
import { el, fill, keyed, text } from "./dom.js";
import { known, onChange, waiting } from "./live.js";
import { deadline, empty, every, loading, phaseChip } from "./parts.js";
import { away, clock, duration } from "./words.js";

const ASKED = 12; // jobs whose answer is asked for at a time: each one costs some runs of the simulator
const answers = new Map(); // id -> what GET jobs/ID/why answered

export function show(main) {
  const list = el("ol.queue");
  const place = el("div", {}, loading("Asking who waits …"));
  fill(main, el("h1", {}, "Queue"), el("p.lead", {}, "Jobs that hold no slots now: what each waits for, and when it is expected to go on."), place);
  const draw = () => {
    if (!known.ready) return;
    const jobs = line();
    if (!jobs.length) {
      if (!place.querySelector(".empty")) fill(place, empty("Nobody waits", "Every job that was taken has slots. What would happen to one more?", "", el("a.button", { href: "#/ask" }, "Ask what if")));
      return;
    }
    if (!place.contains(list)) fill(place, list);
    keyed(list, jobs, (job) => job.id, item);
  };
  const ask = async () => {
    for (const job of line().slice(0, ASKED)) {
      try { answers.set(job.id, await get(`jobs/${encodeURIComponent(job.id)}/why`)); } catch (error) {
        if (!error.status) throw error;
        answers.set(job.id, { why: error.message, start: null, end: null });
      }
      draw();
    }
  };
  const stop = onChange(draw), stopAsking = every(8, ask);
  draw();
  return () => { stop(); stopAsking(); };
}

const line = () => waiting([...known.jobs.values()]).sort((a, b) => a.submitted_s - b.submitted_s);

function item(job) {
  const link = el("a.stop", { href: `#/jobs/${encodeURIComponent(job.id)}` });
  const chip = phaseChip(), due = deadline();
  const why = el("p.why"), when = el("p.when"), since = el("small");
  const whole = el("li.card", {}, el(".head", {}, link, chip, since), why, when, due);
  whole.update = (now_) => {
    whole.style.setProperty("--job", colourOf(now_.id));
    text(link, now_.name || now_.id);
    chip.update(now_);
    due.update(now_);
    text(since, `for ${duration(now() - (now_.waiting_since_s ?? now_.submitted_s))}`);
    const answer = answers.get(now_.id);
    text(why, sentence(answer ? answer.why : now_.reason || "Asking why"));
    text(when, answer ? expected(answer) : "");
  };
  return whole;
}

/** "Expected to start 18:04 (in 3 min; between 18:02 and 18:09) and to end ..." */
export function expected({ start, end }) {
  const begins = start && start.expected_s !== null && start.expected_s > now() + 2 ? `start ${around(start)}` : "";
  const ends = end && end.expected_s !== null ? `end ${around(end)}` : "";
  if (!begins && !ends) return start || end ? "No end is in sight as things are." : "";
  return `Expected to ${[begins, ends].filter(Boolean).join(" and to ")}.`;
}

function around(band) {
  const t = now();
  const sure = band.low_s !== null && band.high_s !== null && band.high_s - band.low_s < 2;
  const range = sure ? "" : `, between ${clock(band.low_s, t)} and ${clock(band.high_s, t)}`;
  return `${clock(band.expected_s, t)} (${away(band.expected_s, t)}${range})`;
}
