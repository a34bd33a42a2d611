# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# farrier's ServiceAccount can only make the writes that farrier itself makes: the API server refuses all others because of the
# ValidatingAdmissionPolicies in deploy/.
# Every write here is a server-side dry run, which admission policies check as well.

# Install the components for the Jobs of checks and forecasts; without the components all of these Jobs are refused.
components='upgrade-checks upgrade-forecasts'
install_farrier
vendor=vendor.example/driver:1
add_node n1 "$kernel_a"
for name in solo fleet; do add_daemonset "$name" "$vendor" OnDelete; done
use_kind NicNodePolicy
make_resource "{tolerations: [{operator: Exists}], nodeSelector: {$mark: 'true'}, ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}}"
node="$run-$scenario-n1"

as_account() { kubectl --kubeconfig "$here/kubeconfig" "$@" --dry-run=server -o name; }
# patch KIND NAME JSON: applies a merge patch.
patch() { as_account patch "$1" "$2" -n "$drivers" --type merge -p "$3"; }
# says WORDS COMMAND...: succeeds if the command is refused with a message that contains WORDS. For `expect` only.
says() {
    local words="$1"
    shift
    not "$@" && grep -qF -- "$words" "$here/expected"
}
refused() { expect "${wait:-0}" "refused: $1" says "$2" "${@:3}"; }
allowed() { expect 0 "allowed: $1" "${@:2}"; }
container() { echo "{\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"name\":\"driver\",\"image\":\"$1\"${2:-}}]}}}}"; }
record() { echo "{\"metadata\":{\"annotations\":{\"farrier.dev/record\":$(jq -n --arg text "$1" '$text')}}}"; }

# The API server needs some seconds to enforce a new policy.
wait=30 refused "a foreign label on a node" "only labels below farrier.dev/" patch node "$node" '{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}'
refused "a foreign annotation" "only annotations below farrier.dev/" patch node "$node" '{"metadata":{"annotations":{"x.example/y":"1"}}}'
refused "a taint" "removes no taint but the startup taint" patch node "$node" '{"spec":{"taints":null}}'
refused "a cordon where farrier does not drain" "its cordon where it may drain" patch node "$node" '{"spec":{"unschedulable":true}}'
allowed "farrier's own marks" patch node "$node" '{"metadata":{"labels":{"farrier.dev/ready-for":"k"},"annotations":{"farrier.dev/ready-for":"k"}}}'

wait=30 refused "another registry's image" "images of its own registry" patch ds solo "$(container evil.example/root@sha256:0)"
refused "a registry whose name begins alike" "images of its own registry" patch ds solo "$(container "${registry}x/root@sha256:0")"
refused "an image that only copies may have" "images of its own registry" patch ds solo "$(container tools.example/root@sha256:0)"
refused "an image by its tag" "by digest" patch ds solo "$(container "$registry/$driver:any")"
allowed "a driver's image" patch ds solo "$(container "$image_a")"
refused "a command beside the image" "nothing of a container but its image" patch ds solo "$(container "$image_a" ', "command": ["sh"]')"
refused "a second container" "nothing of a container but its image" as_account patch ds solo -n "$drivers" --type json \
    -p "[{\"op\":\"add\",\"path\":\"/spec/template/spec/containers/-\",\"value\":{\"name\":\"more\",\"image\":\"$image_a\"}}]"
refused "the host's processes" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"template":{"spec":{"hostPID":true}}}}'
refused "another update strategy" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"updateStrategy":{"type":"RollingUpdate"}}}'
refused "a label of a pod" "nothing of a DaemonSet but images" patch ds solo '{"spec":{"template":{"metadata":{"labels":{"x":"y"}}}}}'
refused "a label of a DaemonSet" "only annotations below farrier.dev/" patch ds solo '{"metadata":{"labels":{"x":"y"}}}'
refused "turning another DaemonSet into a copy" "makes no DaemonSet of others a copy" patch ds solo '{"metadata":{"labels":{"farrier.dev/copy-of":"fleet"}}}'

