# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# Strategy custom-resource with NVIDIADriver, the GPU Operator's resource for the nodes that a nodeSelector selects. The image
# gets a second tag, as for ClusterPolicy.

use_kind NVIDIADriver
also_tagged="{{version}}-{{kernel_label}}-{{os_tag}}"
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
k label node "$run-$scenario-n1" e2e.farrier.dev/pool=a > /dev/null
make_resource "{tolerations: [{operator: Exists}], nodeSelector: {$run_label: $run, e2e.farrier.dev/pool: a}, driverType: gpu, usePrecompiled: true, repository: vendor.example/drivers, image: driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}"
check_resource_rollout debian12
