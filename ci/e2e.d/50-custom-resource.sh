# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Strategy custom-resource: an operator's DaemonSet is its operator's; farrier sets the operator's own resource.

if [ -n "$(k get nicclusterpolicies -o name)" ]; then
    echo "    this cluster has a NicClusterPolicy of its own, which is not touched: nothing to play" >&2
    return 0
fi
definition "{strategy: custom-resource, resource: NicClusterPolicy, name: nic-cluster-policy}"
add_node n1 "$kernel_a"
k create -f - > /dev/null <<YAML
apiVersion: mellanox.com/v1alpha1
kind: NicClusterPolicy
metadata: {name: nic-cluster-policy, labels: {$run_label: $run}}
spec:
  ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {periodSeconds: 10}}
YAML
start_farrier one
field() { k get nicclusterpolicy nic-cluster-policy -o json | jq -r ".spec.ofedDriver.$1"; }
is() { [ "$(field "$1")" = "$2" ]; }
expect 30 "the repository is ours" is repository "$registry"
expect 5 "the image too" is image "$driver"
# What the operator makes of it is the name that is published.
computed() {
    local tag
    tag="$(field version)-$(label_of "$kernel_a")-debian12-$(dpkg --print-architecture)"
    curl --silent --fail --head --output /dev/null -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
        "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/$tag"
}
expect 5 "the tag that the operator computes from the version is in the registry" computed
expect 5 "what is not ours stays" is startupProbe.periodSeconds 10
as_farrier rollback --cluster kube NicClusterPolicy/nic-cluster-policy > "$here/rollback.txt"
expect 10 "rollback puts the vendor's repository back" is repository vendor.example/drivers
expect 5 "and version" is version 25.10-1.2.8.0-0
k delete nicclusterpolicy nic-cluster-policy > /dev/null
