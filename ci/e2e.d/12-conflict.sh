# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Another writer reverts the image: farrier sets it again, and stops after the second revert.

definition "{strategy: image, namespace: $drivers, daemonSet: contested, container: driver, stableFor: 2s, deadline: 10m}"
add_node n1 "$kernel_a"
add_daemonset contested "$registry/$driver:vendor" OnDelete
start_farrier one
expect 30 "farrier sets its image" has_image contested "$image_a"
change_back() { k set image daemonset/contested -n "$drivers" "driver=$registry/$driver:vendor" --field-manager other > /dev/null; }
change_back
expect 20 "after the first revert farrier sets the image again" has_image contested "$image_a"
change_back
says_conflict() {
    k get daemonset contested -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver.state == "conflict"'
}
expect 20 "after the second revert farrier records a conflict" says_conflict
steady 5 "farrier keeps the other writer's value" ds_spec contested
has_image contested "$registry/$driver:vendor"
# The exit code of the plan does not matter here.
reported() {
    { as_farrier plan --cluster kube --registry "$registry" -o json || true; } |
        jq -e '.rollouts | any(.reason == "changed-back")'
}
expect 10 "the plan reports the conflict" reported
