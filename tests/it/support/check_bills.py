"""Validates the documents of images with other projects' validators, and prints what syft reads from the bills of each image, as JSON.

Usage: check_bills.py (CYCLONEDX SPDX STATEMENT)...
       check_bills.py --release DIRECTORY   validates the documents of a release, and prints nothing
"""
import json
import os
import pathlib
import subprocess
import sys

import jsonschema
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from packageurl import PackageURL
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

CYCLONEDX = JsonStrictValidator(SchemaVersion.V1_6)
SLSA = jsonschema.Draft202012Validator(json.loads(pathlib.Path(__file__).with_name("slsa_statement.schema.json").read_text()))


def validate_bill(path):
    bill = pathlib.Path(path).read_text()
    error = CYCLONEDX.validate_str(bill)
    if error:
        sys.exit(f"{path}: CycloneDX: {error}")
    validate_urls(path, [component["purl"] for component in json.loads(bill)["components"] if "purl" in component])


def validate_urls(path, urls):
    for url in urls:
        if PackageURL.from_string(url).to_string() != url:
            sys.exit(f"{path}: not a canonical package URL: {url}")


def validate_spdx(path):
    for message in validate_full_spdx_document(parse_file(path), "SPDX-2.3"):
        sys.exit(f"{path}: SPDX: {message.validation_message}")
    packages = json.loads(pathlib.Path(path).read_text())["packages"]
    validate_urls(path, [r["referenceLocator"] for p in packages for r in p.get("externalRefs", [])])


def validate_statement(path):
    # The types are in-toto's protobuf definitions, where every field is optional; the schema has the required fields.
    text = pathlib.Path(path).read_text()
    Statement.copy_from_pb(json_format.Parse(text, statement_pb2.Statement())).validate()
    json_format.ParseDict(json.loads(text)["predicate"], provenance_pb2.Provenance())
    for error in SLSA.iter_errors(json.loads(text)):
        sys.exit(f"{path}: {error.json_path}: {error.message}")


def listed(path):
    syft = pathlib.Path(sys.executable).with_name("syft")
    # The first line of the script names the place where the environment was made.
    command = [sys.executable, syft, "-q", "convert", path, "-o", "syft-json"]
    offline = {**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=offline)
    found = json.loads(run.stdout)
    distribution = " ".join(found["distro"].get(key, "") for key in ("id", "versionID"))
    # Of SPDX, syft lists the distribution as a package without a type.
    packages = sorted(f'{one["name"]} {one["version"]}' for one in found["artifacts"] if one["type"])
    return {"distribution": distribution, "packages": packages}


if sys.argv[1] == "--release":
    release = pathlib.Path(sys.argv[2])
    bills, statements = list(release.glob("*.cdx.json")), list(release.glob("*.intoto.json"))
    if not bills or not statements:
        sys.exit(f"{release}: no bill of materials or no provenance")
    for file in bills:
        validate_bill(file)
    for file in statements:
        validate_statement(file)
    sys.exit()

images = list(zip(*[iter(sys.argv[1:])] * 3, strict=True))
for cyclonedx, spdx, statement in images:
    validate_bill(cyclonedx)
    validate_spdx(spdx)
    validate_statement(statement)
print(json.dumps([[listed(cyclonedx), listed(spdx)] for cyclonedx, spdx, _ in images]))
