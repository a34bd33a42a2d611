# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# Strategy custom-resource with ClusterPolicy, the GPU Operator's cluster-wide resource. The operator computes a tag that ends
# with the operating system, so the image gets that tag as well.

use_kind ClusterPolicy
also_tagged="{{version}}-{{kernel_label}}-{{os_tag}}"
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
make_resource "{$driver_only, driver: {enabled: true, repository: vendor.example/drivers, image: driver, version: 25.10-1.2.8.0-0, startupProbe: {initialDelaySeconds: 10, periodSeconds: 10}}}"
check_rollout_or_hold nvidia.com/gpu.deploy.driver debian12
