// Starts the page: which view is shown, the header, the keys. Views export `show(main, argument)` and return what ends them.

import { askAgain, now, onUnauthorized } from "./api.js";
import { slotBellows } from "./bellows.js";
import { askToken, help, sentence } from "./dialogs.js";
import { el, fill, shows, text } from "./dom.js";
import { follow, known, onChange, onMove, retry, running, waiting } from "./live.js";
import { phase, plural } from "./words.js";
import * as ask from "./ask.js";
import * as job from "./job.js";
import * as nodes from "./nodes.js";
import * as overview from "./overview.js";
import * as queue from "./queue.js";

const ROUTES = [
  [/^#?\/?$/, "overview", overview], [/^#\/jobs\/(.+)$/, "overview", job], [/^#\/queue$/, "queue", queue],
  [/^#\/nodes$/, "nodes", nodes], [/^#\/ask$/, "ask", ask],
];
const main = document.getElementById("main");
let leave = () => {};
let first = true;

function route() {
  const hash = location.hash;
  if (hash === "#main") return; // the skip link
  const [pattern, name, view] = ROUTES.find(([p]) => p.test(hash)) || ROUTES[0];
  leave();
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const argument = decoded(hash.match(pattern)?.[1] || "");
  fill(main);
  main.dataset.shows = view === job ? "job" : name;
  leave = view.show(main, argument) || (() => {});
  const title = main.querySelector("h1")?.textContent || "concertina";
  document.title = title === "concertina" ? title : `${title} · concertina`;
  scrollTo(0, 0);
  if (!first) main.focus({ preventScroll: true });
  first = false;
}

/** As it stands, if it was not encoded. */
function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

// The header: how the cluster is, and whether what is shown is still true.

const pulse = document.getElementById("pulse");
const strip = slotBellows();
const figures = { slots: el("span"), jobs: el("span"), deadlines: el("span") };
pulse.append(strip, figures.slots, figures.jobs, figures.deadlines);

const strong = (words) => el("strong", {}, words);
const drawSlots = shows(figures.slots, (at, used, total, lent, gone) => fill(at, strong(`${used} of ${total}`), ` slots at work${lent ? `, ${lent} lent out` : ""}${gone ? `, ${gone} away` : ""}`));
const drawJobs = shows(figures.jobs, (at, run, wait) => fill(at, strong(`${run}`), " running, ", strong(`${wait}`), " waiting"));
const drawDeadlines = shows(figures.deadlines, (at, kept, missed) => {
  at.dataset.level = missed ? "late" : "good";
  if (!kept && !missed) return fill(at, "no deadline due yet");
  return missed
    ? fill(at, strong(`${missed} of ${kept + missed}`), " deadlines missed")
    : fill(at, kept === 1 ? "" : "all ", strong(`${kept}`), kept === 1 ? " deadline kept" : " deadlines kept");
});

function deadlines(jobs) {
  const due = jobs.filter((j) => j.phase === "finished" && j.deadline_s !== null && j.deadline_s !== undefined);
  const kept = due.filter((j) => (j.ended_s ?? 0) <= j.deadline_s).length;
  return [kept, due.length - kept];
}

function header() {
  if (!known.ready) return;
  const jobs = [...known.jobs.values()];
  const { slots, placement } = known.cluster;
  strip.update(placement);
  drawSlots(slots.busy, slots.total, slots.lent, slots.away);
  drawJobs(running(jobs).length, waiting(jobs).length);
  drawDeadlines(...deadlines(jobs));
  pulse.hidden = false;
}

const link = document.getElementById("link");
const trouble = document.getElementById("trouble");
link.addEventListener("click", () => { askAgain(); retry(); });

function connection() {
  const { state, retryAt, error } = known.link;
  const wait = Math.max(0, Math.ceil(retryAt - now()));
  link.dataset.state = state;
  const words = { loading: "connecting", live: "live", away: wait ? `reconnecting in ${wait} s` : "reconnecting" }[state];
  text(link.querySelector("span"), words);
  const sentence = complaint(state, error);
  trouble.hidden = !sentence;
  text(trouble, sentence);
}

function complaint(state, error) {
  if (state === "away") {
    if (error?.status === 401) return `${sentence(error.message)} Press “reconnecting” at the top to give a token.`;
    if (error?.status >= 400 && error.status < 500) return `${sentence(error.message)} ${sentence(error.hint)}`; // it is well
    const why = error && error.status ? error.message : "The server does not answer";
    if (known.ready) return `${why}. What you see is from before; running jobs go on without it. Start it again with: concertina up`;
    return `${why}. Start it with: concertina up, or check the address.`;
  }
  if (state !== "live") return "";
  if (known.cluster.going_down) return "The cluster is going down: jobs write their state and wait for the next start.";
  if (!known.cluster.leader) return "No controller is in office: running jobs go on, but nothing new is decided. Start one with: concertina up";
  return "";
}

const announce = document.getElementById("announce");
onMove((before, after) => {
  if (!before) text(announce, `${after.name} was submitted: ${phase(after).word}`);
  else if (before.phase !== after.phase) text(announce, `${after.name} is ${phase(after).word}: ${after.reason}`);
  else text(announce, `${after.name} has ${plural(after.workers, "worker")}: ${after.reason}`);
});

// Keys. None while somebody writes, none with a modifier, none while a question is open.

function onKey(event) {
  const writing = event.target.closest("input, textarea, select, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (writing) { writing.blur(); main.focus({ preventScroll: true }); }
    else if (location.hash.length > 2) location.hash = "#/";
    return;
  }
  if (writing) return;
  if (event.key === "?") help();
  else if (event.key === "/") overview.search();
  else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else return;
  event.preventDefault();
}

/** To the next thing that can be opened. */
function move(by) {
  const stops = [...main.querySelectorAll("a.stop")].filter((stop) => stop.offsetParent);
  if (!stops.length) return;
  const at = stops.indexOf(document.activeElement);
  const to = stops[at < 0 ? (by > 0 ? 0 : stops.length - 1) : Math.min(Math.max(at + by, 0), stops.length - 1)];
  to.focus();
  to.scrollIntoView({ block: "nearest" });
}

const themeButton = document.getElementById("theme");
function nameTheme() {
  const sign = { system: "◐", light: "☀", dark: "☾" }[window.theme.choice];
  themeButton.textContent = sign;
  themeButton.setAttribute("aria-label", `Theme: ${window.theme.choice}. Change it`);
  themeButton.title = `Theme: ${window.theme.choice}`;
}
themeButton.addEventListener("click", () => { window.theme.next(); nameTheme(); });
document.getElementById("help").addEventListener("click", help);
nameTheme();

onUnauthorized(askToken);
onChange(() => { header(); connection(); });
setInterval(connection, 1000);
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
route();
follow();
