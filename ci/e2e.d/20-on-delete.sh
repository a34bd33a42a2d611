# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# With updateStrategy OnDelete, a pod survives the reboot with its old image, so farrier must restart it.

definition "{strategy: image, namespace: $drivers, daemonSet: sleepy, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset sleepy "$registry/$driver:vendor" OnDelete
start_farrier one
expect 30 "the DaemonSet gets kernel A's image" has_image sleepy "$image_a"
k delete pods --all -n "$drivers" --grace-period=0 --force > /dev/null 2>&1
expect 30 "the restarted pod runs the image" pod_on sleepy n1 "$image_a"

k apply -f - > /dev/null <<YAML
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: sleepy, namespace: $drivers}
spec: {minAvailable: 1, selector: {matchLabels: {app: sleepy}}}
YAML
budget() { [ "$(k get pdb sleepy -n "$drivers" -o jsonpath='{.status.observedGeneration}/{.status.disruptionsAllowed}')" = 1/0 ]; }
expect 20 "a budget protects the pod" budget
reboot n1 "$kernel_b"
expect 20 "kernel B's image is set" has_image sleepy "$image_b"
steady 5 "the budget keeps the old pod" pods_of sleepy
k delete pdb sleepy -n "$drivers" > /dev/null
expect 60 "without the budget the pod is restarted" pod_on sleepy n1 "$image_b"
