# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that the scenarios read or lib.sh sets
# A working driver and a crashing driver, for the scenarios about crashes. Sourced by ci/e2e.d/lib.sh.
#
# On the script's own nodes these are two kernels' images, and the script's kubelet simulates their state. With --real-node they
# are versions of an image without a module, whose containers run or end on that node.

crash_words="no such device"

# start_crashing_driver WATCH: makes the DaemonSet `solo` run $good under farrier's control.
start_crashing_driver() {
    local watch="$1" selector
    if [ -n "$real_node" ]; then
        publish_test_drivers
        test_driver_definition works "$watch"
        good="$(jq -r .pinned "$state/crasher/works.json")"
        selector="kubernetes.io/hostname: \"$(real_node_label kubernetes.io/hostname)\""
    else
        definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, $watch}"
        add_node n1 "$kernel_a"
        good="$image_a"
        selector="$mark: \"true\""
    fi
    crash_watch="$watch"
    add_daemonset solo "$good" RollingUpdate "$selector"
    expect 60 "a driver works" driver_runs "$good"
    start_farrier one
}

# crash_after SECONDS: gives farrier another image, $bad, which crashes SECONDS after each start.
crash_after() {
    if [ -n "$real_node" ]; then
        test_driver_definition "crashes-after-$1" "$crash_watch"
        bad="$(jq -r .pinned "$state/crasher/crashes-after-$1.json")"
    else
        set_fate "$image_b" "{\"after\": $1, \"words\": \"$crash_words\"}"
        bad="$image_b"
        reboot n1 "$kernel_b"
    fi
}

restarted() {
    k get pods -n "$drivers" -l app=solo -o json | jq -e '.items | any(.status.containerStatuses[0].restartCount > 0)'
}
driver_runs() { pods_of solo | grep -qF " $1"; }

# The record, the plan and an Event contain the pod's termination message.
record_tells() {
    k get daemonset solo -n "$drivers" -o json | jq -e --arg words "$crash_words" '.metadata.annotations["farrier.dev/record"]
        | fromjson | .driver | .state == "failed" and (.why | contains("exit code 3") and contains($words))'
}
plan_tells() {
    { as_farrier plan --cluster kube --registry "$registry" -o json || true; } > "$here/plan.json"
    grep -qF "$crash_words" "$here/plan.json"
}
event_tells() {
    k get events.events.k8s.io -n "$drivers" -o json | jq -e --arg words "$crash_words" '.items
        | any(.regarding.name == "solo" and .reason == "RolloutRestored" and (.note | contains($words)))'
}
never_good() { not grep -q '"state":"good"' <(k get daemonset solo -n "$drivers" -o json | jq -r '.metadata.annotations["farrier.dev/record"] // ""'); }

real_node_label() { k get node "$real_node" -o json | jq -er --arg key "$1" '.metadata.labels[$key]'; }

# Publishes the test drivers for the real node's kernel, once for all scenarios. Nothing is compiled, so an empty header set
# suffices.
publish_test_drivers() {
    local dir="$state/crasher" definitions="$state/crasher/definitions" release version after
    [ ! -e "$dir/published" ] || return 0
    mkdir -p "$definitions/images" "$definitions/kernels" "$definitions/templates" "$definitions/headers"
    release="$(k get node "$real_node" -o jsonpath='{.status.nodeInfo.kernelVersion}')"
    empty_headers "$release" "$definitions/headers/$release.tar.xz"
    cat > "$definitions/kernels/00-real-node.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: real-node}
spec:
  match: {release: '$(literal "$release")'}
  headers: {tarball: {path: "headers/{{release}}.tar.xz"}}
  toolchain: {bootstrap: {suite: bookworm, include: []}}
YAML
    cat > "$definitions/templates/crasher.Dockerfile.hbs" <<'TEXT'
FROM {{toolchain}} AS modules
RUN mkdir -p /out/usr/share/crasher; echo "{{kernel.release}}" > /out/usr/share/crasher/kernel

FROM scratch
COPY --from=modules /out /
TEXT
    for version in works works-too crashes-after-0 crashes-after-60; do
        after="${version#crashes-after-}"
        cat > "$definitions/images/crasher.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: DriverImage
metadata: {name: crasher}
spec:
  version: $version
  template: crasher
  nodes: {matchLabels: {kubernetes.io/hostname: "$(real_node_label kubernetes.io/hostname)"}}
  modules: []
  runtime:
    # The same base as the other driver's.
    base: {bootstrap: {suite: bookworm, include: [kmod]}}
    entrypoint:
      - sh
      - -c
      - 'case \$CRASH_AFTER in works*) exec sleep infinity ;; esac; sleep \$CRASH_AFTER; echo $crash_words > /dev/termination-log; exit 3'
    env: {CRASH_AFTER: "$after"}
  tags: ["{{version}}-{{kernel_label}}"]
YAML
        "$farrier" build crasher --kernel "$release" --os "$(real_node_label "$nfd/system-os_release.ID")" \
            --os-version "$(real_node_label "$nfd/system-os_release.VERSION_ID")" \
            --arch "$(real_node_label kubernetes.io/arch)" --definitions "$definitions" --engine "$engine" --registry "$registry" \
            --push -o json > "$dir/$version.json" || fail "an image is built for $real_node"
        cp "$definitions/images/crasher.yaml" "$dir/$version.yaml"
    done
    : > "$dir/published"
}

# test_driver_definition VERSION WATCH: defines a version of the test driver with these settings of its rollout.
test_driver_definition() {
    cp -r "$state/crasher/definitions/"{kernels,templates,headers} "$here/definitions/"
    {
        cat "$state/crasher/$1.yaml"
        echo "  rollout: [{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, $2}]"
    } > "$here/definitions/images/.new"
    mv "$here/definitions/images/.new" "$here/definitions/images/crasher.yaml"
}
