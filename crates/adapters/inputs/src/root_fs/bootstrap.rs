//! Makes runtime bases with `mmdebstrap`, from packages whose scripts have to run.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::AtomicBool,
    time::Duration,
};

use farrier_core::kernel::{AptSuites, Architecture, BootstrapSpec};
use farrier_local::{archive::Stoppable, blocking::stoppable, machine::native};
use oci;

use super::{
    LEVEL, MTIME,
    excluded::{SITE_FILES, dpkg_options},
};
use crate::{FetchError, Fetcher, Result, apt, process, root_fs_layer as layer};

/// Time for a canceled mmdebstrap to unmount and to remove its directory.
const GRACE: Duration = Duration::from_secs(10);

/// Hook that makes absolute links relative. The GPU Operator's validator follows links of a driver's root from its own root
/// (`internal/driver/root.go`), and `update-alternatives` makes absolute ones. Under fakechroot, absolute links begin with the path of
/// the root itself.
const RELATIVE_LINKS: &str = r#"find "$1" -xdev -type l -lname '/*' -exec sh -c 'root=$1; shift; for link; do
target=$(readlink "$link") && target=$(realpath -ms --relative-to="${link%/*}" "$root${target#"$root"}") &&
ln -snf "$target" "$link" || exit; done' _ "$1" {} +"#;

/// Makes the layer of a runtime base in `dir`; `driver` is a tar that is unpacked over the packages.
pub(super) async fn mmdebstrap(
    fetcher: &Fetcher,
    spec: &BootstrapSpec,
    suites: AptSuites,
    arch: Architecture,
    driver: Option<&Path>,
    dir: PathBuf,
) -> Result<()> {
    let (suite, include) = (&spec.suite, &spec.include);
    let net = &fetcher.net;
    let entries = apt::entries(net, &fetcher.options.apt_dir, &suites)?;
    let sources = apt::sources::render(&entries);
    let uris = || entries.iter().flat_map(|entry| &entry.uris).map(String::as_str);
    net.check_archives_allowed(uris(), &format!("a root file system of {suite}"))?;
    let apt_options = net.apt_options(uris()).await?;
    let mut command = process::command("mmdebstrap");
    if apt_options.ignores_environment {
        process::without_proxies(&mut command);
    }
    command.env("SOURCE_DATE_EPOCH", MTIME.to_string()).current_dir("/");
    command.args(["--variant=essential", "--format=tar", "--skip=output/dev"]);
    command.arg(format!("--architectures={arch}"));
    if !include.is_empty() {
        command.arg(format!("--include={}", include.join(",")));
    }
    // The site's options come last, so they take precedence.
    for option in host_options().await?.into_iter().chain(apt_options.options) {
        command.arg(format!("--aptopt={option}"));
    }
    command.args(dpkg_options().map(|option| format!("--dpkgopt={option}")));
    for path in SITE_FILES {
        command.arg(format!("--customize-hook=rm -rf \"$1/{path}\""));
    }
    if let Some(tar) = driver {
        let tar = tar.display().to_string().replace('\'', r"'\''");
        command.arg(format!("--customize-hook=tar-in '{tar}' /"));
        // The distribution's own ldconfig: loaders and the container toolkit find libraries through its cache.
        command.arg("--customize-hook=/usr/sbin/chroot \"$1\" /sbin/ldconfig");
    }
    command.arg(format!("--customize-hook={RELATIVE_LINKS}"));
    // Pass the sources on standard input: without root, mmdebstrap switches to a user who cannot read files in the cache.
    command.arg(suite.as_str()).arg("-").arg("-").stdin(Stdio::piped());
    let mut running = process::start(command, "mmdebstrap", GRACE)?;
    let failed = |source| FetchError::Start("mmdebstrap", source);
    let (stdin, stdout, stderr) =
        (running.child.stdin.take(), running.child.stdout.take(), running.child.stderr.take());
    if let Some(mut stdin) = stdin {
        // Ignore a broken pipe: if mmdebstrap exits before it reads the sources, its output has the reason.
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stdin, sources.as_bytes()).await;
    }
    let tar = stdout.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
    let tar = File::from(tar.into_owned_fd().map_err(failed)?);
    let compressed = stoppable({
        let dir = dir.clone();
        move |stop| compress(tar, &dir, stop)
    });
    // `join` instead of `try_join`: after a failure, report mmdebstrap's messages and not the truncated tar.
    let (written, messages) = tokio::join!(compressed, process::read_text(stderr));
    let messages = messages.map_err(failed)?;
    if !running.child.wait().await.map_err(failed)?.success() {
        return Err(failure(format!("make a root file system of {suite}"), &messages));
    }
    written
}

/// Checks that this machine can run programs for `arch`, as mmdebstrap does: package scripts run while mmdebstrap makes a base.
pub(super) fn check_can_run(arch: Architecture) -> Result<()> {
    let mut command = std::process::Command::new("arch-test");
    command.arg(arch.as_str()).stdout(Stdio::null()).stderr(Stdio::null());
    if arch == native() || command.status().is_ok_and(|status| status.success()) {
        return Ok(());
    }
    Err(FetchError::unusable(
        format!(
            "a base of packages for {arch} is built by running programs for {arch}, which this machine \
             cannot run"
        ),
        "install arch-test and qemu-user-static; or run `farrier mirror` on a machine that can run them, to \
         store the base in the registry; bases with `minimal` or `image` do not need this",
    ))
}

