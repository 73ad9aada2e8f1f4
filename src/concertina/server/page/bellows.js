// The bellows: a job's workers as pleats that open when it grows and fold when it shrinks.

import { el, set, text } from "./dom.js";
import { colourOf } from "./colours.js";
import { duration, ENDED } from "./words.js";

const PLEATS = 16; // more are drawn in proportion

export function bellows() {
  const pleats = el("span.pleats", { "aria-hidden": "true" });
  const count = el("span.count");
  const whole = el("span.bellows", {}, pleats, count);
  let last = null;
  whole.update = (job) => {
    const most = Math.max(job.max_workers || job.virtual || 1, job.workers);
    const drawn = Math.min(most, PLEATS);
    const open = Math.round((job.workers / most) * drawn);
    while (pleats.childElementCount < drawn) pleats.append(el("i"));
    while (pleats.childElementCount > drawn) pleats.lastElementChild.remove();
    [...pleats.children].forEach((pleat, i) => pleat.classList.toggle("open", i < open));
    whole.style.setProperty("--job", colourOf(job.id));
    whole.style.setProperty("--most", drawn);
    whole.style.setProperty("--wide", drawn > 8 ? "0.6" : "1");
    const words = `${job.workers} of ${most}`;
    const over = ENDED.has(job.phase);
    whole.classList.toggle("over", over);
    text(count, over ? (job.service_s ? `${duration(job.service_s)} of slot time` : "") : words);
    set(whole, { title: over ? null : `${words} workers` });
    if (over) delete whole.dataset.moved;
    else if (last !== null && last !== job.workers) {
      whole.dataset.moved = job.workers > last ? "grew" : "shrank";
      clearTimeout(whole.timer);
      whole.timer = setTimeout(() => delete whole.dataset.moved, 2500);
    }
    last = job.workers;
  };
  return whole;
}

/** Every slot of the cluster as a pleat in the colour of the job that is on it. */
export function slotBellows() {
  const pleats = el("span.pleats.slots", { "aria-hidden": "true" });
  pleats.update = (slots) => {
    while (pleats.childElementCount < slots.length) pleats.append(el("i"));
    while (pleats.childElementCount > slots.length) pleats.lastElementChild.remove();
    [...pleats.children].forEach((pleat, i) => {
      pleat.classList.toggle("open", ["busy", "leaving"].includes(slots[i].state));
      pleat.dataset.state = slots[i].state;
      pleat.style.setProperty("--job", slots[i].job ? colourOf(slots[i].job) : "var(--line)");
    });
  };
  return pleats;
}