# affinity TERMS: prints a patch that sets the terms of the node affinity.
affinity() {
    echo "{\"spec\":{\"template\":{\"spec\":{\"affinity\":{\"nodeAffinity\":{\"requiredDuringSchedulingIgnoredDuringExecution\":{\"nodeSelectorTerms\":$1}}}}}}}"
}
fence='{"key":"farrier.dev/driver.0","operator":"DoesNotExist"}' zone='{"key":"zone","operator":"In","values":["a"]}'
allowed "a fence" patch ds solo "$(affinity "[{\"matchExpressions\":[$fence]}]")"
refused "other nodes" "nothing of an affinity" patch ds solo "$(affinity "[{\"matchExpressions\":[$zone]}]")"
k patch ds fleet -n "$drivers" --type merge -p "$(affinity "[{\"matchExpressions\":[$zone]}]")" > /dev/null
allowed "a fence beside a requirement" patch ds fleet "$(affinity "[{\"matchExpressions\":[$zone,$fence]}]")"
refused "hiding other nodes behind a fence" "nothing of an affinity" patch ds fleet "$(affinity "[{\"matchExpressions\":[$zone]},{\"matchExpressions\":[$fence]}]")"

# A replaced image may be restored, but a record cannot introduce another image.
allowed "a record of the current image" patch ds solo "$(record "{\"driver\":{\"set\":\"$image_a\",\"replaced\":\"$vendor\"}}")"
refused "a record of an image that was never set" "names as replaced what was there" patch ds solo "$(record '{"driver":{"set":"x","replaced":"evil.example/root:1"}}')"
k patch ds solo -n "$drivers" --type merge -p "$(record "{\"driver\":{\"set\":\"$image_a\",\"replaced\":\"vendor.example/old:1\",\"why\":\"\\\"replaced\\\":\\\"evil.example/root:1\\\"\"}}")" > /dev/null
allowed "the replaced image" patch ds solo "$(container vendor.example/old:1)"
refused "an image from a pod's message" "images of its own registry" patch ds solo "$(container evil.example/root:1)"
# An attempt to merge two names in a record.
k patch ds solo -n "$drivers" --type merge -p "$(record '"replaced":"replaced":"evil.example/root:1"')" > /dev/null
refused "an image between two names" "images of its own registry" patch ds solo "$(container evil.example/root:1)"
k patch ds solo -n "$drivers" --type json \
    -p "[{\"op\":\"add\",\"path\":\"/spec/template/spec/containers/-\",\"value\":{\"name\":\"metrics\",\"image\":\"$vendor\"}}]" > /dev/null
moved="$(k get ds solo -n "$drivers" -o json | jq -c '.spec.template.spec | {spec: {template: {spec: {initContainers: [.containers[1]], containers: [.containers[0]]}}}}')"
refused "a container among the init containers" "nothing of a container but its image" patch ds solo "$moved"

# A realistic driver that is fenced off and avoids some nodes. `fleet` is one of the originals that the installation names.
k patch ds fleet -n "$drivers" --type merge -p "$(affinity "[{\"matchExpressions\":[$zone,$fence]}]")" > /dev/null
k patch ds fleet -n "$drivers" --type merge -p '{"spec": {"template": {"metadata": {"annotations": {"site.example/a": "b"}}, "spec": {
    "serviceAccountName": "driver", "hostPID": true, "volumes": [{"name": "modules", "hostPath": {"path": "/lib/modules"}}],
    "initContainers": [{"name": "first", "image": "'"$image_a"'"}],
    "containers": [{"name": "driver", "image": "'"$vendor"'", "command": ["driver"], "securityContext": {"privileged": true},
        "volumeMounts": [{"name": "modules", "mountPath": "/lib/modules"}]}]}}}}' > /dev/null
# copy_of_fleet [FILTER]: prints a DaemonSet as farrier copies it from `fleet`, modified by a jq filter.
copy_of_fleet() {
    k get ds fleet -n "$drivers" -o json | jq --arg image "$image_a" --arg driver "$image_b" '.metadata as $fleet | {apiVersion, kind,
        metadata: {name: "made", namespace: .metadata.namespace, labels: {"farrier.dev/copy-of": "fleet"},
            ownerReferences: [{apiVersion, kind, name: $fleet.name, uid: $fleet.uid}]},
        spec: (.spec | .selector.matchLabels["farrier.dev/copy-of"] = "fleet" | .template.metadata.labels["farrier.dev/copy-of"] = "fleet"
            | .template.spec |= (.containers[0].image = $driver | .nodeSelector["farrier.dev/driver.0"] = "handed-over"
                | .affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions |= map(select(.operator == "In"))
                | .affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution += [{labelSelector: {matchLabels: {app: "fleet"}},
                    topologyKey: "kubernetes.io/hostname"}]))}
        | '"${1:-.}"
}
copy() { copy_of_fleet "${1:-.}" | as_account create -f -; }
pod_of_copy() { copy ".spec.template.spec |= ($1)"; }
allowed "a copy" copy
allowed "a copy with a container from a registry that the site named" pod_of_copy '.initContainers[0].image = "tools.example/first:1"'
refused "a new DaemonSet" "no DaemonSets but its copies" copy 'del(.metadata.labels)'
refused "a copy without an owner" "owned by its original" copy '.metadata.ownerReferences = []'
refused "a copy of a DaemonSet that the site did not name" "that its admission policy names" copy '.metadata.ownerReferences[0].name = "ghost"'
# The API server first has to read the DaemonSets with which this policy compares. Kubernetes 1.36 does so only once: after an
# earlier run removed its policies, restart the API server (docs/security.md, "Open").
wait=30 refused "a copy of a deleted DaemonSet" "of that name which is there" copy '.metadata.ownerReferences[0].uid = "0"'
while read -r what words filter; do refused "a copy with ${what//_/ }" "${words//_/ }" pod_of_copy "$filter"; done <<'TEXT'
another_image images_of_farrier's_registry_only .containers[0].image = "evil.example/root:1"
another_command its_original's_containers .containers[0].command = ["sh", "-c", "id"]
arguments its_original's_containers .containers[0].args = ["id"]
no_command_of_its_own its_original's_containers del(.containers[0].command)
a_second_container its_original's_containers .containers += [.containers[0] + {name: "more"}]
a_duplicate_init_container its_original's_containers .initContainers += [.initContainers[0] + {name: "more"}]
no_init_container its_original's_containers del(.initContainers)
swapped_container_names its_original's_containers .containers[0].name = "first" | .initContainers[0].name = "driver"
a_Secret_in_a_variable its_original's_containers .containers[0].env = [{name: "KEY", valueFrom: {secretKeyRef: {name: "key", key: "key"}}}]
another_mount its_original's_containers .containers[0].volumeMounts[0].mountPath = "/"
a_capability its_original's_containers .containers[0].securityContext.capabilities.add = ["SYS_BOOT"]
all_of_the_host's_files its_original's_volumes .volumes[0].hostPath.path = "/"
a_second_volume its_original's_volumes .volumes += [{name: "host", hostPath: {path: "/"}}]
another_account its_original's_volumes .serviceAccountName = "farrier" | .serviceAccount = "farrier"
the_host's_network its_original's_volumes .hostNetwork = true
another_priority its_original's_volumes .priorityClassName = "system-node-critical"
all_nodes nodes_of_its_original's_only del(.nodeSelector)
an_additional_zone nodes_of_its_original's_only .affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values += ["b"]
a_way_around_the_zone nodes_of_its_original's_only .affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms += [{matchExpressions: [{key: "farrier.dev/x", operator: "DoesNotExist"}]}]
no_affinity nodes_of_its_original's_only del(.affinity)
TEXT
refused "a copy with another annotation on its pods" "original's annotations and labels" copy '.spec.template.metadata.annotations["x.example/y"] = "1"'
refused "a copy with another label on its pods" "original's annotations and labels" copy '.spec.template.metadata.labels["app.example/y"] = "1"'
# An existing copy whose original has changed: the copy may keep its fields, and may only take new values from the original.
copy_of_fleet | k create -f - > /dev/null
k patch ds fleet -n "$drivers" --type merge -p '{"spec": {"template": {"spec": {"hostPID": false}}}}' > /dev/null
wait=10 allowed "an annotation of a copy whose original changed" patch ds made '{"metadata":{"annotations":{"farrier.dev/rollout":"{}"}}}'
refused "the host's network for an existing copy" "original's volumes" patch ds made '{"spec":{"template":{"spec":{"hostNetwork":true}}}}'
refused "a command for an existing copy" "original's containers" patch ds made "$(container "$image_b" ', "command": ["sh"]')"
allowed "the original's current value" patch ds made '{"spec":{"template":{"spec":{"hostPID":false}}}}'
allowed "the deletion of a copy" as_account delete ds made -n "$drivers"
k delete ds made -n "$drivers" > /dev/null
refused "the deletion of an original DaemonSet" "no DaemonSets but its copies" as_account delete ds fleet -n "$drivers"

refused "another field of an operator's resource" "nothing of an operator's resource but" patch "$plural" "$resource" '{"spec":{"nodeSelector":null}}'
refused "another field of the resource's driver" "nothing of an operator's resource but" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"startupProbe":null}}}'
refused "a registry that only copies may use" "repositories of its own registry" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"repository":"tools.example"}}}'
refused "another registry in an operator's resource" "repositories of its own registry" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"repository":"evil.example"}}}'
refused "a foreign annotation on an operator's resource" "only annotations below farrier.dev/" patch "$plural" "$resource" '{"metadata":{"annotations":{"x.example/y":"1"}}}'
refused "another version of the vendor's driver" "repositories of its own registry" patch "$plural" "$resource" '{"spec":{"ofedDriver":{"version":"24"}}}'
allowed "farrier's driver in an operator's resource" patch "$plural" "$resource" "{\"spec\":{\"ofedDriver\":{\"repository\":\"$registry\",\"image\":\"$driver\",\"version\":\"1\",\"forcePrecompiled\":true}}}"

