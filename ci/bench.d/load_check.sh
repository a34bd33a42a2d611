# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about the load check. Sourced by ci/bench.

# on_kernel KERNEL ARGUMENT...: runs farrier check against a Debian 12 kernel.
on_kernel() {
    local kernel="$1"
    shift
    "$farrier" check "$@" --kernel "$kernel" --os debian --os-version 12 --definitions "$state/definitions"
}

# Checks the GPU modules with their debug information, and 38 in-tree modules that OFED replaces.
check_rows() {
    local kernel run set peak tree
    kernel="$(debian_kernels bookworm 1)"
    if [ ! -d "$state/unstripped" ]; then
        build mstflint "$kernel" >> "$state/bench.log" 2>&1 || die "build mstflint: see $state/bench.log"
        gpu_tree
        say "building the GPU modules with debug information"
        plain_make "$(toolchain "$kernel")" "$kernel"
    fi
    kernel_image "$kernel"
    mkdir -p "$state/rdma"
    tree="$state/kernel-image/lib/modules/$kernel/kernel"
    # The modules that OFED replaces: RDMA, network cards, and NVMe and NFS over them.
    find "$tree/drivers/infiniband" "$tree/drivers/net/ethernet/mellanox" "$tree/drivers/nvme" "$tree/net/sunrpc" \
        -name '*.ko*' | sort | sed -n 1,38p | xargs cp -t "$state/rdma"
    [ "$(find "$state/rdma" -name '*.ko*' | wc -l)" = 38 ] || die "$kernel has fewer than the 38 modules that OFED replaces"

    for set in unstripped rdma; do
        say "check: $(find "$state/$set" -name '*.ko*' | wc -l) modules, $(du -sh "$state/$set" | cut -f 1)"
        on_kernel "$kernel" "$state/$set" >> "$state/bench.log" 2>&1 || die "the check refused $set: see $state/bench.log"
        for ((run = 1; run <= runs + 2; run++)); do timed "check-$set" on_kernel "$kernel" "$state/$set"; done
    done
    /usr/bin/time -o "$state/check-peak" -f %M "$farrier" check "$state/unstripped" --kernel "$kernel" --os debian \
        --os-version 12 --definitions "$state/definitions" >> "$state/bench.log" 2>&1
    peak="$(cat "$state/check-peak")"
    row "check of the five GPU modules, $(du -sm "$state/unstripped" | cut -f 1) MB" "$(median check-unstripped)" 0.5 s
    row "check of the five GPU modules: peak memory" "$((peak / 1024))" 64 MiB
    row "check of 38 modules that OFED replaces" "$(median check-rdma)" 0.2 s
}

# A boot check of a small module, compared with a bare boot of the same kernel to a shell's first line and power-off.
boot_rows() {
    local kernel run root="$state/bare" module
    kernel="$(debian_kernels bookworm 1)"
    need_packages busybox-static cpio qemu-system-x86
    build mstflint "$kernel" >> "$state/bench.log" 2>&1 || die "build mstflint: see $state/bench.log"
    module="$registry/mstflint:$(newest_tag mstflint "$kernel")"
    kernel_image "$kernel"
    mkdir -p "$root/bin"
    cp /bin/busybox "$root/bin/busybox"
    printf '#!/bin/busybox sh\necho up\n/bin/busybox poweroff -f\n' > "$root/init"
    chmod +x "$root/init"
    (cd "$root" && find . | cpio --quiet -o -H newc) > "$state/bare.cpio"

    say "boot check of mstflint on $kernel"
    on_kernel "$kernel" "$module" --boot >> "$state/bench.log" 2>&1 || die "the boot check failed: see $state/bench.log"
    for ((run = 1; run <= runs; run++)); do
        say "run $run of $runs: farrier check --boot"
        timed boot on_kernel "$kernel" "$module" --boot
        say "run $run of $runs: the bare kernel"
        timed bare bare_boot "$kernel"
    done
    row "boot check of a small module" "$(median boot)" 10 s
    row "boot check of a small module / a bare boot of its kernel" "$(ratio boot bare)" 2.00 x
}

bare_boot() {
    timeout 120 qemu-system-x86_64 -accel tcg -m 512 -display none -nic none -no-reboot -serial stdio -monitor none \
        -kernel "$state/kernel-image/boot/vmlinuz-$1" -initrd "$state/bare.cpio" -append "console=ttyS0 no_timer_check quiet" \
        < /dev/null | tee "$state/bare.out"
    grep -q up "$state/bare.out"
}

# kernel_image KERNEL: unpacks the kernel and its modules once to $state/kernel-image.
kernel_image() {
    [ ! -d "$state/kernel-image" ] || return 0
    local package="linux-image-$1" config
    config="$(private_apt bookworm)"
    [ -n "$(APT_CONFIG="$config" apt-cache pkgnames "$package-unsigned")" ] && package="$package-unsigned"
    mkdir -p "$state/kernel-debs"
    (cd "$state/kernel-debs" && APT_CONFIG="$config" apt-get download -qq "$package")
    dpkg-deb -x "$state/kernel-debs/${package}"_*.deb "$state/kernel-image"
}
