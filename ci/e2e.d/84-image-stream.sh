# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# OpenShift's ImageStream in a real API server, which selects a node's toolkit by its OSTREE_VERSION. The CRD follows
# OpenShift's documentation; toolkit, node and kernel are made from Debian's packages.

streams=imagestreams.image.openshift.io
first=416.94.202410151600-0 next=416.94.202412170927-0
if ! k get crd "$streams" > /dev/null 2>&1 && [ -z "$(k api-resources --api-group image.openshift.io -o name)" ]; then
    echo "$streams" >> "$state/crds"
    k apply --server-side -f - > /dev/null <<YAML
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: $streams, labels: {$run_label: $run}}
spec:
  group: image.openshift.io
  scope: Namespaced
  names: {kind: ImageStream, listKind: ImageStreamList, plural: imagestreams, singular: imagestream, shortNames: [is]}
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties:
                dockerImageRepository: {type: string}
                lookupPolicy: {type: object, required: [local], properties: {local: {type: boolean}}}
                tags:
                  type: array
                  items:
                    type: object
                    required: [name]
                    properties:
                      name: {type: string}
                      annotations: {type: object, nullable: true, additionalProperties: {type: string}}
                      from:
                        type: object
                        properties: {kind: {type: string}, name: {type: string}, namespace: {type: string}}
                      reference: {type: boolean}
                      generation: {type: integer, format: int64, nullable: true}
                      importPolicy:
                        type: object
                        properties: {insecure: {type: boolean}, scheduled: {type: boolean}, importMode: {type: string}}
                      referencePolicy: {type: object, required: [type], properties: {type: {type: string}}}
            status:
              type: object
              properties:
                dockerImageRepository: {type: string}
                publicDockerImageRepository: {type: string}
                tags:
                  type: array
                  items:
                    type: object
                    required: [tag, items]
                    properties:
                      tag: {type: string}
                      items:
                        type: array
                        nullable: true
                        items:
                          type: object
                          required: [created, dockerImageReference, image, generation]
                          properties:
                            created: {type: string, format: date-time}
                            dockerImageReference: {type: string}
                            image: {type: string}
                            generation: {type: integer, format: int64}
YAML
    k wait --for condition=established --timeout 30s "crd/$streams" > /dev/null
fi
# An existing OpenShift stream is left unchanged.
where=openshift
if k create namespace "$where" > /dev/null 2>&1; then k label namespace "$where" "$run_label=$run" > /dev/null; else where="$drivers"; fi

# image_stream: applies the ImageStream with the tags on standard input, in YAML flow style.
image_stream() {
    k apply --server-side --force-conflicts --field-manager e2e -f - > /dev/null <<YAML
apiVersion: image.openshift.io/v1
kind: ImageStream
metadata: {name: driver-toolkit, namespace: $where, labels: {$run_label: $run}}
spec: {lookupPolicy: {local: false}, tags: [$(cat)]}
YAML
}

# tag NAME REFERENCE: prints a tag of the ImageStream.
tag() { echo "{name: \"$1\", from: {kind: DockerImage, name: \"$2\"}, importPolicy: {scheduled: true}, referencePolicy: {type: Source}}"; }

