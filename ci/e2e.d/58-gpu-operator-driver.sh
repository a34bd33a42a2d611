# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# The GPU Operator itself with an NVIDIADriver: a DaemonSet for each kernel of the nodes that its nodeSelector selects.

also_tagged="{{version}}-{{kernel_label}}-{{os_tag}}"
use_kind ClusterPolicy
trap remove_resources EXIT
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
hardware 10de n1 n2
k label node "$run-$scenario-n1" "$run-$scenario-n2" e2e.farrier.dev/pool=a > /dev/null
start_gpu_operator
make_resource "{$driver_only, driver: {enabled: true, useNvidiaDriverCRD: true}}"
expect 60 "the operator marks both nodes for its driver" gpu_labels n1 n2

use_kind NVIDIADriver
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
make_resource "{tolerations: [{operator: Exists}], nodeSelector: {e2e.farrier.dev/pool: a}, driverType: gpu, usePrecompiled: true, repository: vendor.example/drivers, image: driver, version: 25.10-1.2.8.0-0}"
expect 60 "the vendor's driver runs on both nodes" vendor_runs 2
start_farrier one
expect 60 "the resource names this run's repository" is repository "$registry"
expect 60 "each kernel's DaemonSet has the image that was built for it" operator_serves "$kernel_a" "$kernel_b"
steady 5 "the resource's spec stays unchanged" spec_of
