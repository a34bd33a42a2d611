# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# NicClusterPolicy, the Network Operator's cluster-wide resource.

use_kind NicClusterPolicy
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
make_resource "{tolerations: [{operator: Exists}], ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}}"
check_rollout_or_hold "$nfd/pci-15b3.present" "debian12-$(dpkg --print-architecture)"
