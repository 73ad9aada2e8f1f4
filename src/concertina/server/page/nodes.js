// The machines, slot by slot; and slots lent to somebody else for a while.

import { post } from "./api.js";
import { colourOf } from "./colours.js";
import { complain, confirm, sentence, toast } from "./dialogs.js";
import { el, fill, keyed, set, text } from "./dom.js";
import { known, onChange } from "./live.js";
import { empty, loading } from "./parts.js";
import { plural } from "./words.js";

const STATES = { free: "free", lent: "lent out", drained: "drained", lost: "lost", busy: "busy", leaving: "leaving" };

export function show(main) {
  const list = el(".nodes");
  const place = el("div", {}, loading("Asking for the nodes …"));
  fill(main, el("h1", {}, "Nodes"), el("p.lead", {}, "A slot is a place for one worker: a GPU, or a share of the CPUs."), lending(), place);
  const draw = () => {
    if (!known.ready) return;
    if (!known.cluster.nodes.length) {
      fill(place, empty("No nodes", "The controller has not reported any machine yet. If this stays, look at what it says:", "concertina up --slots 4"));
      return;
    }
    if (!place.contains(list)) fill(place, list);
    keyed(list, known.cluster.nodes, (node) => node.id, card);
  };
  const stop = onChange(draw);
  draw();
  return stop;
}

/** Does it, and says what the server says, or what `said(answer)` makes of it. */
export async function act(path, body, { method = post, said = (answer) => sentence(answer.reason || "done") } = {}) {
  try {
    const answer = await method(path, body);
    toast(said(answer), { bad: answer.accepted === false });
    return answer;
  } catch (error) {
    complain(error);
    return null;
  }
}

function lending() {
  const field = el("input", { id: "reclaim", type: "number", min: "1", value: "1", required: true });
  const form = el("form.row.card", {
    on: {
      submit: async (event) => {
        event.preventDefault();
        const slots = Number(field.value);
        const yes = await confirm({
          title: `Take ${plural(slots, "slot")} back?`, yes: `Take ${slots === 1 ? "it" : "them"}`,
          sentence: "Jobs there shrink or wait within seconds; none fails and none loses work. The slots stay out of use until they are given again.",
        });
        if (yes) await act("cluster/reclaim", { slots });
      },
    },
  },
  el("label", { for: "reclaim" }, "Reclaim slots for another service"), field, el("button.primary", {}, "Reclaim"),
  el("button", { type: "button", on: { click: () => act("cluster/reclaim", { slots: 0, return: true }) } }, "Give all again"));
  return form;
}

function card(node) {
  const title = el("h2", {}, node.id);
  const about = el("p.about");
  const why = el("p.why");
  const button = el("button", { type: "button" });
  const tiles = el("ul.tiles", { "aria-label": `Slots of ${node.id}` });
  let drained = false;
  button.addEventListener("click", async () => {
    const yes = drained || await confirm({
      title: `Drain ${node.id}?`, yes: "Drain", sentence: "Its jobs move to other nodes or wait with their state kept; nothing new comes here until it is used again.",
    });
    if (yes) await act(`nodes/${encodeURIComponent(node.id)}/drain`, { undrain: drained });
  });
  const whole = el("section.card.node", {}, el(".head", {}, title, about, button), why, tiles);
  whole.update = (now_) => {
    drained = now_.phase === "drained";
    text(about, `${now_.device_type}, ${now_.busy} of ${now_.slots} busy${now_.phase === "up" ? "" : `, ${now_.phase}`}`);
    set(button, { hidden: now_.phase === "lost" });
    text(button, drained ? "Use it again" : "Drain");
    text(why, now_.phase === "up" ? "" : sentence(now_.reason));
    keyed(tiles, known.cluster.placement.filter((slot) => slot.node === now_.id), (slot) => slot.slot, tile);
  };
  return whole;
}

function tile(slot) {
  const index = el("small", {}, slot.slot.slice(slot.node.length + 1));
  const who = el("span");
  const whole = el("li.tile", {}, index, who);
  whole.update = (now_) => {
    const job = now_.job && known.jobs.get(now_.job);
    whole.dataset.state = now_.state;
    whole.style.setProperty("--job", now_.job ? colourOf(now_.job) : "transparent");
    const words = now_.job ? job?.name || now_.job : STATES[now_.state];
    if (who.dataset.said === `${words} ${now_.state}`) return;
    who.dataset.said = `${words} ${now_.state}`;
    fill(who, now_.job ? el("a.stop", { href: `#/jobs/${encodeURIComponent(now_.job)}` }, words) : words, now_.state === "leaving" ? el("small", {}, " leaving") : null);
  };
  return whole;
}
