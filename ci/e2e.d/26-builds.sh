# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Engine kubernetes: builds are Jobs on a real kubelet, in a namespace labeled `restricted`. The scenario covers four concurrent
# drivers, a farrier that is killed and replaced while they compile, deleted pods, a quota, a build that exceeds its memory, and
# a hostile build.

[ -n "$real_node" ] || { say "builds: skipped, because it needs a kubelet (--real-node)"; return 0; }
builds="$ns-builds"
# shellcheck disable=SC2034 # start_farrier takes it
engine=kubernetes
mkdir -p "$here/definitions/templates"
cp "$root"/ci/e2e.d/builds/*.hbs "$here/definitions/templates/"
sed -i -e "/^ATTACK\$/{r $root/tests/escape/pod.c" -e 'd}' "$here/definitions/templates/hostile.Dockerfile.hbs"
cat > "$here/definitions/site.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: e2e}
spec:
  builds: {namespace: $builds, atOnce: 8, labels: {$run_label: $run}}
YAML
install_builds

# build_definition NAME SECONDS [THEN [MEMORY]]: defines the driver with steps that sleep for SECONDS and then run THEN.
build_definition() {
    sed -e '/^  rollout:/,$d' -e "s|^metadata: .*|metadata: {name: $1}|" -e "s|^  nodes: .*|  nodes: {matchLabels: {$mark-$1: \"true\"}}|" \
        -e "s|^  template: .*|  template: slow|" -e "s|^  vars: .*|  vars: {seconds: \"$2\", then: \"${3:-true}\"}|" \
        "$root/images/$driver.yaml" > "$here/definitions/images/$1.yaml"
    echo "  build: {cpus: 250m, memory: ${4:-256Mi}}" >> "$here/definitions/images/$1.yaml"
}

wants() { k label node "$run-$scenario-n1" --overwrite "${@/%/=true}" > /dev/null; }
jobs() { k get jobs -n "$builds" -o json | jq -e ".items | length $1" > /dev/null; }
running() { k get pods -n "$builds" -o json | jq -e "[.items[] | select(.status.phase == \"Running\")] | length == $1" > /dev/null; }
published() {
    local name
    for name; do skopeo list-tags --tls-verify=false "docker://$registry/$name" > /dev/null 2>&1 || return 1; done
}
says() { k get driverbuilds -n "$ns" -o json | jq -e --arg words "$1" '.items | any(tostring | test($words))' > /dev/null; }

add_node n1 "$kernel_a"
for name in one two three four; do build_definition "$name" 40; done
wants "$mark-one" "$mark-two" "$mark-three" "$mark-four"
start_farrier first --interval 5
expect 300 "four drivers compile at once, each in a pod" running 4
pods() { k get pods -n "$builds" -o json | jq -cS '[.items[].metadata.uid] | sort'; }
before="$(pods)"
kill -KILL "$(cat "$here/farrier-first.pid")"
start_farrier second --interval 5
expect 60 "after the kill another farrier leads" leads second
expect 5 "the same pods still compile" [ "$(pods)" = "$before" ]
expect 300 "all four images are published" published one two three four
expect 20 "the Jobs of the four builds are gone" jobs '== 0'
grep -q 'takes over a build that runs' "$here/farrier-second.log" || fail "the second farrier takes over the Jobs"

build_definition deleted 20
wants "$mark-deleted"
expect 60 "one more build compiles" running 1
k delete pods -n "$builds" --all --now > /dev/null
expect 20 "the deletion of the build's pod is reported" says 'ended without a result'
expect 300 "the deleted build runs again" published deleted

k create quota full -n "$builds" --hard=limits.memory=1Gi > /dev/null
build_definition quota 1
wants "$mark-quota"
expect 60 "a build waits for the quota, and the reason is reported" says 'exceeded quota'
k delete quota full -n "$builds" > /dev/null
expect 300 "without the quota the image is built" published quota

build_definition greedy 1 'dd if=/dev/zero of=/dev/null bs=5G count=1 iflag=fullblock'
wants "$mark-greedy"
expect 300 "a build that exceeds its memory reports the limit" says 'MiB of memory; the limit is|OOMKilled'

# with_template NAME TEMPLATE VARS: gives a definition another template.
with_template() { sed -i -e "s/^  template: .*/  template: $2/" -e "s|^  vars: .*|  vars: {$3}|" "$here/definitions/images/$1.yaml"; }
# failed IMAGE [WORDS]: succeeds if a build of the image has failed, and its status matches WORDS, a regular expression.
failed() {
    k get driverbuilds -n "$ns" -o json | jq -e --arg image "$1" --arg words "${2:-}" \
        '.items | any(.spec.image == $image and .status.phase == "failed" and (tostring | test($words)))' > /dev/null
}
log_of() { cat "$here"/cache-*/logs/"$1"-*.log; }

