# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about bundles, compared with skopeo on the same blobs. Sourced by ci/bench.

# Size of the bundle in megabytes; 300 suffice for a trial run.
bundle_megabytes="${FARRIER_BENCH_BUNDLE_MB:-2000}"

bundle_rows() {
    local run layer size peak way empty count=10 image="$registry/bundle:1" layout="$state/bundle/layout"
    need_packages openssl skopeo time
    mkdir -p "$layout/blobs/sha256"
    say "$count layers of about $((bundle_megabytes / count)) MB: gzip-compressed except for two"
    size=$((bundle_megabytes * 1000000 / count))
    : > "$state/bundle/layers"
    for ((layer = 1; layer <= count; layer++)); do
        case $((layer % 5)) in
            # od writes three characters per byte, and gzip compresses them to slightly more than the original size.
            0) bundle_random "$layer" "$((size / 3))" | od -An -v -tx1 -w64 | bundle_blob cat ;;
            1 | 2) bundle_random "$layer" "$((size * 8 / 10))" | od -An -v -tx1 -w64 | bundle_blob gzip -1 -n ;;
            *) bundle_random "$layer" "$size" | bundle_blob gzip -1 -n ;;
        esac
    done
    bundle_layout "$layout"
    skopeo copy --quiet --preserve-digests --dest-tls-verify=false "oci:$layout:bundle:1" "docker://$image"

    for ((run = 1; run <= runs; run++)); do
        say "run $run of $runs: skopeo copy docker:// -> oci:"
        rm -rf "$state/bundle/out" "$state/bundle/file"
        timed bundle-out-skopeo skopeo copy --quiet --preserve-digests --src-tls-verify=false "docker://$image" "oci:$state/bundle/out:bundle:1"
        rm -rf "$state/bundle/out"
        say "run $run of $runs: farrier bundle export"
        timed bundle-out-farrier /usr/bin/time -a -o "$state/bundle-peak" -f %M "$farrier" bundle export \
            --registry "$registry" --reference bundle:1 --to "$state/bundle/file"
        for way in skopeo farrier; do
            say "run $run of $runs: into an empty registry, $way"
            bundle_empty_registry "$way-$run"
            case "$way" in
                skopeo) timed bundle-in-skopeo skopeo copy --quiet --preserve-digests --dest-tls-verify=false "oci:$layout:bundle:1" "docker://$empty/bundle:1" ;;
                farrier) timed bundle-in-farrier /usr/bin/time -a -o "$state/bundle-peak" -f %M "$farrier" bundle import \
                    "$state/bundle/file" --insecure-no-signature --registry "$empty" ;;
            esac
            stop "$state/bundle/registry.pid"
            rm -rf "$state/bundle/registry"
        done
    done
    # 60 % of the speed means 1/0.6 of the time.
    row "bundle export, $bundle_megabytes MB / skopeo copy docker:// oci:" "$(ratio bundle-out-farrier bundle-out-skopeo)" 1.667 x
    row "bundle import, $bundle_megabytes MB / skopeo copy oci: docker://" "$(ratio bundle-in-farrier bundle-in-skopeo)" 1.667 x
    peak="$(sort -n "$state/bundle-peak" | tail -n 1)"
    row "farrier's peak memory, bundles out and in" "$((peak / 1024))" 150 MiB
}

# bundle_random SEED BYTES: prints incompressible bytes that only depend on the seed.
bundle_random() {
    head -c "$2" /dev/zero | openssl enc -aes-128-ctr -nosalt -pbkdf2 -pass "pass:$1"
}

# bundle_blob PACKER...: packs standard input into the layout and records its descriptor.
bundle_blob() {
    local type=application/vnd.oci.image.layer.v1.tar digest diff
    [ "$1" = cat ] || type="$type+$1"
    cat > "$state/bundle/content"
    diff="$(sha256sum < "$state/bundle/content" | cut -d' ' -f1)"
    "$@" < "$state/bundle/content" > "$state/bundle/packed"
    digest="$(sha256sum < "$state/bundle/packed" | cut -d' ' -f1)"
    printf '%s %s %s %s\n' "$type" "$digest" "$(stat -c %s "$state/bundle/packed")" "$diff" >> "$state/bundle/layers"
    mv "$state/bundle/packed" "$layout/blobs/sha256/$digest"
}

# bundle_json TEXT: stores TEXT in the layout, and prints `"digest":...,"size":...` for it.
bundle_json() {
    local digest
    digest="$(printf %s "$1" | sha256sum | cut -d' ' -f1)"
    printf %s "$1" > "$layout/blobs/sha256/$digest"
    printf '"digest":"sha256:%s","size":%s' "$digest" "${#1}"
}

# bundle_layout DIR: writes an image of the recorded layers as bundle:1.
bundle_layout() {
    local layers diffs config manifest
    layers="$(awk '{ printf "%s{\"mediaType\":\"%s\",\"digest\":\"sha256:%s\",\"size\":%s}", s, $1, $2, $3; s = "," }' "$state/bundle/layers")"
    diffs="$(awk '{ printf "%s\"sha256:%s\"", s, $4; s = "," }' "$state/bundle/layers")"
    config="$(bundle_json "{\"architecture\":\"amd64\",\"os\":\"linux\",\"config\":{},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[$diffs]}}")"
    manifest="$(bundle_json "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\"config\":{\"mediaType\":\"application/vnd.oci.image.config.v1+json\",$config},\"layers\":[$layers]}")"
    printf '{"imageLayoutVersion":"1.0.0"}' > "$1/oci-layout"
    printf '{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",%s,"annotations":{"org.opencontainers.image.ref.name":"bundle:1"}}]}' \
        "$manifest" > "$1/index.json"
}

# bundle_empty_registry NAME: starts a registry and sets $empty to its address.
bundle_empty_registry() {
    local port=
    while [ -z "$port" ] || (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do port=$((20000 + RANDOM % 10000)); done
    empty="127.0.0.1:$port"
    cat > "$state/bundle/registry.yml" <<YAML
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $state/bundle/registry}}
http: {addr: "$empty"}
YAML
    docker-registry serve "$state/bundle/registry.yml" > "$state/bundle/registry-$1.log" 2>&1 < /dev/null &
    echo $! > "$state/bundle/registry.pid"
    wait_until 10 bundle_registry_answers || die "the second registry does not answer; see $state/bundle/registry-$1.log"
}

bundle_registry_answers() { curl --silent --fail "http://$empty/v2/" > /dev/null; }
