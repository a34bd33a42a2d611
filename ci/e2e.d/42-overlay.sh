# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy file: an overlay has changed the node selector, so the DaemonSet in the cluster selects pool b, and its manifest still
# selects pool a. farrier must hold the rollout, and must not write the image for pool a into the manifest.

mkdir -p "$here/manifests"
definition "{strategy: file, path: ../manifests, namespace: $drivers, daemonSet: overlaid, container: driver}"
for pool in a b; do
    kernel="$kernel_a"
    if [ "$pool" = b ]; then kernel="$kernel_b"; fi
    add_node "$pool" "$kernel"
    k label node "$run-$scenario-$pool" "$mark-pool=$pool" > /dev/null
done
add_daemonset overlaid "$registry/$driver:vendor" OnDelete "$mark-pool: a"
k get daemonset overlaid -n "$drivers" -o json | jq '{apiVersion, kind, metadata: {name: .metadata.name, namespace: .metadata.namespace}, spec}' \
    > "$here/manifests/overlaid.json"
k patch daemonset overlaid -n "$drivers" -p "{\"spec\": {\"template\": {\"spec\": {\"nodeSelector\": {\"$mark-pool\": \"b\"}}}}}" > /dev/null

once() { as_farrier run --once --cluster kube --write-namespaces "$drivers" --registry "$registry" --engine "$engine" > "$here/once.txt" 2> "$here/once.log" || true; }
holds() { once && grep -q "only the cluster's reaches $run-$scenario-b, only the manifest's reaches $run-$scenario-a" "$here/once.txt"; }
cp "$here/manifests/overlaid.json" "$here/before.json"
expect 60 "the rollout is held, and the reason names the nodes of both selectors" holds
expect 0 "the manifest is unchanged" cmp "$here/before.json" "$here/manifests/overlaid.json"

k patch daemonset overlaid -n "$drivers" -p "{\"spec\": {\"template\": {\"spec\": {\"nodeSelector\": {\"$mark-pool\": \"a\"}}}}}" > /dev/null
written() { once && grep -qF "$image_a" "$here/manifests/overlaid.json"; }
expect 60 "once both selectors select the same nodes, the manifest gets the image for those nodes' kernel" written
