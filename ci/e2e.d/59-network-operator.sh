# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# The Network Operator itself with a NicClusterPolicy: the tags that it computes and finds in the registry, and a DaemonSet for
# each kernel.

driver_container=mofed-container
# No image has this tag yet.
tagged="$scenario-{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}"
use_kind NicClusterPolicy
trap remove_resources EXIT
definition "{strategy: custom-resource, resource: $kind, name: $resource}"
[ -z "$(foreign_nodes "$nfd/pci-15b3.present")" ] || die "other nodes have network cards, for which this run has no image"
add_node n1 "$kernel_a"
add_node n2 "$kernel_a"
hardware 15b3 n1 n2
start_network_operator
make_resource "{tolerations: [{operator: Exists}], ofedDriver: {repository: vendor.example/drivers, image: doca-driver, version: 25.10-1.2.8.0-0, upgradePolicy: {autoUpgrade: true, maxParallelUpgrades: 1, drain: {enable: false}}}}"
expect 120 "the vendor's driver runs on both nodes" vendor_runs 2

start_farrier one
expect 180 "the resource names this run's repository" is repository "$registry"
expect 60 "kernel A's DaemonSet has the image that was built for it" operator_serves "$kernel_a"
expect 240 "this run's driver runs on both nodes" driver_runs_on 2
steady 5 "the resource's spec stays unchanged" spec_of

reboot n1 "$kernel_b"
expect 240 "after n1 boots kernel B, each kernel's DaemonSet has the image that was built for it" operator_serves "$kernel_a" "$kernel_b"
expect 60 "a driver runs on both nodes" driver_runs_on 2

as_admin rollback --cluster kube "$kind/$resource" > "$here/rollback.txt"
expect 10 "rollback restores the vendor's repository" is repository vendor.example/drivers
expect 240 "the vendor's driver runs on both nodes again" vendor_runs 2
