// Elements, made and changed. Whatever comes from the server goes in as text, never as markup.

/** el("a.name", {href: "#/", on: {click}}, "text", child, null) */
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  set(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (key === "style") for (const [name, style] of Object.entries(value)) element.style.setProperty(name, style);
    else if (value === false || value === null || value === undefined) element.removeAttribute(key);
    else if (value === true) element.setAttribute(key, "");
    else if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
  }
  return element;
}

/** Only when it differs: what somebody has selected with the mouse stays selected. */
export function text(element, value) {
  const wanted = value === null || value === undefined ? "" : String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Make `parent` hold one child per item, in order, and keep those that it has: focus, scroll and animations survive.
 * `make(item)` gives an element with `.update(item)`.
 */
export function keyed(parent, items, keyOf, make) {
  const had = parent.keyedChildren || new Map();
  const now = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  items.forEach((item) => {
    const key = keyOf(item);
    const child = had.get(key) || make(item);
    child.update(item);
    now.set(key, child);
  });
  for (const [key, child] of had) if (!now.has(key)) child.remove();
  let at = parent.firstElementChild;
  for (const child of now.values()) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  parent.keyedChildren = now;
  if (focused && focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
  return now;
}

/** A thing that is drawn as an element and redrawn only when what it shows has changed. */
export function shows(element, draw) {
  let last;
  return (...values) => {
    const key = JSON.stringify(values);
    if (key === last) return;
    last = key;
    draw(element, ...values);
  };
}

/** At most once per `ms`, and always once after the last call. */
export function calmly(work, ms) {
  let timer = null, again = false;
  const run = () => {
    timer = setTimeout(() => {
      timer = null;
      if (again) { again = false; run(); }
    }, ms);
    work();
  };
  return () => { if (timer) again = true; else run(); };
}
