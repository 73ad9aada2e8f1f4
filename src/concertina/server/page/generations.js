// Each change of size: when, to how many, why, and where its time went.

import { el, fill, shows } from "./dom.js";
import { sentence } from "./dialogs.js";
import { clock, duration } from "./words.js";
import { now } from "./api.js";

const TINTS = ["#3d7ea6", "#4d9a78", "#d1893a", "#7c6cb4", "#b85c74", "#96902f", "#2f9ca4", "#9d7350", "#6d91cf", "#c65d4c"];
const READABLE = (name) => name.replace(/_s$/, "").replaceAll("_", " ");

export function generations() {
  const body = el("tbody");
  const key = el("ul.legend", { "aria-label": "Phases of a change" });
  const whole = el("section.card", { "aria-labelledby": "generations-title", hidden: true },
    el("h2", { id: "generations-title" }, "Generations"), el("p.hint", {}, "A generation is a membership. “Stopped” is how long training stood still for the change; the bar shows where the whole change spent its time."),
    el(".scroll", { tabindex: "0", role: "region", "aria-label": "Table of generations" }, el("table.generations", {},
      el("thead", {}, el("tr", {}, ["", "From step", "Workers", "Stopped", "Time of the change", "Why"].map((words) => el("th", { scope: "col" }, words)))), body)), key);
  const draw = shows(whole, (at, list) => {
    at.hidden = !list.length;
    const names = [...new Set(list.flatMap((one) => Object.keys(one.phases)))];
    const tint = new Map(names.map((name, i) => [name, TINTS[i % TINTS.length]]));
    const longest = Math.max(0.001, ...list.map((one) => sum(one.phases)));
    fill(body, [...list].reverse().map((one) => row(one, tint, longest)));
    fill(key, names.map((name) => el("li", {}, el("i", { style: { background: tint.get(name) } }), READABLE(name))));
  });
  whole.update = (list) => draw(list);
  return whole;
}

const sum = (phases) => Object.values(phases).reduce((total, seconds) => total + Math.max(0, seconds), 0);

function row(one, tint, longest) {
  const pieces = Object.entries(one.phases).filter(([, seconds]) => seconds > 0);
  const words = pieces.map(([name, seconds]) => `${READABLE(name)} ${duration(seconds)}`).join(", ");
  const bar = el(".phases", { role: "img", "aria-label": words || "not measured", title: words },
    pieces.map(([name, seconds]) => el("i", { style: { width: `${(100 * seconds) / longest}%`, background: tint.get(name) } })));
  return el("tr", {},
    el("th", { scope: "row" }, `${one.generation} `, el("small", {}, clock(one.at_s, now(), true))), el("td", { "data-label": "from step" }, one.step.toLocaleString()), el("td", { "data-label": "workers" }, `${one.workers}`),
    el("td", { "data-label": "stopped" }, duration(one.stop_s)), el("td.wide", {}, pieces.length ? bar : "", pieces.length ? el("small", {}, duration(sum(one.phases))) : ""),
    el("td.words", {}, sentence(one.reason)));
}
