// Brings the newest pass into the page that is open, when the server says that there is one. Without script, a reload does it.
"use strict";
const { events } = document.currentScript.dataset;
let due = false;

async function bring() {
  // What is being written in the form stays.
  due = document.activeElement.matches("input, select");
  if (due) return;
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  const focused = document.activeElement.getAttribute("href");
  for (const part of ["main", "header .when"]) document.querySelector(part).replaceWith(page.querySelector(part));
  for (const summary of document.querySelectorAll("details > summary")) {
    summary.parentElement.open ||= open.has(summary.textContent);
  }
  if (focused) document.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

new EventSource(events).onmessage = bring;
// Builds go on between passes.
setInterval(() => !document.hidden && document.querySelector("main[data-live]") && bring(), 5000);
document.addEventListener("focusout", () => setTimeout(() => due && bring()));
