# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about in-place builds: how soon a build for a new kernel starts compared with Docker, and the cost of a sandbox.
# Sourced by ci/bench.
#
# The templates' steps print timestamps. "New kernel" is the time from the start of `farrier build` to the first step. Toolchain
# and sources are cached, and only the registry on loopback has the kernel's headers. "Start and removal" uses an image with a
# prebuilt module, so that its sandbox does almost nothing. It is the time from "compiling" to "checking" minus the time of the
# step.

sandbox_rows() {
    local kernels run way place="$state/sandbox"
    mapfile -t kernels < <(debian_kernels bookworm-security 2)
    [ ${#kernels[@]} = 2 ] || die "the security suite has fewer than two 6.1 kernels"
    sandbox_definitions
    for way in sandbox docker; do
        say "toolchain and sources for builds in a $way, on ${kernels[0]}"
        clocked "$way" clock "${kernels[0]}" warm
    done
    store_headers "${kernels[1]}"
    engine=docker cached_images > "$place/images"
    for ((run = 1; run <= runs; run++)); do
        for way in sandbox docker; do
            rm -rf "$place/run"
            cp -a "$place/warm" "$place/run"
            clocked "$way" clock "${kernels[1]}" run
            awk 'NR == 1 { begun = $1 } $2 == "STEPS-BEGIN" { printf "%.3f\n", $3 - begun }' "$place/lines" |
                tee -a "$state/times/seen-$way" >&2
            # Remove the headers from the engine, so that the next run transfers them again.
            engine=docker cached_images | comm -13 "$place/images" - | xargs -r docker image rm --force > /dev/null 2>&1 || true
        done
    done
    row "new kernel to the first step of its build / in Docker" "$(ratio seen-sandbox seen-docker)" 0.5 x

    say "sandboxes without work"
    bring_module "${kernels[1]}"
    for ((run = 0; run <= runs; run++)); do
        clocked sandbox brought "${kernels[1]}" run
        # The first build fetches its base.
        if [ "$run" = 0 ]; then continue; fi
        awk '$NF == "compiling" { before = $1 } $NF == "checking" { after = $1 }
             $2 == "STEPS-BEGIN" { begin = $3 } $2 == "STEPS-END" { end = $3 }
             END { printf "%.3f\n", after - before - (end - begin) }' "$place/lines" | tee -a "$state/times/sandbox" >&2
    done
    row "start of a sandbox, and its removal" "$(awk -v s="$(median sandbox)" 'BEGIN { print s * 1000 }')" 50 ms
    rm -rf "$place"
}

# Defines two images: `clock`, which is mstflint with steps that print the time, and `brought`, whose source is a prebuilt module
# (bring_module).
sandbox_definitions() {
    local place="$state/sandbox/definitions"
    mkdir -p "$place/images" "$place/templates" "$place/sources/brought"
    sed -e 's/{name: mstflint}/{name: clock}/' -e 's/template: kbuild/template: clock/' -e '/^  rollout:/,$d' \
        images/mstflint.yaml > "$place/images/clock.yaml"
    # shellcheck disable=SC2016 # the step's own expressions
    sed 's/^RUN set -eu; \\$/RUN echo "STEPS-BEGIN $(date +%s.%N)"; set -eu; \\/' templates/kbuild.Dockerfile.hbs \
        > "$place/templates/clock.Dockerfile.hbs"
    sed -e 's/{name: clock}/{name: brought}/' -e 's/template: clock/template: brought/' -e 's/^  vars: .*/  vars: {}/' \
        -e 's/version: {source: mstflint}/version: "1"/' -e '/^  sources:$/,/^    *subdir:/d' "$place/images/clock.yaml" \
        > "$place/images/brought.yaml"
    echo '  sources: [{name: brought, from: {path: {path: sources/brought}}}]' >> "$place/images/brought.yaml"
    cat > "$place/templates/brought.Dockerfile.hbs" <<'DOCKERFILE'
FROM {{toolchain}} AS modules
COPY sources/brought/ /build/
RUN echo "STEPS-BEGIN $(date +%s.%N)"; mkdir -p /out/lib/modules/{{kernel.release}}/extra; \
    cp /build/mstflint_access.ko /out/lib/modules/{{kernel.release}}/extra/; depmod -b /out {{kernel.release}}; \
    echo "STEPS-END $(date +%s.%N)"
FROM scratch
COPY --from=modules /out /
DOCKERFILE
}

# Makes the module of image `clock` in the registry the source of `brought`.
bring_module() {
    local place="$state/sandbox" layer
    skopeo copy --quiet --src-tls-verify=false "docker://$registry/clock:$(newest_tag clock "$1")" "dir:$place/image"
    layer="$(jq --raw-output '.layers[-1].digest | ltrimstr("sha256:")' "$place/image/manifest.json")"
    tar -xf "$place/image/$layer" --to-stdout --wildcards '*/mstflint_access.ko' \
        > "$place/definitions/sources/brought/mstflint_access.ko"
}

# Imports a kernel's headers into the registry, as for a site without a package mirror.
store_headers() {
    local place="$state/sandbox/headers" config deb
    config="$(private_apt bookworm-security)"
    mkdir -p "$place/tree"
    (cd "$place" && APT_CONFIG="$config" apt-get download -qq "linux-headers-$1" "linux-headers-${1%-*}-common" \
        "linux-kbuild-$(cut -d. -f1,2 <<< "$1")")
    for deb in "$place"/*.deb; do dpkg-deb -x "$deb" "$place/tree"; done
    "$farrier" headers import "$place/tree" --kernel "$1" --arch amd64 --cache-dir "$place/cache" --registry "$registry" \
        >> "$state/bench.log" 2>&1 || die "import the headers of $1: see $state/bench.log"
}

# clocked ENGINE IMAGE KERNEL CACHE: runs a build and writes its messages to `lines`, each prefixed with its time, and then its
# steps' output. The first line marks the start.
clocked() {
    local place="$state/sandbox"
    echo "$EPOCHREALTIME begun" > "$place/lines"
    "$farrier" build "$2" --kernel "$3" --os debian --os-version 12 --engine "$1" --definitions "$place/definitions" \
        --registry "$registry" --cache-dir "$place/$4" --push --force 2>&1 >> "$state/bench.log" |
        while IFS= read -r line; do echo "$EPOCHREALTIME $line"; done >> "$place/lines" ||
        { cat "$place/lines" >&2; die "build $2 with engine $1 on $3"; }
    "$farrier" logs "$2" "$3" --cache-dir "$place/$4" | grep -o 'STEPS-[A-Z]* [0-9][0-9.]*' | sed 's/^/- /' >> "$place/lines"
}
