// Talks to the server: JSON both ways, the token in a header, errors as sentences, and events as they happen.

const TOKEN = "concertina-token";
const PATIENCE_MS = 20000;
let askForToken = async () => null;
let asking = null;
let declined = false; // "Not now": until somebody asks for the question
let ahead = 0; // seconds that the server's clock is ahead of ours

export const now = () => Date.now() / 1000 + ahead;

/** What to do when the server wants a token: `ask(sentence)` resolves to one, or to null. */
export function onUnauthorized(ask) { askForToken = ask; }

/** The next refusal leads to the question for a token again. */
export function askAgain() { declined = false; }

const token = () => sessionStorage.getItem(TOKEN) || "";

export class ApiError extends Error {
  constructor(status, code, message, hint) {
    super(message);
    Object.assign(this, { status, code, hint: hint || "" });
  }
}

async function failure(response) {
  let error = {};
  try { error = (await response.json()).error || {}; } catch { /* not ours: a proxy, or a server that is going down */ }
  const message = error.message || `the server answered ${response.status} ${response.statusText}`;
  return new ApiError(response.status, error.code || "", message, error.hint);
}

function headers(more) {
  const all = { Accept: "application/json", ...more };
  if (token()) all.Authorization = `Bearer ${token()}`;
  return all;
}

async function newToken(refused, used) {
  if (token() !== used) return true; // somebody has just given one
  if (declined) return false;
  asking ||= askForToken(refused.message, Boolean(used)).finally(() => { asking = null; });
  const given = await asking;
  declined = given === null;
  if (declined) return false;
  sessionStorage.setItem(TOKEN, given);
  return true;
}

async function open(path, options) {
  for (;;) {
    const used = token();
    let response;
    try {
      response = await fetch(`api/v1/${path}`, { cache: "no-store", ...options, headers: headers(options.headers) });
    } catch (cause) {
      if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw cause;
      throw new ApiError(0, "unreachable", "the server does not answer", "is `concertina up` running?");
    }
    const date = Date.parse(response.headers.get("Date") || "");
    if (date) {
      const off = date / 1000 - Date.now() / 1000;
      ahead = Math.abs(off) > 3 ? off : 0; // the header knows whole seconds only
    }
    if (response.ok) return response;
    const error = await failure(response);
    if (response.status !== 401 || !(await newToken(error, used))) throw error;
  }
}

/** The answer as JSON. */
export async function call(path, { method = "GET", body, headers: more = {} } = {}) {
  const options = { method, headers: { ...more }, signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await open(path, options);
  return response.status === 204 ? null : response.json();
}

export const get = (path) => call(path);
export const post = (path, body, more) => call(path, { method: "POST", body, headers: more });

/** A key that the server knows a repeated submission by. */
export function onceKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Server-sent events over fetch, because EventSource can not send a token.
 * Calls `got({id, event, data})` until the stream ends (returns) or breaks (throws); silence for `silentMs` breaks it.
 */
export async function stream(path, { lastId, got, opened, silentMs = 45000, signal }) {
  const broken = new AbortController();
  const stop = () => broken.abort(signal.reason);
  signal.addEventListener("abort", stop);
  let watch = setTimeout(() => broken.abort(), PATIENCE_MS);
  try {
    const more = { Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) };
    const response = await open(path, { headers: more, signal: broken.signal });
    opened();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parse = parser(got);
    for (;;) {
      clearTimeout(watch);
      watch = setTimeout(() => broken.abort(), silentMs);
      const { done, value } = await reader.read();
      if (done) return;
      parse(value);
    }
  } finally {
    clearTimeout(watch);
    signal.removeEventListener("abort", stop);
    broken.abort();
  }
}

/** Takes pieces of an event stream, cut anywhere. */
export function parser(got) {
  let rest = "", event = {};
  return (piece) => {
    const lines = (rest + piece).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line) {
        if (event.data !== undefined) got({ id: event.id, event: event.event || "message", data: event.data });
        event = {};
        continue;
      }
      const [, name, value] = line.match(/^([^:]*):? ?(.*)$/s);
      if (name === "data") event.data = event.data === undefined ? value : `${event.data}\n${value}`;
      else if (name === "id" || name === "event") event[name] = value;
    }
  };
}
