// How things are said. Pure: numbers and records in, words out.

const MINUTE = 60, HOUR = 3600, DAY = 86400;
export const ENDED = new Set(["finished", "cancelled", "failed", "rejected"]);

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "unknown";
  const s = Math.abs(seconds);
  if (s === 0) return "0 s";
  if (s < 0.1) return s < 0.001 ? "under 1 ms" : `${Math.round(s * 1000)} ms`;
  if (s < 1) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 90 * MINUTE) return `${Math.round(s / MINUTE)} min`;
  if (s < DAY) {
    const hours = Math.floor(s / HOUR), minutes = Math.round((s % HOUR) / MINUTE);
    return minutes === 60 ? `${hours + 1} h` : minutes && hours < 10 ? `${hours} h ${minutes} min` : `${hours} h`;
  }
  return `${(s / DAY).toFixed(s < 10 * DAY ? 1 : 0)} days`;
}

/** 18:04 today, "tomorrow 18:04", else with the date; to the second when it is near. */
export function clock(at, now = Date.now() / 1000, seconds = Math.abs(at - now) < 10 * MINUTE) {
  if (at === null || at === undefined || !Number.isFinite(at)) return "not in sight";
  const then = new Date(Math.round(at) * 1000), today = new Date(now * 1000);
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(seconds && { second: "2-digit" }) });
  const midnight = (d) => new Date(d.getFullYear(), d.getMonth(), d.getDate()).getTime();
  const days = Math.round((midnight(then) - midnight(today)) / (DAY * 1000));
  if (days === 0) return time;
  if (days === 1) return `tomorrow ${time}`;
  if (days === -1) return `yesterday ${time}`;
  return `${then.toLocaleDateString([], { day: "numeric", month: "short" })} ${time}`;
}

export function away(at, now) {
  if (at === null || at === undefined || !Number.isFinite(at)) return "not in sight";
  const by = at - now;
  if (Math.abs(by) < 1.5) return "now";
  return by > 0 ? `in ${duration(by)}` : `${duration(by)} ago`;
}

export const plural = (n, noun) => `${n.toLocaleString()} ${noun}${n === 1 ? "" : "s"}`;
export const percent = (x) => `${Math.floor(100 * x)} %`;
export const figure = (x) => (!Number.isFinite(x) ? "unknown" : Math.abs(x) >= 100 ? x.toFixed(0) : Number(x.toPrecision(3)).toString());

const PHASES = {
  submitted: "asking", waiting: "waiting", running: "running", finished: "finished", cancelled: "cancelled",
  failed: "failed", rejected: "refused",
};
const DOING = {
  starting: "starting", changing: "changing size", suspending: "saving its state", suspended: "suspended, state kept",
};

/** The phase in one word, and what it is doing when that says more. */
export function phase(job) {
  const word = PHASES[job.phase] || job.phase;
  if (job.profiling && job.phase === "submitted") return { word: "measuring", more: DOING[job.activity] || "" };
  return { word, more: ENDED.has(job.phase) ? "" : DOING[job.activity] || "" };
}

/** good, tight, late or none; always with words, never by colour alone. */
export function slack(job, now) {
  if (job.deadline_s === null || job.deadline_s === undefined) return { level: "none", words: "no deadline" };
  const kind = job.soft ? " (soft)" : "";
  if (job.phase === "rejected") {
    return { level: "none", words: job.earliest_s ? `not promised; ${clock(job.earliest_s, now)} could be` : "not promised" };
  }
  if (job.phase === "cancelled" || job.phase === "failed") return { level: "none", words: `was ${clock(job.deadline_s, now)}` };
  if (job.phase === "finished") {
    const early = job.deadline_s - (job.ended_s ?? now);
    if (early >= 0) return { level: "good", words: `kept, ${duration(early)} early${kind}` };
    return { level: "late", words: `missed by ${duration(early)}${kind}` };
  }
  const left = job.slack_s;
  const promised = job.promised_s !== null && job.promised_s !== undefined;
  if (now > job.deadline_s) return { level: "late", words: `passed ${duration(now - job.deadline_s)} ago${kind}` };
  if (left === null || left === undefined) {
    return promised ? { level: "good", words: `promised${kind}` } : { level: "none", words: `slack not known yet${kind}` };
  }
  // Slack is reckoned at the speed of this moment; a promised job gets more workers before it is too late.
  if (left < 0) {
    return promised
      ? { level: "tight", words: `promised; at this speed ${duration(left)} late` }
      : { level: "late", words: `at this speed ${duration(left)} late${kind}` };
  }
  const tight = left < Math.max(15, 0.1 * (job.deadline_s - now));
  return tight
    ? { level: "tight", words: `tight, ${duration(left)} to spare${kind}` }
    : { level: "good", words: `${duration(left)} to spare${kind}` };
}

/** A deadline as people write it, in seconds since 1970: "2h", "90 min", "18:00", "2026-12-01T18:00". */
export function moment(written, now) {
  const said = written.trim().toLowerCase();
  if (!said) return null;
  const parts = [...said.matchAll(/(\d+(?:\.\d+)?)\s*(?:(d)(?:ays?)?|(h)(?:(?:ou)?rs?)?|(m)(?:in(?:ute)?s?)?|(s)(?:ec(?:ond)?s?)?)(?![a-z])/g)];
  if (parts.length && parts.map((p) => p[0]).join("").replace(/\s/g, "") === said.replace(/\s/g, "")) {
    return now + parts.reduce((sum, [, n, d, h, m]) => sum + Number(n) * (d ? DAY : h ? HOUR : m ? MINUTE : 1), 0);
  }
  const hours = said.match(/^(\d{1,2}):(\d{2})$/);
  if (hours && hours[1] < 24 && hours[2] < 60) {
    const at = new Date(now * 1000);
    at.setHours(Number(hours[1]), Number(hours[2]), 0, 0);
    if (at.getTime() / 1000 <= now) at.setDate(at.getDate() + 1);
    return at.getTime() / 1000;
  }
  const date = Date.parse(written.trim());
  if (Number.isNaN(date) || !/^\d{4}-\d{2}-\d{2}[t ]/.test(said)) throw new RangeError(`"${written}" is no time: write 2h, 90 min, 18:00 or 2026-12-01T18:00`);
  return date / 1000;
}

/** A moment as `moment` reads it, by the clock of this place on that day. */
export function written(at) {
  const there = new Date(at * 1000);
  return new Date(there.getTime() - there.getTimezoneOffset() * MINUTE * 1000).toISOString().slice(0, 19);
}

/** Arguments of a command, with quotes as a shell has them; nothing is expanded. */
export function split(line) {
  const found = [];
  for (const [whole] of line.matchAll(/(?:[^\s"']+|"[^"]*"|'[^']*')+/g)) {
    found.push(whole.replace(/"([^"]*)"|'([^']*)'/g, (_, a, b) => a ?? b));
  }
  return found;
}
