"""Checks that values.yaml and values.schema.json of a chart name the same values."""

import json
import sys

import yaml

chart = sys.argv[1]
with open(f"{chart}/values.yaml") as file:
    values = yaml.safe_load(file)
with open(f"{chart}/values.schema.json") as file:
    schema = json.load(file)


def compare(value, schema, place):
    known = schema.get("properties")
    if known is None or not isinstance(value, dict) or not value:
        return []
    # Helm itself sets `global`, so values.yaml need not document it.
    differ = (set(known) ^ set(value)) - {"global"}
    wrong = [f"{place}{name}" for name in differ]
    for name in set(known) & set(value):
        wrong += compare(value[name], known[name], f"{place}{name}.")
    return wrong


wrong = compare(values, schema, "")
if wrong:
    sys.exit("in one of values.yaml and values.schema.json only: " + ", ".join(sorted(wrong)))
