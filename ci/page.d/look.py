#!/usr/bin/python3
"""Checks pages in Chromium like users see them: in both themes and three widths, by keyboard, and with axe.

usage: look.py AXE PICTURES FROM TO NAME=ADDRESS...

AXE is axe-core's script. A screenshot of each page in each theme and width goes to PICTURES. Pages whose name begins
with `large` have one width in dark, and served pages are timed. Folded parts are unfolded for the screenshots of `materials` and `upgrade`.
When FROM is renamed to TO, open pages named `fleet` and `nodes` must show one more skipped node. Exit code 1 when a check failed.
"""

import base64
import os
import pathlib
import sys
import time

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTHS = {360: 740, 390: 844, 1280: 900, 3840: 2160}
# Maximum height of a screenshot.
TALLEST = 2000

# Lists elements wider than the window with their text, except inside elements that scroll.
SPILLS = """
if (document.scrollingElement.scrollWidth <= innerWidth) return [];
return [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1
    && !one.parentElement.closest(".scroll, pre")).map((one) => `${one.tagName} ${one.textContent.slice(0, 60)}`).slice(0, 3);
"""
# Elements that the keyboard must reach.
STOPS = """
window.stops = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), summary, [tabindex='0']")]
    .filter((one) => one.checkVisibility());
return stops.length;
"""
# The focused element's index among these, and any fault that hides the focus from users.
STOP = """
const one = document.activeElement, box = one.getBoundingClientRect(), style = getComputedStyle(one);
const [x, y] = [(Math.max(box.left, 0) + Math.min(box.right, innerWidth)) / 2, (Math.max(box.top, 0) + Math.min(box.bottom, innerHeight)) / 2];
// An inline box of two lines is not where its middle is.
const boxes = [...one.getClientRects()], over = [document.elementFromPoint(x, y), boxes.length > 1
    ? document.elementFromPoint(boxes[0].left + boxes[0].width / 2, boxes[0].top + boxes[0].height / 2) : null];
const faults = [];
if (style.outlineStyle === "none") faults.push("has no outline");
if (!over.some((top) => top && (one.contains(top) || top.contains(one)))) faults.push("is covered or outside the window");
return [stops.indexOf(one), one.outerHTML.slice(0, 120), faults.join(", ")];
"""
# A user's position in the first view: scrolled down in the matrix, with selected text and a half-written filter.
PLACE = """
document.querySelector("tbody .group").parentElement.querySelectorAll("a")[0].scrollIntoView();
window.matrix = document.querySelector(".scroll"); matrix.scrollTop = 30;
window.kept = [scrollY, matrix.scrollTop];
getSelection().selectAllChildren(document.querySelector("h1"));
document.querySelector("[name=image]").value = "half"; document.querySelector("[name=image]").focus({preventScroll: true});
getSelection().selectAllChildren(document.querySelector("h1"));
"""
PLACED = """
const faults = [];
if (!document.contains(matrix) || matrix.scrollTop !== kept[1] || kept[1] === 0) faults.push(`the matrix was scrolled to ${kept[1]}`);
if (getSelection().toString() !== document.querySelector("h1").textContent) faults.push("the selection was lost");
if (document.querySelector("[name=image]").value !== "half") faults.push("the input was lost");
return faults;
"""
UNFOLDED = """
const [one] = document.querySelectorAll("main details");
one.open = true; one.querySelector("a").focus(); window.focused = document.activeElement.textContent;
"""
STILL_UNFOLDED = """
const faults = [], all = [...document.querySelectorAll("main details")];
if (!all[0].open || all.slice(1).some((one) => one.open)) faults.push("the unfolded parts changed");
if (document.activeElement.textContent !== focused) faults.push("the focus moved");
return faults;
"""
UNFOLD = "document.querySelectorAll('details').forEach((one) => one.open = true)"
AXE = """
const done = arguments[0];
axe.run(document, {preload: false}).then(({violations}) => done(violations.map(({id, help, nodes}) =>
    `${id}: ${help}: ` + nodes.slice(0, 3).map((node) => node.target.join(" ") + " " + (node.any[0]?.message ?? "")).join("; "))),
    (error) => done([`axe ended: ${error}`]));
"""
FIGURES = """
const [page] = performance.getEntriesByType("navigation"), paint = performance.getEntriesByName("first-contentful-paint")[0];
const bytes = performance.getEntriesByType("resource").reduce((sum, one) => sum + one.transferSize, page.transferSize);
return [page.responseStart - page.requestStart, page.responseEnd - page.requestStart, paint?.startTime ?? NaN, page.transferSize, bytes];
"""


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    # A name lookup would be a request to another host, so block it.
    arguments = ["--headless=new", "--hide-scrollbars", "--no-proxy-server", "--lang=en", "--disable-gpu",
                 "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
                 "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    for argument in arguments + (["--no-sandbox"] if os.getuid() == 0 else []):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(service=Service("/usr/bin/chromedriver"), options=options)


class Look:
    def __init__(self, driver, axe, pictures):
        self.driver, self.axe, self.pictures, self.found = driver, axe, pictures, {}

    def note(self, where, faults):
        for fault in faults:
            self.found.setdefault(fault, []).append(where)

    def window(self, width, theme, height=None):
        size = {"width": width, "height": height or WIDTHS[width], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def key(self, name, code):
        for kind in ["rawKeyDown", "char", "keyUp"] if name == "Enter" else ["rawKeyDown", "keyUp"]:
            event = {"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": code}
            if kind == "char":
                event["text"] = "\r"
            self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)

    def picture(self, name):
        height = min(self.driver.execute_script("return document.documentElement.scrollHeight"), TALLEST)
        width = self.driver.execute_script("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        asked = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))

    def keyboard(self, name):
        """Tab reaches every element, each focused element is visible, and the first one skips the header."""
        driver = self.driver
        wanted = driver.execute_script(STOPS)
        reached = set()
        for press in range(wanted + 2):
            self.key("Tab", 9)
            place, what, fault = driver.execute_script(STOP)
            if place < 0:
                break
            reached.add(place)
            if fault:
                self.note(f"{name}, keyboard", [f"{what} {fault}"])
        missed = [driver.execute_script("return stops[arguments[0]].outerHTML.slice(0, 120)", place)
                  for place in sorted(set(range(wanted)) - reached)]
        self.note(f"{name}, keyboard", [f"{what} is not reached" for what in missed])
        driver.get(driver.current_url.split("#")[0])
        self.key("Tab", 9)
        self.key("Enter", 13)
        if driver.execute_script("return document.activeElement.id") != "main":
            self.note(f"{name}, keyboard", ["the first link does not lead to the content"])

    def page(self, name, address):
        driver, served = self.driver, address.startswith("http:")
        is_large = name.startswith("large")
        for theme in ["light", "dark"]:
            for width in [1280] if is_large and theme == "dark" else WIDTHS:
                where = f"{name}, {theme}, {width} px"
                self.window(width, theme)
                driver.get(address)
                self.note(where, [f"wider than the window: {what}" for what in driver.execute_script(SPILLS)])
                if name in ("materials", "upgrade"):
                    driver.execute_script(UNFOLD)
                self.picture(f"{name}-{theme}-{width}")
                # axe takes long for a thousand cells, and the result is the same for each width. At 360 pixels only the layout is checked.
                if width != 360 and (not is_large or width == 1280):
                    driver.execute_script(UNFOLD)
                    driver.execute_script(self.axe)
                    self.note(where, driver.execute_async_script(AXE))
        if not is_large:
            self.window(1280, "light")
            driver.get(address)
            self.keyboard(name)
        said = driver.get_log("browser")
        self.note(name, [entry["message"] for entry in said if served])

    def until(self, where, script, fault):
        deadline = time.monotonic() + 120
        while not self.driver.execute_script(script):
            if time.monotonic() > deadline:
                return self.note(where, [fault])
            time.sleep(0.2)

    def live(self, fleet, nodes, old, new):
        """Open pages follow the cluster without a reload, and keep the user's position."""
        driver, says = self.driver, "document.body.textContent.includes('skipped 2 nodes')"
        self.window(1280, "light", 100)
        driver.get(fleet)
        driver.execute_script(PLACE)
        os.rename(old, new)
        self.until("fleet, open", "return document.querySelector('#wrong').parentElement.textContent.includes('2 nodes')",
                   "does not show the new node")
        self.note("fleet, open", driver.execute_script(PLACED))
        self.window(1280, "light")
        driver.get(nodes)
        driver.execute_script(UNFOLDED)
        os.rename(new, old)
        self.until("nodes, open", f"return !{says}", "still shows the removed node")
        os.rename(old, new)
        self.until("nodes, open", f"return {says}", "does not show the new node")
        self.note("nodes, open", driver.execute_script(STILL_UNFOLDED))
        # A hidden tab holds no connection, and a visible tab reports a lost connection.
        for hidden in ["true", "false"]:
            driver.execute_script(f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {hidden}}});"
                                  "document.dispatchEvent(new Event('visibilitychange'))")
            if driver.execute_script("return stream.readyState === EventSource.CLOSED") != (hidden == "true"):
                self.note("nodes, open", [f"with hidden {hidden} the connection has the wrong state"])
        driver.execute_cdp_cmd("Network.enable", {})
        lost = "document.querySelector('.lost').textContent.includes('No connection since')"
        for offline, said in [(True, lost), (False, f"!{lost}")]:
            limits = {"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
            driver.execute_cdp_cmd("Network.emulateNetworkConditions", limits)
            driver.execute_script("document.dispatchEvent(new Event('visibilitychange'))")
            self.until("nodes, open", f"return {said}", f"offline {offline} is not shown")
            if offline:
                driver.execute_script(self.axe)
                self.note("nodes, offline", driver.execute_async_script(AXE))
        driver.get_log("browser")

    def figures(self, name, address):
        """Prints timings of a page without judging them, because the machine may be busy."""
        times = []
        self.window(1280, "light")
        for _ in range(5):
            self.driver.get("about:blank")
            self.driver.get(address)
            self.driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 200))")
            times.append(self.driver.execute_script(FIGURES))
        first, last, paint, page, whole = (sorted(column)[2] for column in zip(*times))
        print(f"{name}: {page:.0f} bytes over the wire, {whole:.0f} with style and script; the server's first byte after "
              f"{first:.0f} ms, its last after {last:.0f} ms; first paint after {paint:.0f} ms (medians of 5)")


def main(axe, pictures, old, new, *pages):
    pictures = pathlib.Path(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    driver = browser()
    try:
        driver.set_script_timeout(120)
        look = Look(driver, pathlib.Path(axe).read_text(encoding="utf-8"), pictures)
        for name, address in (page.split("=", 1) for page in pages):
            look.page(name, address)
            if name == "nodes":
                look.live(address.removesuffix("nodes.html"), address, old, new)
            if name.startswith("large") and address.startswith("http:"):
                look.figures(name, address)
    finally:
        driver.quit()
    for fault, places in look.found.items():
        print(f"{fault}\n    {'; '.join(places[:4])}{f'; and {len(places) - 4} more' if len(places) > 4 else ''}", file=sys.stderr)
    sys.exit(1 if look.found else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
