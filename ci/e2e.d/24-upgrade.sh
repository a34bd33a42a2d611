# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# Nodes get another driver one by one. farrier evicts a user of the device only once its PodDisruptionBudget allows that, and a
# Job checks each node. After a kill, a new farrier resumes the upgrade. Apart from the base, farrier has only the permissions of
# the components `drain` and `upgrade-checks`.

components='drain upgrade-checks'
install_farrier
apps="farrier-$run-$scenario-apps"
k create namespace "$apps" > /dev/null
k label namespace "$apps" "$run_label=$run" > /dev/null

# The Job that checks a node; finish_check sets its outcome.
k apply -f - > /dev/null <<YAML
apiVersion: batch/v1
kind: CronJob
metadata: {name: smoke, namespace: $drivers}
spec:
  schedule: "0 0 1 1 *"
  suspend: true
  jobTemplate:
    spec:
      backoffLimit: 0
      template: {spec: {restartPolicy: Never, tolerations: [{operator: Exists}], containers: [{name: smoke, image: "smoke.example/smoke:1"}]}}
YAML

# add_device_user NAME NODE: creates a pod that uses a device, with the status that a kubelet would report.
add_device_user() {
    k create -f - > /dev/null <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $1, namespace: $apps, labels: {app: $1}}
spec:
  nodeName: $run-$scenario-$2
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  containers:
    - {name: train, image: "train.example/train:1", resources: {requests: {e2e.farrier.dev/device: 1}, limits: {e2e.farrier.dev/device: 1}}}
YAML
    k patch pod "$1" -n "$apps" --subresource status --type merge \
        -p '{"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}' > /dev/null
}

state() { k get node "$run-$scenario-$1" -o json | jq -r '.metadata.labels["farrier.dev/upgrade"] // ""'; }
has_state() { [ "$(state "$1")" = "$2" ]; }
cordoned() { k get node "$run-$scenario-$1" -o json | jq -e '.spec.unschedulable == true'; }
gone() { not k get pod "$1" -n "$apps"; }
check_pods() { k get pods -n "$drivers" -l batch.kubernetes.io/job-name -o json; }
# check_on NODE: succeeds if the check's pod runs on the node. From then on, the script's kubelet does not change the pod's
# status.
check_on() { check_pods | jq -e --arg node "$run-$scenario-$1" 'any(.items[]; .spec.nodeName == $node and .status.phase == "Running")'; }
# finish_check NODE: waits for the check's pod on the node, and lets it succeed.
finish_check() {
    local pod
    expect 30 "a Job checks $1" check_on "$1"
    pod="$(check_pods | jq -r --arg node "$run-$scenario-$1" '[.items[] | select(.spec.nodeName == $node) | .metadata.name][0]')"
    k patch pod "$pod" -n "$drivers" --subresource status --type merge -p '{"status": {"phase": "Succeeded"}}' > /dev/null
}
back_in_service() { has_state "$1" uncordoned && not cordoned "$1"; }

definition "{strategy: image, namespace: $drivers, daemonSet: fleet, container: driver, stableFor: 2s,
      upgrade: {canary: 1, waitFor: {job: smoke}, drain: device-users, deviceResources: [e2e.farrier.dev/*], timeout: 5m}}"
for node in n1 n2 n3; do add_node "$node" "$kernel_a"; done
k cordon "$run-$scenario-n3" > /dev/null
add_daemonset fleet "$registry/$driver:vendor" OnDelete
for node in n1 n2 n3; do expect 30 "the vendor's driver runs on $node" pod_on fleet "$node" "$registry/$driver:vendor"; done
add_device_user first n1
add_device_user second n2
k apply -f - > /dev/null <<YAML
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: first, namespace: $apps}
spec: {minAvailable: 1, selector: {matchLabels: {app: first}}}
YAML
budget_blocks_eviction() { [ "$(k get pdb first -n "$apps" -o jsonpath='{.status.observedGeneration}/{.status.disruptionsAllowed}')" = 1/0 ]; }
expect 20 "a budget protects the device user on n1" budget_blocks_eviction

start_farrier one
expect 30 "the DaemonSet gets kernel A's image" has_image fleet "$image_a"
expect 30 "n1 is cordoned" has_state n1 cordoned
expect 5 "n1 is unschedulable" cordoned n1
expect 20 "farrier waits for the budget" grep -q 'may not be evicted now' "$here/farrier-one.log"
kill -KILL "$(cat "$here/farrier-one.pid")"
k delete pdb first -n "$apps" > /dev/null
start_farrier two
expect 90 "after the kill another farrier continues, and the device user on n1 is evicted" gone first
expect 30 "n1 gets its driver" pod_on fleet n1 "$image_a"
expect 5 "n2 waits for n1" pod_on fleet n2 "$registry/$driver:vendor"
as_admin upgrade pause "$drivers/fleet" --cluster kube > /dev/null
finish_check n1
expect 60 "n1 is uncordoned" back_in_service n1
waits_for() {
    as_farrier upgrade plan --cluster kube --registry "$registry" --write-namespaces "$drivers" -o json |
        jq -e --arg node "$run-$scenario-$1" --arg reason "$2" 'any(.[].nodes[]; .node == $node and .waits.reason == $reason)'
}
expect 20 "the plan reports the remaining nodes as paused" waits_for n2 paused
expect 5 "the plan reports that n3 was cordoned before the upgrade" waits_for n3 cordoned
steady 10 "the upgrade of n2 does not start" state n2
as_admin upgrade resume "$drivers/fleet" --cluster kube > /dev/null
expect 90 "n2 gets its driver" pod_on fleet n2 "$image_a"
expect 0 "the device user on n2 was evicted" gone second
finish_check n2
expect 60 "n2 is uncordoned" back_in_service n2
expect 5 "n3 keeps its driver" pod_on fleet n3 "$registry/$driver:vendor"
expect 0 "n3 stays cordoned, as before the upgrade" cordoned n3

expect 10 "the upgrade can be aborted" as_admin upgrade abort "$drivers/fleet" --cluster kube
expect 90 "n1 gets its previous driver" pod_on fleet n1 "$registry/$driver:vendor"
