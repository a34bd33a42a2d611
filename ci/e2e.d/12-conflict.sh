# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Another writer changes the image back: farrier sets it once more, and then leaves it.

definition "{strategy: image, namespace: $drivers, daemonSet: contested, container: driver, stableFor: 2s, deadline: 10m}"
add_node n1 "$kernel_a"
add_daemonset contested "$registry/$driver:vendor" OnDelete
start_farrier one
expect 30 "farrier sets its image" has_image contested "$image_a"
change_back() { k set image daemonset/contested -n "$drivers" "driver=$registry/$driver:vendor" --field-manager other > /dev/null; }
change_back
expect 20 "changed back once: it is set again" has_image contested "$image_a"
change_back
says_conflict() {
    k get daemonset contested -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver.state == "conflict"'
}
expect 20 "changed back twice: a conflict is recorded" says_conflict
steady 5 "and the value is left" ds_spec contested
has_image contested "$registry/$driver:vendor"
# What its exit code is, is not this scenario's question.
reported() {
    { as_farrier plan --cluster kube --registry "$registry" -o json || true; } > "$here/plan.json"
    grep -qiE 'reverted it|changed-?back' "$here/plan.json"
}
expect 10 "the plan reports it" reported
