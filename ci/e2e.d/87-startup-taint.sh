# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# New nodes have a startup taint. farrier removes the taint once the node's driver is loaded, and not before. Apart from the
# base, farrier has only the permissions of the component `startup-taint`.

components='startup-taint'
install_farrier
taint=farrier.dev/driver-not-ready
scaled=startup-taint.cluster-autoscaler.kubernetes.io/farrier-driver-not-ready
node() { echo "$run-$scenario-$1"; }
# has_taint NODE KEY
has_taint() { k get node "$(node "$1")" -o json | jq -e --arg key "$2" 'any(.spec.taints[]?; .key == $key)'; }
taints() { k get node "$(node "$1")" -o json | jq -cS '.spec.taints'; }
# add_new_node NAME KERNEL KEY: adds a node as an autoscaler does, with the startup taint among others.
add_new_node() {
    add_node "$1" "$2"
    k taint node "$(node "$1")" "$3:NoSchedule" example.com/other=kept:NoSchedule > /dev/null
}
said() { grep '"the startup taint stays"' "$here/farrier-one.log" | grep -F "\"$(node "$1")\"" | grep -qF -- "$2"; }

cat > "$here/definitions/site.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: e2e}
spec: {startupTaint: true}
YAML
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s, deadline: 10m}"
add_node old "$kernel_a"
add_daemonset solo "$image_a" RollingUpdate
expect 30 "the driver runs on the old node" pod_on solo old "$image_a"
add_new_node n1 "$kernel_a" "$taint"
expect 30 "the driver runs on n1, because the DaemonSet tolerates the taint" pod_on solo n1 "$image_a"
start_farrier one
expect 30 "without a readiness probe, farrier cannot know whether the driver is loaded, so the taint stays" said n1 "no readinessProbe"
steady 5 "the taints of n1 stay" taints n1

# The script's kubelet runs no probe: the image's fate decides when the kubelet reports the pod as ready.
set_fate "$image_a" '{"never": "modprobe: not yet"}'
k patch daemonset solo -n "$drivers" --type strategic -p '{"spec": {"template": {"spec": {"containers": [{"name": "driver",
    "readinessProbe": {"exec": {"command": ["cat", "/run/driver-entrypoint/ready"]}}}]}}}}' > /dev/null
expect 60 "the driver is not loaded yet, so the taint stays" said n1 "is not ready"
steady 5 "the taints of n1 stay until the driver is loaded" taints n1
k annotate namespace "$drivers" --overwrite "e2e.farrier.dev/fates={}" > /dev/null
expect 60 "the driver is loaded, and the startup taint is removed" not has_taint n1 "$taint"
expect 0 "another taint stays" has_taint n1 example.com/other
expect 0 "the run's own taint stays" has_taint n1 "$run_label"

add_new_node n2 "$kernel_a" "$scaled"
expect 60 "the taint with Cluster Autoscaler's prefix is also removed" not has_taint n2 "$scaled"
expect 0 "another taint of n2 stays" has_taint n2 example.com/other

# The kernel of n3 has no image, so the startup taint keeps other pods off n3.
add_new_node n3 6.1.0-99999-amd64 "$taint"
expect 60 "the kernel of n3 has no image, so the taint stays" said n3 "not known to have the modules"
steady 5 "the node without a driver keeps its taints" taints n3
explained() { as_farrier why "node/$(node n3)" --cluster kube --registry "$registry" | grep -q "$taint stays"; }
expect 30 "farrier why reports that the taint stays" explained
