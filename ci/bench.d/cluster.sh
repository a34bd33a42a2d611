# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The rows about builds in a cluster. They need --kubeconfig and a node whose container runtime reaches registries on this
# machine's loopback. Sourced by ci/bench.
#
# "Overhead" is the time from the creation of the pod's image to the check, minus the time of the build's step. The node already
# has all of the image's layers except the topmost. "50 builds": each build sleeps for 20 s and requests a 25th of the node's
# CPUs. For comparison, 50 plain Jobs sleep just as long. The ideal is twice 20 s, and the kubelet's own work adds to that.

cluster_rows() {
    local kernel run place="$state/sandbox" builds="farrier-bench-$$-builds" room
    [ -n "$kubeconfig" ] || return 0
    export KUBECONFIG="$kubeconfig"
    need_kubectl
    kernel="$(debian_kernels bookworm-security 1)"
    sandbox_definitions
    mkdir -p "$place/builds"
    cat > "$place/builds/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: $builds
resources: [$(realpath --relative-to "$(realpath "$place/builds")" "$root/deploy/kustomize/builds")]
YAML
    kubectl apply --server-side -k "$place/builds" >> "$state/bench.log"
    kubectl patch resourcequota farrier-builds -n "$builds" --type merge -p '{"spec": {"hard": {"pods": "60", "limits.memory": "400Gi"}}}' \
        >> "$state/bench.log"
    cat > "$place/definitions/site.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: bench}
spec: {builds: {namespace: $builds, atOnce: 50}}
YAML
    say "building the module for builds that do almost nothing, on $kernel"
    clocked sandbox clock "$kernel" warm
    bring_module "$kernel"
    for ((run = 0; run <= 20; run++)); do
        clocked kubernetes brought "$kernel" warm
        # The first build transfers toolchain and headers to the node.
        if [ "$run" = 0 ]; then continue; fi
        awk '/putting headers into/ { before = $1 } $NF == "checking" { after = $1 }
             $2 == "STEPS-BEGIN" { begin = $3 } $2 == "STEPS-END" { end = $3 }
             END { printf "%.3f\n", after - before - (end - begin) }' "$place/lines" | tee -a "$state/times/overhead" >&2
    done
    row "overhead of a build in a cluster, p95 of 20" "$(sort -n "$state/times/overhead" | sed -n 19p)" 10 s

    say "50 builds of 20 s in a cluster with room for 25"
    # The first node's allocatable CPU in millicores. A quota would instead measure the Job controller's increasing backoff.
    room="$(kubectl get nodes -o json | jq '.items[0].status.allocatable.cpu | if endswith("m") then rtrimstr("m") | tonumber else tonumber * 1000 end')"
    # The module is prebuilt, because 25 concurrent compilers would measure the CPUs.
    sed 's/^RUN /RUN sleep 20; /' "$place/definitions/templates/brought.Dockerfile.hbs" > "$place/definitions/templates/sleeper.Dockerfile.hbs"
    for ((run = 1; run <= 50; run++)); do
        sed -e "s/{name: brought}/{name: sleeper-$run}/" -e 's/template: brought/template: sleeper/' "$place/definitions/images/brought.yaml" \
            > "$place/definitions/images/sleeper-$run.yaml"
        echo "  build: {cpus: $((room / 25))m, memory: 64Mi}" >> "$place/definitions/images/sleeper-$run.yaml"
    done
    rm "$place"/definitions/images/{brought,clock}.yaml
    mkdir -p "$place/cluster"
    cat > "$place/cluster/node.yaml" <<YAML
apiVersion: v1
kind: Node
metadata:
  name: n1
  labels:
    feature.node.kubernetes.io/pci-15b3.present: "true"
    feature.node.kubernetes.io/kernel-version.full: $kernel
    feature.node.kubernetes.io/system-os_release.ID: debian
    feature.node.kubernetes.io/system-os_release.VERSION_ID: "12"
    kubernetes.io/arch: amd64
status: {nodeInfo: {kernelVersion: $kernel, architecture: amd64, osImage: Debian GNU/Linux 12 (bookworm), containerRuntimeVersion: containerd://2}}
YAML
    timed sleepers "$farrier" run --once --cluster "dir:$place/cluster" --engine kubernetes --definitions "$place/definitions" \
        --registry "$registry" --cache-dir "$place/warm"
    say "50 Jobs that sleep for 20 s"
    sleeping_jobs "$builds" "$((room / 25))m"
    row "50 builds of 20 s, room for 25 / 50 Jobs that only sleep" "$(ratio sleepers jobs)" 1.15 x
    say "both compared with the ideal: $(awk -v b="$(median sleepers)" -v j="$(median jobs)" 'BEGIN { printf "%.2f x and %.2f x", b / 40, j / 40 }')"
    kubectl delete namespace "$builds" --wait=false >> "$state/bench.log"
    rm -rf "$place"
}

# Measures Jobs that start as fast as possible: no result to fetch, an image that the node already has, and little networking.
sleeping_jobs() { # NAMESPACE CPUS
    local run image
    image="$registry/farrier-rootfs:$(skopeo list-tags --tls-verify=false "docker://$registry/farrier-rootfs" | jq -r '.Tags[0]')"
    for ((run = 1; run <= 50; run++)); do
        cat <<YAML
---
apiVersion: batch/v1
kind: Job
metadata: {name: sleep-$run, labels: {bench: sleep}}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: sleep
          image: $image
          command: [sleep, "20"]
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
          resources: {requests: {cpu: $2, memory: 64Mi, ephemeral-storage: 1Gi}, limits: {cpu: "1", memory: 256Mi, ephemeral-storage: 32Gi}}
YAML
    done > "$state/jobs.yaml"
    timed jobs jobs_end "$1"
    rm "$state/jobs.yaml"
}

jobs_end() { # NAMESPACE
    kubectl create -n "$1" -f "$state/jobs.yaml" && kubectl wait -n "$1" --for=condition=Complete jobs -l bench=sleep --timeout=300s
}
