//! Adapter: root file systems from packages, through `mmdebstrap`.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use flate2::{Compression, GzBuilder};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncReadExt;

use super::{FetchError, Fetcher, RootFs, apt, blocking::blocking, digest, io_error, process, stored::CARRY};
use crate::{
    image::{
        Digest,
        checked::{PackageToInstall, Rule as _},
    },
    kernel::{AptSuites, Architecture, BootstrapSpec},
    store::Kind,
};

/// Changes when the same specification gives another root file system.
const FORMAT: &str = "rootfs-1";
const PLACE: &str = "rootfs";
pub(super) const LAYER: &str = "layer.tar.gz";
const RECORD: &str = "layer.json";

/// Time of every file that is newer. A day after the oldest supported toolchain, and any fixed one does.
const EPOCH: &str = "1700000000";

/// Tenths of a percent larger than level 6 for half the time; it must keep up with mmdebstrap.
const LEVEL: u32 = 4;

/// Time for mmdebstrap to unmount and to remove its directory when it is told to end.
const GRACE: Duration = Duration::from_secs(10);

/// What nobody reads in a build container. Licences stay.
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

#[derive(Debug, Serialize, Deserialize)]
struct Layer {
    /// sha256 of the compressed layer, hexadecimal.
    digest: String,
    /// sha256 of the tar in it.
    diff_id: String,
    size: u64,
}

/// A hash over everything in the specification that decides what the root file system holds: 64
/// hexadecimal digits. The host's mirror is not part of it; one that is written down is.
pub fn bootstrap_key(spec: &BootstrapSpec, arch: Architecture) -> String {
    let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = spec;
    let include: BTreeSet<&str> = include.iter().map(String::as_str).collect();
    let signed_by = signed_by.as_ref().map(|path| path.to_string_lossy().into_owned());
    let mut parts = vec![FORMAT, arch.as_str(), suite];
    parts.push("suites");
    parts.extend(extra_suites.iter().map(String::as_str));
    parts.push("components");
    parts.extend(components.iter().map(String::as_str));
    parts.push("include");
    parts.extend(include);
    parts.extend(["mirror", mirror.as_deref().unwrap_or_default()]);
    parts.extend(["signed-by", signed_by.as_deref().unwrap_or_default()]);
    digest::of_parts(parts)
}

impl Fetcher {
    /// Makes the root file system, or finds it made.
    pub async fn bootstrap(&self, spec: &BootstrapSpec, arch: Architecture) -> Result<RootFs, FetchError> {
        let key = bootstrap_key(spec, arch);
        let make = |dir: PathBuf| {
            let key = &key;
            async move {
                if let Some(stored) = self.stored_content(Kind::RootFs, key).await? {
                    self.take_root_fs(&stored, &dir).await
                } else {
                    let what = || format!("root file system of {} ({arch})", spec.suite);
                    self.unless_kept(self.mmdebstrap(spec, arch, dir).await, what, CARRY)
                }
            }
        };
        let place = self.cache.get_or_make(PLACE, &key, make).await?;
        made(&place, arch)
    }

    /// The root file system, if it has been made here.
    pub fn bootstrapped(
        &self,
        spec: &BootstrapSpec,
        arch: Architecture,
    ) -> Result<Option<RootFs>, FetchError> {
        let place = self.cache.get(PLACE, &bootstrap_key(spec, arch))?;
        place.map(|place| made(&place, arch)).transpose()
    }

    async fn mmdebstrap(
        &self,
        spec: &BootstrapSpec,
        arch: Architecture,
        dir: PathBuf,
    ) -> Result<(), FetchError> {
        let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = spec;
        for name in include {
            if !PackageToInstall::accepts(name) || name.contains("{{") {
                return Err(FetchError::Value {
                    what: "a package to include",
                    value: name.chars().take(200).collect(),
                    why: "no package can have this name",
                });
            }
        }
        let suites = AptSuites {
            suites: std::iter::once(suite).chain(extra_suites).cloned().collect(),
            components: components.clone(),
            mirror: mirror.clone(),
            signed_by: signed_by.clone(),
        };
        let entries = apt::entries(&self.net, &self.options.apt_dir, &suites)?;
        let sources = apt::sources::render(&entries);
        let uris = || entries.iter().flat_map(|entry| &entry.uris).map(String::as_str);
        self.net.permit_archives(uris(), &format!("a root file system of {suite}"))?;
        let reach = self.net.apt_reach(uris())?;
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
        command.arg(suite).arg("-").arg("-").stdin(std::process::Stdio::piped());
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
        let place = dir.join(LAYER);
        let compressed = blocking(move |stop| compress(tar, &place, stop));
        let words = async {
            let mut text = Vec::new();
            if let Some(mut stderr) = stderr {
                stderr.read_to_end(&mut text).await.map_err(failed)?;
            }
            Ok::<_, FetchError>(String::from_utf8_lossy(&text).into_owned())
        };
        // Joined, not tried: when it fails, its words tell more than its half a tar.
        let (layer, words) = tokio::join!(compressed, words);
        let words = words?;
        if !running.child.wait().await.map_err(failed)?.success() {
            return Err(FetchError::Program {
                action: format!("make a root file system of {suite}"),
                message: process::last_words(&words),
                transient: process::may_pass(&words),
            });
        }
        write_record(&dir, &layer?)
    }
}

