# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# One write sets the image of two containers and an init container.

definition "{strategy: image, namespace: $drivers, daemonSet: trio, containers: [prepare, driver, helper], stableFor: 2s}"
add_node n1 "$kernel_a"
k apply --server-side --field-manager e2e -f - > /dev/null <<YAML
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: trio, namespace: $drivers, labels: {$run_label: $run}}
spec:
  selector: {matchLabels: {app: trio}}
  template:
    metadata: {labels: {app: trio}}
    spec:
      nodeSelector: {$mark: "true"}
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 0
      initContainers: [{name: prepare, image: "$image_b"}]
      containers:
        - {name: driver, image: "$image_b"}
        - {name: other, image: tools.example/other:1}
        - {name: helper, image: "$image_b"}
YAML
# Prints the DaemonSet's generation, which each write of its spec increases, and the images.
trio() {
    k get daemonset trio -n "$drivers" -o json |
        jq -r '[.metadata.generation, (.spec.template.spec | .initContainers + .containers | .[].image)] | join(" ")'
}
is() { [ "$(trio)" = "$1" ]; }
start_farrier one
expect 30 "one write sets three images, and no other" is "2 $image_a $image_a tools.example/other:1 $image_a"
reboot n1 "$kernel_b"
expect 30 "one write follows the node's new kernel" is "3 $image_b $image_b tools.example/other:1 $image_b"
steady 5 "farrier writes nothing more" trio
