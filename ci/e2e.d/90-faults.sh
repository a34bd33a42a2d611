# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Faults from which farrier must recover.

definition "{strategy: per-kernel, namespace: $drivers, daemonSet: doomed, container: driver, stableFor: 2s, deadline: 60s}" \
    "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset doomed "$registry/$driver:vendor" RollingUpdate
add_daemonset solo "$registry/$driver:vendor" OnDelete
start_farrier one
copies() { k get daemonsets -n "$drivers" -l farrier.dev/copy-of=doomed -o name | wc -l; }
one_copy() { [ "$(copies)" = 1 ]; }
expect 60 "a copy for kernel A is created" one_copy
k delete daemonset doomed -n "$drivers" --wait=false > /dev/null
no_copy() { [ "$(copies)" = 0 ]; }
expect 60 "deleting the original deletes its copies" no_copy
steady 6 "the copies are not recreated" copies

expect 30 "kernel A's image is set" has_image solo "$image_a"
# The registry loses the image: farrier notices, and publishes the image again.
tag="$(jq -r .reference "$state/build-$kernel_a.json")"
has_manifest() {
    curl --silent --fail --output /dev/null --head -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
        "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/$1"
}
curl --silent --fail -X DELETE "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/${image_a##*@}"
expect 0 "the registry has lost the tag" not has_manifest "${tag##*:}"
expect 240 "the lost tag is published again" has_manifest "${tag##*:}"
find_images
expect 30 "the DaemonSet has the published image" has_image solo "$image_a"

# A node alternates between two kernels.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    reboot n1 "$kernel_b"
    reboot n1 "$kernel_a"
done
expect 30 "after alternating, the DaemonSet has the final kernel's image" has_image solo "$image_a"

# A permission is removed: farrier names the permission and keeps running.
k get rolebinding "farrier-rollout-$run-$scenario" -n "$drivers" -o json | jq 'del(.metadata.resourceVersion, .metadata.uid)' > "$here/binding.json"
k delete rolebinding "farrier-rollout-$run-$scenario" -n "$drivers" > /dev/null
reboot n1 "$kernel_b"
log_names_permission() { grep -qE 'daemonsets.*(verbs|patch)|patch.*daemonsets' "$here/farrier-one.log"; }
expect 30 "the log names the missing permission" log_names_permission
expect 5 "farrier is still healthy" get one healthz
k create -f "$here/binding.json" > /dev/null
expect 120 "with the permission restored, farrier sets kernel B's image" has_image solo "$image_b"
