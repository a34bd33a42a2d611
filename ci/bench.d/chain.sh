# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about images that are compiled against each other, and about concurrent builds. Sourced by ci/bench.
#
# Two concurrent builds are compared with their CPU-bound share, which comes from a plain `make` of each tree. The two `make`s run
# one after the other, each on all CPUs, in farrier's toolchain image. The share is their total CPU time divided by the number of
# CPUs. If the CPU time of the longer `make` alone is larger, the share is that time: the longer compilation uses one CPU while
# the other build uses the rest.
# The measured time covers one whole `farrier run --once`: observe, plan, build, check, assemble, push.

# Number of files in each tree: some seconds of compilation, with one tree longer than the other.
longer=24 shorter=20

chain_rows() {
    local kernel base run driver
    kernel="$(debian_kernels bookworm-security 1)"
    chain_definitions
    mkdir -p "$state/chain/cluster"
    node "$state/chain/cluster/node.yaml" node "$kernel" farrier.dev/bench=true
    say "chain: a first reconcile on $kernel, for the toolchain and the headers"
    chain_pass || die "the first reconcile failed: see $state/bench.log"
    base="$(chain_toolchain "$kernel")"
    side_by_side_row "$base" "$kernel"
    rebuilt_row
    say "each driver built and pushed, compared with its plain make"
    for ((run = 1; run <= runs; run++)); do
        drivers_run "$base" "$kernel"
    done
    for driver in mofed mstflint; do
        say "$driver: pushed $(median "chain-$driver") s, plain make $(median "chain-make-$driver") s, ratio $(ratio "chain-$driver" "chain-make-$driver")"
    done
}

# Defines the stand-in for OFED, an image compiled against the stand-in, and three unrelated images.
chain_definitions() {
    local place="$state/chain/definitions" name
    mkdir -p "$place/images" "$place/sources/peer" "$place/templates"
    cp -r tests/fixtures/ofed "$place/sources/mofed"
    # No rollout, because the rows cover images only.
    sed -e '/^  rollout:/,$d' -e '/^  nodes:/d' images/mstflint.yaml > "$place/images/mstflint.yaml"
    echo '  nodes: {matchLabels: {farrier.dev/bench: "true"}}' >> "$place/images/mstflint.yaml"
    wide_tree longer "$longer"
    wide_tree shorter "$shorter"
    definition mofed mofed 'vars: {parts: default, configureArgs: "", makeArgs: ""}' 'exposes: [/usr/src/ofa_kernel]'
    definition peer kbuild 'needs: [mofed]' 'vars: {directory: ., makeArgs: KBUILD_EXTRA_SYMBOLS=/usr/src/ofa_kernel/default/Module.symvers}'
    for name in longer shorter; do
        definition "$name" kbuild 'vars: {directory: ., makeArgs: ""}'
    done
    printf 'obj-m := bench_peer.o\nccflags-y := -I/usr/src/ofa_kernel/default/include\n' > "$place/sources/peer/Kbuild"
    cat > "$place/sources/peer/bench_peer.c" <<'C'
// SPDX-License-Identifier: GPL-2.0
#include <linux/module.h>
#include <rdma/peer_mem.h>

static int __init bench_peer_init(void)
{
	static const struct peer_memory_client client = { .name = "bench", .version = "1" };
	invalidate_peer_memory invalidate;

	return ib_register_peer_memory_client(&client, &invalidate) ? 0 : -EINVAL;
}
module_init(bench_peer_init);

MODULE_DESCRIPTION("Uses the peer memory interface");
MODULE_LICENSE("GPL");
C
}

# definition NAME TEMPLATE LINE...: defines an image of sources/NAME.
definition() {
    local name="$1" template="$2"
    shift 2
    {
        cat <<YAML
apiVersion: farrier.dev/v1alpha1
kind: DriverImage
metadata: {name: $name}
spec:
  version: "1.0"
  template: $template
  sources:
    - {name: src, from: {path: {path: sources/$name}}}
  nodes: {matchLabels: {farrier.dev/bench: "true"}}
  onConflict: overwrite
YAML
        printf '  %s\n' "$@"
    } > "$state/chain/definitions/images/$name.yaml"
}

# wide_tree NAME COUNT: writes a module of COUNT files, each including the headers of a network driver.
wide_tree() {
    local tree="$state/chain/definitions/sources/$1" number objects=''
    mkdir -p "$tree"
    for ((number = 1; number <= $2; number++)); do
        objects+=" part$number.o"
        cat > "$tree/part$number.c" <<C
// SPDX-License-Identifier: GPL-2.0
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <net/tcp.h>
#include <net/cfg80211.h>

int bench_part$number(struct net_device *device);
int bench_part$number(struct net_device *device)
{
	return device->mtu + $number;
}
C
    done
    cat > "$tree/main.c" <<'C'
// SPDX-License-Identifier: GPL-2.0
#include <linux/module.h>
MODULE_DESCRIPTION("Takes its time to compile");
MODULE_LICENSE("GPL");
C
    printf 'obj-m := bench_%s.o\nbench_%s-y := main.o%s\n' "$1" "$1" "$objects" > "$tree/Kbuild"
}

# Runs one reconcile and writes its result to $state/chain/pass.
chain_pass() {
    "$farrier" run --once --cluster "dir:$state/chain/cluster" --definitions "$state/chain/definitions" \
        --registry "$registry" --engine "$engine" --build-cpus "$(nproc)" > "$state/chain/pass" 2>> "$state/bench.log"
}

