# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Node Feature Discovery and NVIDIA's operators, compiled from checkouts (--nfd, --gpu-operator, --network-operator). An operator
# runs on this machine as the ServiceAccount of its chart, in the namespace of the scenario's DaemonSets. Sourced by
# ci/e2e.d/lib.sh.

# build_operator NAME CHECKOUT PACKAGE: compiles an operator once for all scenarios.
build_operator() {
    [ ! -x "$state/programs/$1" ] || return 0
    mkdir -p "$state/programs"
    CGO_ENABLED=0 go build -C "$2" -o "$state/programs/$1" "$3" > "$here/$1-build.log" 2>&1 ||
        fail "$1 compiles in $2: $(tail -n 3 "$here/$1-build.log")"
}

# operator_crds: prints the files and directories with the CRDs of the checkouts.
operator_crds() {
    [ -z "$gpu_operator" ] || echo "$gpu_operator/deployments/gpu-operator/crds"
    [ -z "$network_operator" ] || echo "$network_operator/deployment/network-operator/crds"
    [ -z "$node_feature_discovery" ] || echo "$node_feature_discovery/deployment/base/nfd-crds/nfd-api-crds.yaml"
}

# install_operator NAME CHECKOUT SETTINGS: creates the permissions that the operator's chart gives it, and a kubeconfig with them.
install_operator() {
    "$HELM" template "$1" "$2"/deployment*/"$1" --namespace "$drivers" --no-hooks --set "$3" > "$here/$1.yaml"
    awk 'BEGIN { RS = "---\n"; ORS = "---\n" } /\nkind: (ServiceAccount|(Cluster)?Role(Binding)?)\n/' "$here/$1.yaml" > "$here/$1-permissions.yaml"
    k label --local -f "$here/$1-permissions.yaml" "$run_label=$run" -o json | k apply --server-side -f - > /dev/null
    account_kubeconfig "$1" "$drivers" "$here/$1.kubeconfig"
}

# start_gpu_operator: starts the GPU Operator, which reads its objects below a path that the host need not have.
start_gpu_operator() {
    local namespaces=(--mount)
    build_operator gpu-operator "$gpu_operator" ./cmd/gpu-operator
    install_operator gpu-operator "$gpu_operator" nfd.enabled=false
    [ "$(id -u)" = 0 ] || namespaces+=(--map-root-user)
    # shellcheck disable=SC2016 # for the inner shell
    env KUBECONFIG="$here/gpu-operator.kubeconfig" OPERATOR_NAMESPACE="$drivers" \
        DRIVER_MANAGER_IMAGE=vendor.example/driver-manager:1 VALIDATOR_IMAGE=vendor.example/validator:1 \
        unshare "${namespaces[@]}" sh -c '
            set -e
            mount -t tmpfs tmpfs /opt
            mkdir /opt/gpu-operator
            cp -r "$1/assets/." "$1/manifests" /opt/gpu-operator
            shift
            exec "$@"' sh "$gpu_operator" "$state/programs/gpu-operator" \
            --metrics-bind-address 0 --health-probe-bind-address 0 > "$here/gpu-operator.log" 2>&1 < /dev/null &
    echo $! > "$here/operator.pid"
}

# start_network_operator: starts the Network Operator, which lists the registry's tags every minute instead of every 30.
start_network_operator() {
    build_operator network-operator "$network_operator" .
    install_operator network-operator "$network_operator" \
        nfd.enabled=false,sriovNetworkOperator.enabled=false,maintenanceOperator.enabled=false
    env KUBECONFIG="$here/network-operator.kubeconfig" POD_NAMESPACE="$drivers" DOCA_DRIVER_IMAGE_POLL_TIME_MINUTES=1 \
        STATE_MANIFEST_BASE_DIR="$network_operator/manifests" "$state/programs/network-operator" \
        --metrics-bind-address 0 --health-probe-bind-address 0 > "$here/network-operator.log" 2>&1 < /dev/null &
    echo $! > "$here/operator.pid"
}

