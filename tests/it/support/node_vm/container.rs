//! Shell scripts that do a container runtime's work on a node, with busybox: a fresh layer over the image, volumes with mount
//! propagation, a separate root, and processes that enter the container.

use std::fmt::Write as _;

use super::daemon_set::{ContainerSpec, Mount, Propagation};

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Quotes a word for the shell.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn words(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// Returns the container's directory on the node: `pid` and `status` of its first process, its `log`, and a layer per start.
pub fn directory(spec: &ContainerSpec) -> String {
    format!("/containers/{}", spec.name)
}

/// Returns a script that starts the container, which outlives the script. `entrypoint` is the image's.
pub fn start(spec: &ContainerSpec, image: &str, entrypoint: &[&str]) -> String {
    let own = directory(spec);
    let processes = if spec.host_pid { "" } else { "-p -f" };
    let network = if spec.host_network { "" } else { "-n" };
    format!(
        "set -e\nmkdir -p {own}\nlayer=$(mktemp -d {own}/layer.XXXXXX)\nrm -f {own}/pid {own}/status\n\
         cat > {own}/setup <<'SETUP'\n{setup}SETUP\n\
         ( set +e; env -i {PATH} {environment} /bin/busybox unshare -m {processes} {network} \
         --propagation shared /bin/busybox sh {own}/setup \"$layer\"; \
         echo $? > {own}/status.new; mv {own}/status.new {own}/status ) > {own}/log 2>&1 < /dev/null &\n\
         tries=0\nuntil [ -s {own}/pid ]; do\n\
         tries=$((tries + 1)); [ $tries -lt 1000 -a ! -e {own}/status ] || {{ cat {own}/log; exit 1; }}; usleep 10000\ndone\n",
        setup = setup(spec, image, entrypoint),
        environment = environment(spec),
    )
}

/// Runtimes create missing mount points; a base made from packages lacks `/dev`.
const MOUNT_POINTS: &str = "mkdir -p $root/dev $root/mnt $root/proc $root/sys";

/// Returns the script that runs in the new namespaces and becomes the container's first process.
fn setup(spec: &ContainerSpec, image: &str, entrypoint: &[&str]) -> String {
    let own = directory(spec);
    let shared = spec.mounts.iter().any(|mount| mount.propagation == Propagation::Bidirectional);
    let mut script = format!(
        "set -e\nmount --make-private /containers\nlayer=$1\nroot=$layer/root\nmkdir $layer/upper $layer/work $root\n\
         mount -t overlay -o lowerdir=/images/{image},upperdir=$layer/upper,workdir=$layer/work overlay $root\n\
         {MOUNT_POINTS}\nmount -t proc proc $root/proc\n"
    );
    for (source, propagation) in [("/sys", "rslave"), ("/dev", "rslave")] {
        writeln!(script, "mount --rbind {source} $root{source}\nmount --make-{propagation} $root{source}")
            .unwrap();
    }
    // A mount below another one must follow it.
    let mut mounts = spec.mounts.clone();
    mounts.sort_by_key(|mount| mount.target.matches('/').count());
    for volume in &mounts {
        script.push_str(&bind(volume));
    }
    // Like runtimes do for a bidirectional mount: the container's root is shared, too.
    let root = if shared { "--make-shared" } else { "--make-private" };
    write!(
        script,
        "read -r pid _ < /proc/self/stat\ncd $root\npivot_root . mnt\ncd /\n\
         /mnt/bin/busybox mount {root} /\n\
         echo $pid > /mnt{own}/pid.new\n/mnt/bin/busybox mv /mnt{own}/pid.new /mnt{own}/pid\n\
         /mnt/bin/busybox mount --make-rprivate /mnt\n/mnt/bin/busybox umount -l /mnt\n\
         unset layer root pid OLDPWD\nexec {command}\n",
        command = words(&command(spec, entrypoint)),
    )
    .unwrap();
    script
}

/// Returns the command line: `command` replaces the entrypoint and its arguments, `args` only the arguments.
fn command(spec: &ContainerSpec, entrypoint: &[&str]) -> Vec<String> {
    let (program, arguments) = entrypoint.split_first().expect("an image has an entrypoint");
    let own = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    match (spec.command.as_slice(), spec.args.as_slice()) {
        ([], []) => own(entrypoint),
        ([], args) => [&[(*program).to_owned()], args].concat(),
        (command, args) => {
            let _ = arguments;
            [command, args].concat()
        }
    }
}

fn bind(mount: &Mount) -> String {
    let (source, target) = (quoted(&mount.source), format!("$root{}", quoted(&mount.target)));
    // Runtimes create a missing source as a directory.
    let mut script = format!(
        "[ -e {source} ] || mkdir -p {source}\n\
         if [ -d {source} ]; then mkdir -p {target}\n\
         elif [ ! -e {target} ]; then mkdir -p \"$(dirname {target})\"; : > {target}; fi\n\
         mount --rbind {source} {target}\n"
    );
    let propagation = match mount.propagation {
        Propagation::None => "rprivate",
        Propagation::HostToContainer => "rslave",
        Propagation::Bidirectional => "rshared",
    };
    writeln!(script, "mount --make-{propagation} {target}").unwrap();
    if mount.read_only {
        writeln!(script, "mount -o remount,bind,ro {target}").unwrap();
    }
    script
}

fn environment(spec: &ContainerSpec) -> String {
    spec.env.iter().map(|(name, value)| quoted(&format!("{name}={value}"))).collect::<Vec<_>>().join(" ")
}

/// Returns a script that runs a command in the container, like a probe or `kubectl exec`.
pub fn exec(spec: &ContainerSpec, command: &[String]) -> String {
    let processes = if spec.host_pid { "" } else { "-p" };
    format!(
        "exec env -i {PATH} {} /bin/busybox nsenter -t \"$(cat {}/pid)\" -m {processes} -- {}\n",
        environment(spec),
        directory(spec),
        words(command)
    )
}
