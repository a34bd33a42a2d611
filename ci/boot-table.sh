# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that ci/community and ci/dkms set or read
# Builds with a boot check, and what a table says about each. Sourced by ci/community and ci/dkms.

# build_and_boot IMAGE DEBIAN-VERSION RELEASE FILE: builds an image of $results for a kernel, and boots the kernel to load the
# modules. FILE.json gets the build's report and is empty if the build fails. FILE.log gets farrier's messages.
build_and_boot() {
    "$farrier" build "$1" --kernel "$3" --os debian --os-version "$2" --arch amd64 --definitions "$results" --engine sandbox \
        --color never --output json > "$4.json" 2> "$4.log" || true
}

# read_outcome FILE: sets from FILE.json and FILE.log
# - outcome: built, compile (does not compile), check (refused by the check), boot (refused at boot) or other (not built),
# - all and loaded: the numbers of modules, and of modules that the booted kernel loaded, if the kernel was booted,
# - why: the first error, or the modules that were not loaded.
read_outcome() {
    all='' loaded=''
    if [ -s "$1.json" ]; then
        outcome=built
        all="$(jq '.check.modules | length' "$1.json")"
        loaded="$(jq '[.check.boot.modules[] | select(.outcome == "loaded")] | length' "$1.json")"
        why="$(jq --raw-output '[.check.boot.modules[] | select(.outcome != "loaded") | "\(.name): \(.outcome) \(.error // "")"] | join("; ")' "$1.json")"
        return
    fi
    why="$(sed -n 's/^error: //p' "$1.log" | head -n 1)"
    # A failed build has no JSON. These messages come from compile.rs and check.rs in crates/adapters/builder/src.
    case "$why" in
        'compile failed: '*) outcome=compile ;;
        'check refused '*) outcome=check ;;
        'the boot check failed: '*)
            outcome=boot
            # The check's report below the error: `NAME  loads` for each module, and `NAME: loaded` below the boot.
            all="$(grep -c '^  [^ ]*  *loads$' "$1.log" || true)"
            loaded="$(grep -c '^    [^ ]*: loaded$' "$1.log" || true)"
            ;;
        *) outcome=other ;;
    esac
}
