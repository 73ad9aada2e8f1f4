"use strict";
// Runs before the first paint, so that a dark room stays dark. The choice is "system" until somebody makes another.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try { return localStorage.getItem("concertina-theme") || "system"; } catch { return "system"; }
  };
  let choice = kept();
  const apply = () => {
    document.documentElement.dataset.theme = choice === "system" ? (dark.matches ? "dark" : "light") : choice;
    dispatchEvent(new Event("themechange"));
  };
  dark.addEventListener("change", apply);
  window.theme = {
    get choice() { return choice; },
    next() {
      const order = dark.matches ? ["system", "light", "dark"] : ["system", "dark", "light"];
      choice = order[(order.indexOf(choice) + 1) % order.length];
      try { localStorage.setItem("concertina-theme", choice); } catch { /* private window: it lasts as long as the page */ }
      apply();
    },
  };
  apply();
})();
