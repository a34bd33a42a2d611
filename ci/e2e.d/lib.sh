# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that ci/e2e and the scenarios set or read
# Helpers for the scenarios of ci/e2e. Sourced by ci/e2e.
#
# Variables for scenarios: $ns, farrier's namespace; $drivers, the namespace of the DaemonSets; $builds, the namespace of
# builds; $mark, the label of the scenario's nodes; $kernel_a and $kernel_b with their images $image_a and $image_b. A scenario
# ends at the first condition that does not hold in time.

# shellcheck source=ci/e2e.d/kubelet.sh
. "$root/ci/e2e.d/kubelet.sh"
# shellcheck source=ci/e2e.d/crash.sh
. "$root/ci/e2e.d/crash.sh"
# shellcheck source=ci/e2e.d/resource.sh
. "$root/ci/e2e.d/resource.sh"
# shellcheck source=ci/e2e.d/operators.sh
. "$root/ci/e2e.d/operators.sh"

run_label=e2e.farrier.dev/run
driver=mstflint
nfd=feature.node.kubernetes.io

# Runs kubectl as the administrator, without its warnings about versions. All messages are written when it ends.
k() {
    local code=0
    # In braces, because the redirection of a single command would belong to a child, which `wait` does not know.
    { kubectl --kubeconfig "$kubeconfig" "$@" || code=$?; } 2> >(grep -v 'version difference' >&2)
    wait $! || true
    return "$code"
}

label_of() { tr -c 'A-Za-z0-9_.\n-' _ <<< "$1"; }

# --- once for all scenarios

# Reports what in the cluster could interfere, and the consequences. The function only compares names and changes nothing.
survey_cluster() {
    local nodes devices others
    nodes="$(k get nodes -o json)"
    say "$(jq '.items | length' <<< "$nodes") nodes are there and stay untouched; this run's own are tainted"
    devices="$(jq -r --arg nfd "$nfd" '[.items[] | select(.metadata.labels[$nfd + "/pci-15b3.present"] == "true"
        or .metadata.labels["nvidia.com/gpu.deploy.driver"] == "true") | .metadata.name] | join(", ")' <<< "$nodes")"
    [ -z "$devices" ] ||
        echo "    with hardware that the operators look for: $devices. Their resources for the whole cluster are held there, which is what is tested" >&2
    others="$(k get deployments -A -l app.kubernetes.io/name=farrier -o json |
        jq -r '[.items[] | select(.spec.replicas > 0) | "\(.metadata.namespace)/\(.metadata.name)"] | join(", ")')"
    [ -z "$others" ] || echo "    farrier runs here: $others. It sees this run's nodes; this run's farriers have names of their own" >&2
    others="$(k get nodes,namespaces -l "$run_label" -o name | paste -sd ' ')"
    [ -z "$others" ] || echo "    another run's objects are here: $others. If that run is over, delete them" >&2
    if [ -n "$real_node" ]; then
        jq -e --arg name "$real_node" --arg nfd "$nfd" '.items[] | select(.metadata.name == $name)
            | .metadata.labels as $labels
            | ["/kernel-version.full", "/system-os_release.ID", "/system-os_release.VERSION_ID"] | all($labels[$nfd + .] != null)' \
            <<< "$nodes" > /dev/null || die "$real_node is no node with NFD's labels for kernel and operating system"
        echo "    drivers crash on $real_node, whose container runtime has to reach $registry" >&2
    fi
}

# Publishes the driver for both kernels beforehand, so that compile times do not affect the scenarios.
publish_driver() {
    local kernel dir="$state/published"
    mkdir -p "$dir/images"
    sed '/^  rollout:/,$d' "$root/images/$driver.yaml" > "$dir/images/$driver.yaml"
    for kernel in "$kernel_a" "$kernel_b"; do
        "$farrier" build "$driver" --kernel "$kernel" --os debian --os-version 12 --definitions "$dir" \
            --engine "$engine" --registry "$registry" --push -o json > "$state/build-$kernel.json" ||
            die "the driver was not built for $kernel"
    done
}