# Builds and pushes the toolkit, one image with Debian 12's compiler and kernel A's headers, and prints its digest.
toolkit="${registry%%/*}/ocp/$run/toolkit"
push_toolkit() {
    local layout="$here/toolkit" layers='' diff_ids='' layer compiler=''
    for layer in "$XDG_CACHE_HOME"/farrier/packages-root/*/layer.tar.gz; do
        if tar -tzf "$layer" | grep -E '^(\./)?usr/bin/gcc-12$' > /dev/null; then compiler="$layer"; fi
    done
    [ -n "$compiler" ] || die "no toolchain with gcc-12 in $XDG_CACHE_HOME"
    mkdir -p "$layout/blobs/sha256"
    unpack_headers "$kernel_a" "$here/headers" > /dev/null
    gunzip -c "$compiler" > "$here/compiler.tar"
    tar -C "$here/headers" -cf "$here/headers.tar" usr
    for layer in "$here/compiler.tar" "$here/headers.tar"; do
        blob application/vnd.oci.image.layer.v1.tar "$layer"
        layers+="${layers:+,}$descriptor" diff_ids+="${diff_ids:+,}\"$digest\""
    done
    echo "{\"architecture\":\"$(dpkg --print-architecture)\",\"os\":\"linux\",\"config\":{},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[$diff_ids]}}" > "$here/config.json"
    blob application/vnd.oci.image.config.v1+json "$here/config.json"
    echo "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\"config\":$descriptor,\"layers\":[$layers]}" > "$here/manifest.json"
    blob application/vnd.oci.image.manifest.v1+json "$here/manifest.json"
    echo '{"imageLayoutVersion":"1.0.0"}' > "$layout/oci-layout"
    echo "{\"schemaVersion\":2,\"manifests\":[$descriptor]}" > "$layout/index.json"
    skopeo copy --quiet --preserve-digests --dest-tls-verify=false "oci:$layout" "docker://$toolkit:first" >&2
    echo "$digest"
}

# blob TYPE FILE: stores a file in the layout, and sets $digest and $descriptor.
blob() {
    digest="sha256:$(sha256sum "$2" | cut -d ' ' -f 1)"
    cp "$2" "$here/toolkit/blobs/sha256/${digest#sha256:}"
    descriptor="{\"mediaType\":\"$1\",\"digest\":\"$digest\",\"size\":$(stat -c %s "$2")}"
}

mkdir -p "$here/definitions/kernels"
cat > "$here/definitions/kernels/05-coreos.yaml" <<YAML
apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: coreos}
spec:
  match: {os: rhcos}
  headers: {oci: {image: "$toolkit@{{digest}}"}}
  toolchain: {image: "$toolkit@{{digest}}"}
  imageStream: $where/driver-toolkit
YAML
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, deadline: 10m, stableFor: 2s}"
add_node n1 "$kernel_a"
k label node "$run-$scenario-n1" --overwrite "$nfd/system-os_release.ID=rhcos" "$nfd/system-os_release.VERSION_ID=4.16" \
    "$nfd/system-os_release.OSTREE_VERSION=$first" > /dev/null
add_daemonset solo "$registry/$driver:vendor" RollingUpdate

planned() { as_farrier plan --cluster kube --registry "$registry" --engine "$engine" -o json || true; }
skipped() { planned | jq -r '.skipped[].why.message' | grep -F "$1"; }
why() { { as_farrier why "node/$run-$scenario-n1" --cluster kube --registry "$registry" --engine "$engine" || true; } | grep -F "$1"; }
expect 30 "the plan names the missing ImageStream" skipped "the cluster has no ImageStream $where/driver-toolkit"
tag "$next" "quay.io/openshift-release-dev/ocp-v4.0-art-dev@sha256:$(printf '%064d' 1)" | image_stream
expect 30 "the plan names the version that the ImageStream lacks" skipped "ImageStream $where/driver-toolkit has no tag $first"
expect 30 "farrier why also names the version" why "has no tag $first"

push_toolkit > "$here/digest"
digest="$(cat "$here/digest")"
tag "$first" "quay.io/openshift-release-dev/ocp-v4.0-art-dev@$digest" | image_stream
toolchain() { planned | jq -e --arg image "$toolkit@$1" '.builds | length == 1 and .[0].cell.toolchain == $image'; }
expect 30 "once the ImageStream has the version, the plan uses that version's toolkit" toolchain "$digest"

# For a tag without a digest in its specification, farrier uses the digest of the imported image, which OpenShift's controller
# records in the status.
imported() {
    jq -n --arg tag "$first" --arg image "$1" '{status: {dockerImageRepository: "", tags: [{tag: $tag, items: [{created: "2026-01-01T00:00:00Z",
        dockerImageReference: ("quay.io/openshift/toolkit@" + $image), image: $image, generation: 2}]}]}}' |
        k patch "$streams" driver-toolkit -n "$where" --subresource status --type merge --patch-file /dev/stdin > /dev/null
}
tag "$first" quay.io/openshift/toolkit:first | image_stream
expect 30 "a tag without a digest and without an import is ignored" skipped "has no tag $first"
other="sha256:$(printf '%064d' 2)"
imported "$other"
expect 30 "the plan uses the imported image as the toolkit" toolchain "$other"
imported "$digest"
start_farrier one
expect 300 "the driver is built with the toolkit, and the DaemonSet has its image" has_our_image solo
can_list() { k get "$1" -n "$where" --as "system:serviceaccount:$ns:$account" > /dev/null 2>&1; }
expect 0 "farrier may not list Secrets in namespace $where" not can_list secrets
expect 5 "farrier may not list ImageStreams" not can_list "$streams"
