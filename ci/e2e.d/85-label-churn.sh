# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Labels of many nodes change continuously. A DaemonSet whose own nodes do not change must not be delayed.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
for name in n1 n2 n3 n4; do add_node "$name" "$kernel_a"; done
add_daemonset solo "$image_a" RollingUpdate "kubernetes.io/hostname: $run-$scenario-n1"
expect 30 "the driver runs on n1" pod_on solo n1 "$image_a"
start_farrier one
expect 20 "farrier leads" leads one

churn() {
    local turn kernel
    for ((turn = 0; ; turn++)); do
        kernel="$kernel_a"
        if [ $((turn / 3 % 2)) = 0 ]; then kernel="$kernel_b"; fi
        reboot "n$((2 + turn % 3))" "$kernel" || return 0
    done
}
churn > "$here/churn.log" 2>&1 &
churning=$!
trap 'kill "$churning" 2> /dev/null || true' EXIT
sleep 3
for kernel in "$kernel_b" "$kernel_a" "$kernel_b"; do
    image="$image_a"
    if [ "$kernel" = "$kernel_b" ]; then image="$image_b"; fi
    reboot n1 "$kernel"
    expect 6 "n1's new kernel gets its image promptly while other nodes change" has_image solo "$image"
done
alive_churn() { kill -0 "$churning"; }
expect 0 "the other nodes' labels still change" alive_churn
kill "$churning"
# Warnings are reserved for problems that need a user's attention.
warnings="$(grep -c '"level":"WARN"' "$here/farrier-one.log" || true)"
[ "$warnings" -le 3 ] || fail "farrier logs at most three warnings, not $warnings"
