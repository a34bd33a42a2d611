# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# The kubelet of the script's own nodes, and their scheduler if the cluster has none. Sourced by ci/e2e.d/lib.sh.
#
# It keeps its nodes alive, binds their pods, reports their containers' state (kubelet.jq), and ends deleted pods. It ignores
# pods of other nodes.

kubelet() {
    local fates todo name value beat=-10
    while :; do
        if [ $((SECONDS - beat)) -ge 10 ]; then
            beat=$SECONDS
            heartbeat || true
        fi
        fates="$(k get namespace "$drivers" -o json | jq -r '.metadata.annotations["e2e.farrier.dev/fates"] // "{}"')"
        [ -n "$fates" ] || fates='{}'
        k get pods -n "$drivers" -o json |
            jq -r --arg prefix "$run-$scenario-" --argjson fates "$fates" -f "$root/ci/e2e.d/kubelet.jq" \
                > "$here/pods" || true
        while IFS=$'\t' read -r todo name value; do
            case "$todo" in
                delete) k delete pod "$name" -n "$drivers" --grace-period=0 --force > /dev/null 2>&1 ;;
                bind) bind_pod "$name" "$value" 2> /dev/null ;;
                status) k patch pod "$name" -n "$drivers" --subresource status --type merge -p "$value" > /dev/null ;;
            esac || true
        done < "$here/pods"
        sleep 0.5
    done
}

# Without a heartbeat, a node and its pods become unready after 50 seconds.
heartbeat() {
    local node
    for node in $(k get nodes -l "$mark,$run_label=$run" -o name); do
        k patch "$node" --subresource status --type strategic > /dev/null \
            -p "{\"status\": {\"conditions\": [{\"type\": \"Ready\", \"status\": \"True\", \"lastHeartbeatTime\": \"$(date -u +%FT%TZ)\"}]}}"
    done
}

bind_pod() {
    jq -n --arg name "$1" --arg node "$2" \
        '{apiVersion: "v1", kind: "Binding", metadata: {name: $name}, target: {apiVersion: "v1", kind: "Node", name: $node}}' |
        k create --raw "/api/v1/namespaces/$drivers/pods/$1/binding" -f - > /dev/null
}

# The command line contains the state directory, by which `stop` recognizes the process.
start_kubelet() {
    export -f kubelet heartbeat bind_pod k
    export drivers here kubeconfig mark root run run_label scenario
    bash -c 'set -u; kubelet' "$here/kubelet" > "$here/kubelet.log" 2>&1 &
    echo $! > "$here/kubelet.pid"
}

# set_fate IMAGE FATE: sets the simulated state of pods with an image, in kubelet.jq's format.
set_fate() {
    local fates
    fates="$(jq -cn --arg image "${1##*@}" --argjson fate "$2" '{($image): $fate}')"
    k annotate namespace "$drivers" --overwrite "e2e.farrier.dev/fates=$fates" > /dev/null
}

# Makes the image's pods never become ready.
break_image() { set_fate "$1" '{"never": "modprobe: invalid module format"}'; }
