#!/usr/bin/python3
"""Prints a CycloneDX bill of materials of farrier's programs, with the crates that they are compiled from.

usage: bill.py CARGO_LOCK COMMIT EPOCH < `cargo metadata --locked --filter-platform TARGET`

Crates that only run during the compilation (build scripts, procedural macros) have the scope `excluded`.
"""
import datetime
import json
import sys
import tomllib
import urllib.parse
import uuid

PROGRAMS = ["farrier", "driver-entrypoint", "farrier-runner", "farrier-host"]


def reached(metadata, packages, with_tools):
    """Ids of the packages below the programs, with or without those that only run during the compilation."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    kinds = {None, "build"} if with_tools else {None}
    waiting = [one["id"] for one in packages.values() if one["name"] in PROGRAMS and one["source"] is None]
    found = set()
    while waiting:
        current = waiting.pop()
        if current in found or (not with_tools and is_macro(packages[current])):
            continue
        found.add(current)
        waiting += [dep["pkg"] for dep in nodes[current]["deps"] if kinds & {one["kind"] for one in dep["dep_kinds"]}]
    return found, nodes, kinds


def is_macro(package):
    return any("proc-macro" in target["kind"] for target in package["targets"])


def purl(package):
    return f"pkg:cargo/{package['name']}@{urllib.parse.quote(package['version'], safe='')}"


def component(package, checksums, is_shipped):
    made = {
        "type": "application" if package["name"] in PROGRAMS else "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "scope": "required" if is_shipped else "excluded",
    }
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        made["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["license"]:
        # Cargo's old notation for alternatives is a slash.
        alternatives = [one.strip() for one in package["license"].split("/")]
        made["licenses"] = [{"expression": " OR ".join(alternatives)}]
    if package["source"]:
        made["purl"] = purl(package)
    return made


def main():
    lock, commit, epoch = sys.argv[1:]
    metadata = json.load(sys.stdin)
    packages = {one["id"]: one for one in metadata["packages"]}
    with open(lock, "rb") as file:
        locked = tomllib.load(file)["package"]
    checksums = {(one["name"], one["version"]): one["checksum"] for one in locked if "checksum" in one}
    shipped, _, _ = reached(metadata, packages, False)
    everything, nodes, kinds = reached(metadata, packages, True)
    listed = sorted((packages[one] for one in everything), key=purl)
    program = next(one for one in listed if one["name"] == "farrier")
    components = [component(one, checksums, one["id"] in shipped) for one in listed if one is not program]
    edges = [
        {
            "ref": purl(one),
            "dependsOn": sorted(
                {purl(packages[dep["pkg"]]) for dep in nodes[one["id"]]["deps"] if kinds & {kind["kind"] for kind in dep["dep_kinds"]}}
            ),
        }
        for one in listed
    ]
    root = component(program, checksums, True)
    del root["scope"]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": "",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": root | {"properties": [{"name": "farrier.dev:commit", "value": commit}]},
        },
        "components": components,
        "dependencies": edges,
    }
    bill["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill, sort_keys=True))}"
    json.dump(bill, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