# build [FILTER]: prints a build's Job as farrier creates it, modified by a jq filter.
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
        | .spec.template.metadata.annotations = '"${annotations:-null}"' | .spec.template.spec |= ('"${1:-.}"')' | as_account create -n "$builds" -f -
}
wait=30 refused "a build with another image" "one of the builds of farrier's registry" build ".containers[0].image = \"$image_a\""
refused "a build's image by its tag" "by digest" build ".containers[0].image = \"$registry/builds:any\""
allowed "a build" build
while read -r what words filter; do refused "a build with ${what//_/ }" "${words//_/ }" build "$filter"; done <<'TEXT'
the_host's_files has_no_volume .volumes = [{name: "host", hostPath: {path: "/"}}]
a_Secret has_no_volume .volumes = [{name: "key", secret: {secretName: "key"}}]
the_host's_network nothing_of_its_node's .hostNetwork = true
the_host's_processes nothing_of_its_node's .hostPID = true
a_system_priority displaces_nothing .priorityClassName = "system-node-critical"
a_node's_name nothing_of_its_node's .nodeName = "node1"
another_account nothing_of_its_node's .serviceAccountName = "farrier"
an_init_container no_initial_container .initContainers = [.containers[0] + {name: "first"}]
a_second_container_of_another_registry one_of_the_builds .containers += [{name: "more", image: "evil.example/root:1"}]
a_Secret_in_a_variable no_variables .containers[0].env = [{name: "KEY", valueFrom: {secretKeyRef: {name: "key", key: "key"}}}]
a_token no_token .automountServiceAccountToken = true
a_token_by_default no_token del(.automountServiceAccountToken)
root user_is_not_root .securityContext.runAsUser = 0
no_user user_is_not_root del(.securityContext.runAsUser)
another_user_of_a_container no_capability .containers[0].securityContext.runAsUser = 0
no_security_context_of_a_container no_capability del(.containers[0].securityContext)
all_system_calls_of_a_container no_capability .containers[0].securityContext.seccompProfile.type = "Unconfined"
a_capability no_capability .containers[0].securityContext.capabilities.add = ["SYS_ADMIN"]
set-id_programs no_capability del(.containers[0].securityContext.allowPrivilegeEscalation)
all_system_calls seccomp_profile .securityContext.seccompProfile.type = "Unconfined"
TEXT
annotations='{"k8s.v1.cni.cncf.io/networks":"any"}' refused "a build with another network" "no annotation" build
k create -n "$builds" -f - > /dev/null <<YAML
apiVersion: batch/v1
kind: Job
metadata: {name: others}
spec:
  suspend: true
  template: {spec: {restartPolicy: Never, containers: [{name: any, image: "$vendor"}]}}