/// The root file system in a finished entry of the cache.
pub(super) fn made(place: &Path, arch: Architecture) -> Result<RootFs, FetchError> {
    let path = place.join(RECORD);
    let text = fs::read(&path).map_err(io_error("read", &path))?;
    let damaged = || io_error("read", &path)(io::ErrorKind::InvalidData.into());
    let Layer { digest, diff_id, size } = serde_json::from_slice(&text).map_err(|_| damaged())?;
    let digest = parse_digest(&digest).ok_or_else(damaged)?;
    let diff_id = parse_digest(&diff_id).ok_or_else(damaged)?;
    Ok(RootFs { layer: place.join(LAYER), digest, diff_id, size, arch })
}

/// Says what the layer in `dir` is.
pub(super) fn record(dir: &Path, digest: &Digest, diff_id: &Digest, size: u64) -> Result<(), FetchError> {
    let [digest, diff_id] = [digest, diff_id].map(|digest| digest.hex().to_owned());
    write_record(dir, &Layer { digest, diff_id, size })
}

fn write_record(dir: &Path, layer: &Layer) -> Result<(), FetchError> {
    let path = dir.join(RECORD);
    let text = serde_json::to_vec(layer).map_err(|e| io_error("write", &path)(e.into()))?;
    fs::write(&path, text).map_err(io_error("write", &path))
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

/// Compresses a tar, with the digests of both forms.
fn compress(tar: impl Read, path: &Path, stop: &AtomicBool) -> Result<Layer, FetchError> {
    let file = File::create(path).map_err(io_error("create", path))?;
    let hashing = Hashing { inner: file, hasher: Sha256::new(), bytes: 0 };
    // No name and no time in the header: the same tar gives the same bytes.
    let mut encoder = GzBuilder::new().write(hashing, Compression::new(LEVEL));
    let (mut tar, mut diff_id, mut buffer) = (BufReader::new(tar), Sha256::new(), vec![0; 256 << 10]);
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(FetchError::Interrupted);
        }
        let count = tar.read(&mut buffer).map_err(io_error("read the tar for", path))?;
        if count == 0 {
            break;
        }
        diff_id.update(&buffer[..count]);
        encoder.write_all(&buffer[..count]).map_err(io_error("write", path))?;
    }
    let hashing = encoder.finish().map_err(io_error("write", path))?;
    Ok(Layer {
        digest: hex::encode(hashing.hasher.finalize()),
        diff_id: hex::encode(diff_id.finalize()),
        size: hashing.bytes,
    })
}

struct Hashing<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(buffer)?;
        self.hasher.update(&buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn parse_digest(text: &str) -> Option<Digest> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    Some(Digest::from_sha256(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> BootstrapSpec {
        BootstrapSpec {
            suite: "bookworm".into(),
            extra_suites: vec![],
            components: vec![],
            include: vec!["make".into(), "gcc-12".into()],
            mirror: None,
            signed_by: None,
        }
    }

    #[test]
    fn every_field_is_in_the_key_and_the_order_of_packages_is_not() {
        let key = |spec: &BootstrapSpec| bootstrap_key(spec, Architecture::Amd64);
        let plain = key(&spec());
        assert_eq!(plain.len(), 64);
        assert_eq!(plain, key(&BootstrapSpec { include: vec!["gcc-12".into(), "make".into()], ..spec() }));
        assert_ne!(plain, bootstrap_key(&spec(), Architecture::Arm64));
        for other in [
            BootstrapSpec { suite: "sid".into(), ..spec() },
            BootstrapSpec { extra_suites: vec!["x".into()], ..spec() },
            BootstrapSpec { components: vec!["x".into()], ..spec() },
            BootstrapSpec { include: vec!["make".into()], ..spec() },
            BootstrapSpec { mirror: Some("http://x".into()), ..spec() },
            BootstrapSpec { signed_by: Some("/x".into()), ..spec() },
        ] {
            assert_ne!(plain, key(&other), "{other:?}");
        }
    }

    #[test]
    fn compression_is_deterministic_and_its_digests_are_right() {
        let dir = tempfile::tempdir().unwrap();
        let tar = b"not really a tar".repeat(10_000);
        let run = |name: &str| {
            let path = dir.path().join(name);
            let layer = compress(&tar[..], &path, &AtomicBool::new(false)).unwrap();
            let bytes = fs::read(path).unwrap();
            assert_eq!(layer.size, bytes.len() as u64);
            assert_eq!(parse_digest(&layer.digest).unwrap(), Digest::of(&bytes));
            assert_eq!(parse_digest(&layer.diff_id).unwrap(), Digest::of(&tar));
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
