// Updates the open page after each reconcile, when the server sends an event. Without script, users reload the page.
"use strict";
const { events } = document.currentScript.dataset;
let stream, timer, retry, lostSince = "", busy = false, again = false, behind = true;
document.documentElement.classList.add("script");

// Changes only what differs, so that scrolling, unfolded details, focus, input and selection are kept.
function renew(old, fresh, marked) {
  if (old.isEqualNode(fresh)) return;
  if (marked?.intersectsNode(old) && !old.firstElementChild) return;
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE || old.dataset.key !== fresh.dataset.key) {
    return old.replaceWith(fresh);
  }
  for (const { name } of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const known = new Map([...old.children].map((one) => [one.dataset.key, one]));
  const wanted = new Set([...fresh.children].map((one) => one.dataset.key));
  let place = old.firstChild;
  const drop = (isOver) => {
    while (place && isOver(place.dataset?.key)) {
      const one = place;
      place = one.nextSibling;
      one.remove();
    }
  };
  // Elements with a key are matched by the key at any position, others by their position among elements without a key.
  for (const node of [...fresh.childNodes]) {
    const key = node.dataset?.key, same = key && known.get(key);
    drop((one) => (one ? !wanted.has(one) : same && same !== place));
    const one = key ? same : place?.dataset?.key ? undefined : place;
    known.delete(key);
    if (!one) {
      old.insertBefore(node, place);
      continue;
    }
    if (one !== place) old.insertBefore(one, place);
    place = one.nextSibling;
    renew(one, node, marked);
  }
  drop(() => true);
}

function show(page) {
  const open = [...document.querySelectorAll("details[open]")].map((one) => one.dataset.key);
  const [focused, selection] = [document.activeElement, getSelection()];
  const href = focused?.getAttribute("href"), marked = selection.isCollapsed ? null : selection.getRangeAt(0);
  for (const part of ["main", "header .when"]) renew(document.querySelector(part), page.querySelector(part), marked);
  tick();
  for (const one of document.querySelectorAll("details")) one.open ||= open.includes(one.dataset.key);
  if (href && (!focused.isConnected || focused.getAttribute("href") !== href)) {
    document.querySelector(`main a[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
  }
}

// The age of what the page shows. A clock that is behind the server's shows none.
function tick() {
  const seconds = Math.round((Date.now() - Date.parse(document.querySelector(".when time").dateTime)) / 1000);
  const [count, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [Math.floor(seconds / 60), "min"] : [Math.floor(seconds / 3600), "h"];
  document.querySelector(".when .age").textContent = seconds < 0 ? "" : `(${count} ${unit} ago)`;
}

// Fetches run one at a time, so that an older page never replaces a newer one.
async function bring() {
  again = busy;
  if (busy || document.hidden) return;
  busy = true;
  let lost = "";
  try {
    const answer = await fetch(location.href, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(new DOMParser().parseFromString(await answer.text(), "text/html"));
    behind = stream?.readyState !== EventSource.OPEN;
    lostSince = "";
  } catch (error) {
    lostSince ||= new Date().toLocaleTimeString();
    lost = `No connection since ${lostSince}, trying again: ${error.message}`;
    clearTimeout(retry);
    retry = setTimeout(bring, 5000);
  }
  const said = document.querySelector(".lost");
  if (said.textContent !== lost) said.textContent = lost;
  busy = false;
  if (again) bring();
}

// A hidden tab keeps no connection, because a browser opens at most six to a server.
function follow() {
  clearTimeout(timer);
  stream?.close();
  behind ||= document.hidden;
  if (document.hidden) return;
  stream = new EventSource(events);
  stream.onmessage = bring;
  stream.onopen = () => behind && bring();
  stream.onerror = () => {
    behind = true;
    bring();
    // EventSource reconnects by itself, unless the server refused the connection.
    if (stream.readyState === EventSource.CLOSED) timer = setTimeout(follow, 30000);
  };
}

// Without a secure connection, browsers offer no clipboard; then the command is selected.
document.addEventListener("click", async ({ target }) => {
  const button = target.closest("button.copy"), code = button?.previousElementSibling;
  if (!code) return;
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
  }
});

follow();
tick();
setInterval(tick, 1000);
document.addEventListener("visibilitychange", follow);
// Builds make progress between reconciles.
setInterval(() => document.querySelector("main[data-live]") && bring(), 5000);
