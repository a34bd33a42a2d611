# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about large fleets. Sourced by ci/bench.

plan_rows() {
    say "planning 10,000 nodes, 40 kernels, 8 images"
    rust_bench plan "$state/times/plan"
    row "plan: 10,000 nodes, 40 kernels, 8 images" "$(median plan)" 50 ms
    rust_bench plan "$state/times/placed" placed
    row "plan: 10,000 nodes with taints and affinities" "$(median placed)" 50 ms
}

fleet_rows() {
    say "the loop over 10,000 nodes, then 300 changes of a kernel label at 5,000 nodes"
    rust_bench live "$state/fleet"
    row "resident memory over 10,000 nodes with 20 KiB of status each" "$(metric resident-mib)" 100 MiB
    row "peak resident memory over 10,000 nodes" "$(metric resident-peak-mib)" 100 MiB
    row "kernel label change to rewritten image, 5,000 nodes, p99" "$(percentile rewritten-ms 99)" 1000 ms
    row "LIST requests in 30 idle seconds" "$(metric steady-lists)" 0 ""
    row "writes in 30 idle seconds" "$(metric steady-writes)" 0 ""
    say "label change to rewritten image: median $(percentile rewritten-ms 50) ms, longest $(percentile rewritten-ms 100) ms"
}

churn_rows() {
    churn ""
    if [ -n "$kubeconfig" ]; then FARRIER_BENCH_KUBECONFIG="$kubeconfig" churn ", real API server"; fi
}

churn() { # WHERE
    say "50 changes of a kernel label 0.4 s apart, then 50 at once, at 5,000 nodes$1"
    rust_bench churn "$state/fleet"
    row "50 kernel label changes 0.4 s apart, 5,000 nodes$1, p99" "$(percentile apart-ms 99)" 1000 ms
    row "50 kernel label changes at once, 5,000 nodes$1, the last" "$(percentile at-once-ms 100)" 3000 ms
    row "first view of the page, 5,000 nodes$1, p95" "$(percentile page-ms 95)" 200 ms
    row "first view of the page, 5,000 nodes$1: bytes" "$(percentile page-bytes 100)" 100000 ""
    row "the page of all nodes, 5,000 nodes$1, p95" "$(percentile nodes-ms 95)" 200 ms
    row "label change to image, 50 viewers / none$1, median" \
        "$(awk -v a="$(percentile watched-ms 50)" -v b="$(percentile alone-ms 50)" 'BEGIN { printf "%.3f", a / b }')" 1.10 x
    say "medians: $(percentile apart-ms 50) ms and $(percentile at-once-ms 50) ms"
}

page_rows() {
    local run address
    say "the page of 5,000 nodes of 100 kernels, by 10 images"
    fleet_of_cells "$state/cells"
    (
        cd "$state/cells" || exit
        exec "$farrier" ui --no-browser --cluster dir:cluster --definitions "$state/cells/definitions" --registry "$registry" \
            > "$state/page.address" 2>> "$state/bench.log"
    ) &
    echo $! > "$state/page.pid"
    wait_until 120 test -s "$state/page.address" || die "farrier ui did not print its address: see $state/bench.log"
    address="$(cat "$state/page.address")"
    : > "$state/fleet"
    # Filtered pages are not cached, so each request measures a rendering.
    for ((run = 0; run < 20; run++)); do
        curl --silent --fail --output "$state/page.html" --write-out '%{time_total}\n' "$address?kernel=6.1" |
            awk '{ print "cells-ms", $1 * 1000 }' >> "$state/fleet"
    done
    stop "$state/page.pid"
    row "first view of 100 x 10 cells, 5,000 nodes, p95" "$(percentile cells-ms 95)" 200 ms
    row "first view of 100 x 10 cells, 5,000 nodes: bytes" "$(wc -c < "$state/page.html")" 100000 ""
}

growth_rows() {
    say "2,000 kernels in turn through a cache with a quota for a tenth of them"
    rust_bench growth "$state/fleet"
    row "cache after 2,000 kernels / after 500: bytes" "$(growth_factor bytes)" 1.05 x
    row "cache after 2,000 kernels / after 500: files" "$(growth_factor files)" 1.05 x
    row "cache eviction before a build, p99" "$(percentile room-ms 99)" 100 ms
    row "time series in /metrics with 2,000 kernels" "$(metric series)" 60 ""
}

# growth_factor WHAT: prints a metric after 2,000 kernels as a multiple of its value after 500.
growth_factor() { awk -v a="$(metric "$1-500")" -v b="$(metric "$1-2000")" 'BEGIN { printf "%.3f", b / a }'; }

# metric NAME: prints a number that the benchmark measured once.
metric() { awk -v name="$1" '$1 == name { print $2 }' "$state/fleet"; }

# percentile WHAT PERCENT: prints the smallest value that is at least as large as PERCENT of all values.
percentile() {
    awk -v what="$1" '$1 == what { print $2 }' "$state/fleet" | sort -n |
        awk -v p="$2" '{ v[NR] = $1 } END { n = int((NR * p + 99) / 100); print v[n < 1 ? 1 : n] }'
}
