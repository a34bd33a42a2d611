// Updates the open page after each reconcile, when the server sends an event. Without script, users reload the page.
"use strict";
const { events } = document.currentScript.dataset;
let stream, timer, retry, offlineSince = "", isFetching = false, refreshAgain = false, isStale = true;
document.documentElement.classList.add("script");

// Changes only what differs, so that scrolling, unfolded details, focus, input and selection are kept.
function updateNode(old, fresh, selectedRange) {
  if (old.isEqualNode(fresh)) return;
  if (selectedRange?.intersectsNode(old) && !old.firstElementChild) return;
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE || old.dataset.key !== fresh.dataset.key) {
    return old.replaceWith(fresh);
  }
  for (const { name } of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const oldByKey = new Map([...old.children].map((one) => [one.dataset.key, one]));
  const newKeys = new Set([...fresh.children].map((one) => one.dataset.key));
  let cursor = old.firstChild;
  const removeWhile = (isObsolete) => {
    while (cursor && isObsolete(cursor.dataset?.key)) {
      const one = cursor;
      cursor = one.nextSibling;
      one.remove();
    }
  };
  // Elements with a key are matched by the key at any position, others by their position among elements without a key.
  for (const node of [...fresh.childNodes]) {
    const key = node.dataset?.key, same = key && oldByKey.get(key);
    removeWhile((oldKey) => (oldKey ? !newKeys.has(oldKey) : same && same !== cursor));
    const one = key ? same : cursor?.dataset?.key ? undefined : cursor;
    oldByKey.delete(key);
    if (!one) {
      old.insertBefore(node, cursor);
      continue;
    }
    if (one !== cursor) old.insertBefore(one, cursor);
    cursor = one.nextSibling;
    updateNode(one, node, selectedRange);
  }
  removeWhile(() => true);
}

function show(page) {
  const open = [...document.querySelectorAll("details[open]")].map((one) => one.dataset.key);
  const [focused, selection] = [document.activeElement, getSelection()];
  const href = focused?.getAttribute("href"), selectedRange = selection.isCollapsed ? null : selection.getRangeAt(0);
  for (const part of ["main", "header .when"]) updateNode(document.querySelector(part), page.querySelector(part), selectedRange);
  updateAge();
  for (const one of document.querySelectorAll("details")) one.open ||= open.includes(one.dataset.key);
  if (href && (!focused.isConnected || focused.getAttribute("href") !== href)) {
    document.querySelector(`main a[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
  }
}

// Shows the age of the page's content, or nothing if this machine's clock is behind the server's.
function updateAge() {
  const seconds = Math.round((Date.now() - Date.parse(document.querySelector(".when time").dateTime)) / 1000);
  const [count, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [Math.floor(seconds / 60), "min"] : [Math.floor(seconds / 3600), "h"];
  document.querySelector(".when .age").textContent = seconds < 0 ? "" : `(${count} ${unit} ago)`;
}

// Fetches run one at a time, so that an older page never replaces a newer one.
async function refresh() {
  refreshAgain = isFetching;
  if (isFetching || document.hidden) return;
  isFetching = true;
  let message = "";
  try {
    const answer = await fetch(location.href, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(new DOMParser().parseFromString(await answer.text(), "text/html"));
    isStale = stream?.readyState !== EventSource.OPEN;
    offlineSince = "";
  } catch (error) {
    offlineSince ||= new Date().toLocaleTimeString();
    message = `No connection since ${offlineSince}, trying again: ${error.message}`;
    clearTimeout(retry);
    retry = setTimeout(refresh, 5000);
  }
  const statusLine = document.querySelector(".lost");
  if (statusLine.textContent !== message) statusLine.textContent = message;
  isFetching = false;
  if (refreshAgain) refresh();
}

// A hidden tab keeps no connection, because a browser opens at most six to a server.
function connect() {
  clearTimeout(timer);
  stream?.close();
  isStale ||= document.hidden;
  if (document.hidden) return;
  stream = new EventSource(events);
  stream.onmessage = refresh;
  stream.onopen = () => isStale && refresh();
  stream.onerror = () => {
    isStale = true;
    refresh();
    // EventSource reconnects by itself, unless the server refused the connection.
    if (stream.readyState === EventSource.CLOSED) timer = setTimeout(connect, 30000);
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

connect();
updateAge();
setInterval(updateAge, 1000);
document.addEventListener("visibilitychange", connect);
// Builds make progress between reconciles.
setInterval(() => document.querySelector("main[data-live]") && refresh(), 5000);
