// What if: one form for the question and for the submission.

import { now, onceKey, post } from "./api.js";
import { sentence, toast } from "./dialogs.js";
import { el, fill } from "./dom.js";
import { known } from "./live.js";
import { loading } from "./parts.js";
import { away, clock, duration, moment, plural, split, written } from "./words.js";

const kept = {}; // what was written, while the page is open

function field(name, label, attributes, hint) {
  const input = el("input", { id: `ask-${name}`, name, "aria-describedby": hint ? `hint-${name}` : null, ...attributes });
  if (attributes.type === "checkbox") input.checked = kept[name] ?? false;
  else input.value = kept[name] ?? attributes.value ?? "";
  const words = el("label", { for: `ask-${name}` }, label);
  const note = hint ? el("p.hint", { id: `hint-${name}` }, hint) : null;
  return attributes.type === "checkbox" ? el(".field.check", {}, input, words, note) : el(".field", {}, words, input, note);
}

const whole = (value, otherwise) => (value.trim() ? Number(value) : otherwise);

/** What the form says, as the server wants it. Throws RangeError with a sentence. */
function request(form) {
  const said = Object.fromEntries(new FormData(form));
  const due = moment(said.deadline, now());
  if (due !== null && due <= now()) throw new RangeError(`the deadline ${said.deadline} has passed`);
  const body = {
    script: said.script.trim(), args: split(said.args), virtual: whole(said.virtual, 4), min_workers: whole(said.min_workers, 1),
    max_workers: whole(said.max_workers, 0), steps: whole(said.steps, 0), soft: Boolean(said.soft) && due !== null,
  };
  if (said.name.trim()) body.name = said.name.trim();
  if (due !== null) body.deadline_s = due;
  return body;
}

export function show(main) {
  const answer = el("section.answer", { "aria-live": "polite", "aria-label": "The answer" },
    el(".empty", {}, el("p.title", {}, "Nothing is submitted by asking"), el("p", {}, "The cluster plays the next hours through in its simulator, with your job in it, and says what it would do.")));
  const form = el("form.card.ask", { novalidate: false },
    field("script", "Script", { required: true, placeholder: "/home/me/train.py", autocomplete: "off", spellcheck: "false", pattern: "/.*" }, "Absolute path where the cluster runs."),
    field("args", "Arguments", { autocomplete: "off", spellcheck: "false", placeholder: "--epochs 30" }),
    el(".pair", {},
      field("virtual", "Virtual workers", { type: "number", min: "1", max: "1024", value: "4" }, "They decide the result; workers only how fast it comes."),
      field("steps", "Steps", { type: "number", min: "0", placeholder: "all of them" })),
    el(".pair", {},
      field("deadline", "Deadline", { placeholder: "2h", autocomplete: "off" }, "Or 18:00, or 2026-12-01T18:00. Empty: none."),
      field("name", "Name", { placeholder: "from the script", autocomplete: "off", pattern: "[A-Za-z0-9][A-Za-z0-9_.\\-]*", maxlength: "63" })),
    field("soft", "Soft: run it also if the deadline can not be promised", { type: "checkbox" }),
    el("details", {}, el("summary", {}, "Fewest and most workers"),
      el(".pair", {},
        field("min_workers", "Fewest", { type: "number", min: "1", max: "1024", placeholder: "1" }),
        field("max_workers", "Most", { type: "number", min: "0", max: "1024", placeholder: "as many as virtual workers" }))),
    el(".buttons", {},
      el("button.primary", { value: "quote" }, "What if?"),
      el("button", { value: "submit", id: "submit-now" }, "Submit")));
  let once = onceKey();
  let unsure = null; // what was submitted without hearing what came of it: "2h" from then, not from now
  form.addEventListener("input", (event) => {
    const { name, type, checked, value } = event.target;
    kept[name] = type === "checkbox" ? checked : value;
    event.target.setCustomValidity("");
    once = onceKey(); // something else is asked for now
    unsure = null;
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const submit = event.submitter?.value === "submit";
    let body;
    try { body = (submit && unsure) || request(form); } catch (error) {
      form.elements.deadline.setCustomValidity(sentence(error.message));
      form.elements.deadline.reportValidity();
      return;
    }
    const buttons = form.querySelectorAll(".buttons button");
    buttons.forEach((button) => { button.disabled = true; });
    fill(answer, loading(submit ? "Submitting …" : "Playing the next hours through …"));
    try {
      if (submit) await submitted(answer, await post("jobs", body, { "Idempotency-Key": once }), form);
      else fill(answer, verdict(await post("quote", body), body, form));
      if (submit) { once = onceKey(); unsure = null; }
    } catch (error) {
      if (submit) unsure = error.status === 0 || error.status >= 500 ? body : null;
      fill(answer, el(".card.verdict", { "data-level": "late" }, el("h2", {}, submit ? "Not submitted" : "No answer"), el("p", {}, sentence(error.message)), error.hint ? el("p.hint", {}, sentence(error.hint)) : null));
    } finally {
      buttons.forEach((button) => { button.disabled = false; });
    }
  });
  fill(main, el("h1", {}, "What if"), el("p.lead", {}, "Ask before you submit: would it be taken, when would it run, and who would end later."), el(".two", {}, form, answer));
  return () => {};
}