# hardware VENDOR NAME...: sets the label that Node Feature Discovery sets for a vendor's PCI devices.
hardware() {
    local name
    for name in "${@:2}"; do k label node "$run-$scenario-$name" "$nfd/pci-$1.present=true" > /dev/null; done
}

# gpu_labels NAME...: succeeds when the GPU Operator has marked the nodes for its driver.
gpu_labels() {
    local name
    for name in "$@"; do
        k get node "$run-$scenario-$name" -o json | jq -e '.metadata.labels | .["nvidia.com/gpu.present"] == "true"
            and .["nvidia.com/gpu.deploy.driver"] == "true"' > /dev/null || return 1
    done
}

# The container of the operator's driver pods.
driver_container=nvidia-driver-ctr

# driver_daemonsets: prints "kernel image" of each of the operator's driver DaemonSets.
driver_daemonsets() {
    k get daemonsets -n "$drivers" -o json | jq -r --arg nfd "$nfd" --arg name "$driver_container" '.items[].spec.template.spec
        | .containers[] as $container | select($container.name == $name)
        | "\(.nodeSelector[$nfd + "/kernel-version.full"]) \($container.image)"' | sort
}

# operator_serves KERNEL...: succeeds if the operator has a DaemonSet for exactly these kernels, each with a tag of the image that
# farrier built for that kernel.
operator_serves() {
    local kernel image sets
    sets="$(driver_daemonsets)"
    echo "$sets"
    [ "$(cut -d' ' -f1 <<< "$sets")" = "$(for kernel in "$@"; do label_of "$kernel"; done | sort)" ] || return 1
    while read -r kernel image; do
        skopeo inspect --raw --tls-verify=false "docker://$image" |
            jq -e --arg kernel "$kernel" '.annotations["farrier.dev/kernel-release"] == $kernel' > /dev/null || return 1
    done <<< "$sets"
}

# driver_pods: prints "node image" of the operator's driver pods that are ready.
driver_pods() {
    k get pods -n "$drivers" -o json | jq -r --arg name "$driver_container" '.items[] | select(.metadata.deletionTimestamp == null)
        | select(any(.status.conditions[]?; .type == "Ready" and .status == "True"))
        | .spec.nodeName as $node | .spec.containers[] | select(.name == $name) | "\($node) \(.image)"' | sort
}

# vendor_runs NUMBER: succeeds if NUMBER nodes run the vendor's driver. driver_runs_on NUMBER: the same for this run's driver.
vendor_runs() { [ "$(driver_pods | grep -cF ' vendor.example/')" = "$1" ]; }
driver_runs_on() { [ "$(driver_pods | grep -cF " $registry/")" = "$1" ]; }

# start_nfd: starts Node Feature Discovery with an administrator's permissions, for the node of --real-node.
start_nfd() {
    local prefix
    prefix="$(cd "$node_feature_discovery" && go list -m)/pkg/utils/hostpath.pathPrefix"
    build_operator nfd-master "$node_feature_discovery" ./cmd/nfd-master
    # In a container the worker would read the host's directories below another path.
    GOFLAGS="-ldflags=-X=$prefix=/" build_operator nfd-worker "$node_feature_discovery" ./cmd/nfd-worker
    NODE_NAME="$real_node" KUBERNETES_NAMESPACE="$drivers" "$state/programs/nfd-master" -kubeconfig "$kubeconfig" -port "$(free_port)" \
        > "$here/nfd-master.log" 2>&1 < /dev/null &
    echo $! > "$here/operator.pid"
    start_nfd_worker
}

start_nfd_worker() {
    NODE_NAME="$real_node" KUBERNETES_NAMESPACE="$drivers" "$state/programs/nfd-worker" -kubeconfig "$kubeconfig" -port "$(free_port)" \
        -no-owner-refs -feature-sources kernel,system -label-sources kernel,system >> "$here/nfd-worker.log" 2>&1 < /dev/null &
    echo $! > "$here/nfd-worker.pid"
}
