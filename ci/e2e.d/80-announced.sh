# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# A kernel is announced before a node boots it, and the node is told when it may.

definition "{strategy: publish-only}"
add_node n1 "$kernel_a"
start_farrier one
code=0
as_farrier preflight --kernel "$kernel_b" --os debian --os-version 12 --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 0 ] || { cat "$here/preflight.txt" >&2; expect 0 "kernel B's image is published: preflight says yes" false; }
code=0
as_farrier preflight --kernel 6.1.0-99999-amd64 --os debian --os-version 12 --cluster kube --registry "$registry" > "$here/preflight.txt" || code=$?
[ "$code" = 1 ] || { cat "$here/preflight.txt" >&2; expect 0 "nothing is published for a kernel that exists nowhere: preflight exits with 1" false; }

k annotate node "$run-$scenario-n1" "farrier.dev/next-kernel=$kernel_b" > /dev/null
ready_for() { [ "$(node_annotation n1 farrier.dev/ready-for)" = "$(label_of "$1")" ]; }
expect 30 "n1 is told that it may boot kernel B" ready_for "$kernel_b"
k annotate node "$run-$scenario-n1" --overwrite "farrier.dev/next-kernel=6.1.0-99999-amd64" > /dev/null
told_nothing() { [ -z "$(node_annotation n1 farrier.dev/ready-for)" ]; }
expect 30 "another kernel without an image: it is taken back" told_nothing
# shellcheck disable=SC2016 # so it is meant
k annotate node "$run-$scenario-n1" --overwrite 'farrier.dev/next-kernel=../../etc/passwd; rm -rf $(x)' > /dev/null
annotations() { k get node "$run-$scenario-n1" -o json | jq -cS '[.metadata.annotations, .metadata.labels]'; }
steady 4 "a hostile value does nothing" annotations
expect 5 "and farrier goes on" get one healthz
