# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# Node Feature Discovery itself, on the node of --real-node: NFD sets its labels, removes them when its worker is uninstalled, and
# sets them again.

labels=("$nfd/kernel-version.full" "$nfd/system-os_release.ID" "$nfd/system-os_release.VERSION_ID")
before=()
for label in "${labels[@]}"; do before+=("$label=$(real_node_label "$label")"); done
# The other scenarios need the labels.
trap 'stop "$here/nfd-worker.pid"; stop "$here/operator.pid"; k label node "$real_node" --overwrite "${before[@]}" > /dev/null' EXIT

start_crashing_driver "stableFor: 2s, deadline: 60s"
steady 5 "the DaemonSet already has this driver" ds_spec solo

k label node "$real_node" "${labels[@]/%/-}" > /dev/null
unlabeled() { not real_node_label "$nfd/kernel-version.full"; }
labeled() {
    [ "$(real_node_label "$nfd/kernel-version.full")" = "$(label_of "$(uname -r)")" ] || return 1
    # shellcheck source=/dev/null
    (. /etc/os-release && [ "$(real_node_label "$nfd/system-os_release.ID")" = "$ID" ] &&
        [ "$(real_node_label "$nfd/system-os_release.VERSION_ID")" = "$VERSION_ID" ])
}
expect 5 "the node has no labels" unlabeled
start_nfd
expect 60 "NFD sets the labels that farrier reads" labeled
steady 5 "the DaemonSet stays unchanged" ds_spec solo

stop "$here/nfd-worker.pid"
k delete nodefeatures -n "$drivers" --all > /dev/null
expect 60 "without its worker, NFD removes the labels" unlabeled
steady 5 "the DaemonSet stays unchanged without the labels" ds_spec solo
waits() { { as_farrier plan --cluster kube --registry "$registry" -o json || true; } | grep -qF "$real_node"; }
expect 10 "the plan names the node" waits
start_nfd_worker
expect 60 "with its worker, NFD sets the labels again" labeled
steady 5 "the DaemonSet stays unchanged" ds_spec solo
