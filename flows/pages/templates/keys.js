"use strict";
// A key presses the button that names it; keys that a browser or a field wants are left to it.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat || event.target.closest("input")) return;
  const found = document.querySelector(`[data-keys~="${CSS.escape(event.key)}"]`);
  if (!found) return;
  event.preventDefault();
  found.click();
});
// A rating is sent once, however often its button is pressed.
document.addEventListener("submit", (event) => {
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});
// Who comes back by the browser's own button may rate again.
window.addEventListener("pageshow", () => document.querySelectorAll("form").forEach((form) => delete form.dataset.sent));