# Finds the images that both kernels' tags name. A rebuild from content that others stored gets another digest, because without
# keys farrier includes that content in the input hash.
find_images() {
    image_a="$(published_image "$kernel_a")"
    image_b="$(published_image "$kernel_b")"
}

# published_image KERNEL: prints the image by digest.
published_image() {
    local reference digest
    reference="$(jq -r .reference "$state/build-$1.json")"
    digest="$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$reference")" || die "$reference is not published"
    echo "${reference%:*}@$digest"
}

# CRDs belong to the whole cluster: existing ones stay, and the ones created here are removed.
make_cluster_objects() {
    local kind group version plural path
    : > "$state/crds"
    if ! k get crd driverbuilds.farrier.dev > /dev/null 2>&1; then
        k apply --server-side -f "$root/deploy/crds/driverbuild.yaml" > /dev/null
        echo driverbuilds.farrier.dev >> "$state/crds"
    fi
    # An operator watches all of its kinds.
    for path in $(operator_crds); do
        k create --dry-run=client -f "$path" -o name | sed 's,.*/,,' > "$state/operator-crds"
        while read -r plural; do
            k get crd "$plural" > /dev/null 2>&1 || echo "$plural" >> "$state/crds"
        done < "$state/operator-crds"
        k apply --server-side -f "$path" > /dev/null
    done
    while read -r kind group version plural _; do
        if k get crd "$plural.$group" > /dev/null 2>&1; then continue; fi
        echo "$plural.$group" >> "$state/crds"
        k apply --server-side -f - > /dev/null <<YAML
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: $plural.$group, labels: {$run_label: $run}}
spec:
  group: $group
  scope: Cluster
  names: {kind: $kind, plural: $plural, singular: ${kind,,}}
  versions:
    - name: $version
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true}}
YAML
    done < <(resource_kinds)
    while read -r plural; do
        k wait --for condition=established --timeout 30s "crd/$plural" > /dev/null
    done < "$state/crds"
}

remove_objects() {
    local node object
    [ -s "$state/version.json" ] || return 0
    say "removing this run's objects"
    k delete namespace -l "$run_label=$run" --wait=false --ignore-not-found > /dev/null
    remove_resources
    # No kubelet confirms the end of these pods, so force their deletion.
    for node in $(k get nodes -l "$run_label=$run" -o name); do
        k delete pods -A --field-selector "spec.nodeName=${node#node/}" --grace-period=0 --force > /dev/null 2>&1 || true
        k delete "$node" > /dev/null
    done
    k delete clusterrolebindings,clusterroles,validatingadmissionpolicybindings,validatingadmissionpolicies -l "$run_label=$run" > /dev/null
    wait_until 60 namespaces_gone || { echo "namespaces of run $run still exist" >&2; return 1; }
    # The run may have ended before it created CRDs.
    [ -f "$state/crds" ] || return 0
    while read -r object; do k delete crd "$object" --ignore-not-found > /dev/null; done < "$state/crds"
}

namespaces_gone() {
    local name
    for name in $(k get namespaces -l "$run_label=$run" -o name); do
        k delete pods --all -n "${name#namespace/}" --grace-period=0 --force > /dev/null 2>&1 || true
    done
    [ -z "$(k get namespaces -l "$run_label=$run" -o name)" ]
}

