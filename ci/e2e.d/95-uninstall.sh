# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Uninstalls farrier as described in docs/deploy.md: a rollback without definitions restores everything that farrier set, and only
# annotations remain.

use_kind NicNodePolicy
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}" \
    "{strategy: per-kernel, namespace: $drivers, daemonSet: fleet, container: driver, stableFor: 2s, deadline: 60s}" \
    "{strategy: union, namespace: $drivers, daemonSet: whole, container: driver, stableFor: 2s}" \
    "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
for name in solo fleet whole; do add_daemonset "$name" "$registry/$driver:vendor" RollingUpdate; done
make_resource "{tolerations: [{operator: Exists}], nodeSelector: {$mark: 'true'}, ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0}}"
start_farrier one
all_set() {
    [ "$(ds_image solo)" = "$image_a" ] && [[ "$(ds_image whole)" == *@sha256:* ]] && is repository "$registry" &&
        k get daemonsets -n "$drivers" -l farrier.dev/copy-of=fleet -o name | grep -q . &&
        k get node "$run-$scenario-n1" -o json | grep -q handed-over
}
expect 120 "DaemonSets of three strategies and a resource are rolled out" all_set
vendors_run() { [ "$(k get pods -n "$drivers" -o json | jq '[.items[] | select(.metadata.deletionTimestamp == null)
    | .spec.containers[0].image | select(endswith(":vendor"))] | length')" = 3 ]; }
# Succeeds if DaemonSets outside this run have records.
foreign_records() {
    k get daemonsets -A -o json | jq -e --arg ours "farrier-$run-" '.items | any(.metadata.annotations["farrier.dev/record"]
        and (.metadata.namespace | startswith($ours) | not))' > /dev/null
}
stop "$here/farrier-one.pid"

# The definitions may already be gone: a rollback only uses the records on the objects.
mkdir -p "$here/nothing/images"
take_back() { KUBECONFIG="$kubeconfig" "$farrier" rollback --cluster kube --definitions "$here/nothing" --cache-dir "$here/cache-cli" "$@"; }
take_back --dry-run > "$here/dry-run.txt"
cat "$here/dry-run.txt" >&2
for object in "$drivers/solo" "$drivers/fleet" "$drivers/whole" "$kind/$resource"; do
    grep -qF "$object " "$here/dry-run.txt" || fail "the dry run names $object"
done
expect 0 "a dry run changes nothing" all_set
# If another farrier has set objects as well, name this run's objects.
ours=()
if foreign_records; then ours=("$drivers/solo" "$drivers/fleet" "$drivers/whole" "$kind/$resource"); fi
take_back "${ours[@]}" > "$here/rollback.txt"
all_back() {
    local name
    for name in solo fleet whole; do has_image "$name" "$registry/$driver:vendor" || return 1; done
    is repository vendor.example/drivers && is version 25.10-1.2.8.0-0 &&
        [ -z "$(k get daemonsets -n "$drivers" -l farrier.dev/copy-of -o name)" ] &&
        not grep -q handed-over <(k get node "$run-$scenario-n1" -o json)
}
expect 20 "everything is restored" all_back
expect 40 "the vendor's pods run again" vendors_run
# Delete everything that kustomize created, except the CRD, which the other scenarios need.
awk 'BEGIN { RS = "---\n"; ORS = "---\n" } !/kind: CustomResourceDefinition/' "$here/objects.yaml" |
    k delete -f - --ignore-not-found --wait=false > /dev/null
gone() {
    not k get namespace "$ns" && not grep -q -- "-$scenario\$" <(k get clusterroles,clusterrolebindings -l "$run_label=$run" -o name)
}
expect 60 "farrier's namespace and cluster roles are gone" gone
k delete "$plural.$group" "$resource" > /dev/null
