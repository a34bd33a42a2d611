"""Prints the objects of standard input in a comparable form.

Sorts the objects by kind, namespace and name, and each list of items with a `name` by that name. Quantities and strings stay
unchanged, except for the digits of the chart's Jobs, which stand for their settings.
"""

import re
import sys

import yaml


def by_name(value):
    if isinstance(value, dict):
        return {key: by_name(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [by_name(item) for item in value]
        if inner and all(isinstance(item, dict) and "name" in item for item in inner):
            return sorted(inner, key=lambda item: item["name"])
        return inner
    return value


def place(item):
    meta = item["metadata"]
    return (item["kind"], meta.get("namespace", ""), meta["name"])


class Dumper(yaml.SafeDumper):
    pass


Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))
items = [item for item in yaml.safe_load_all(sys.stdin) if item]
for item in items:
    if item["kind"] == "Job":
        item["metadata"]["name"] = re.sub("-[0-9a-f]{8}$", "", item["metadata"]["name"])
items.sort(key=place)
names = [place(item) for item in items]
twice = {name for name in names if names.count(name) > 1}
if twice:
    sys.exit(f"rendered twice: {twice}")
for item in items:
    print("---\n# " + "/".join(part for part in place(item) if part))
    print(yaml.dump(by_name(item), Dumper=Dumper, sort_keys=True, width=1000), end="")
