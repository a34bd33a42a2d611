# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Strategy custom-resource, for each kind of resource: an operator's DaemonSet is its operator's; farrier sets the
# operator's own resource. Sourced by ci/e2e.d/lib.sh.

# Each kind with its group, version, plural, what below `spec` holds the driver, and the field that asks for
# precompiled drivers.
resource_kinds() {
    cat <<'TEXT'
NicClusterPolicy mellanox.com v1alpha1 nicclusterpolicies .ofedDriver forcePrecompiled
NicNodePolicy mellanox.com v1alpha1 nicnodepolicies .ofedDriver forcePrecompiled
ClusterPolicy nvidia.com v1 clusterpolicies .driver usePrecompiled
NVIDIADriver nvidia.com v1alpha1 nvidiadrivers . usePrecompiled
TEXT
}

# use_kind KIND: sets what the others of this file need.
use_kind() {
    kind="$1"
    read -r _ group version plural section flag < <(resource_kinds | grep "^$kind ")
    resource="e2e-$run"
}

# An operator's resource for the whole cluster reaches every node with its hardware, also those that are not this run's.
# These are nodes for which this run has no image.
foreign_nodes() { k get nodes -l "$1=true,$run_label!=$run" -o name; }

# make_resource SPEC: a resource of this kind, of a vendor's driver. SPEC is YAML in flow style.
make_resource() {
    k create -f - > /dev/null <<YAML
apiVersion: $group/$version
kind: $kind
metadata: {name: $resource, labels: {$run_label: $run}}
spec: $1
YAML
}

spec_of() { k get "$plural.$group" "$resource" -o json | jq -cS .spec; }
field() { spec_of | jq -r "$section | .$1"; }
is() { [ "$(field "$1")" = "$2" ]; }

# computed TAG-END: the tag that the operator computes from the resource's version is in the registry.
computed() {
    curl --silent --fail --head --output /dev/null -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
        "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/$(field version)-$(label_of "$kernel_a")-$1"
}

# play_resource TAG-END: farrier sets the resource's driver, and puts back what was there.
play_resource() {
    start_farrier one
    expect 60 "the repository is ours" is repository "$registry"
    expect 5 "the image too" is image "$driver"
    expect 5 "and precompiled drivers are asked for" is "$flag" true
    expect 5 "the tag that the operator computes from the version is in the registry" computed "$1"
    expect 5 "what is not ours stays" is startupProbe.periodSeconds 10
    steady 5 "then nothing is written" spec_of
    as_admin rollback --cluster kube "$kind/$resource" > "$here/rollback.txt"
    expect 10 "rollback puts the vendor's repository back" is repository vendor.example/drivers
    expect 5 "and version" is version 25.10-1.2.8.0-0
    k delete "$plural.$group" "$resource" > /dev/null
}

is_held() {
    { as_farrier plan --cluster kube --registry "$registry" -o json || true; } |
        jq -e --arg name "$resource" '.rollouts | any((tostring | contains($name)) and .decision == "hold")'
}

# held_by_foreign_nodes LABEL: where other nodes have the label, the resource stays as it is: farrier points nothing at an
# image that a node could not load.
held_by_foreign_nodes() {
    start_farrier one
    expect 20 "$(foreign_nodes "$1" | wc -l) nodes of others have $1, and this run has no image for them: the plan holds it" is_held
    steady 5 "and the resource stays" is repository vendor.example/drivers
    k delete "$plural.$group" "$resource" > /dev/null
}

# play_where_possible LABEL TAG-END: one or the other.
play_where_possible() {
    if [ -n "$(foreign_nodes "$1")" ]; then held_by_foreign_nodes "$1"; else play_resource "$2"; fi
}
