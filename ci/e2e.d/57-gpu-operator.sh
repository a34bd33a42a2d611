# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# The GPU Operator itself with a ClusterPolicy: its node labels, a DaemonSet for each kernel, its computed tags, and its upgrade
# of each node.

use_kind ClusterPolicy
trap remove_resources EXIT
also_tagged="{{version}}-{{kernel_label}}-{{os_tag}}"
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
[ -z "$(foreign_nodes nvidia.com/gpu.present)" ] || die "other nodes have GPUs, for which this run has no image"
add_node n1 "$kernel_a"
add_node n2 "$kernel_b"
hardware 10de n1 n2
start_gpu_operator
make_resource "{$driver_only, driver: {enabled: true, usePrecompiled: true, repository: vendor.example/drivers, image: driver, version: 25.10-1.2.8.0-0, upgradePolicy: {autoUpgrade: true, maxParallelUpgrades: 1, maxUnavailable: 50%, podDeletion: {force: true}, drain: {enable: false}}}}"
expect 60 "the operator marks both nodes for its driver" gpu_labels n1 n2
expect 60 "the vendor's driver runs on both nodes" vendor_runs 2

start_farrier one
expect 60 "the resource names this run's repository" is repository "$registry"
expect 60 "each kernel's DaemonSet has the image that was built for it" operator_serves "$kernel_a" "$kernel_b"
expect 240 "the operator has removed the vendor's driver from both nodes" vendor_runs 0
expect 60 "this run's driver runs on both nodes" driver_runs_on 2
steady 5 "the resource's spec stays unchanged" spec_of

reboot n1 "$kernel_b"
expect 90 "after n1 boots kernel B, only kernel B's DaemonSet remains" operator_serves "$kernel_b"
expect 60 "a driver runs on both nodes" driver_runs_on 2
steady 5 "the resource's spec stays unchanged" spec_of

as_admin rollback --cluster kube "$kind/$resource" > "$here/rollback.txt"
expect 10 "rollback restores the vendor's repository" is repository vendor.example/drivers
expect 240 "the vendor's driver runs on both nodes again" vendor_runs 2
