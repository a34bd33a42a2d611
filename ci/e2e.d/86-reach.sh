# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# farrier and the DaemonSet controller agree on the nodes of a DaemonSet: 25 random DaemonSets on 8 nodes, whose labels, taints,
# conditions and cordons change in 20 rounds.

seed="${FARRIER_E2E_SEED:-$RANDOM}" sets=25 rounds=20 prefix="$run-$scenario-"
reach() { python3 "$root/ci/e2e.d/reach.py" "$@"; }
say "FARRIER_E2E_SEED=$seed repeats this run"

nodes=()
for name in n1 n2 n3 n4 n5 n6 n7 n8; do
    add_node "$name" "$kernel_a"
    nodes+=("$prefix$name")
done
reach daemonsets "$seed" "$sets" "$drivers" "$mark" "$run_label=$run" "$image_a" "${nodes[@]}" > "$here/daemonsets.json"
mapfile -t rollouts < <(jq -r '.items[].metadata | "{strategy: image, namespace: \(.namespace), daemonSet: \(.name), container: driver}"' \
    "$here/daemonsets.json")
definition "${rollouts[@]}"

# `controller` prints the pods that the DaemonSet controller has created, and `farrier` the pods that farrier expects: a line
# `DAEMONSET NODE` for each pod.
controller() {
    k get pods -n "$drivers" -o json | reach pods | sort
}
farrier() {
    local node
    for node in "${nodes[@]}"; do
        as_farrier why "node/$node" --cluster kube --registry "$registry" -o json > "$here/why-$node.json"
    done
    reach explained "$here/daemonsets.json" "$here"/why-*.json | sort
}
# Compares twice, because the controller may not have acted yet at the first comparison.
agree() {
    farrier > "$here/farrier" && controller > "$here/controller" && diff "$here/farrier" "$here/controller" &&
        sleep 2 && controller > "$here/controller" && diff "$here/farrier" "$here/controller"
}

pods=0
for ((round = 0; round < rounds; round++)); do
    while IFS=$'\t' read -r node spec status; do
        k patch node "$node" --type merge -p "$spec" > /dev/null
        k patch node "$node" --subresource status --type strategic -p "$status" > /dev/null
    done < <(reach nodes "$seed" "$round" "$run_label=$run" "${nodes[@]}")
    # Create the DaemonSets after the nodes' first taints, so that taints prevent pods in the first round and evict pods later.
    [ "$round" != 0 ] || k apply --server-side -f "$here/daemonsets.json" > /dev/null
    expect 90 "round $round: farrier and the controller agree" agree
    pods=$((pods + $(wc -l < "$here/controller")))
done
some() { [ "$pods" -gt $((rounds * sets / 4)) ] && [ "$pods" -lt $((rounds * sets * ${#nodes[@]} * 3 / 4)) ]; }
expect 0 "$pods of $((rounds * sets * ${#nodes[@]})) pods run, neither none nor all" some
