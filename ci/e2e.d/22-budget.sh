# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A PodDisruptionBudget refuses an eviction, so one DaemonSet waits. Another DaemonSet with the same image continues, and
# farrier does not overload the API server with retries.

definition "{strategy: image, namespace: $drivers, daemonSet: guarded, container: driver, stableFor: 2s}" \
    "{strategy: image, namespace: $drivers, daemonSet: open, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset guarded "$image_a" OnDelete
add_daemonset open "$image_a" OnDelete
expect 30 "the pod of one DaemonSet runs" pod_on guarded n1 "$image_a"
expect 30 "the pod of the other DaemonSet runs" pod_on open n1 "$image_a"
k apply -f - > /dev/null <<YAML
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: guarded, namespace: $drivers}
spec: {minAvailable: 1, selector: {matchLabels: {app: guarded}}}
YAML
budget() { [ "$(k get pdb guarded -n "$drivers" -o jsonpath='{.status.observedGeneration}/{.status.disruptionsAllowed}')" = 1/0 ]; }
expect 20 "a budget protects the pod of the first" budget
start_farrier one
reboot n1 "$kernel_b"
expect 20 "kernel B's image is set in the first" has_image guarded "$image_b"
expect 5 "kernel B's image is set in the second" has_image open "$image_b"
expect 40 "the second DaemonSet's pod is restarted" pod_on open n1 "$image_b"
expect 5 "the budget keeps the first DaemonSet's pod" pod_on guarded n1 "$image_a"
refused() { grep -c 'may not be evicted now' "$here/farrier-one.log"; }
expect 20 "the log gives the reason for waiting" refused
before="$(refused)"
steady 20 "the pod stays" pods_of guarded
[ $(($(refused) - before)) -le 2 ] || expect 0 "farrier retries at most twice in 20 s" false
k delete pdb guarded -n "$drivers" > /dev/null
expect 40 "without the budget the pod is restarted" pod_on guarded n1 "$image_b"
