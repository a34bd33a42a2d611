# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables for and of ci/e2e.d/lib.sh
# The GPU Operator's cluster-wide resource. Its tags end with the operating system, so the image gets a second tag.

use_kind ClusterPolicy
also_tagged="{{version}}-{{kernel_label}}-{{os_tag}}"
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
add_node n1 "$kernel_a"
make_resource "{driver: {enabled: true, repository: vendor.example/drivers, image: driver, version: 25.10-1.2.8.0-0, startupProbe: {periodSeconds: 10}}}"
play_where_possible nvidia.com/gpu.deploy.driver debian12
