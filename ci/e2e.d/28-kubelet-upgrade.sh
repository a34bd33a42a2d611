# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# A driver is upgraded on a real kubelet. farrier waits for the budget of the device's user; once the budget is deleted,
# farrier evicts the user, the driver's container restarts, a Job checks the node, and the node is uncordoned.

[ -n "$real_node" ] || { say "kubelet-upgrade: skipped, because it needs a kubelet (--real-node)"; return 0; }
components='drain upgrade-checks'
install_farrier
publish_test_drivers
pinned() { jq -r .pinned "$state/crasher/$1.json"; }
upgrade="stableFor: 5s, upgrade: {waitFor: {job: smoke}, drain: device-users, deviceResources: [e2e.farrier.dev/*], timeout: 5m}"

# devices add|remove: changes the node's capacity for a device that has no plug-in, as Kubernetes documents for extended
# resources.
devices() {
    k patch node "$real_node" --subresource status --type json \
        -p "[{\"op\": \"$1\", \"path\": \"/status/capacity/e2e.farrier.dev~1device\", \"value\": \"1\"}]" > /dev/null
}
restore_node() {
    k uncordon "$real_node" > /dev/null || true
    k label node "$real_node" farrier.dev/upgrade- > /dev/null || true
    devices remove || true
}
trap restore_node EXIT

node_is() { k get node "$real_node" -o json | jq -e "$1" > /dev/null; }
has_state() { node_is ".metadata.labels[\"farrier.dev/upgrade\"] == \"$1\""; }
runs() { k get pod "$1" -n "$drivers" -o json | jq -e '.status.phase == "Running"' > /dev/null; }
gone() { not k get pod "$1" -n "$drivers"; }
# Start time of the container, which only the kubelet and its runtime write.
started() { k get pods -n "$drivers" -l app=solo -o json | jq -r '[.items[].status.containerStatuses[]?.state.running.startedAt] | max // ""'; }

devices add
allocatable() { node_is '.status.allocatable["e2e.farrier.dev/device"] == "1"'; }
expect 60 "$real_node offers a device" allocatable
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
      template:
        spec:
          restartPolicy: Never
          tolerations: [{operator: Exists}]
          containers: [{name: smoke, image: "$(pinned works)", command: [sh, -c, "sleep 3"]}]
---
apiVersion: v1
kind: Pod
metadata: {name: train, namespace: $drivers, labels: {app: train}}
spec:
  nodeName: $real_node
  terminationGracePeriodSeconds: 2
  containers:
    - {name: train, image: "$(pinned works)", resources: {requests: {e2e.farrier.dev/device: 1}, limits: {e2e.farrier.dev/device: 1}}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: train, namespace: $drivers}
spec: {minAvailable: 1, selector: {matchLabels: {app: train}}}
YAML
test_driver_definition works "$upgrade"
add_daemonset solo "$(pinned works)" OnDelete "kubernetes.io/hostname: \"$(real_node_label kubernetes.io/hostname)\""
expect 120 "the driver runs" driver_runs "$(pinned works)"
expect 60 "a user of the device runs" runs train
before="$(started)"

start_farrier one
steady 10 "the driver's container is not restarted" started
test_driver_definition works-too "$upgrade"
expect 60 "after a change of the driver's version, farrier cordons the node" has_state cordoned
expect 30 "farrier waits for the budget" grep -q 'may not be evicted now' "$here/farrier-one.log"
steady 5 "the driver keeps running" started
k delete pdb train -n "$drivers" > /dev/null
expect 60 "without the budget, farrier evicts the device user" gone train
expect 60 "the driver's container runs the new image" driver_runs "$(pinned works-too)"
[[ "$(started)" > "$before" ]] || fail "the driver's container has restarted"
checked() { k get jobs -n "$drivers" -o json | jq -e 'any(.items[]; .status.succeeded == 1)' > /dev/null; }
expect 60 "the Job ran on the node" checked
expect 60 "the node is uncordoned" has_state uncordoned
expect 5 "the node is schedulable" node_is '.spec.unschedulable != true'
