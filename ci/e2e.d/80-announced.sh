# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A kernel is announced before a node boots it, and farrier marks the node when its image is published.

definition "{strategy: publish-only}"
add_node n1 "$kernel_a"
# The instance name is unique to this run, because an installed farrier also sees these nodes and would write their marks.
start_farrier one
code=0
as_farrier preflight --kernel "$kernel_b" --node "$run-$scenario-n1" --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 0 ] || { cat "$here/preflight.txt" >&2; fail "preflight succeeds for kernel B, whose image is published"; }
code=0
as_farrier preflight --kernel 6.1.0-99999-amd64 --node "$run-$scenario-n1" --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 1 ] || { cat "$here/preflight.txt" >&2; fail "preflight exits with 1 for a kernel without an image"; }

k annotate node "$run-$scenario-n1" "farrier.dev/next-kernel=$kernel_b" > /dev/null
ready_for() { [ "$(node_annotation n1 "farrier.dev/ready-for.$run")" = "$(label_of "$1")" ]; }
expect 30 "n1 is marked as ready for kernel B" ready_for "$kernel_b"
k annotate node "$run-$scenario-n1" --overwrite "farrier.dev/next-kernel=6.1.0-99999-amd64" > /dev/null
told_nothing() { [ -z "$(node_annotation n1 "farrier.dev/ready-for.$run")" ]; }
expect 30 "for a kernel without an image the mark is removed" told_nothing

k annotate node "$run-$scenario-n1" "farrier.dev/next-kernel-" > /dev/null
k label node "$run-$scenario-n1" "$nfd/farrier-next-kernel=$kernel_b" > /dev/null
expect 30 "the node label that NFD sets from farrier-host's feature also announces kernel B" ready_for "$kernel_b"

add_node n2 "$kernel_a"
k label node "$run-$scenario-n2" "$mark-" > /dev/null
k annotate node "$run-$scenario-n2" "farrier.dev/next-kernel=$kernel_b" > /dev/null
told_n2() { echo "$(node_annotation n2 "farrier.dev/ready-for.$run") $(node_annotation n2 "farrier.dev/no-driver-for.$run")"; }
steady 4 "n2 has no hardware labels and needs no image, so it gets no mark" told_n2
k label node "$run-$scenario-n2" "$nfd/cpu-hardware_multithreading=true" > /dev/null
no_driver() { [ "$(told_n2)" = " $(label_of "$kernel_b")" ]; }
expect 30 "with hardware labels n2 is marked as needing no driver, not as ready" no_driver
# shellcheck disable=SC2016 # the value must not be expanded
k annotate node "$run-$scenario-n1" --overwrite 'farrier.dev/next-kernel=../../etc/passwd; rm -rf $(x)' > /dev/null
expect 30 "for a hostile value the mark is removed, although the label announces kernel B" told_nothing
annotations() { k get node "$run-$scenario-n1" -o json | jq -cS '[.metadata.annotations, .metadata.labels]'; }
steady 4 "a hostile value has no other effect" annotations
expect 5 "farrier is still healthy" get one healthz
