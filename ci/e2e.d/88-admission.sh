# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Whoever has farrier's ServiceAccount can write what farrier writes, and nothing else: the API server refuses it by the
# ValidatingAdmissionPolicies of deploy/. Every write here is a dry run of the server, which asks admission all the same.

vendor=vendor.example/driver:1
add_node n1 "$kernel_a"
for name in solo fleet; do add_daemonset "$name" "$vendor" OnDelete; done
use_kind NicNodePolicy
make_resource "{nodeSelector: {$mark: 'true'}, ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {periodSeconds: 10}}}"
node="$run-$scenario-n1"

as_account() { kubectl --kubeconfig "$here/kubeconfig" "$@" --dry-run=server -o name; }
# patch KIND NAME JSON: a merge patch.
patch() { as_account patch "$1" "$2" -n "$drivers" --type merge -p "$3"; }
# The attempt is refused, in these words.
says() {
    local words="$1"
    shift
    not "$@" && grep -qF -- "$words" "$here/expected"
}
refused() { expect "${wait:-0}" "refused: $1" says "$2" "${@:3}"; }
allowed() { expect 0 "allowed: $1" "${@:2}"; }
container() { echo "{\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"name\":\"driver\",\"image\":\"$1\"${2:-}}]}}}}"; }
record() { echo "{\"metadata\":{\"annotations\":{\"farrier.dev/record\":$(jq -n --arg text "$1" '$text')}}}"; }

# A policy takes the API server some seconds.
wait=30 refused "a label of others on a node" "only labels below farrier.dev/" patch node "$node" '{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}'
refused "an annotation of others" "only annotations below farrier.dev/" patch node "$node" '{"metadata":{"annotations":{"x.example/y":"1"}}}'
refused "a taint" "nothing of a node but labels and annotations" patch node "$node" '{"spec":{"taints":null}}'
allowed "farrier's own marks" patch node "$node" '{"metadata":{"labels":{"farrier.dev/ready-for":"k"},"annotations":{"farrier.dev/ready-for":"k"}}}'

wait=30 refused "another registry's image" "images of its own registry" patch ds solo "$(container evil.example/root@sha256:0)"
refused "a registry whose name begins alike" "images of its own registry" patch ds solo "$(container "${registry}x/root@sha256:0")"
refused "an image by its tag" "by digest" patch ds solo "$(container "$registry/$driver:any")"
allowed "a driver's image" patch ds solo "$(container "$image_a")"
refused "a command beside it" "nothing of a container but its image" patch ds solo "$(container "$image_a" ', "command": ["sh"]')"
refused "a second container" "nothing of a container but its image" as_account patch ds solo -n "$drivers" --type json \
    -p "[{\"op\":\"add\",\"path\":\"/spec/template/spec/containers/-\",\"value\":{\"name\":\"more\",\"image\":\"$image_a\"}}]"
refused "the host's processes" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"template":{"spec":{"hostPID":true}}}}'
refused "another update strategy" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"updateStrategy":{"type":"RollingUpdate"}}}'
refused "a label of a pod" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"template":{"metadata":{"labels":{"x":"y"}}}}}'
refused "a label of a DaemonSet" "only annotations below farrier.dev/" patch ds solo '{"metadata":{"labels":{"x":"y"}}}'
refused "the name of a copy" "makes no DaemonSet of others a copy" patch ds solo '{"metadata":{"labels":{"farrier.dev/copy-of":"fleet"}}}'

