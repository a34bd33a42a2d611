# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Answers to users' questions about a fleet of 5,000 nodes: specific and within a time limit.

fleet=5000
no_headers=6.1.0-999-amd64
repository="file://$here/forge.git"
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s, upgrade: {canary: 1}}" \
    "{strategy: git, repository: \"$repository\", branch: main, namespace: $drivers, daemonSet: forge, container: driver}"

# Only n1 and n2 have pods, because the script's kubelet does not run the other nodes. Of those, one in ten runs kernel B, three
# have a kernel without headers, and one has no labels yet.
fleet_of_nodes() {
    jq -nc --argjson fleet "$fleet" --arg a "$kernel_a" --arg b "$kernel_b" --arg c "$no_headers" --arg nfd "$nfd" --arg mark "$mark" \
        --arg prefix "$run-$scenario-f" --arg taint "$run_label" --arg run "$run" --arg arch "$(dpkg --print-architecture)" --arg now "$(date -u +%FT%TZ)" '
        range($fleet) | . as $number
        | (if $number < 3 then $c elif $number % 10 == 0 then $b else $a end) as $kernel
        | {apiVersion: "v1", kind: "Node",
           metadata: {name: "\($prefix)\($number)", labels: ({($mark): "true", ($taint): $run, "kubernetes.io/os": "linux", "kubernetes.io/arch": $arch,
               ($nfd + "/kernel-version.full"): $kernel, ($nfd + "/system-os_release.ID"): "debian",
               ($nfd + "/system-os_release.VERSION_ID"): "12"} | if $number == 3 then del(.[$nfd + "/kernel-version.full"]) else . end)},
           spec: {taints: [{key: $taint, effect: "NoSchedule"}]},
           status: {conditions: [{type: "Ready", status: "True", reason: "KubeletReady", lastHeartbeatTime: $now, lastTransitionTime: $now}],
               nodeInfo: {kernelVersion: $kernel, architecture: $arch, operatingSystem: "linux", osImage: "Debian GNU/Linux 12 (bookworm)",
                   containerRuntimeVersion: "containerd://1.7.27", machineID: "", systemUUID: "", bootID: "", kubeletVersion: "v1.30.0",
                   kubeProxyVersion: ""}}}'
}
# Deletes all nodes with one request, because one request per node takes minutes. A busy API server ends the request after a
# minute.
fleet_is_gone() {
    k delete --raw "/api/v1/nodes?labelSelector=$mark" > /dev/null 2>&1 || true
    [ -z "$(k get --raw "/api/v1/nodes?labelSelector=$mark&limit=1" | jq -r '.items[].metadata.name')" ]
}
remove_fleet() { wait_until 300 fleet_is_gone; }
trap remove_fleet EXIT
fleet_of_nodes | split --number r/8 - "$here/nodes."
printf '%s\n' "$here"/nodes.* | xargs -P 8 -I FILE kubectl --kubeconfig "$kubeconfig" create --validate=false -f FILE > /dev/null
for node in n1 n2; do
    add_node "$node" "$kernel_a"
    k label node "$run-$scenario-$node" "$mark-pool=solo" > /dev/null
done
add_daemonset solo "$registry/$driver:vendor" OnDelete "$mark-pool: solo"
add_daemonset forge "$registry/$driver:vendor" OnDelete "$mark-pool: solo"

# The repository that the cluster's GitOps tool applies.
git init --quiet --bare --initial-branch main "$here/forge.git"
git -c init.defaultBranch=main clone --quiet "$repository" "$here/forge" 2> /dev/null
k get daemonset forge -n "$drivers" -o json | jq '{apiVersion, kind, metadata: {name: .metadata.name, namespace: .metadata.namespace}, spec}' \
    > "$here/forge/forge.json"
git -C "$here/forge" add forge.json
git -C "$here/forge" -c user.name=e2e -c user.email=e2e@example.org commit --quiet --message first
git -C "$here/forge" push --quiet origin HEAD:main

export KUBECONFIG="$here/kubeconfig" FARRIER_DEFINITIONS="$here/definitions" FARRIER_CACHE_DIR="$here/cache-cli" FARRIER_CLUSTER=kube
export FARRIER_REGISTRY="$registry" FARRIER_WRITE_NAMESPACES="$drivers" FARRIER_ENGINE="$engine"
mkdir -p "$here/bin"
ln -s "$farrier" "$here/bin/kubectl-farrier"
PATH="$here/bin:$PATH"

# answers CODE WORDS COMMAND...: asserts that the command ends with CODE within two minutes, and that its output contains all
# WORDS, which are separated by `;`. The first command also fills the cache.
answers() {
    local code="$1" wanted="$2" began="${EPOCHREALTIME/./}" ended=0 word words
    shift 2
    timeout 120 "$@" > "$here/answer" 2> "$here/answer.err" || ended=$?
    printf '    %6d ms %9d bytes  %s\n' $(((${EPOCHREALTIME/./} - began) / 1000)) "$(stat --format %s "$here/answer")" "${*##*/}" >&2
    IFS=';' read -ra words <<< "$wanted"
    for word in "${words[@]}"; do
        grep -qF -- "$word" "$here/answer" && [ "$ended" = "$code" ] && continue
        { tail -n 5 "$here/answer.err"; head -c 2000 "$here/answer"; } >&2
        fail "the command ends with $code (not $ended) and prints: $word"
    done
}

last="$run-$scenario-f$((fleet - 1))"
answers 0 "$kernel_a;$kernel_b;$no_headers;published;$run-$scenario-f3" "$farrier" status
answers 0 "$driver" "$farrier" status --html "$here/page"
grep -qF "$kernel_b" "$here/page/index.html" || fail "the page's files show the matrix"
answers 0 "$mark=true;solo" "$farrier" why "node/$run-$scenario-n1"
answers 0 "published" "$farrier" why "node/$last"
answers 0 "published;$kernel_b" "$farrier" why "$driver" "$kernel_b"
answers 1 "skipped;kubectl label --overwrite node;may be written;$no_headers" "$farrier" doctor
answers 0 "ready for $kernel_b" "$farrier" preflight --kernel "$kernel_b" --node "$last"
answers 1 "more: not ready for $no_headers" "$farrier" preflight --kernel "$no_headers"
answers 0 "definitions/images/mstflint.yaml" env KUBECONFIG="$kubeconfig" "$farrier" init "$here/init/definitions" --driver "$driver"
answers 0 "$last" env FARRIER_COMPLETE=bash "$farrier" -- 2 "node/$last" farrier why "node/$last"
answers 0 "published" kubectl farrier status
answers 0 "solo" kubectl farrier upgrade plan

"$farrier" ui --no-browser --cache-dir "$here/cache-cli" > "$here/ui.txt" 2> "$here/farrier-ui.log" < /dev/null &
echo $! > "$here/farrier-ui.pid"
expect 120 "the page is served" grep -q "^http" "$here/ui.txt"
answers 0 "$kernel_b;$no_headers" curl --silent --fail --compressed "$(cat "$here/ui.txt")"
answers 0 "$last" curl --silent --fail --compressed "$(cat "$here/ui.txt")n/$(printf %s "$last" | sha256sum | cut -c -16).html"

answers 1 "rewrote   DaemonSet $drivers/solo;in $repository, branch main: " "$farrier" run --once
expect 0 "the branch has the image" grep -qF "$image_a" <(git -C "$here/forge.git" show main:forge.json)
git -C "$here/forge" pull --quiet
k apply -f "$here/forge/forge.json" > /dev/null 2>&1
expect 0 "the applied manifest sets the image in the cluster" has_image forge "$image_a"
answers 1 "in $repository, branch main  already set  $image_a" "$farrier" run --once
