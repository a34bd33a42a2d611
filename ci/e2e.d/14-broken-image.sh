# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# The pods of a new image do not become ready: farrier restores the previous image, unless the previous image has no modules for
# the node's kernel. farrier does not retry the new image.

for name in solo duo; do
    rollouts+=("{strategy: image, namespace: $drivers, daemonSet: $name, container: driver, stableFor: 2s, deadline: 15s}")
done
definition "${rollouts[@]}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
vendor="$registry/$driver:vendor"
add_daemonset solo "$vendor" RollingUpdate "kubernetes.io/hostname: $run-$scenario-n1"
add_daemonset duo "$vendor" RollingUpdate "kubernetes.io/hostname: $run-$scenario-n2"
break_image "$image_b"
start_farrier one
# The record of a DaemonSet says that the image failed, with the pod's message.
failed() {
    k get daemonset "$1" -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver | .state == "failed" and (.why | contains("invalid module format"))'
}
expect 60 "kernel B's image misses its deadline" failed duo
expect 5 "the vendor's image is restored" has_image duo "$vendor"
expect 30 "kernel A's image works" pod_on solo n1 "$image_a"
expect 20 "the rollout is no longer watched" watch_is_over solo
reboot n1 "$kernel_b"
expect 20 "kernel B's image is set" has_image solo "$image_b"
held() {
    as_farrier plan --cluster kube --registry "$registry" -o json > "$here/plan.json" || true
    grep -q 'was not restored, because it has no modules for' "$here/plan.json"
}
expect 90 "the image misses its deadline, and kernel A's image is not restored for kernel B" held
both() { ds_spec solo && ds_spec duo; }
steady 6 "the failed image is not retried" both
expect 0 "kernel B's image stays" has_image solo "$image_b"
