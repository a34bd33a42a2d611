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
refused "a cordon, where farrier does not drain" "its cordon where it may drain" patch node "$node" '{"spec":{"unschedulable":true}}'
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

# build [FILTER]: the Job of a build, as farrier makes it and a filter of jq changes it.
build="$registry/builds@sha256:$(printf '0%.0s' {1..64})"
build() {
    jq -n --arg image "$build" '{apiVersion: "batch/v1", kind: "Job",
        metadata: {name: "made", labels: {"app.kubernetes.io/name": "farrier-build", "app.kubernetes.io/managed-by": "farrier"}},
        spec: {backoffLimit: 0, suspend: true, ttlSecondsAfterFinished: 3600, template: {
            metadata: {labels: {"app.kubernetes.io/name": "farrier-build"}},
            spec: {restartPolicy: "Never", activeDeadlineSeconds: 9900, terminationGracePeriodSeconds: 0,
                automountServiceAccountToken: false, enableServiceLinks: false, nodeSelector: {"kubernetes.io/arch": "amd64"},
                priorityClassName: "any", runtimeClassName: "any", schedulerName: "any",
                imagePullSecrets: [{name: "any"}], tolerations: [{operator: "Exists"}],
                topologySpreadConstraints: [{maxSkew: 1, topologyKey: "kubernetes.io/hostname", whenUnsatisfiable: "ScheduleAnyway"}],
                securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, seccompProfile: {type: "RuntimeDefault"}},
                containers: [{name: "build", image: $image, command: ["/.farrier/runner", "pod"],
                    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: ["ALL"]}},
                    resources: {requests: {cpu: "1", memory: "1Gi"}, limits: {cpu: "1", memory: "2Gi"}}}]}}}}
        | .spec.template.spec |= ('"${1:-.}"')' | as_account create -n "$builds" -f -
}
wait=30 refused "a build with another image" "one of the builds of farrier's registry" build ".containers[0].image = \"$image_a\""
refused "a build's image by its tag" "by digest" build ".containers[0].image = \"$registry/builds:any\""
allowed "a build" build
while read -r what words filter; do refused "a build with ${what//_/ }" "${words//_/ }" build "$filter"; done <<'TEXT'
the_host's_files has_no_volume .volumes = [{name: "host", hostPath: {path: "/"}}]
a_Secret has_no_volume .volumes = [{name: "key", secret: {secretName: "key"}}]
the_host's_network nothing_of_its_node's .hostNetwork = true
the_host's_processes nothing_of_its_node's .hostPID = true
a_priority_of_the_system's displaces_nothing .priorityClassName = "system-node-critical"
a_node's_name nothing_of_its_node's .nodeName = "node1"
another_account nothing_of_its_node's .serviceAccountName = "farrier"
an_initial_container no_initial_container .initContainers = [.containers[0] + {name: "first"}]
a_second_container_of_another_registry one_of_the_builds .containers += [{name: "more", image: "evil.example/root:1"}]
a_Secret_in_a_variable no_variables .containers[0].env = [{name: "KEY", valueFrom: {secretKeyRef: {name: "key", key: "key"}}}]
a_token no_token .automountServiceAccountToken = true
a_token_by_default no_token del(.automountServiceAccountToken)
root user_is_not_root .securityContext.runAsUser = 0
any_user user_is_not_root del(.securityContext.runAsUser)
another_user_of_its_container no_capability .containers[0].securityContext.runAsUser = 0
a_container's_defaults no_capability del(.containers[0].securityContext)
all_system_calls_of_its_container no_capability .containers[0].securityContext.seccompProfile.type = "Unconfined"
a_capability no_capability .containers[0].securityContext.capabilities.add = ["SYS_ADMIN"]
set-id_programs no_capability del(.containers[0].securityContext.allowPrivilegeEscalation)
all_system_calls seccomp_profile .securityContext.seccompProfile.type = "Unconfined"
TEXT
k create -n "$builds" -f - > /dev/null <<YAML
apiVersion: batch/v1
kind: Job
metadata: {name: others}
spec:
  suspend: true
  template: {spec: {restartPolicy: Never, containers: [{name: any, image: "$vendor"}]}}
YAML
refused "the end of another's Job" "no Jobs but its builds" as_account delete job others -n "$builds"
builds="$ns" refused "a build elsewhere" "cannot create" build
refused "a pod without a Job" "cannot create" as_account run alone --image "$build" -n "$builds"
k create -n "$builds" -f - > /dev/null <<YAML
apiVersion: v1
kind: Pod
metadata: {name: others}
spec:
  automountServiceAccountToken: false
  nodeSelector: {e2e.farrier.dev/none: "true"}
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  containers: [{name: build, image: "$vendor", securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}}]
YAML
refused "a pod that is not restricted, whoever makes it" "violates PodSecurity" k run alone --image "$vendor" -n "$builds" --dry-run=server
# Without a dry run, which exec does not have. No node is the pod's: what is allowed ends there.
exec_as_account() { kubectl --kubeconfig "$here/kubeconfig" exec others -n "$builds" -- "$@"; }
wait=30 refused "a shell in a pod" "nothing in a pod but the runner's follow" exec_as_account sh -c id
refused "output of a build, by nothing but the pod" "does not have a host assigned" exec_as_account /.farrier/runner follow 0

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
