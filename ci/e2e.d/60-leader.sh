# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Of two farriers only the leader writes. After the leader is killed, the other farrier takes over.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "the first farrier leads" leads one
start_farrier two
expect 30 "the first farrier rolls out the image" has_image solo "$image_a"
expect 0 "the second farrier does not lead" not leads two
holder() { k get lease farrier -n "$ns" -o jsonpath='{.spec.holderIdentity}'; }
first="$(holder)"
kill -KILL "$(cat "$here/farrier-one.pid")"
reboot n1 "$kernel_b"
expect 60 "after the kill the second farrier leads" leads two
[ "$(holder)" != "$first" ] || fail "the Lease names the second farrier"
expect 30 "the second farrier rolls out the image" has_image solo "$image_b"
# A clean stop releases the Lease, so that a standby need not wait for its expiry.
stop "$here/farrier-two.pid"
released() { [ -z "$(holder)" ]; }
expect 10 "a stopped farrier releases the Lease" released
