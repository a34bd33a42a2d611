# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that ci/bench reads or sets
# Compares the machine's speed with the reference machine's. Sourced by ci/bench.

# Seconds that the make below takes on the reference machine. The targets in seconds apply to that machine.
reference_make=1.2

# Sets `slowdown` to this machine's time for the make, divided by the reference machine's, and at least to 1. `row` multiplies
# targets in seconds by `slowdown`, but not ratios, bytes and counts.
measure_slowdown() {
    local kernel base run
    kernel="$(debian_kernels bookworm-security 1)"
    say "the machine's speed: plain make of mstflint_access on $kernel"
    unpack_package sid mstflint-dkms "$state/pace"
    base="$(toolchain "$kernel")"
    for ((run = 1; run <= (runs > 5 ? runs : 5); run++)); do
        docker run --rm --network none --name "$mark" --volume "$state/pace/usr/src:/source:ro" "$base" bash -c "
            cp -a /source/mstflint-* /build && cd /build || exit 1
            start=\$(date +%s.%N)
            make -C /lib/modules/$kernel/build M=/build -j\$(nproc) modules > /tmp/log 2>&1 || { tail /tmp/log >&2; exit 1; }
            awk -v s=\$start -v e=\$(date +%s.%N) 'BEGIN { printf \"%.3f\n\", e - s }'" | tee -a "$state/times/reference-make" >&2
    done
    slowdown="$(awk -v s="$(median reference-make)" -v r="$reference_make" 'BEGIN { p = s / r; printf "%.2f", p < 1 ? 1 : p }')"
    say "the machine's speed: $(median reference-make) s for this make, $reference_make s on the reference machine"
}
