# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about the import of a header set. Sourced by ci/bench.

# Imports the newest Debian headers as one tarball, extended to 100 MB with the kernel's own source files.
headers_rows() {
    local kernel config deb tree="$state/headers/tree" tarball="$state/headers/headers.tar" run peak
    kernel="$(debian_kernels bookworm 1)"
    config="$(private_apt bookworm)"
    mkdir -p "$state/headers/debs" "$tree"
    (cd "$state/headers/debs" && APT_CONFIG="$config" apt-get download -qq "linux-headers-$kernel" \
        "linux-headers-${kernel%-*}-common" "linux-kbuild-$(cut -d. -f1,2 <<< "$kernel")")
    for deb in "$state"/headers/debs/*.deb; do dpkg-deb -x "$deb" "$tree"; done
    rm -r "${tree:?}/usr/share"
    run=0
    while tar -C "$tree" -cf "$tarball" lib usr && [ "$(stat -c %s "$tarball")" -lt 100000000 ]; do
        run=$((run + 1))
        cp -r "$tree/usr/src/linux-headers-${kernel%-*}-common/include/linux" "$state/headers/more"
        # Vary the content, so that compression cannot deduplicate it.
        find "$state/headers/more" -type f -exec sed -i "1i // $run" {} +
        mv "$state/headers/more" "$tree/usr/src/linux-headers-$kernel/include/more-$run"
    done
    say "headers: import of $(du -m "$tarball" | cut -f 1) MB, $(tar -tf "$tarball" | wc -l) entries"
    # Flush the disk first, so that only the import is measured.
    sync
    for ((run = 1; run <= runs; run++)); do
        timed headers /usr/bin/time -a -o "$state/headers/peak" -f %M "$farrier" headers import "$tarball" \
            --kernel "$kernel" --arch amd64 --cache-dir "$state/headers/cache-$run" --registry "oci:$state/headers/layout-$run"
    done
    row "import of a header tarball, $(du -m "$tarball" | cut -f 1) MB" "$(median headers)" 3 s
    peak="$(sort -n "$state/headers/peak" | tail -n 1)"
    row "import of a header tarball: peak memory" "$((peak / 1024))" 100 MiB
    rm -rf "$state/headers"
}