# Starts another follower in the hostile build's pod, like farrier after a cut connection, and checks whether the build has
# ended.
hostile_is_over() {
    local pod
    for pod in $(k get pods -n "$builds" -l farrier.dev/image=hostile --field-selector status.phase=Running -o name); do
        timeout 1 kubectl --kubeconfig "$kubeconfig" exec -n "$builds" "$pod" -- /.farrier/runner follow 0 > /dev/null 2>&1 || true
    done
    published hostile || failed hostile
}

build_definition hostile 1
with_template hostile hostile ''
wants "$mark-hostile"
expect 300 "a hostile build attacks the runner and tries to escape" hostile_is_over
log_of hostile > "$here/hostile.log"
if grep ' ESCAPED$\|^error: a step got at' "$here/hostile.log" >&2; then fail "no attack succeeds"; fi
# attacked TIMES: asserts that every attack, including those named below, was tried this many times and denied.
attacked() {
    local denied what
    denied="$(grep -c ' denied$' "$here/hostile.log")"
    [ "$(grep -cx "$((denied / $1)) attacks" "$here/hostile.log")" = "$1" ] || return 1
    while read -r what; do
        [ "$(grep -cxF "$what denied" "$here/hostile.log")" = "$1" ] || { echo "not $1 times: $what"; return 1; }
    done <<'TEXT'
the follower: write mem
the follower: write fd/1
the follower: read exe
the follower: attach
the follower: take its descriptor 1
process 1: write mem
process 1: write fd/1
process 1: list fd
process 1: seize
process 1: end or stop it by signals
the runner's files: read the runner
the runner's files: write the plan
the runner's files: replace the directory
the runner's files: replace the runner
the runner's files: ask the runner
the runner's socket: connect a pair of type 2
descriptors: frames to descriptor 1
a follower that begins: write its memory
a follower that begins: write its output
TEXT
}
expect 0 "each attack was tried in four places, and denied in all of them" attacked 4
expect 0 "the build also tried the other escapes" grep -qx 'all was refused' "$here/hostile.log"
expect 0 "every escape fails, and the image is built" published hostile
# Output that imitates the runner's messages is still only output.
expect 0 "the forged messages appear as lines of the log" grep -qa 'forged' "$here/hostile.log"

# Symbolic links that replace paths which the runner opens next.
swapped() { build_definition "swapped-$1" 1 && with_template "swapped-$1" swapped "place: $2, link: $3"; }
swapped workdir workdir /proc/self/root/tmp
swapped copy copy /proc/self/root/tmp
swapped document document /proc/self/root/tmp
swapped current workdir /proc/self/cwd
for name in workdir copy document current; do wants "$mark-swapped-$name"; done
for name in workdir copy document current; do
    expect 300 "the runner follows no magic link: $name" failed "swapped-$name" 'symbolic links'
    expect 0 "the image is not published" not published "swapped-$name"
done
newest_image() { echo "$registry/$1:$(skopeo list-tags --tls-verify=false "docker://$registry/$1" | jq -r '.Tags[]' | grep -v '^sha256-' | tail -n 1)"; }

# The same inputs give the same image in a sandbox.
as_is=(--kernel "$kernel_a" --os debian --os-version 12 --definitions "$here/definitions" --registry "$registry")
in_cluster="$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$(newest_image one)")"
in_sandbox="$("$farrier" build one "${as_is[@]}" --cache-dir "$here/cache-sandbox" --engine sandbox --push --force -o json | jq -r .digest)"
[ "$in_cluster" = "$in_sandbox" ] || fail "the sandbox and the cluster build the same digest: $in_sandbox, $in_cluster"