# affinity TERMS
affinity() {
    echo "{\"spec\":{\"template\":{\"spec\":{\"affinity\":{\"nodeAffinity\":{\"requiredDuringSchedulingIgnoredDuringExecution\":{\"nodeSelectorTerms\":$1}}}}}}}"
}
fence='{"key":"farrier.dev/driver.0","operator":"DoesNotExist"}' zone='{"key":"zone","operator":"In","values":["a"]}'
allowed "a fence" patch ds solo "$(affinity "[{\"matchExpressions\":[$fence]}]")"
refused "other nodes" "nothing of an affinity" patch ds solo "$(affinity "[{\"matchExpressions\":[$zone]}]")"
k patch ds fleet -n "$drivers" --type merge -p "$(affinity "[{\"matchExpressions\":[$zone]}]")" > /dev/null
allowed "a fence beside a requirement" patch ds fleet "$(affinity "[{\"matchExpressions\":[$zone,$fence]}]")"
refused "a fence as a way around it" "nothing of an affinity" patch ds fleet "$(affinity "[{\"matchExpressions\":[$zone]},{\"matchExpressions\":[$fence]}]")"

# What was replaced may be put back; the record is not a way to name another image.
allowed "a record of what is there" patch ds solo "$(record "{\"driver\":{\"set\":\"$image_a\",\"replaced\":\"$vendor\"}}")"
refused "a record of what was never there" "names as replaced what was there" patch ds solo "$(record '{"driver":{"set":"x","replaced":"evil.example/root:1"}}')"
k patch ds solo -n "$drivers" --type merge -p "$(record "{\"driver\":{\"set\":\"$image_a\",\"replaced\":\"vendor.example/old:1\",\"why\":\"\\\"replaced\\\":\\\"evil.example/root:1\\\"\"}}")" > /dev/null
allowed "what was replaced" patch ds solo "$(container vendor.example/old:1)"
refused "what a pod says" "images of its own registry" patch ds solo "$(container evil.example/root:1)"
# Where it ends one name and begins the next.
k patch ds solo -n "$drivers" --type merge -p "$(record '"replaced":"replaced":"evil.example/root:1"')" > /dev/null
refused "an image between two names" "images of its own registry" patch ds solo "$(container evil.example/root:1)"

# copy LABELS IMAGE OWNERS: makes a DaemonSet.
copy() {
    as_account create -f - <<YAML
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: made
  namespace: $drivers
  labels: $1
  ownerReferences: $3
spec:
  selector: {matchLabels: {app: made}}
  template:
    metadata: {labels: {app: made}}
    spec: {nodeSelector: {$mark: none}, containers: [{name: driver, image: "$2"}]}
YAML
}
owners="[{apiVersion: apps/v1, kind: DaemonSet, name: fleet, uid: $(k get ds fleet -n "$drivers" -o jsonpath='{.metadata.uid}')}]"
refused "a new DaemonSet" "no DaemonSets but its copies" copy '{}' "$image_a" "$owners"
refused "a copy of nothing" "owned by its original" copy '{farrier.dev/copy-of: fleet}' "$image_a" '[]'
refused "a copy with another image" "images of farrier's registry only" copy '{farrier.dev/copy-of: fleet}' evil.example/root:1 "$owners"
allowed "a copy" copy '{farrier.dev/copy-of: fleet}' "$image_a" "$owners"
refused "the end of a DaemonSet" "no DaemonSets but its copies" as_account delete ds fleet -n "$drivers"

refused "another field of an operator's resource" "nothing of an operator's resource but" patch "$plural" "$resource" '{"spec":{"nodeSelector":null}}'
refused "another field of its driver" "nothing of an operator's resource but" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"startupProbe":null}}}'
refused "another registry in it" "repositories of its own registry" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"repository":"evil.example"}}}'
refused "an annotation of others on it" "only annotations below farrier.dev/" patch "$plural" "$resource" '{"metadata":{"annotations":{"x.example/y":"1"}}}'
refused "another version of the vendor's" "repositories of its own registry" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"version":"24"}}}'
allowed "its driver" patch "$plural" "$resource" "{\"spec\":{\"ofedDriver\":{\"repository\":\"$registry\",\"image\":\"$driver\",\"version\":\"1\",\"forcePrecompiled\":true}}}"

# Namespaces that were not named: RBAC ends there.
k create -f - > /dev/null <<YAML
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: elsewhere, namespace: $ns}
spec:
  selector: {matchLabels: {app: elsewhere}}
  template:
    metadata: {labels: {app: elsewhere}}
    spec: {nodeSelector: {$mark: none}, containers: [{name: driver, image: "$vendor"}]}
YAML
# What RBAC gives nobody is not even asked of the policies.
refused "the end of a node" "cannot delete" as_account delete node "$node"
refused "the end of an operator's resource" "cannot delete" as_account delete "$plural.$group" "$resource"
refused "a DaemonSet of another namespace" "cannot patch" as_account patch ds elsewhere -n "$ns" --type merge -p "$(container "$image_a")"

# Others are not bound by it, and without the policies RBAC alone lets all of it pass.
expect 0 "an administrator writes as before" k patch ds solo -n "$drivers" --type merge --dry-run=server -o name -p "$(container evil.example/root:1)"
k delete validatingadmissionpolicybindings -l "$run_label=$run" > /dev/null
expect 30 "without the policies another registry's image passes: they are what refused it" patch ds solo "$(container evil.example/root:1)"
k delete "$plural.$group" "$resource" > /dev/null
