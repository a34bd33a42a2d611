# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# A kernel whose headers only its node has: farrier says that they are missing; `farrier headers collect`, as the Job runs it,
# sends them to farrier, which stores them; the image is built from them, and is the same for every other farrier.

# Debian's packages as they lie on a node, headers in three places: a tree, a common one and the kernel's own tools.
flavour="cloud-$(dpkg --print-architecture)"
kernel="$(debian_kernels bookworm-security 1 "$flavour")"
[ -n "$kernel" ] || expect 0 "the security suite has a kernel of the flavour $flavour" false
# A registry place of its own: in the other one this kernel's headers may be from another scenario.
registry="$registry/$scenario"
mkdir -p "$here/host" "$here/node" "$here/definitions/kernels"
unpack_headers "$kernel" "$here/host"
# What the Job mounts of the node, and nothing more.
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
# Nothing in the cluster changes when the headers come: it looks again by itself.
mkdir -p "$here/keys"
start_farrier one --interval 5 --collect-keys "$here/keys"
tells_missing() { k get driverbuilds -n "$ns" -o json | jq -e '.items | any(tostring | test("no headers"))'; }
expect 40 "kubectl get dbuild says that there are no headers" tells_missing
steady 4 "and nothing is built or set" ds_spec solo

# The node has its kernel's key, and no credential.
openssl rand -hex 32 > "$here/key"
collect() {
    env -u REGISTRY_AUTH_FILE "$farrier" headers collect --root "$here/node" --kernel "$kernel" --key-file "$here/key" \
        --to "http://127.0.0.1:$(cat "$here/farrier-one.port")" --definitions "$here/definitions" --cache-dir "$here/cache-node"
}
not_taken() { not collect && grep -qF 'the key is not valid for headers of' "$here/expected"; }
expect 0 "without an administrator's word its headers are not taken" not_taken
openssl rand -hex 32 > "$here/keys/$(label_of "$kernel")"
expect 0 "nor with another kernel's key" not_taken
cp "$here/key" "$here/keys/$(label_of "$kernel")"
expect 0 "with its own key they are" collect
expect 0 "once more, they are known" collect
echo "struct evil;" >> "$(find "$here/node/usr/src" -name module.h -path '*/include/linux/*' | head -n 1)"
not_replaced() { not collect && grep -qF ' holds others, with content ' "$here/expected"; }
expect 0 "others in their place are not taken" not_replaced
expect 180 "the image is built from them and set" ours_is_set
expect 60 "and noted as good" noted_good solo
first="$(ds_image solo)"

# Another replica, and whoever plans elsewhere, have caches of their own: all find what was published as they want it.
up_to_date() {
    as_farrier plan --cluster kube --registry "$registry" -o json > "$here/plan.json" &&
        jq -e '.builds == [] and .conflicts == [] and (.upToDate | length) == 1' "$here/plan.json"
}
expect 30 "another farrier, with an empty cache, finds it up to date" up_to_date
stop "$here/farrier-one.pid"
start_farrier two --interval 5
steady 8 "and so does one that is started anew: nothing is built again" ds_spec solo
[ "$(ds_image solo)" = "$first" ] || expect 0 "the image stays" false
conflicts() { k get driverbuilds -n "$ns" -o json | jq -e '.items | any(.status.phase == "conflict")'; }
expect 0 "no conflict is reported" not conflicts
