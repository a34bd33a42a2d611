# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy image: one DaemonSet whose nodes all share a kernel.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s, deadline: 20s}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "the DaemonSet gets kernel A's image" has_image solo "$image_a"
expect 30 "the pod on n1 runs the image" pod_on solo n1 "$image_a"
expect 30 "the pod on n2 runs the image" pod_on solo n2 "$image_a"
# With server-side apply, farrier's field manager owns exactly the fields that farrier sets.
owned() {
    k get daemonset solo -n "$drivers" -o json --show-managed-fields | jq -e --arg manager "farrier-$run" '[.metadata.managedFields[]
        | select(.manager == $manager) | .fieldsV1["f:spec"]["f:template"]["f:spec"] | keys] == [["f:containers"]]'
}
expect 5 "farrier owns only the image in the pod template" owned
expect 20 "the rollout is no longer watched" watch_is_over solo
steady 5 "farrier writes nothing when there is nothing to do" ds_spec solo

node_label n1 "$kernel_b"
steady 4 "n1's label is ahead of its kernel: the DaemonSet stays unchanged" ds_spec solo
waits() { as_farrier plan --cluster kube --registry "$registry" -o json | jq -e --arg n "$run-$scenario-n1" '.. | strings | select(contains($n))'; }
expect 10 "the plan names the node" waits

node_info n1 "$kernel_b"
steady 4 "the nodes have different kernels, so the image stays" ds_spec solo
reboot n2 "$kernel_b"
expect 20 "both nodes have kernel B, and its image follows" has_image solo "$image_b"

# NFD restarts and removes its labels for a moment.
k label node "$run-$scenario-n1" "$nfd/kernel-version.full-" > /dev/null
steady 4 "n1 has lost its label, but the DaemonSet stays unchanged" ds_spec solo
node_label n1 "$kernel_b"

expect 30 "the rollout has settled" pod_on solo n1 "$image_b"
as_farrier rollback --cluster kube "$drivers/solo" > "$here/rollback.txt"
expect 10 "rollback restores kernel A's image" has_image solo "$image_a"
steady 5 "the running farrier keeps the restored image" has_image solo "$image_a"
