# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy custom-resource, for each kind of resource: an operator manages its own DaemonSet, so farrier sets the operator's
# resource.
# Sourced by ci/e2e.d/lib.sh.

# Each kind with its group, version, plural, the path of the driver below `spec`, and the field that enables precompiled
# drivers.
resource_kinds() {
    cat <<'TEXT'
NicClusterPolicy mellanox.com v1alpha1 nicclusterpolicies .ofedDriver forcePrecompiled
NicNodePolicy mellanox.com v1alpha1 nicnodepolicies .ofedDriver forcePrecompiled
ClusterPolicy nvidia.com v1 clusterpolicies .driver usePrecompiled
NVIDIADriver nvidia.com v1alpha1 nvidiadrivers . usePrecompiled
TEXT
}

# use_kind KIND: sets the variables of the other functions in this file.
use_kind() {
    kind="$1"
    read -r _ group version plural section flag < <(resource_kinds | grep "^$kind ")
    resource="e2e-$run"
    # The only name that the Network Operator accepts.
    [ "$kind" != NicClusterPolicy ] || resource=nic-cluster-policy
}

# Lists nodes outside this run that an operator's cluster-wide resource would select by their hardware. This run has no image
# for them.
foreign_nodes() { k get nodes -l "$1=true,$run_label!=$run" -o name; }

# Fields of a ClusterPolicy that installs nothing but drivers.
driver_only="operator: {}, daemonsets: {tolerations: [{operator: Exists}]}"
for part in toolkit devicePlugin dcgm dcgmExporter gfd migManager nodeStatusExporter; do driver_only+=", $part: {enabled: false}"; done

# make_resource SPEC: creates a resource of this kind with a vendor's driver. SPEC is in YAML flow style.
make_resource() {
    k create -f - > /dev/null <<YAML
apiVersion: $group/$version
kind: $kind
metadata: {name: $resource, labels: {$run_label: $run}}
spec: $1
YAML
}

# Deletes this run's resources. An operator accepts only one ClusterPolicy in a cluster.
remove_resources() {
    local group plural
    while read -r _ group _ plural _; do
        k delete "$plural.$group" -l "$run_label=$run" --ignore-not-found > /dev/null 2>&1 || true
    done < <(resource_kinds)
}

spec_of() { k get "$plural.$group" "$resource" -o json | jq -cS .spec; }
field() { spec_of | jq -r "$section | .$1"; }
is() { [ "$(field "$1")" = "$2" ]; }

# computed TAG-END: succeeds if the registry has the tag that the operator computes from the resource's version.
computed() {
    curl --silent --fail --head --output /dev/null -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
        "http://${registry%%/*}/v2/${registry#*/}/$driver/manifests/$(field version)-$(label_of "$kernel_a")-$1"
}

# check_resource_rollout TAG-END: checks that farrier sets the resource's driver, and that a rollback restores it.
check_resource_rollout() {
    start_farrier one
    expect 60 "the resource names this run's repository" is repository "$registry"
    expect 5 "the resource names the driver's image" is image "$driver"
    expect 5 "the resource enables precompiled drivers" is "$flag" true
    expect 5 "the tag that the operator computes from the version is in the registry" computed "$1"
    expect 5 "other fields are unchanged" is startupProbe.periodSeconds 10
    steady 5 "the resource's spec stays unchanged" spec_of
    as_admin rollback --cluster kube "$kind/$resource" > "$here/rollback.txt"
    expect 10 "rollback restores the vendor's repository" is repository vendor.example/drivers
    expect 5 "rollback restores the vendor's version" is version 25.10-1.2.8.0-0
    k delete "$plural.$group" "$resource" > /dev/null
}

is_held() {
    { as_farrier plan --cluster kube --registry "$registry" -o json || true; } |
        jq -e --arg name "$resource" '.rollouts | any((tostring | contains($name)) and .decision == "hold")'
}

# check_hold LABEL: checks that farrier holds the rollout while foreign nodes have the label, because farrier must not
# assign an image that a node could not load.
check_hold() {
    start_farrier one
    expect 20 "$(foreign_nodes "$1" | wc -l) foreign nodes have $1, and this run has no image for them: the plan holds the rollout" is_held
    steady 5 "the resource keeps the vendor's repository" is repository vendor.example/drivers
    k delete "$plural.$group" "$resource" > /dev/null
}

# check_rollout_or_hold LABEL TAG-END: checks the rollout, or its hold if foreign nodes have the label.
check_rollout_or_hold() {
    if [ -n "$(foreign_nodes "$1")" ]; then check_hold "$1"; else check_resource_rollout "$2"; fi
}
