# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Strategy custom-resource with NicClusterPolicy, the Network Operator's cluster-wide resource: farrier sets the driver's fields,
# and a rollback restores them. If other nodes have the hardware, farrier holds the rollout instead. `use_kind` sets $kind and
# $resource.

use_kind NicClusterPolicy
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
make_resource "{tolerations: [{operator: Exists}], ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}}"
check_rollout_or_hold "$nfd/pci-15b3.present" "debian12-$(dpkg --print-architecture)"
