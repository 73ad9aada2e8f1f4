// One colour per job, in the order in which they were submitted, the same in every picture.

const COLOURS = [
  "#3d7ea6", "#d1893a", "#4d9a78", "#b85c74", "#7c6cb4", "#96902f",
  "#2f9ca4", "#c873a4", "#9d7350", "#6d91cf", "#c65d4c", "#66864f",
];
const given = new Map();
let dealt = false; // until all jobs are known, colours are for the time being

export function colourOf(id) {
  if (!given.has(id)) given.set(id, COLOURS[given.size % COLOURS.length]);
  return given.get(id);
}

/** Called with all jobs when they are read, and with each new one, so that two people see the same colours. */
export function deal(jobs) {
  if (!dealt) given.clear();
  dealt = true;
  [...jobs].sort((a, b) => a.submitted_s - b.submitted_s || (a.id < b.id ? -1 : 1)).forEach((job) => colourOf(job.id));
}
