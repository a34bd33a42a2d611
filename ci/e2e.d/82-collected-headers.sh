# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A kernel whose headers only its node has: farrier reports them as missing. `farrier headers collect`, run like in the Job,
# sends them to farrier, which stores them. The image is built from them and is up to date for every other farrier.

# Debian's packages as installed on a node, with headers in three places: the kernel's tree, a common tree and the kernel's own
# tools.
flavor="cloud-$(dpkg --print-architecture)"
kernel="$(debian_kernels bookworm-security 1 "$flavor")"
[ -n "$kernel" ] || fail "the security suite has a kernel of the flavor $flavor"
# A separate registry path, because another scenario may have stored this kernel's headers in the shared one.
registry="$registry/$scenario"
mkdir -p "$here/host" "$here/node" "$here/definitions/kernels"
unpack_headers "$kernel" "$here/host"
# Exactly the directories that the Job mounts from the node.
while read -r path; do
    mkdir -p "$here/node$path"
    cp -a "$here/host$path/." "$here/node$path/"
done < <(grep -o 'hostPath: {path: [^,]*' "$root/deploy/kustomize/components/collect-headers/job.yaml" | cut -d' ' -f3)
cat > "$here/definitions/kernels/00-own.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: own}
spec:
  match: {release: '$(literal "$kernel")'}
  headers: {tarball: {path: "headers/{{release}}.tar.xz"}}
  toolchain: {bootstrap: {suite: bookworm, include: [gcc, gcc-12, libc6-dev, make, patch, perl, kmod, libelf1, xz-utils]}}
YAML
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
# Headers change no object in the cluster when they arrive, so no watch event tells farrier about them. farrier finds them at its
# next resync, so the interval is short.
mkdir -p "$here/keys"
start_farrier one --interval 5 --collect-keys "$here/keys"
tells_missing() { k get driverbuilds -n "$ns" -o json | jq -e '.items | any(tostring | test("no headers"))'; }
expect 40 "kubectl get dbuild reports the missing headers" tells_missing
steady 4 "the DaemonSet stays unchanged" ds_spec solo

# The node has its kernel's key and no registry credential.
openssl rand -hex 32 > "$here/key"
collect() {
    env -u REGISTRY_AUTH_FILE "$farrier" headers collect --root "$here/node" --kernel "$kernel" --key-file "$here/key" \
        --to "http://127.0.0.1:$(cat "$here/farrier-one.port")" --definitions "$here/definitions" --cache-dir "$here/cache-node"
}
not_taken() { not collect && grep -qF 'the key is not valid for headers of' "$here/expected"; }
expect 0 "headers with an unknown key are refused" not_taken
openssl rand -hex 32 > "$here/keys/$(label_of "$kernel")"
expect 0 "headers with another kernel's key are refused" not_taken
cp "$here/key" "$here/keys/$(label_of "$kernel")"
expect 0 "headers with the kernel's key are accepted" collect
expect 0 "the same headers are accepted again" collect
echo "struct evil;" >> "$(find "$here/node/usr/src" -name module.h -path '*/include/linux/*' | head -n 1)"
not_replaced() { not collect && grep -qF ' has other headers, with content ' "$here/expected"; }
expect 0 "different headers for the same kernel are refused" not_replaced
expect 180 "the image is built from the headers and set" has_our_image solo
expect 60 "the image is recorded as good" noted_good solo
first="$(ds_image solo)"

# Other replicas and command-line users have separate caches; all of them must find the published image up to date.
up_to_date() {
    as_farrier plan --cluster kube --registry "$registry" -o json > "$here/plan.json" &&
        jq -e '.builds == [] and .conflicts == [] and (.upToDate | length) == 1' "$here/plan.json"
}
expect 30 "a farrier with an empty cache finds the image up to date" up_to_date
stop "$here/farrier-one.pid"
start_farrier two --interval 5
steady 8 "with another farrier the DaemonSet stays unchanged" ds_spec solo
[ "$(ds_image solo)" = "$first" ] || fail "the DaemonSet keeps the image"
conflicts() { k get driverbuilds -n "$ns" -o json | jq -e '.items | any(.status.phase == "conflict")'; }
expect 0 "no conflict is reported" not conflicts
