# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# Two farriers: one writes. It is killed, and the other takes over.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "the first leads" leads one
start_farrier two
expect 30 "the first rolls out" has_image solo "$image_a"
if leads two; then expect 0 "the second does not lead" not leads two; fi
holder() { k get lease farrier -n "$ns" -o jsonpath='{.spec.holderIdentity}'; }
first="$(holder)"
kill -KILL "$(cat "$here/farrier-one.pid")"
reboot n1 "$kernel_b"
expect 60 "the first was killed: the second leads" leads two
[ "$(holder)" != "$first" ] || expect 0 "the Lease names the second" false
expect 30 "and rolls out" has_image solo "$image_b"
# A stop gives the Lease back: no standby waits for it to run out.
stop "$here/farrier-two.pid"
released() { [ -z "$(holder)" ]; }
expect 10 "stopped in order, it gives the Lease back" released
