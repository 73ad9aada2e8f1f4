// What the page knows of the cluster, kept up to date: read once, then changed by events; read anew after a break.

import { get, now, stream } from "./api.js";
import { deal } from "./colours.js";
import { calmly } from "./dom.js";
import { ENDED } from "./words.js";

const PAGE = 500; // jobs per request
const MOST = 2000; // live jobs that the page keeps
const NEWEST = 300; // jobs of any kind that it begins with; the rest is a matter for the command line
const WAITS_S = [1, 2, 4, 8];

export const known = {
  jobs: new Map(), // id -> job, in the order of the server
  total: 0, // jobs there are, also those that are not kept here
  cluster: null, // as GET /cluster answers
  ready: false,
  link: { state: "loading", retryAt: 0, error: null }, // loading, live, away
};

const listeners = new Set();
/** Called after changes, at most a few times a second. Returns what ends it. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
const tell = calmly(() => { for (const listener of [...listeners]) listener(); }, 150);

const moves = new Set();
/** Called with (job before, job after) when a job gets another number of workers or another phase. */
export function onMove(listener) { moves.add(listener); }

function put(job) {
  const before = known.jobs.get(job.id);
  if (!before && known.ready) deal([job]); // before all are read, one job alone says nothing about its place among them
  known.jobs.set(job.id, job);
  if (known.ready && String(before?.slots) !== String(job.slots)) reread();
  if (known.ready && (before?.workers !== job.workers || before?.phase !== job.phase)) {
    for (const listener of moves) listener(before, job);
  }
}

async function pages(query, most) {
  const found = [];
  let after = "", total = 0;
  do {
    const page = await get(`jobs?${query}&limit=${Math.min(PAGE, most)}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    found.push(...page.items);
    total = page.total;
    after = page.next;
  } while (after && found.length < most);
  return { found, total };
}

/** All that live, and the newest of the others. */
async function readJobs() {
  const [live, newest] = await Promise.all([pages("phase=running&phase=waiting&phase=submitted", MOST), pages("order=newest", NEWEST)]);
  const found = new Map([...live.found, ...newest.found].map((job) => [job.id, job]));
  deal([...found.values()]);
  for (const id of [...known.jobs.keys()]) if (!found.has(id)) known.jobs.delete(id);
  for (const job of found.values()) put(job);
  known.total = newest.total;
}

async function readCluster() { known.cluster = await get("cluster"); }

async function readAll() {
  await Promise.all([readJobs(), readCluster()]);
  known.ready = true;
  tell();
}

const reread = calmly(() => readCluster().then(tell, () => {}), 1000);

function got({ event, data }) {
  let value;
  try { value = JSON.parse(data); } catch { return; }
  if (event === "job" && value.id && value.phase) {
    if (!known.jobs.has(value.id)) known.total += 1;
    put(value);
  } else if (event === "cluster") {
    const counts = (cluster) => JSON.stringify([cluster?.slots, cluster?.jobs, cluster?.going_down]);
    if (counts(known.cluster) !== counts(value)) reread(); // who is where: it does not fit into an event
    if (known.cluster) Object.assign(known.cluster, value);
  } else if (event === "node") reread();
  else if (event === "reset") readAll().catch(() => {});
  tell();
}

let wake = null;
function pause(seconds) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    wake = () => { clearTimeout(timer); resolve(); };
  }).finally(() => { wake = null; });
}

/** Try now, whatever the wait says. */
export function retry() { wake?.(); }

function link(state, more = {}) {
  known.link = { state, retryAt: 0, error: null, ...more };
  tell();
}

/** Never returns. */
export async function follow() {
  let lastId = "", misses = 0;
  addEventListener("online", retry);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) retry(); });
  for (;;) {
    const attempt = new AbortController();
    let failed = null;
    try {
      await stream("events", {
        lastId,
        signal: attempt.signal,
        got: (message) => { if (message.id) lastId = message.id; got(message); },
        opened: () => {
          // Reading after the stream is open: what happens in between comes as an event.
          readAll().then(() => { misses = 0; link("live"); }, (error) => { failed = error; attempt.abort(); });
        },
      });
    } catch (error) { failed ||= error; }
    const wait = WAITS_S[Math.min(misses, WAITS_S.length - 1)];
    link("away", { error: failed, retryAt: now() + wait });
    await pause(wait);
    misses += 1;
  }
}

// Pure questions about what is known.

/** A job that is being measured trains already, before it is admitted. */
export const isRunning = (job) => job.phase === "running" || (job.phase === "submitted" && job.slots.length > 0);
export const isWaiting = (job) => !isRunning(job) && !ENDED.has(job.phase);
export const waiting = (jobs) => jobs.filter(isWaiting);
export const running = (jobs) => jobs.filter(isRunning);

/** Those at work first, then those that wait, then the others, newest first. */
export function ordered(jobs) {
  const rank = (job) => (isRunning(job) ? 0 : ENDED.has(job.phase) ? 2 : 1);
  return [...jobs].sort((a, b) => {
    if (rank(a) !== rank(b)) return rank(a) - rank(b);
    return rank(a) === 2 ? (b.ended_s ?? b.submitted_s) - (a.ended_s ?? a.submitted_s) : a.submitted_s - b.submitted_s;
  });
}