async function submitted(answer, job, form) {
  toast(`${job.name} was submitted as ${job.id}.`);
  if (job.phase === "rejected") {
    fill(answer, el(".card.verdict", { "data-level": "late" }, el("h2", {}, "Refused"), el("p", {}, sentence(job.reason)), earliest(job.earliest_s, form)));
  } else location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
}

function earliest(at, form) {
  if (at === null || at === undefined) return null;
  // A little later than the earliest: time passes between the answer and the submission.
  const use = () => {
    const due = form.elements.deadline;
    due.value = written(Math.ceil(at + 0.02 * (at - now()) + 5));
    due.dispatchEvent(new Event("input", { bubbles: true }));
    due.focus();
  };
  return el("p", {}, `The earliest deadline that can be promised is ${clock(at, now())} (${away(at, now())}). `, el("button", { type: "button", on: { click: use } }, "Use it"));
}

function verdict(quote, body, form) {
  const card = el(".card.verdict", { "data-level": quote.taken ? "good" : "late" },
    el("h2", {}, quote.taken ? "It would be taken" : "It would be refused"),
    el("p", {}, sentence(quote.reason)),
    quote.taken && body.deadline_s === undefined ? null : earliest(quote.earliest_s, form),
    quote.start || quote.end ? bands(quote, body.deadline_s) : null,
    delays(quote.delays),
    el("p.hint", {}, `${quote.profiled ? "From the measured speed of such jobs" : "Such a job was never measured here, so this rests on a guess; it is measured as soon as it starts"}; ${plural(quote.runs, "run")} of the simulator.`),
    el(".buttons", {}, el("button.primary", { type: "button", on: { click: () => form.querySelector("#submit-now").click() } }, quote.taken ? "Submit it" : "Submit it all the same")));
  return card;
}

function delays(list) {
  if (!list.length) return el("p", {}, "Nobody would end later because of it.");
  const rows = list.map((delay) => {
    const name = delay.job === null ? "somebody else's job" : known.jobs.get(delay.job)?.name || delay.job;
    const by = delay.by_s === null ? "would have no end in sight" : `would end ${duration(delay.by_s)} later`;
    const at = delay.after_s === null ? "" : ` (${clock(delay.before_s, now())} → ${clock(delay.after_s, now())})`;
    return el("li", {}, delay.job === null ? name : el("a", { href: `#/jobs/${encodeURIComponent(delay.job)}` }, name), ` ${by}${at}`);
  });
  return el("div", {}, el("h3", {}, "Who would end later"), el("ul.plain", {}, rows));
}

/** Start and end as stretches of one line of time, each as wide as it is unsure. */
function bands({ start, end }, due) {
  const from = now();
  const finite = [start?.high_s, start?.expected_s, end?.high_s, end?.expected_s, due].filter((at) => Number.isFinite(at));
  const span = Math.max(1, ...finite.map((at) => at - from)) * 1.05;
  const at = (value) => `${Math.min(100, Math.max(0, (100 * (value - from)) / span))}%`;
  const line = (name, band) => {
    if (!band) return null;
    const known_ = band.expected_s !== null;
    const low = band.low_s ?? from, high = band.high_s ?? from + span;
    const words = known_ ? `${clock(band.expected_s, from)} (${away(band.expected_s, from)})` : "not in sight";
    const range = known_ && band.high_s !== null && high - low > 2 ? `, between ${clock(low, from)} and ${clock(band.high_s, from)}` : "";
    const stretch = el("i.stretch", { style: { left: at(low), width: `max(6px, calc(${at(high)} - ${at(low)}))` } });
    const middle = known_ ? el("i.middle", { style: { left: at(band.expected_s) } }) : null;
    return el(".band", {}, el("span.name", {}, name), el(".track", { "aria-hidden": "true" }, stretch, middle,
      Number.isFinite(due) ? el("i.limit", { style: { left: at(due) } }) : null), el("span.words", {}, words + range));
  };
  return el(".bands", {}, line("start", start), line("end", end),
    Number.isFinite(due) ? el("p.hint", {}, `The upright line is the deadline, ${clock(due, from)}.`) : null);
}