stop_all() {
    local file
    for file in "$state"/*/farrier-*.pid "$state"/*/operator.pid "$state"/*/kubelet.pid; do
        if [ -f "$file" ]; then stop "$file"; fi
    done
}

# Escapes a text as a regular expression, as far as kernel releases need that.
literal() { printf '%s' "$1" | sed 's/[.+]/\\&/g'; }

# unpack_headers KERNEL DIRECTORY: unpacks a Debian kernel's headers as on a node.
unpack_headers() {
    local packages="$state/headers-$1" package suite common
    mkdir -p "$packages"
    common="${1%-"$(dpkg --print-architecture)"}"
    for package in "linux-headers-$1" "linux-headers-${common%-cloud}-common" linux-kbuild-6.1; do
        for suite in bookworm-security bookworm; do
            (cd "$packages" && APT_CONFIG="$(private_apt "$suite")" apt-get download -qq "$package" 2> /dev/null) && break
        done || die "no suite has $package"
    done
    mkdir -p "$2/usr/lib"
    ln -sfn usr/lib "$2/lib"
    for package in "$packages"/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory "$2"; done
}

# --- each scenario

run_scenario() {
    set -euo pipefail
    here="$state/$scenario"
    ns="farrier-$run-$scenario" drivers="farrier-$run-$scenario-drivers" builds="farrier-$run-$scenario-builds"
    mark="e2e.farrier.dev/$run-$scenario"
    mkdir -p "$here/definitions/images"
    find_images
    k create namespace "$drivers" > /dev/null
    k label namespace "$drivers" "$run_label=$run" > /dev/null
    install_farrier
    start_kubelet
    # shellcheck source=/dev/null
    . "$1"
}

finish_scenario() {
    stop_all
    $keep && return
    # The next scenario's farrier would see these objects and log them.
    k delete daemonsets --all -n "farrier-$run-$scenario-drivers" --wait=false > /dev/null 2>&1 || true
    k delete nodes -l "e2e.farrier.dev/$run-$scenario" --wait=false > /dev/null 2>&1 || true
}

# part DIRECTORY NAMESPACE: prints deploy/kustomize's objects for that namespace, with this scenario's names and ServiceAccount.
part() {
    mkdir -p "$here/kustomize/$1"
    cat > "$here/kustomize/$1/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: $2
nameSuffix: -$run-$scenario
labels: [{pairs: {$run_label: $run}}]
resources: [../$relative/$1]
patches:
  - target: {kind: RoleBinding}
    patch: |-
      - {op: replace, path: /subjects/0, value: {kind: ServiceAccount, name: $account, namespace: $ns}}
YAML
    echo ---
    kubectl kustomize "$here/kustomize/$1"
}

# Components of deploy/kustomize for a scenario, which then calls install_farrier again.
components=''

# Installs deploy/kustomize/base with this scenario's names but without pods: farrier runs on this machine as the
# ServiceAccount. It may write in the drivers' namespace and run builds in theirs.
install_farrier() {
    local relative component
    account="farrier-$run-$scenario"
    mkdir -p "$here/kustomize"
    relative="$(realpath --relative-to "$(realpath "$here/kustomize")" "$root/deploy/kustomize")"
    cat > "$here/kustomize/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: $ns
nameSuffix: -$run-$scenario
labels: [{pairs: {$run_label: $run}}]
resources: [$relative/base]
components: [$(for component in $components; do printf '%s, ' "$relative/components/$component"; done)]
replicas: [{name: farrier, count: 0}]
patches:
  - target: {kind: ValidatingAdmissionPolicy}
    patch: |-
      - {op: replace, path: /spec/matchConditions/0/expression, value: "request.userInfo.username == 'system:serviceaccount:$ns:$account'"}
      - {op: replace, path: /spec/variables/0/expression, value: "['$registry/']"}
  # The originals of the scenarios with strategy per-kernel.
  - target: {kind: ValidatingAdmissionPolicy, name: farrier-daemonsets.*}
    patch: |-
      - {op: replace, path: /spec/variables/1/expression, value: "['$drivers/fleet', '$drivers/doomed']"}
      - {op: replace, path: /spec/variables/2/expression, value: "['tools.example/']"}
YAML
    # The CRD exists already, and its definition did not change for this scenario.
    {
        kubectl kustomize "$here/kustomize" && part rollout "$drivers" && part builds "$builds" &&
            { [ -z "$components" ] || part checks "$drivers"; }
    } > "$here/objects.yaml"
    awk 'BEGIN { RS = "---\n"; ORS = "---\n" } !/kind: CustomResourceDefinition/' "$here/objects.yaml" |
        k apply --server-side -f - > /dev/null
    account_kubeconfig "$account" "$ns" "$here/kubeconfig"
}

# account_kubeconfig ACCOUNT NAMESPACE FILE: writes a kubeconfig with the permissions of a ServiceAccount.
account_kubeconfig() {
    local token user
    k config view --raw --minify --flatten > "$3"
    chmod 600 "$3"
    token="$(k create token "$1" -n "$2" --duration 2h)"
    user="$(KUBECONFIG="$3" kubectl config view -o jsonpath='{.users[0].name}')"
    KUBECONFIG="$3" kubectl config delete-user "$user" > /dev/null
    KUBECONFIG="$3" kubectl config set-credentials "$1" --token "$token" > /dev/null
    KUBECONFIG="$3" kubectl config set-context --current --user "$1" --namespace "$2" > /dev/null
}

# Creates the namespace of builds with farrier's permissions in it, as in deploy/kustomize.
install_builds() {
    local relative
    mkdir -p "$here/kustomize/builds"
    relative="$(realpath --relative-to "$(realpath "$here/kustomize/builds")" "$root/deploy/kustomize")"
    cat > "$here/kustomize/builds/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: $builds
labels: [{pairs: {$run_label: $run}}]
resources: [$relative/builds]
patches:
  - target: {kind: RoleBinding}
    patch: |-
      - {op: replace, path: /subjects/0, value: {kind: ServiceAccount, name: $account, namespace: $ns}}
YAML
    k apply --server-side -k "$here/kustomize/builds" > /dev/null
}

# The driver's tag pattern, and a second one for scenarios that need it.
tagged="$(sed -n 's/^  tags: \["\(.*\)"\]$/\1/p' "$root/images/$driver.yaml")"
also_tagged=''

# definition ROLLOUT...: defines the driver for this scenario's nodes with these rollout targets (YAML flow style).
definition() {
    {
        sed -e '/^  rollout:/,$d' -e "s|^  nodes: .*|  nodes: {matchLabels: {$mark: \"true\"}}|" \
            -e "s|^  tags: .*|  tags: [\"$tagged\"${also_tagged:+, \"$also_tagged\"}]|" "$root/images/$driver.yaml"
        echo "  rollout:"
        printf '    - %s\n' "$@"
    } > "$here/definitions/images/.new"
    mv "$here/definitions/images/.new" "$here/definitions/images/$driver.yaml"
}

# --- nodes, which have no real kubelet

# add_node NAME KERNEL: creates a Ready node with that kernel and NFD's labels.
add_node() {
    local arch
    arch="$(dpkg --print-architecture)"
    k create -f - > /dev/null <<YAML
apiVersion: v1
kind: Node
metadata:
  name: $run-$scenario-$1
  labels:
    kubernetes.io/hostname: $run-$scenario-$1
    kubernetes.io/os: linux
    kubernetes.io/arch: $arch
    $run_label: $run
    $mark: "true"
    $nfd/kernel-version.full: $(label_of "$2")
    $nfd/system-os_release.ID: debian
    $nfd/system-os_release.VERSION_ID: "12"
spec:
  taints: [{key: $run_label, value: $run, effect: NoSchedule}]
YAML
    # The API server adds a taint to an unready node, and only a controller would remove it.
    k patch node "$run-$scenario-$1" --type merge \
        -p "{\"spec\": {\"taints\": [{\"key\": \"$run_label\", \"value\": \"$run\", \"effect\": \"NoSchedule\"}]}}" > /dev/null
    node_info "$1" "$2"
}

# node_info NAME KERNEL: sets the status that a kubelet would report after a reboot.
node_info() {
    local now
    now="$(date -u +%FT%TZ)"
    jq -n --arg kernel "$2" --arg now "$now" --arg arch "$(dpkg --print-architecture)" '{status: {
        capacity: {cpu: "8", memory: "16Gi", pods: "110"}, allocatable: {cpu: "8", memory: "16Gi", pods: "110"},
        conditions: [{type: "Ready", status: "True", reason: "KubeletReady", message: "", lastHeartbeatTime: $now,
            lastTransitionTime: $now}],
        nodeInfo: {kernelVersion: $kernel, architecture: $arch, operatingSystem: "linux",
            osImage: "Debian GNU/Linux 12 (bookworm)", containerRuntimeVersion: "containerd://1.7.27", machineID: "",
            systemUUID: "", bootID: $now, kubeletVersion: "v1.30.0", kubeProxyVersion: ""}}}' |
        k patch node "$run-$scenario-$1" --subresource status --type merge --patch-file /dev/stdin > /dev/null
}

# node_label NAME KERNEL: sets the label that NFD would write some seconds later.
node_label() { k label node "$run-$scenario-$1" --overwrite "$nfd/kernel-version.full=$(label_of "$2")" > /dev/null; }

# reboot NAME KERNEL: sets the node's status and its label.
reboot() {
    node_info "$@"
    node_label "$@"
}

# --- DaemonSets and their pods

# add_daemonset NAME IMAGE UPDATE-STRATEGY [NODE-SELECTOR]: creates a DaemonSet for this scenario's nodes, or for nodes with one
# label.
add_daemonset() {
    k apply --server-side --field-manager e2e -f - > /dev/null <<YAML
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: $1, namespace: $drivers, labels: {$run_label: $run}}
spec:
  selector: {matchLabels: {app: $1}}
  updateStrategy: {type: $3}
  template:
    metadata: {labels: {app: $1}}
    spec:
      nodeSelector: {${4:-"$mark: \"true\""}}
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 0
      containers:
        - {name: driver, image: "$2"}
YAML
}

# --- farrier

# start_farrier NAME [ARGUMENT...]: starts the loop like the Deployment.
start_farrier() {
    local name="$1" port
    shift
    port="$(free_port)"
    echo "$port" > "$here/farrier-$name.port"
    KUBECONFIG="$here/kubeconfig" "$farrier" run --cluster kube --write-namespaces "$drivers" --registry "$registry" --engine "$engine" \
        --definitions "$here/definitions" --cache-dir "$here/cache-$name" --leader-elect --lease-name farrier --listen "127.0.0.1:$port" \
        --log-format json "$@" > "$here/farrier-$name.out" 2>> "$here/farrier-$name.log" < /dev/null &
    echo $! > "$here/farrier-$name.pid"
    expect 30 "farrier $name is ready or has ended" ready_or_ended "$name"
    expect 0 "farrier $name runs" alive "$here/farrier-$name.pid"
}

ready_or_ended() { get "$1" readyz > /dev/null || not alive "$here/farrier-$1.pid"; }

free_port() {
    local port
    port=$((30000 + RANDOM % 10000))
    while (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do port=$((30000 + RANDOM % 10000)); done
    echo "$port"
}

get() { curl --silent --fail "http://127.0.0.1:$(cat "$here/farrier-$1.port")/$2"; }

# as_farrier COMMAND...: runs a farrier command with the ServiceAccount's permissions and this scenario's definitions.
as_farrier() {
    KUBECONFIG="$here/kubeconfig" "$farrier" "$@" --definitions "$here/definitions" --cache-dir "$here/cache-cli"
}

# as_admin COMMAND...: runs a farrier command with an administrator's permissions, which no policy restricts.
as_admin() {
    KUBECONFIG="$kubeconfig" "$farrier" "$@" --definitions "$here/definitions" --cache-dir "$here/cache-cli"
}

leads() { get "$1" metrics | grep -q '^farrier_leader 1'; }

# --- conditions

# expect SECONDS WHAT COMMAND...: waits until the command succeeds; otherwise prints the state and ends the scenario. WHAT is the
# condition that the command checks.
expect() {
    local seconds="$1" what="$2"
    shift 2
    if wait_until "$seconds" "$@" > "$here/expected" 2>&1; then
        echo "    $what" >&2
        return
    fi
    {
        echo "--- not within $seconds s: $what ($*)"
        tail -n 5 "$here/expected"
    } >&2
    abort_scenario
}

# fail WHAT: prints the state and ends the scenario, because the condition WHAT does not hold.
fail() {
    echo "--- not true: $1" >&2
    abort_scenario
}

# Prints the scenario's objects and the last lines of farrier's logs. Exits with an error.
abort_scenario() {
    local file
    {
        k get nodes -l "$mark" -L "$nfd/kernel-version.full" || true
        k get daemonsets,pods -n "$drivers" -o wide || true
        k get driverbuilds -n "$ns" -o wide || true
        for file in "$here"/farrier-*.log; do
            echo "--- $file"
            tail -n 25 "$file"
        done
    } >&2
    exit 1
}

# watch_is_over DAEMONSET: succeeds when farrier has finished watching the pods and recorded the outcome, so that no write
# follows.
watch_is_over() {
    k get daemonset "$1" -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver.state != "set"'
}

# steady SECONDS WHAT COMMAND...: asserts that the command's output does not change for SECONDS.
steady() {
    local before after end=$((SECONDS + $1))
    before="$("${@:3}")"
    while [ "$SECONDS" -lt "$end" ]; do
        after="$("${@:3}")"
        if [ "$before" != "$after" ]; then
            printf -- '--- changed: %s\n%s\n%s\n' "$2" "$before" "$after" >&2
            fail "$2"
        fi
        sleep 0.5
    done
    echo "    $2" >&2
}

ds_image() { k get daemonset "$1" -n "$drivers" -o jsonpath='{.spec.template.spec.containers[0].image}'; }
has_image() { [ "$(ds_image "$1")" = "$2" ]; }
# has_our_image APP: succeeds when farrier has set any of its images.
has_our_image() { [[ "$(ds_image "$1")" == "$registry/$driver@sha256:"* ]]; }
# Prints everything that farrier or another writer could change in a DaemonSet.
ds_spec() { k get daemonset "$1" -n "$drivers" -o json | jq -cS '[.metadata.annotations, .spec]'; }

# noted_good APP: succeeds when farrier has recorded the image as good.
noted_good() {
    k get daemonset "$1" -n "$drivers" -o json |
        jq -e '.metadata.annotations["farrier.dev/record"] | fromjson | .driver.state == "good"' > /dev/null
}

# pods_of APP: prints "node image" for each of the ready pods.
pods_of() {
    k get pods -n "$drivers" -l "app=$1" -o json | jq -r '.items[]
        | select(.metadata.deletionTimestamp == null)
        | select([.status.conditions[]? | select(.type == "Ready" and .status == "True")] | length > 0)
        | "\(.spec.nodeName) \(.spec.containers[0].image)"' | sort
}
pod_on() { pods_of "$1" | grep -qxF "$run-$scenario-$2 $3"; }

dbuild_phases() {
    k get driverbuilds -n "$ns" -o json | jq -r '.items[] | "\(.spec.image) \(.spec.release) \(.status.phase)"' | sort
}
node_annotation() { k get node "$run-$scenario-$1" -o json | jq -r --arg key "$2" '.metadata.annotations[$key] // ""'; }
node_has_label() { k get node "$run-$scenario-$1" -o json | jq -e --arg key "$2" '.metadata.labels | has($key)' > /dev/null; }