YAML
refused "the deletion of a foreign Job" "no Jobs but its builds" as_account delete job others -n "$builds"
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
refused "an unrestricted pod, whoever creates it" "violates PodSecurity" k run alone --image "$vendor" -n "$builds" --dry-run=server
# exec supports no dry run. The pod has no node, so an allowed exec fails there.
exec_as_account() { kubectl --kubeconfig "$here/kubeconfig" exec others -n "$builds" -- "$@"; }
wait=30 refused "a shell in a pod" "nothing in a pod but the runner's follow" exec_as_account sh -c id
refused "the runner's follow, but only because the pod has no node" "does not have a host assigned" exec_as_account /.farrier/runner follow 0

# check NAME [FILTER]: prints a check's Job as farrier creates it from a site's CronJob, with its pod modified by a jq filter.
check() {
    jq -n --arg name "$1" --arg namespace "$drivers" --arg node "$node" '{apiVersion: "batch/v1", kind: "Job",
        metadata: {name: $name, namespace: $namespace, labels: {"farrier.dev/upgrade-check": ""}},
        spec: {backoffLimit: 0, suspend: true, template: {spec: {restartPolicy: "Never", nodeName: $node, automountServiceAccountToken: false,
            tolerations: [{operator: "Exists"}], imagePullSecrets: [{name: "any"}], securityContext: {runAsUser: 1000, fsGroup: 1000},
            volumes: [{name: "scratch", emptyDir: {}}, {name: "settings", configMap: {name: "any"}}],
            initContainers: [{name: "first", image: "smoke.example/smoke:1", args: ["first"]}],
            containers: [{name: "smoke", image: "smoke.example/smoke:1", command: ["smoke"], workingDir: "/tmp",
                env: [{name: "FARRIER_DRIVER_POD", value: "uid"}, {name: "NODE", valueFrom: {fieldRef: {fieldPath: "spec.nodeName"}}}],
                envFrom: [{configMapRef: {name: "any"}}], volumeMounts: [{name: "scratch", mountPath: "/scratch"}],
                securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: ["ALL"]}, seccompProfile: {type: "RuntimeDefault"}},
                resources: {limits: {"e2e.farrier.dev/device": "1"}}}]}}}}
        | .spec.template.metadata.annotations = '"${annotations:-null}"' | .spec.template.spec |= ('"${2:-.}"')' | as_account create -f -
}
wait=30 allowed "a check" check farrier-check-1
refused "a check of another name" "no Jobs but its builds" check any
annotations='{"site.example/any":"x","container.apparmor.security.beta.kubernetes.io/smoke":"runtime/default"}' allowed "a check with annotations" check farrier-check-1
annotations='{"container.apparmor.security.beta.kubernetes.io/smoke":"unconfined"}' refused "a check with an AppArmor annotation" "lifts none" check farrier-check-1
while read -r what words filter; do refused "a check with ${what//_/ }" "${words//_/ }" check farrier-check-1 "$filter"; done <<'TEXT'
a_privileged_container not_privileged .containers[0].securityContext = {privileged: true}
a_privileged_init_container not_privileged .initContainers[0].securityContext = {privileged: true}
the_host's_network nothing_of_its_node's .hostNetwork = true
the_host's_processes nothing_of_its_node's .hostPID = true
the_host's_IPC nothing_of_its_node's .hostIPC = true
a_host_port nothing_of_its_node's .containers[0].ports = [{containerPort: 80, hostPort: 80}]
another_account no_account .serviceAccountName = "farrier"
a_token no_token .automountServiceAccountToken = true
a_token_by_default no_token del(.automountServiceAccountToken)
the_host's_files no_volumes_but .volumes += [{name: "host", hostPath: {path: "/"}}]
a_Secret no_volumes_but .volumes += [{name: "key", secret: {secretName: "key"}}]
a_Secret_among_others no_volumes_but .volumes += [{name: "key", projected: {sources: [{secret: {name: "key"}}]}}]
a_projected_token no_volumes_but .volumes += [{name: "key", projected: {sources: [{serviceAccountToken: {path: "token"}}]}}]
others'_data no_volumes_but .volumes += [{name: "data", persistentVolumeClaim: {claimName: "data"}}]
a_CSI_volume no_volumes_but .volumes += [{name: "data", csi: {driver: "csi.example", nodePublishSecretRef: {name: "key"}}}]
a_Secret_in_a_variable no_variables_from .containers[0].env += [{name: "KEY", valueFrom: {secretKeyRef: {name: "key", key: "key"}}}]
a_Secret_in_a_variable_of_an_init_container no_variables_from .initContainers[0].env = [{name: "KEY", valueFrom: {secretKeyRef: {name: "key", key: "key"}}}]
a_Secret_as_variables no_variables_from .containers[0].envFrom += [{secretRef: {name: "key"}}]
a_capability adds_no_capability .containers[0].securityContext.capabilities.add = ["SYS_MODULE"]
a_capability_of_an_init_container adds_no_capability .initContainers[0].securityContext.capabilities.add = ["SYS_ADMIN"]
all_system_calls adds_no_capability .containers[0].securityContext.seccompProfile.type = "Unconfined"
all_system_calls_of_the_pod adds_no_capability .securityContext.seccompProfile.type = "Unconfined"
an_unmasked_proc adds_no_capability .hostUsers = false | .containers[0].securityContext.procMount = "Unmasked"
no_AppArmor adds_no_capability .containers[0].securityContext.appArmorProfile.type = "Unconfined"
an_SELinux_type adds_no_capability .containers[0].securityContext.seLinuxOptions.type = "spc_t"
a_kernel_parameter adds_no_capability .securityContext.sysctls = [{name: "net.ipv4.ip_forward", value: "1"}]
a_system_priority displaces_nothing .priorityClassName = "system-node-critical"
TEXT
forecast='del(.volumes, .initContainers, .securityContext) | .hostPID = true | .hostNetwork = true | .containers = [{name: "forecast", image: "'"$image_a"'",
    command: ["driver-entrypoint", "forecast", "--message", "/dev/termination-log", "m"], env: [{name: "FARRIER_DRIVER_POD", value: "uid"}],
    securityContext: {capabilities: {drop: ["ALL"], add: ["SYS_PTRACE", "DAC_READ_SEARCH"]}, appArmorProfile: {type: "Unconfined"}}}]'
