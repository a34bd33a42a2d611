# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# A kernel is announced before a node boots it, and the node is told when it may.

definition "{strategy: publish-only}"
add_node n1 "$kernel_a"
# A name of its own: a farrier that is installed here sees these nodes, too, and would write their marks.
start_farrier one
code=0
as_farrier preflight --kernel "$kernel_b" --node "$run-$scenario-n1" --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 0 ] || { cat "$here/preflight.txt" >&2; expect 0 "kernel B's image is published: preflight says yes" false; }
code=0
as_farrier preflight --kernel 6.1.0-99999-amd64 --node "$run-$scenario-n1" --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 1 ] || { cat "$here/preflight.txt" >&2; expect 0 "nothing is published for a kernel that exists nowhere: preflight exits with 1" false; }

k annotate node "$run-$scenario-n1" "farrier.dev/next-kernel=$kernel_b" > /dev/null
ready_for() { [ "$(node_annotation n1 "farrier.dev/ready-for.$run")" = "$(label_of "$1")" ]; }
expect 30 "n1 is told that it may boot kernel B" ready_for "$kernel_b"
k annotate node "$run-$scenario-n1" --overwrite "farrier.dev/next-kernel=6.1.0-99999-amd64" > /dev/null
told_nothing() { [ -z "$(node_annotation n1 "farrier.dev/ready-for.$run")" ]; }
expect 30 "another kernel without an image: it is taken back" told_nothing

add_node n2 "$kernel_a"
k label node "$run-$scenario-n2" "$mark-" > /dev/null
k annotate node "$run-$scenario-n2" "farrier.dev/next-kernel=$kernel_b" > /dev/null
told_n2() { echo "$(node_annotation n2 "farrier.dev/ready-for.$run") $(node_annotation n2 "farrier.dev/no-driver-for.$run")"; }
steady 4 "no image is called for on n2, whose hardware labels have not come: it is told nothing" told_n2
k label node "$run-$scenario-n2" "$nfd/cpu-hardware_multithreading=true" > /dev/null
no_driver() { [ "$(told_n2)" = " $(label_of "$kernel_b")" ]; }
expect 30 "they have come: n2 is told that it needs no driver, and not that it is ready" no_driver
# shellcheck disable=SC2016 # so it is meant
k annotate node "$run-$scenario-n1" --overwrite 'farrier.dev/next-kernel=../../etc/passwd; rm -rf $(x)' > /dev/null
annotations() { k get node "$run-$scenario-n1" -o json | jq -cS '[.metadata.annotations, .metadata.labels]'; }
steady 4 "a hostile value does nothing" annotations
expect 5 "and farrier goes on" get one healthz
