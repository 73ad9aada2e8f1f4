// What the workers print: the tail of one worker's log, followed.

import { get } from "./api.js";
import { el, fill, set, text } from "./dom.js";
import { every } from "./parts.js";

const KEPT = 2000; // lines; the whole is in the file

export function logs(path) {
  const choice = el("select", { id: "log-worker", "aria-label": "Worker" });
  const follow = el("input", { id: "log-follow", type: "checkbox" });
  follow.checked = true;
  const note = el("p.note", {}, "No lines yet.");
  const lines = el("pre.log", { tabindex: "0", "aria-label": "Log", hidden: true });
  const whole = el("section.card", { "aria-labelledby": "logs-title" },
    el(".head", {}, el("h2", { id: "logs-title" }, "Logs"), el("span.row", {}, choice, el("label", { for: "log-follow" }, follow, " follow"))), note, lines);
  let picked = null; // by hand; else the server's first choice, which may change as workers appear
  let shown = null, after = null, ended = false, count = 0;

  const restart = () => { after = null; count = 0; ended = false; fill(lines); };
  choice.addEventListener("change", () => { picked = choice.value; restart(); read().catch(() => {}); });
  follow.addEventListener("change", () => { if (follow.checked) toEnd(); });
  lines.addEventListener("scroll", () => {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    if (!atEnd && follow.checked && lines.scrollTop < lastTop) follow.checked = false;
    lastTop = lines.scrollTop;
  });
  let lastTop = 0;
  const toEnd = () => { lines.scrollTop = lines.scrollHeight; lastTop = lines.scrollTop; };

  async function read() {
    if (ended || (!follow.checked && after !== null)) return;
    const asked = picked;
    const query = new URLSearchParams({ limit: "500" });
    if (picked) query.set("worker", picked);
    if (after !== null) query.set("after", after);
    const page = await get(`${path}/logs?${query}`);
    if (asked !== picked) return;
    offer(page);
    if (page.worker !== shown) {
      const first = shown === null;
      shown = page.worker;
      if (!first) { restart(); return; }
    }
    if (page.lines.length) add(page.lines);
    after = page.next;
    ended = page.ended && !page.lines.length;
    if (page.lines.length === 500) await read();
  }

  function offer(page) {
    const names = page.workers;
    if (names.join() !== [...choice.options].map((option) => option.value).join()) {
      fill(choice, names.map((name) => el("option", { value: name }, /^\d+$/.test(name) ? `worker ${name}` : name)));
    }
    if (page.worker !== null) choice.value = page.worker;
    set(choice, { hidden: !names.length });
  }

  function add(more) {
    lines.append(document.createTextNode(more.map((line) => `${line}\n`).join("")));
    count += more.length;
    if (count > KEPT && lines.childNodes.length > 1) {
      const kept = lines.textContent.split("\n").slice(-KEPT - 1);
      text(lines, kept.join("\n"));
      count = kept.length;
    }
    note.hidden = true;
    lines.hidden = false;
    if (follow.checked) toEnd();
  }

  const stop = every(2, read);
  whole.update = (job) => text(note, job.first_start_s ? "No lines yet." : "It has not started, so nothing was printed yet.");
  whole.end = stop;
  return whole;
}