allowed "a forecast" check farrier-forecast-1 "$forecast"
while read -r what words filter; do refused "a forecast with ${what//_/ }" "${words//_/ }" check farrier-forecast-1 "$forecast | $filter"; done <<'TEXT'
another_image nothing_but_driver-entrypoint .containers[0].image = "evil.example/root:1"
another_program nothing_but_driver-entrypoint .containers[0].command = ["sh", "-c"]
a_capability nothing_but_driver-entrypoint .containers[0].securityContext.capabilities.add += ["SYS_ADMIN"]
a_privileged_container not_privileged .containers[0].securityContext.privileged = true
a_token no_token .automountServiceAccountToken = true
another_account no_account .serviceAccountName = "farrier"
TEXT

# Namespaces that the installation does not name are out of reach because of RBAC.
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
# RBAC refuses these writes before the policies are evaluated.
refused "the deletion of a node" "cannot delete" as_account delete node "$node"
refused "the deletion of an operator's resource" "cannot delete" as_account delete "$plural.$group" "$resource"
refused "a DaemonSet of another namespace" "cannot patch" as_account patch ds elsewhere -n "$ns" --type merge -p "$(container "$image_a")"

# The policies do not restrict other users. Without the policies, RBAC alone would allow all of these writes.
expect 0 "an administrator is not restricted" k patch ds solo -n "$drivers" --type merge --dry-run=server -o name -p "$(container evil.example/root:1)"
k delete validatingadmissionpolicybindings -l "$run_label=$run" > /dev/null
expect 30 "without the policies another registry's image is allowed" patch ds solo "$(container evil.example/root:1)"
k delete "$plural.$group" "$resource" > /dev/null
