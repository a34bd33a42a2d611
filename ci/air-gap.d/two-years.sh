# Two years after the first transfer, for ci/air-gap: updates as deltas, an older bundle, a key that is replaced and revoked, garbage
# collection of the site's registry, and its restoration from bundles.
# shellcheck shell=bash disable=SC2154 # the caller's variables

# deployed: prints the image in the site's DaemonSet.
deployed() { sed -n 's/.*image: *\([^ }]*\).*/\1/p' "$state/other/cluster/daemonset.yaml"; }

# update LAST NEXT: changes the driver, and carries the change across as a delta to the bundle LAST.
update() {
    local before
    before="$(deployed)"
    {
        cat <<SH
sed -i -e 's/^  tags: .*/  tags: ["{{version}}-$2-{{kernel_label}}"]/' -e '/^    env:/d' -e 's/^  runtime:/&\n    env: {UPDATE: $2}/' \\
    definitions/images/mstflint.yaml
SH
        blocks "The next bundle"
    } | connected "LAST=$1" "NEXT=$2"
    blocks "The next import" | sealed "NEXT=$2"
    [ "$(deployed)" != "$before" ] || die "$2.bundle did not change the DaemonSet's image"
}

say "the first year: a delta, and a delta to the delta"
update site update-1
update update-1 update-2
image="$(deployed)"

say "an older bundle is refused"
sealed <<'SH'
if farrier bundle import "$CARRY/site.bundle" --key "$CARRY/images.pub" 2> refused; then exit 1; fi
grep 'is older than the newest that this site accepted' refused
SH

say "the second year: another key, and the old one is revoked"
connected <<'SH'
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$KEYS/images-2.key"
openssl pkey -in "$KEYS/images-2.key" -pubout -out definitions/keys/images-2.pub
cp definitions/keys/images-2.pub "$CARRY/"
sed -i -e 's|images.key|images-2.key|' -e 's|publicKey: .*|publicKey: keys/images-2.pub|' \
    -e 's|requireSigned: .*|requireSigned: [keys/images-2.pub, keys/images.pub]|' definitions/site.yaml
farrier rotate
farrier mirror --kernel "$KERNEL" --os debian --os-version 12 --image mstflint
farrier bundle export --kernel "$KERNEL" --os debian --os-version 12 --image mstflint --to "$CARRY/rotated.bundle"

sed -i 's|requireSigned: .*|requireSigned: [keys/images-2.pub]|' definitions/site.yaml
cat >> definitions/site.yaml <<YAML
  revoked:
    - {key: keys/images.pub, since: 2026-11-28T00:00:00Z}
YAML
farrier mirror --kernel "$KERNEL" --os debian --os-version 12 --image mstflint
farrier bundle export --kernel "$KERNEL" --os debian --os-version 12 --image mstflint \
    --since "$CARRY/rotated.bundle" --to "$CARRY/revoked.bundle"
SH
sealed "IMAGE=$image" <<'SH'
farrier bundle import "$CARRY/rotated.bundle" --key "$CARRY/images.pub" --key "$CARRY/images-2.pub" --definitions-to definitions --overwrite
farrier verify "$IMAGE" --key "$CARRY/images-2.pub"
farrier bundle import "$CARRY/revoked.bundle" --key "$CARRY/images-2.pub" --definitions-to definitions --overwrite
if farrier bundle import "$CARRY/update-2.bundle" --key "$CARRY/images.pub" 2> refused; then exit 1; fi
grep 'is revoked since 2026-11-28' refused
farrier run --once
SH

say "the site's registry deletes every manifest without a tag"
docker-registry garbage-collect --delete-untagged "$state/other/registry.yml" > "$state/other/garbage.log" 2>&1
sealed "IMAGE=$image" <<'SH'
farrier verify "$IMAGE" --deep
farrier run --once 2>&1 | tee said
grep 'nothing to do' said
SH

say "the site's registry and cache are lost, and restored from two bundles"
rm -rf --one-file-system "$state/other/registry" "$state/other/cache"
sealed "IMAGE=$image" <<'SH'
farrier bundle import "$CARRY/rotated.bundle" --key "$CARRY/images-2.pub"
farrier bundle import "$CARRY/revoked.bundle" --key "$CARRY/images-2.pub"
farrier verify "$IMAGE" --deep
farrier run --once 2>&1 | tee said
grep 'nothing to do' said
SH
[ "$(deployed)" = "$image" ] || die "the DaemonSet has the image $(deployed) instead of $image"
say "after two years the site runs the image that was built here, signed with the new key"