/// Converts mmdebstrap's output to an error.
fn failure(action: String, messages: &str) -> FetchError {
    if messages.contains("unable to pick chroot mode") {
        return FetchError::unusable(
            format!("{action}: mmdebstrap needs root or user namespaces, and this process has neither"),
            "run farrier as root, or allow user namespaces; or run `farrier mirror` on another machine, to \
             store the base in the registry; bases with `minimal` or `image` do not need this",
        );
    }
    process::failure(action, messages)
}

/// Returns the host's apt options for reaching archives, which mmdebstrap itself does not pass on. mmdebstrap removes them from the
/// root file system.
async fn host_options() -> Result<Vec<String>> {
    let mut command = process::command("apt-config");
    command.args(["dump", "--format", "%F \"%v\";%n", "Acquire"]);
    let output = process::output(command, "apt-config").await?;
    let mut options: Vec<String> =
        output.stdout.lines().filter(|line| is_reach_option(line)).map(str::to_owned).collect();
    options.push("Acquire::Retries \"3\";".to_owned());
    Ok(options)
}

/// Whether a line sets an option of a transport, such as a proxy, or allows outdated lists.
fn is_reach_option(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    let transport = ["acquire::http::", "acquire::https::"].iter().any(|start| line.starts_with(start));
    let dates =
        ["acquire::check-valid-until ", "acquire::check-date "].iter().any(|start| line.starts_with(start));
    (transport || dates) && !line.contains(" \"\";")
}

/// Compresses a tar into the cache entry.
fn compress(tar: impl io::Read, entry: &Path, stop: &AtomicBool) -> Result<()> {
    let file = fs_err::File::create(entry.join(layer::FILE))?;
    let tar = Stoppable { inner: io::BufReader::with_capacity(256 << 10, tar), stop };
    let written = oci::compress_at(LEVEL, tar, file)?;
    layer::record(entry, &written)
}

#[cfg(test)]
mod tests {
    use farrier_core::image::Digest;

    use super::*;

    #[test]
    fn compression_is_deterministic_and_its_digests_are_right() {
        let dir = tempfile::tempdir().unwrap();
        let tar = b"not really a tar".repeat(10_000);
        let run = |name: &str| {
            let entry = dir.path().join(name);
            fs_err::create_dir(&entry).unwrap();
            compress(&tar[..], &entry, &AtomicBool::new(false)).unwrap();
            let layer::RootFs { file, layer } = layer::read(&entry).unwrap();
            let bytes = fs_err::read(&file).unwrap();
            assert_eq!(layer.size, bytes.len() as u64);
            assert_eq!(layer.digest, Digest::of(&bytes));
            assert_eq!(layer.diff_id, Digest::of(&tar));
            bytes
        };
        assert_eq!(run("a"), run("b"));
    }

    #[test]
    fn links_resolve_without_a_change_of_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap().join("a root");
        let link = |target: &str, path: &str| {
            let path = root.join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::os::unix::fs::symlink(target, path).unwrap();
        };
        link("/etc/alternatives/nvidia-smi", "usr/bin/nvidia-smi");
        link("/usr/lib/nvidia/current/nvidia-smi", "etc/alternatives/nvidia-smi");
        link("/proc/self/mounts", "etc/mtab");
        link("/run", "a link");
        link("x86_64-linux-gnu", "usr/lib/relative");
        link(root.join("usr/lib").to_str().unwrap(), "of-fakechroot");
        let program = root.join("usr/lib/nvidia/current/nvidia-smi");
        fs_err::create_dir_all(program.parent().unwrap()).unwrap();
        fs_err::write(&program, "").unwrap();
        // As mmdebstrap runs a hook.
        let mut hook = std::process::Command::new("sh");
        assert!(hook.args(["-c", RELATIVE_LINKS, "exec"]).arg(&root).status().unwrap().success());
        assert_eq!(root.join("usr/bin/nvidia-smi").canonicalize().unwrap(), program);
        for (path, target) in [
            ("etc/alternatives/nvidia-smi", "../../usr/lib/nvidia/current/nvidia-smi"),
            ("etc/mtab", "../proc/self/mounts"),
            ("a link", "run"),
            ("usr/lib/relative", "x86_64-linux-gnu"),
            ("of-fakechroot", "usr/lib"),
        ] {
            assert_eq!(fs_err::read_link(root.join(path)).unwrap(), Path::new(target), "{path}");
        }
    }

    #[test]
    fn what_a_machine_does_not_allow_is_said_with_what_to_do() {
        let said = "I: automatically chosen format: tar\nE: unable to pick chroot mode automatically (use --mode for manual selection)\n";
        let error = failure("make a root file system of x".to_owned(), said);
        assert!(!error.is_transient() && error.hint().unwrap().contains("farrier mirror"), "{error}");
        assert!(failure("make it".to_owned(), "E: odd\n").to_string().ends_with("odd"));
    }

    #[test]
    fn only_options_of_reach_are_handed_on() {
        assert!(is_reach_option("Acquire::http::Proxy \"http://proxy.test:3128\";"));
        assert!(is_reach_option("Acquire::Check-Valid-Until \"false\";"));
        for line in [
            "Acquire::http \"\";",
            "Acquire::https::Proxy \"\";",
            "Acquire::AllowInsecureRepositories \"1\";",
            "Acquire::Languages:: \"none\";",
        ] {
            assert!(!is_reach_option(line), "{line}");
        }
    }
}
