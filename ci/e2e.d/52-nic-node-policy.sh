# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy custom-resource with NicNodePolicy, the Network Operator's resource for the nodes that a nodeSelector selects. Other
# nodes do not affect the rollout.

use_kind NicNodePolicy
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
k label node "$run-$scenario-n1" e2e.farrier.dev/pool=a > /dev/null
make_resource "{tolerations: [{operator: Exists}], nodeSelector: {$run_label: $run, e2e.farrier.dev/pool: a}, ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}}"
check_resource_rollout "debian12-$(dpkg --print-architecture)"
