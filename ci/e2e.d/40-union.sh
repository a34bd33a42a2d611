# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy union: one image contains the modules of every kernel.

definition "{strategy: union, namespace: $drivers, daemonSet: whole, container: driver, stableFor: 2s, dropAfter: 1s}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_a"
add_daemonset whole "$registry/$driver:vendor" OnDelete
start_farrier one
expect 60 "the DaemonSet gets a union image" has_our_image whole
first="$(ds_image whole)"
k delete pods --all -n "$drivers" --grace-period=0 --force > /dev/null 2>&1
expect 30 "n1's pod runs the union image" pod_on whole n1 "$first"
expect 30 "n2's pod runs the union image" pod_on whole n2 "$first"

# kernels_of IMAGE: prints the kernels in the annotations of the image's manifest.
kernels_of() {
    curl --silent --fail -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
        "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/${1##*@}" |
        jq -r '.annotations["farrier.dev/kernels"] // .annotations["farrier.dev/kernel-release"]'
}
reboot n2 "$kernel_b"
holds_both() { kernels_of "$(ds_image whole)" | grep -qF "$kernel_a" && kernels_of "$(ds_image whole)" | grep -qF "$kernel_b"; }
expect 60 "n2 has kernel B, and the image contains both kernels" holds_both
second="$(ds_image whole)"
expect 60 "n2's pod restarts with the new image" pod_on whole n2 "$second"
expect 0 "n1's pod keeps the first image" pod_on whole n1 "$first"
# farrier records the outcome last, after the pods are ready.
expect 30 "the image is recorded as good" noted_good whole
steady 5 "the DaemonSet stays unchanged" ds_spec whole