# built NAME...: asserts that the last reconcile built exactly these images.
built() {
    local built wanted
    built="$(awk '$1 == "built" { print $2 }' "$state/chain/pass" | sort | xargs)"
    wanted="$(printf '%s\n' "$@" | sort | xargs)"
    [ "$built" = "$wanted" ] || die "the reconcile built '$built', not '$wanted'"
}

chain_toolchain() {
    local base
    "$farrier" build longer --kernel "$1" --os debian --os-version 12 --engine docker --definitions "$state/chain/definitions" \
        --registry "$registry" --push --force >> "$state/bench.log" 2>&1 || die "build the driver in Docker on $1: see $state/bench.log"
    base="$("$farrier" render longer --kernel "$1" --os debian --os-version 12 --definitions "$state/chain/definitions" |
        awk '/^FROM/ && !found++ { print $2 }')"
    docker image inspect "$base" > /dev/null || die "the engine has no $base"
    echo "$base"
}

# in_toolchain BASE SOURCES COMMANDS: runs the commands with the sources in /build, and prints their wall-clock seconds and CPU
# seconds.
# The container's start and the copy are not measured.
in_toolchain() {
    docker run --rm --network none --name "$mark" --volume "$2:/source:ro" "$1" bash -c "
        cp -a /source /build && cd /build || exit 1
        TIMEFORMAT='%R %U %S'
        times() { time { $3; } > /tmp/log 2>&1; }
        times 2> /tmp/times || { tail /tmp/log >&2; exit 1; }
        awk '{ print \$1, \$2 + \$3 }' /tmp/times"
}

kbuild() { echo "make -C /lib/modules/$1/build M=/build -j\$(nproc) KCFLAGS=-g0 ${2:-} modules"; }

side_by_side_row() {
    local base="$1" kernel="$2" run name share
    for ((run = 1; run <= runs; run++)); do
        for name in longer shorter; do
            say "run $run of $runs: plain make of the $name tree"
            in_toolchain "$base" "$state/chain/definitions/sources/$name" "$(kbuild "$kernel")" > "$state/chain/taken"
            awk '{ print $2 }' "$state/chain/taken" | tee -a "$state/times/cpu-$name" >&2
        done
        # New versions are new inputs, so both images must be built.
        for name in longer shorter; do
            sed -i "s/^  version: .*/  version: \"1.$run\"/" "$state/chain/definitions/images/$name.yaml"
        done
        say "run $run of $runs: both trees with one farrier run --once"
        timed side-by-side chain_pass
        built longer shorter
    done
    share="$(awk -v a="$(median cpu-longer)" -v b="$(median cpu-shorter)" -v n="$(nproc)" \
        'BEGIN { sum = (a + b) / n; longer = a > b ? a : b; print (sum > longer ? sum : longer) }')"
    say "two builds: $(median side-by-side) s, processor-bound share $share s"
    row "two builds at once / their processor-bound share" \
        "$(awk -v t="$(median side-by-side)" -v s="$share" 'BEGIN { print t / s }')" 1.15 x
}

rebuilt_row() {
    local tree="$state/chain/definitions/sources/mofed"
    say "a change in OFED that does not affect dependents, then one in its exposed headers"
    echo '/* As before. */' >> "$tree/compat/main.c"
    chain_pass || die "build OFED: see $state/bench.log"
    built mofed
    sed -i 's/^#define IB_PEER_MEMORY_VER_MAX 16/#define IB_PEER_MEMORY_VER_MAX 24/' "$tree/include/rdma/peer_mem.h"
    chain_pass || die "build the images that need OFED: see $state/bench.log"
    built mofed peer
    row "compiled after a change in OFED alone: OFED and peer memory" "$(grep -c '^built ' "$state/chain/pass")" 2 ""
    chain_pass || die "a reconcile with nothing to do failed: see $state/bench.log"
    built
}

drivers_run() {
    local base="$1" kernel="$2" tree="$state/chain/definitions/sources/mofed" driver
    for driver in mofed mstflint; do
        timed "chain-$driver" "$farrier" build "$driver" --kernel "$kernel" --os debian --os-version 12 --engine "$engine" \
            --definitions "$state/chain/definitions" --registry "$registry" --push --force
    done
    in_toolchain "$base" "$tree" "./configure --kernel-version=$kernel --kernel-sources=/lib/modules/$kernel/build --default \
        -j\$(nproc) && make -j\$(nproc) KCFLAGS=-g0 kernel" | awk '{ print $1 }' | tee -a "$state/times/chain-make-mofed" >&2
    mstflint_tree
    in_toolchain "$base" "$state/chain/mstflint" "$(kbuild "$kernel")" |
        awk '{ print $1 }' | tee -a "$state/times/chain-make-mstflint" >&2
}

mstflint_tree() {
    local place="$state/chain/mstflint"
    [ ! -d "$place" ] || return 0
    mkdir -p "$place.deb"
    (cd "$place.deb" && APT_CONFIG="$(private_apt sid)" apt-get download -qq mstflint-dkms)
    dpkg-deb --extract "$place.deb/"mstflint-dkms_*.deb "$place.deb"
    mv "$place.deb/usr/src/"mstflint-* "$place"
}
