# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy per-kernel: one DaemonSet per kernel, to which nodes are handed over one by one.

definition "{strategy: per-kernel, namespace: $drivers, daemonSet: fleet, container: driver, stableFor: 2s, deadline: 60s, retireAfter: 1s}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
add_node n3 "$kernel_a"
add_daemonset fleet "$registry/$driver:vendor" RollingUpdate
wait_for_vendor() { [ "$(pods_of fleet | grep -c :vendor)" = 3 ]; }
expect 30 "the vendor's pods run on three nodes" wait_for_vendor
start_farrier one

# node_pod NODE: prints the images of the node's driver pods.
node_pod() {
    k get pods -n "$drivers" -o json | jq -r --arg n "$run-$scenario-$1" '.items[]
        | select(.spec.nodeName == $n and .metadata.deletionTimestamp == null) | .spec.containers[0].image'
}
runs() { [ "$(node_pod "$1")" = "$2" ]; }
expect 90 "exactly one pod runs on n1, with kernel A's image" runs n1 "$image_a"
expect 60 "n2 runs kernel B's image" runs n2 "$image_b"
expect 60 "n3 runs kernel A's image" runs n3 "$image_a"
copies() { k get daemonsets -n "$drivers" -l farrier.dev/copy-of=fleet -o name | wc -l; }
two_copies() { [ "$(copies)" = 2 ]; }
expect 0 "there are two copies" two_copies
handed_over() {
    local n
    for n in n1 n2 n3; do
        k get node "$run-$scenario-$n" -o json | jq -e '.metadata.labels | to_entries
            | any((.key | startswith("farrier.dev/driver.")) and .value == "handed-over")' > /dev/null || return 1
    done
}
expect 10 "all nodes carry the handover label" handed_over
# Two DaemonSets never select the same node.
expect 5 "the original DaemonSet still has the vendor's image" has_image fleet "$registry/$driver:vendor"

reboot n2 "$kernel_a"
expect 60 "after a kernel change n2 belongs to kernel A's copy" runs n2 "$image_a"
one_copy() { [ "$(copies)" = 1 ]; }
expect 90 "kernel B's copy is retired after its grace time" one_copy
all_specs() { k get daemonsets -n "$drivers" -o json | jq -cS '.items[] | [.metadata.name, .metadata.annotations, .spec]'; }
steady 5 "the DaemonSets stay unchanged" all_specs

as_farrier rollback --cluster kube "$drivers/fleet" > "$here/rollback.txt"
back() { [ "$(copies)" = 0 ] && runs n1 "$registry/$driver:vendor" && runs n2 "$registry/$driver:vendor"; }
expect 90 "after a rollback there are no copies, and the original runs on every node" back
