//! Adapter: root file systems from packages, through `mmdebstrap`.

use std::{
    collections::BTreeSet,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

use super::RootFileSystems;
use crate::{
    archive::Stoppable,
    blocking::stoppable,
    image::checked::{Component, PackageToInstall, Suite},
    inputs::{
        CARRY, FetchError, StoredUnder, apt, digest, process,
        root_fs_layer::{self as layer, RootFs},
    },
    kernel::{AptSuites, Architecture, BootstrapSpec},
    oci,
};

/// Changes when the same specification gives another root file system.
const FORMAT: &str = "rootfs-1";
/// The kind of the cache's entries.
const PLACE: &str = "rootfs";

/// Time of every file that is newer. A day after the oldest supported toolchain, and any fixed one does.
const EPOCH: &str = "1700000000";

/// Tenths of a percent larger than level 6 for half the time; it must keep up with mmdebstrap.
const LEVEL: u32 = 4;

/// Time for mmdebstrap to unmount and to remove its directory when it must end.
const GRACE: Duration = Duration::from_secs(10);

/// What is not read in a build container. Licences stay.
const DPKG_OPTIONS: [&str; 7] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/bug/*",
];

/// Files that tell which machine or mirror made it: two sites must get the same layer.
const FORGET: [&str; 5] = [
    "etc/resolv.conf",
    "etc/hostname",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/apt.conf.d/99mmdebstrap",
];

/// A hash over everything in the specification that decides what the root file system holds: 64
/// hexadecimal digits. The host's mirror is not part of it; one that is written down is.
pub fn bootstrap_key(spec: &BootstrapSpec, arch: Architecture) -> String {
    let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = spec;
    let include: BTreeSet<&str> = include.iter().map(PackageToInstall::as_str).collect();
    let signed_by = signed_by.as_ref().map(|path| path.to_string_lossy().into_owned());
    let mut parts = vec![FORMAT, arch.as_str(), suite];
    parts.push("suites");
    parts.extend(extra_suites.iter().map(Suite::as_str));
    parts.push("components");
    parts.extend(components.iter().map(Component::as_str));
    parts.push("include");
    parts.extend(include);
    parts.extend(["mirror", mirror.as_deref().unwrap_or_default()]);
    parts.extend(["signed-by", signed_by.as_deref().unwrap_or_default()]);
    digest::of_parts(parts)
}

impl RootFileSystems<'_> {
    /// Makes the root file system, or finds it made.
    pub async fn bootstrap(self, spec: &BootstrapSpec, arch: Architecture) -> Result<RootFs, FetchError> {
        let make = |dir: PathBuf| async move {
            let what = || format!("root file system of {} ({arch})", spec.suite);
            self.0.unless_kept(self.mmdebstrap(spec, arch, dir).await, what, CARRY)
        };
        let place = self.0.obtain_root_fs(PLACE, &bootstrap_key(spec, arch), make).await?;
        layer::read(&place, arch)
    }

    /// The root file system, if it has been made here.
    pub fn bootstrapped(
        self,
        spec: &BootstrapSpec,
        arch: Architecture,
    ) -> Result<Option<RootFs>, FetchError> {
        let place = self.0.cache.get(PLACE, &bootstrap_key(spec, arch))?;
        place.map(|place| layer::read(&place, arch)).transpose()
    }

    /// Puts the root file system into the store, unless it is there.
    pub async fn keep_bootstrap(
        self,
        spec: &BootstrapSpec,
        arch: Architecture,
    ) -> Result<StoredUnder, FetchError> {
        let what = format!("root file system of {} ({arch})", spec.suite);
        let root_fs = async { Ok((self.bootstrap(spec, arch).await?, spec.include.join(" "))) };
        Box::pin(self.keep(what, &bootstrap_key(spec, arch), None, root_fs)).await
    }

    async fn mmdebstrap(
        self,
        spec: &BootstrapSpec,
        arch: Architecture,
        dir: PathBuf,
    ) -> Result<(), FetchError> {
        let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = spec;
        for name in include {
            if name.parse::<PackageToInstall>().is_err() || name.contains("{{") {
                return Err(FetchError::value("a package to include", name, "no package can have this name"));
            }
        }
        let suites = AptSuites {
            suites: std::iter::once(suite).chain(extra_suites).cloned().collect(),
            components: components.clone(),
            mirror: mirror.clone(),
            signed_by: signed_by.clone(),
        };
        let net = &self.0.net;
        let entries = apt::entries(net, &self.0.options.apt_dir, &suites)?;
        let sources = apt::sources::render(&entries);
        let uris = || entries.iter().flat_map(|entry| &entry.uris).map(String::as_str);
        net.permit_archives(uris(), &format!("a root file system of {suite}"))?;
        let reach = net.apt_reach(uris()).await?;
        let mut command = process::command("mmdebstrap");
        if reach.without_environment {
            process::without_proxies(&mut command);
        }
        command.env("SOURCE_DATE_EPOCH", EPOCH).current_dir("/");
        command.args(["--variant=essential", "--format=tar", "--skip=output/dev"]);
        command.arg(format!("--architectures={arch}"));
        if !include.is_empty() {
            command.arg(format!("--include={}", include.join(",")));
        }
        // The site's words come last, and so count.
        for option in host_options().await?.into_iter().chain(reach.options) {
            command.arg(format!("--aptopt={option}"));
        }
        command.args(DPKG_OPTIONS.map(|option| format!("--dpkgopt={option}")));
        for path in FORGET {
            command.arg(format!("--customize-hook=rm -rf \"$1/{path}\""));
        }
        // The sources come on its standard input: a file in the cache is not readable for the user that
        // mmdebstrap turns into when it is not root.
        command.arg(suite.as_str()).arg("-").arg("-").stdin(std::process::Stdio::piped());
        let mut running = process::start(command, "mmdebstrap", GRACE)?;
        let failed = |source| FetchError::Start { program: "mmdebstrap", source };
        let (stdin, stdout, stderr) =
            (running.child.stdin.take(), running.child.stdout.take(), running.child.stderr.take());
        if let Some(mut stdin) = stdin {
            // Should it end before it reads them, its own words say more than a broken pipe.
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stdin, sources.as_bytes()).await;
        }
        let tar = stdout.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let tar = File::from(tar.into_owned_fd().map_err(failed)?);
        let compressed = stoppable({
            let dir = dir.clone();
            move |stop| compress(tar, &dir, stop)
        });
        // Joined, not tried: when it fails, its words tell more than its half a tar.
        let (written, words) = tokio::join!(compressed, process::read_text(stderr));
        let words = words.map_err(failed)?;
        if !running.child.wait().await.map_err(failed)?.success() {
            return Err(process::failure(format!("make a root file system of {suite}"), &words));
        }
        written
    }
}

/// The host's apt options that decide how archives are reached: mmdebstrap itself leaves them out. They
/// are removed from the result.
async fn host_options() -> Result<Vec<String>, FetchError> {
    let mut command = process::command("apt-config");
    command.args(["dump", "--format", "%F \"%v\";%n", "Acquire"]);
    let output = process::output(command, "apt-config").await?;
    let mut options: Vec<String> =
        output.stdout.lines().filter(|line| is_reach_option(line)).map(str::to_owned).collect();
    options.push("Acquire::Retries \"3\";".to_owned());
    Ok(options)
}

/// Proxies and other settings of a transport, and whether old lists are accepted.
fn is_reach_option(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    let transport = ["acquire::http::", "acquire::https::"].iter().any(|start| line.starts_with(start));
    let dates =
        ["acquire::check-valid-until ", "acquire::check-date "].iter().any(|start| line.starts_with(start));
    (transport || dates) && !line.contains(" \"\";")
}

/// Compresses a tar into the entry.
fn compress(tar: impl io::Read, entry: &Path, stop: &AtomicBool) -> Result<(), FetchError> {
    let file = fs_err::File::create(entry.join(layer::FILE))?;
    let made = oci::compress_at(
        LEVEL,
        Stoppable { inner: io::BufReader::with_capacity(256 << 10, tar), stop },
        file,
    )?;
    layer::record(entry, &made.digest, &made.diff_id, made.size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Digest;

    fn spec() -> BootstrapSpec {
        BootstrapSpec {
            suite: "bookworm".parse().unwrap(),
            extra_suites: vec![],
            components: vec![],
            include: vec!["make".parse().unwrap(), "gcc-12".parse().unwrap()],
            mirror: None,
            signed_by: None,
        }
    }

    #[test]
    fn every_field_is_in_the_key_and_the_order_of_packages_is_not() {
        let key = |spec: &BootstrapSpec| bootstrap_key(spec, Architecture::Amd64);
        let plain = key(&spec());
        assert_eq!(plain.len(), 64);
        assert_eq!(
            plain,
            key(&BootstrapSpec {
                include: vec!["gcc-12".parse().unwrap(), "make".parse().unwrap()],
                ..spec()
            })
        );
        assert_ne!(plain, bootstrap_key(&spec(), Architecture::Arm64));
        for other in [
            BootstrapSpec { suite: "sid".parse().unwrap(), ..spec() },
            BootstrapSpec { extra_suites: vec!["x".parse().unwrap()], ..spec() },
            BootstrapSpec { components: vec!["x".parse().unwrap()], ..spec() },
            BootstrapSpec { include: vec!["make".parse().unwrap()], ..spec() },
            BootstrapSpec { mirror: Some("http://x".parse().unwrap()), ..spec() },
            BootstrapSpec { signed_by: Some("/x".parse().unwrap()), ..spec() },
        ] {
            assert_ne!(plain, key(&other), "{other:?}");
        }
    }

    #[test]
    fn compression_is_deterministic_and_its_digests_are_right() {
        let dir = tempfile::tempdir().unwrap();
        let tar = b"not really a tar".repeat(10_000);
        let run = |name: &str| {
            let entry = dir.path().join(name);
            fs_err::create_dir(&entry).unwrap();
            compress(&tar[..], &entry, &AtomicBool::new(false)).unwrap();
            let layer = layer::read(&entry, Architecture::Amd64).unwrap();
            let bytes = fs_err::read(&layer.layer).unwrap();
            assert_eq!(layer.size, bytes.len() as u64);
            assert_eq!(layer.digest, Digest::of(&bytes));
            assert_eq!(layer.diff_id, Digest::of(&tar));
            bytes
        };
        assert_eq!(run("a"), run("b"));
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
