# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about RPM metadata. Sourced by ci/bench.

# Measures the lookup of a kernel that is in none of 50,000 packages. The metadata has createrepo_c's format. farrier reads only
# the metadata, so the repository has no package files.
rpm_rows() {
    local run peak server work="$state/rpm"
    mkdir -p "$work/served/repodata" "$work/definitions/kernels" "$work/definitions/keys"
    python3 - "$work/served" << 'PYTHON'
import gzip, hashlib, sys
out = sys.argv[1]
entry = '<rpm:entry name="lib{0}-{1}.so.1()(64bit)" flags="EQ" epoch="0" ver="1.{0}" rel="{1}.el9"/>\n'
text = ['<?xml version="1.0" encoding="UTF-8"?>\n<metadata xmlns="http://linux.duke.edu/metadata/common" '
        'xmlns:rpm="http://linux.duke.edu/metadata/rpm" packages="50000">\n']
for i in range(50000):
    name = "kernel-devel" if i % 500 == 0 else f"package-{i}"
    provides = "".join(entry.format(i, j) for j in range(12))
    uname = f'<rpm:entry name="kernel-devel-uname-r" flags="EQ" epoch="0" ver="5.14.0" rel="{i}.el9.x86_64"/>\n'
    text.append(
        f'<package type="rpm">\n<name>{name}</name>\n<arch>x86_64</arch>\n<version epoch="0" ver="5.14.0" rel="{i}.el9"/>\n'
        f'<checksum type="sha256" pkgid="YES">{hashlib.sha256(name.encode() + str(i).encode()).hexdigest()}</checksum>\n'
        f'<summary>Package {i}</summary>\n<description>{"What it is for, in some words. " * 20}</description>\n'
        f'<location href="Packages/{name}-{i}.rpm"/>\n<format>\n<rpm:provides>\n{uname if name == "kernel-devel" else ""}{provides}'
        f'</rpm:provides>\n<rpm:requires>\n{provides}</rpm:requires>\n<file>/usr/bin/x{i}</file>\n</format>\n</package>\n')
text.append("</metadata>\n")
data = gzip.compress("".join(text).encode(), 6)
open(f"{out}/repodata/primary.xml.gz", "wb").write(data)
open(f"{out}/repodata/repomd.xml", "w").write(
    '<repomd xmlns="http://linux.duke.edu/metadata/repo"><data type="primary"><checksum type="sha256">'
    f'{hashlib.sha256(data).hexdigest()}</checksum><location href="repodata/primary.xml.gz"/></data></repomd>')
print(f"{sum(map(len, text)) / 1e6:.0f} MB of XML", file=sys.stderr)
PYTHON
    # Any well-formed armor suffices; farrier would refuse a package signed with this key.
    printf -- '-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n' > "$work/definitions/keys/bench.asc"
    python3 -u -m http.server --bind 127.0.0.1 --directory "$work/served" 0 > "$work/server.log" 2>&1 &
    server=$!
    until grep -q ' port ' "$work/server.log"; do sleep 0.1; done
    cat > "$work/definitions/kernels/00-bench.yaml" << YAML
apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: bench}
spec:
  match: {}
  headers:
    rpm:
      packages: [kernel-devel]
      from:
        repositories: [{url: "http://127.0.0.1:$(sed -n 's/.* port \([0-9]*\).*/\1/p' "$work/server.log")/"}]
        signedBy: keys/bench.asc
  toolchain: {image: localhost/bench:1}
YAML
    for ((run = 1; run <= runs; run++)); do
        timed rpm rpm_look "$work" "$run"
    done
    kill "$server"
    wait "$server" || true
    row "metadata of an RPM repository, 50,000 packages" "$(median rpm)" 3 s
    peak="$(sort -n "$work/peak" | tail -n 1)"
    row "metadata of an RPM repository: peak memory" "$((peak / 1024))" 150 MiB
    rm -rf "$work"
}

# rpm_look DIR RUN: looks up the headers of a kernel that the repository lacks, with an empty cache. Success means that farrier
# reports them as missing.
rpm_look() {
    local said
    said="$(/usr/bin/time -a -o "$1/peak" -f %M "$farrier" headers fetch --kernel 5.14.0-50001.el9.x86_64 --os rocky --os-version 9.5 \
        --definitions "$1/definitions" --cache-dir "$1/cache-$2" 2>&1)" && return 1
    grep -q 'kernel-devel' <<< "$said"
}
