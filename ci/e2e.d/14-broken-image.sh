# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# The pods of a new image do not become ready: farrier restores the previous image and does not retry the new one.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s, deadline: 15s}"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "kernel A's image works" pod_on solo n1 "$image_a"
expect 20 "the rollout is no longer watched" watch_is_over solo
break_image "$image_b"
reboot n1 "$kernel_b"
expect 20 "kernel B's image is set" has_image solo "$image_b"
expect 60 "the image misses its deadline, and the previous image is restored" has_image solo "$image_a"
tells_why() {
    k get daemonset solo -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver | .state == "failed" and (.why | contains("invalid module format"))'
}
expect 10 "the record contains the pod's message" tells_why
steady 6 "the failed image is not retried" ds_spec solo
