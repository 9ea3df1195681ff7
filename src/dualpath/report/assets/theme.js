// Chooses light or dark before anything is painted, as the system has it or as the reader last chose.
(() => {
  "use strict";
  const THEMES = ["auto", "light", "dark"];
  const KEY = "dualpath-report-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = remembered();

  // Storage may be closed to files; the choice then lasts as long as the page.
  function remembered() {
    try {
      const kept = localStorage.getItem(KEY);
      return THEMES.includes(kept) ? kept : "auto";
    } catch {
      return "auto";
    }
  }

  function remember() {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // As above.
    }
  }

  function apply() {
    root.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
    document.dispatchEvent(new Event("themechange"));
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      button.textContent = `Theme: ${theme}`;
    };
    name();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      name();
      remember();
      apply();
    });
  });
})();
