# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A PodDisruptionBudget refuses an eviction, so one DaemonSet waits. Another DaemonSet with the same image continues, and
# farrier does not overload the API server with retries.

definition "{strategy: image, namespace: $drivers, daemonSet: guarded, container: driver, stableFor: 2s}" \
    "{strategy: image, namespace: $drivers, daemonSet: open, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset guarded "$image_a" OnDelete
add_daemonset open "$image_a" OnDelete
expect 30 "the pod of DaemonSet guarded runs" pod_on guarded n1 "$image_a"
expect 30 "the pod of DaemonSet open runs" pod_on open n1 "$image_a"
k apply -f - > /dev/null <<YAML
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: guarded, namespace: $drivers}
spec: {minAvailable: 1, selector: {matchLabels: {app: guarded}}}
YAML
budget() { [ "$(k get pdb guarded -n "$drivers" -o jsonpath='{.status.observedGeneration}/{.status.disruptionsAllowed}')" = 1/0 ]; }
expect 20 "a budget protects the pod of DaemonSet guarded" budget
start_farrier one
reboot n1 "$kernel_b"
expect 20 "kernel B's image is set in DaemonSet guarded" has_image guarded "$image_b"
expect 5 "kernel B's image is set in DaemonSet open" has_image open "$image_b"
expect 40 "the pod of DaemonSet open is restarted" pod_on open n1 "$image_b"
expect 5 "the budget keeps the old pod of DaemonSet guarded" pod_on guarded n1 "$image_a"
refusal_count() { grep -c 'may not be evicted now' "$here/farrier-one.log" || true; }
refused() { [ "$(refusal_count)" -gt 0 ]; }
expect 20 "the log gives the reason for waiting" refused
before="$(refusal_count)"
steady 20 "the old pod of DaemonSet guarded stays" pods_of guarded
[ $(($(refusal_count) - before)) -le 2 ] || fail "farrier retries at most twice in 20 s"
k delete pdb guarded -n "$drivers" > /dev/null
expect 40 "without the budget the pod of DaemonSet guarded is restarted" pod_on guarded n1 "$image_b"
