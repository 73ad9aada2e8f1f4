// Questions that stop everything else, and short notes that do not. Native <dialog>: focus and Esc are the browser's.

import { el } from "./dom.js";

function show(dialog) {
  document.body.append(dialog);
  const before = document.activeElement;
  dialog.addEventListener("close", () => { dialog.remove(); before?.focus?.({ preventScroll: true }); });
  dialog.showModal();
  return dialog;
}

/** Resolves to what `read()` gives when it is confirmed, else to null. */
export function confirm({ title, sentence, yes, no = "Leave it", danger = false, inside = null, read = () => true }) {
  return new Promise((resolve) => {
    const form = el("form", { method: "dialog" },
      el("h2", { id: "dialog-title" }, title),
      sentence ? el("p", {}, sentence) : null,
      inside,
      el(".buttons", {},
        el("button", { type: "button", on: { click: () => dialog.close() } }, no),
        el(danger ? "button.danger" : "button.primary", { value: "yes" }, yes)));
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? read() : null));
    show(dialog);
  });
}

export async function askToken(sentence, again) {
  const field = el("input", { type: "password", id: "token", required: true, autocomplete: "off", spellcheck: "false" });
  const inside = el(".field", {}, el("label", { for: "token" }, "Token"), field,
    el("p.hint", {}, "Kept for this tab only. Whoever runs the cluster hands tokens out."));
  const said = again ? `That token was not accepted: ${sentence}` : sentence;
  return confirm({ title: "The server asks who you are", sentence: said, yes: "Go on", no: "Not now", inside, read: () => field.value.trim() });
}

const KEYS = [
  ["/", "search the jobs"], ["j", "next job"], ["k", "previous job"], ["Enter", "open it"], ["Esc", "back"], ["?", "this help"],
];
export function help() {
  const rows = KEYS.map(([key, does]) => el("tr", {}, el("th", { scope: "row" }, el("kbd", {}, key)), el("td", {}, does)));
  const dialog = el("dialog.help", { "aria-labelledby": "help-title" },
    el("form", { method: "dialog" },
      el("h2", { id: "help-title" }, "Keys"), el("table", {}, el("tbody", {}, rows)),
      el("p.hint", {}, "The same questions in a terminal: concertina jobs, describe, logs, quote, nodes."),
      el(".buttons", {}, el("button.primary", {}, "Close"))));
  show(dialog);
}

/** A sentence that goes away by itself, unless it is about trouble. */
export function toast(sentence, { bad = false, hint = "" } = {}) {
  const note = el(bad ? "p.toast.bad" : "p.toast", {}, el("span", {}, sentence, hint ? el("small", {}, hint) : null),
    el("button.quiet", { type: "button", "aria-label": "Dismiss", on: { click: () => note.remove() } }, "×"));
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), bad ? 15000 : 7000);
}

export const complain = (error) => toast(sentence(error.message), { bad: true, hint: error.hint });

export function sentence(words) {
  const said = String(words || "").trim();
  return said && `${said[0].toUpperCase()}${said.slice(1)}${/[.!?…]$/.test(said) ? "" : "."}`;
}
