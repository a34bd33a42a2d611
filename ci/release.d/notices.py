#!/usr/bin/python3 -B
"""Prints the licenses of everything that is compiled into farrier's programs. Most of them require that copies contain their text.

usage: notices.py RUST MUSL < `cargo metadata --locked --filter-platform TARGET`

RUST is the toolchain's COPYRIGHT-library.html, MUSL the copyright file of musl's Debian package.
"""
import html.parser
import json
import pathlib
import re
import sys

from bill import reached

FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)s?([._-].*)?", re.IGNORECASE)


class Text(html.parser.HTMLParser):
    """The text of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_data(self, data):
        self.found.append(data)


def license_files(crate):
    for path in sorted(crate.rglob("*")):
        is_named = FILE.fullmatch(path.name) and path.suffix not in (".rs", ".sh")
        # zstd has two licenses: LICENSE is BSD's, COPYING is the GPL.
        is_alternative = path.name == "COPYING" and path.with_name("LICENSE").exists()
        if path.is_file() and (is_named or path.parent.name == "LICENSES") and not is_alternative:
            yield path


def main():
    rust, musl = (pathlib.Path(argument).read_text(encoding="utf-8") for argument in sys.argv[1:])
    metadata = json.load(sys.stdin)
    packages = {one["id"]: one for one in metadata["packages"]}
    shipped, _, _ = reached(metadata, packages, False)
    works, without = {}, []
    for package in sorted((packages[one] for one in shipped), key=lambda one: (one["name"], one["version"])):
        if package["source"] is None:
            continue
        work = f"{package['name']} {package['version']}"
        found = {path.read_text(encoding="utf-8", errors="replace").strip() for path in license_files(pathlib.Path(package["manifest_path"]).parent)}
        for text in sorted(found):
            works.setdefault(text, []).append(work)
        if not found:
            by = "".join(f", by {author}" for author in package["authors"])
            without.append(f"{work}{by}: {package['license']}")
    works["".join(Text(rust).found).strip()] = ["Rust's standard library"]
    works[musl.strip()] = ["musl"]
    print("farrier's programs contain these works. Each text below is the license of the works that are named before it.\n")
    print("Works without a license file, with the license that they declare:\n", *without, "", sep="\n")
    for text, names in works.items():
        print("=" * 80, "\n".join(names), "-" * 80, text, "", sep="\n")


main()
