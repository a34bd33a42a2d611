"""Checks that every relative link of a site leads to a file of the site, and every anchor to an element of that file."""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif name in ("href", "src", "srcset") and value is not None:
                self.links.append(value)


site = pathlib.Path(sys.argv[1]).resolve()
# The page for missing files has absolute links, and print.html has every page's links once more.
paths = [path for path in site.rglob("*.html") if path.name not in ("404.html", "print.html")]
pages = {path: Page(path) for path in paths}
broken, checked = [], 0
for path, page in pages.items():
    for link in page.links:
        parts = urllib.parse.urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        checked += 1
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        anchor = urllib.parse.unquote(parts.fragment)
        if not target.is_file():
            broken.append(f"{path.relative_to(site)}: {link}: no such file")
        elif anchor and target in pages and anchor not in pages[target].anchors:
            broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
print(*sorted(set(broken)), sep="\n", end="\n" if broken else "")
print(f"{checked} links in {len(pages)} pages, {len(set(broken))} broken")
sys.exit(bool(broken) or not checked)
