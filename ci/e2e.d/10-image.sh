# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Strategy image: one DaemonSet, all of whose nodes share a kernel.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s, deadline: 20s}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "the DaemonSet gets kernel A's image" has_image solo "$image_a"
expect 30 "a pod on n1 runs it" pod_on solo n1 "$image_a"
expect 30 "and one on n2" pod_on solo n2 "$image_a"
# Server-side apply: what farrier owns is what it says it owns.
owned() {
    k get daemonset solo -n "$drivers" -o json --show-managed-fields | jq -e --arg manager "farrier-$run" '[.metadata.managedFields[]
        | select(.manager == $manager) | .fieldsV1["f:spec"]["f:template"]["f:spec"] | keys] == [["f:containers"]]'
}
expect 5 "farrier owns the image and nothing else of the pod" owned
expect 20 "the rollout is no longer watched" watch_is_over solo
steady 5 "nothing to do: no write" ds_spec solo

node_label n1 "$kernel_b"
steady 4 "n1's label runs ahead of its kernel: nothing changes" ds_spec solo
waits() { as_farrier plan --cluster kube --registry "$registry" -o json | jq -e --arg n "$run-$scenario-n1" '.. | strings | select(contains($n))'; }
expect 10 "the plan names the node that waits" waits

node_info n1 "$kernel_b"
steady 4 "one kernel each: one image would break a node, so it stays" ds_spec solo
reboot n2 "$kernel_b"
expect 20 "both have kernel B: its image follows" has_image solo "$image_b"

# NFD starts again and takes its labels away for a moment.
k label node "$run-$scenario-n1" "$nfd/kernel-version.full-" > /dev/null
steady 4 "n1 lost its label: nothing is torn down" ds_spec solo
node_label n1 "$kernel_b"

expect 30 "the rollout has settled" pod_on solo n1 "$image_b"
as_farrier rollback --cluster kube "$drivers/solo" > "$here/rollback.txt"
expect 10 "rollback puts kernel A's image back" has_image solo "$image_a"
steady 5 "and the running farrier leaves it" has_image solo "$image_a"
