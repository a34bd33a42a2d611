# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about a driver container's life cycle. Sourced by ci/bench.

lifecycle_rows() {
    need_packages busybox-static gcc-12 kmod qemu-system-x86
    say "a MOFED container on a node in a virtual machine, compared with modprobe of its modules"
    rust_bench lifecycle "$state/lifecycle"
    awk '$1 == "start-to-ready" { print $2 }' "$state/lifecycle" > "$state/times/start-to-ready"
    awk '$1 == "modprobe" { print $2 }' "$state/lifecycle" > "$state/times/modprobe"
    row "container start to ready: in-tree drivers out, ours in" "$(median start-to-ready)" 5 s
    say "modprobe of the same modules, nothing to replace: $(median modprobe) s"
}
