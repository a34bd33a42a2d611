//! Adapter: what is compiled: packages, downloads, files and directories.

use std::{
    ffi::{OsStr, OsString},
    fmt::Write as _,
    fs,
    path::{Component, Path, PathBuf},
    sync::atomic::AtomicBool,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::{
    FetchError, FetchedSource, Fetcher, SourceIdentity,
    apt::{self, AptArchive, control::PackageRecord, version},
    blocking::blocking,
    copy, digest, io_error,
    stored::{CARRY, note},
    unpack,
};
use crate::{
    archive::Format,
    image::{AptSource, SourceOrigin, SourceSpec, checked::fits},
    kernel::Architecture,
    oci::annotations,
    store::Kind,
};

/// Changes when the same content is laid out differently.
const FORMAT: &str = "source-1";

/// What a package search came to, and when.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) sha256: String,
    /// Seconds since 1970.
    pub(super) found: u64,
}

/// The content of a source, before it is fetched.
enum Content {
    Package(Package),
    Download { url: String, sha256: String },
    File { path: PathBuf, sha256: String },
    Directory { path: PathBuf, sha256: String },
}

impl Fetcher {
    /// What the source is at this moment, relative paths starting at `root`. Downloads no source.
    pub async fn source_identity(
        &self,
        spec: &SourceSpec,
        root: &Path,
    ) -> Result<SourceIdentity, FetchError> {
        if let Some(stored) = self.stored_source(spec, root).await? {
            let identity = note(&stored, annotations::IDENTITY)?.to_owned();
            let version = stored.annotations.get(annotations::VERSION).cloned();
            return Ok(SourceIdentity { identity, version });
        }
        let content = self.content(&spec.from, root).await?;
        let version = match &content {
            Content::Package(package) => Some(version::upstream(&package.version).to_owned()),
            _ => None,
        };
        Ok(SourceIdentity { identity: identity(spec, &content), version })
    }

    /// Fetches and unpacks the source, relative paths starting at `root`.
    pub async fn source(&self, spec: &SourceSpec, root: &Path) -> Result<FetchedSource, FetchError> {
        let SourceSpec { name: _, from, unpack, subdir } = spec;
        if let Some(stored) = self.stored_source(spec, root).await? {
            let origin = note(&stored, annotations::IDENTITY)?.to_owned();
            let make = |dir| self.take_tree(&stored, dir);
            let place = self.cache.get_or_make("sources", &content_key(&origin), make).await?;
            return Ok(FetchedSource { root: place.join(TREE), origin });
        }
        let content = self.content(from, root).await?;
        let origin = identity(spec, &content);
        if let (Content::Directory { path, .. }, None) = (&content, unpack) {
            // Used where it lies: the user's own tree, which the build only reads.
            let (path, subdir) = (path.clone(), subdir.clone());
            let root = blocking(move |_| pick(&path, subdir.as_deref())).await?;
            return Ok(FetchedSource { root, origin });
        }
        let key = content_key(&origin);
        let stored_key = key.clone();
        let make = |dir: PathBuf| async move {
            // What lies on this machine is not fetched from another one.
            let is_here = matches!(content, Content::File { .. } | Content::Directory { .. });
            match if is_here { None } else { self.stored_content(Kind::Source, &stored_key).await? } {
                Some(stored) => self.take_tree(&stored, dir).await,
                None => self.fill(spec, content, dir).await,
            }
        };
        let place = self.cache.get_or_make("sources", &key, make).await?;
        Ok(FetchedSource { root: place.join(TREE), origin })
    }

    /// Makes the source's tree in `dir`.
    async fn fill(&self, spec: &SourceSpec, content: Content, dir: PathBuf) -> Result<(), FetchError> {
        let file = match content {
            Content::Package(package) => {
                let SourceOrigin::Apt(source) = &spec.from else { return Err(FetchError::Interrupted) };
                self.package_file(source, &package, native()).await?
            }
            Content::Download { url, sha256 } => {
                let what = format!("source {}", spec.name);
                self.unless_kept(
                    self.download(&what, &url, &sha256).await,
                    || format!("{what} ({url})"),
                    CARRY,
                )?
            }
            Content::File { path, .. } | Content::Directory { path, .. } => path,
        };
        let (inner, subdir) = (spec.unpack.clone(), spec.subdir.clone());
        blocking(move |stop| lay_out(stop, &file, &dir, inner.as_deref(), subdir.as_deref())).await
    }

    async fn content(&self, from: &SourceOrigin, root: &Path) -> Result<Content, FetchError> {
        match from {
            SourceOrigin::Apt(source) => Ok(Content::Package(self.package(source, native()).await?)),
            SourceOrigin::Url { url, sha256 } => {
                Ok(Content::Download { url: url.clone(), sha256: checked_sha256(sha256)? })
            }
            SourceOrigin::Path { path, sha256 } => {
                let path = root.join(path);
                let (cache, place) = (self.cache.clone(), path.clone());
                let known = blocking(move |stop| digest::remembered(&cache, &place, stop)).await?;
                match sha256 {
                    Some(sha256) if known.is_dir => Err(FetchError::Value {
                        what: "the sha256 of a directory",
                        value: sha256.chars().take(200).collect(),
                        why: "only files have one",
                    }),
                    Some(sha256) if checked_sha256(sha256)? != known.digest => Err(FetchError::Checksum {
                        what: path.display().to_string(),
                        found: known.digest,
                        wanted: checked_sha256(sha256)?,
                    }),
                    _ if known.is_dir => Ok(Content::Directory { path, sha256: known.digest }),
                    _ => Ok(Content::File { path, sha256: known.digest }),
                }
            }
        }
    }

    /// The package that the source names, from a record while that is fresh.
    pub(super) async fn package(
        &self,
        source: &AptSource,
        arch: Architecture,
    ) -> Result<Package, FetchError> {
        let (key, version) = (package_key(source, arch), &source.version);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if let Some(known) = self.cache.read_record::<Package>("packages", &key)? {
            let age = now.checked_sub(known.found);
            // One version's content never changes; and where nobody may be asked, what was said last counts.
            if version.is_some()
                || self.is_offline()
                || age.is_some_and(|age| age < self.options.refresh.as_secs())
            {
                return Ok(known);
            }
        }
        let looked_up = self.find_package(source, version.as_deref(), arch).await;
        let PackageRecord { name, version, sha256, .. } =
            self.unless_kept(looked_up, || format!("package {}", source.package), CARRY)?.1;
        let found = Package { name, version, sha256, found: now };
        self.cache.write_record("packages", &key, &found)?;
        Ok(found)
    }

    /// What a search came to last, however long ago.
    pub(super) fn known_package(
        &self,
        source: &AptSource,
        arch: Architecture,
    ) -> Result<Option<Package>, FetchError> {
        Ok(self.cache.read_record("packages", &package_key(source, arch))?)
    }

    async fn find_package(
        &self,
        source: &AptSource,
        version: Option<&str>,
        arch: Architecture,
    ) -> Result<(AptArchive, PackageRecord), FetchError> {
        let AptSource { package, version: _, suites } = source;
        let (apt_dir, refresh) = (&self.options.apt_dir, self.options.refresh);
        let archive = AptArchive::open(&self.cache, &self.net, apt_dir, suites, arch, refresh).await?;
        match archive.find(package, version).await? {
            Some(found) => Ok((archive, found)),
            None => Err(FetchError::NoPackage {
                package: version.map_or_else(|| package.clone(), |version| format!("{package}={version}")),
                suites: suites.suites.join(", "),
            }),
        }
    }

    pub(super) async fn package_file(
        &self,
        source: &AptSource,
        package: &Package,
        arch: Architecture,
    ) -> Result<PathBuf, FetchError> {
        let download = async {
            let (archive, found) = self.find_package(source, Some(&package.version), arch).await?;
            archive.download(&[found]).await
        };
        let what = || format!("package {}={}", package.name, package.version);
        let files = self.unless_kept(download.await, what, CARRY)?;
        files.into_iter().next().ok_or(FetchError::Interrupted)
    }
}

/// The tree's name in its cache entry. It has a mode of its own: the entry's is private.
pub(super) const TREE: &str = "tree";

/// The key of a source's tree, in the cache and in the store.
pub(super) fn content_key(identity: &str) -> String {
    digest::of_parts([FORMAT, identity])
}

/// A source is not compiled for its own architecture: packages of this machine's do.
pub(super) fn native() -> Architecture {
    if cfg!(target_arch = "aarch64") { Architecture::Arm64 } else { Architecture::Amd64 }
}

/// Where a search's result is recorded.
fn package_key(source: &AptSource, arch: Architecture) -> String {
    let AptSource { package, version, suites } = source;
    let parts = apt::key_parts(suites);
    let head = [FORMAT, arch.as_str(), package, version.as_deref().unwrap_or_default()];
    digest::of_parts(head.into_iter().chain(parts.iter().map(String::as_str)))
}

fn identity(spec: &SourceSpec, content: &Content) -> String {
    let SourceSpec { name: _, from: _, unpack, subdir } = spec;
    let mut text = match content {
        Content::Package(Package { name, version, sha256, found: _ }) => {
            format!("{name}={version} sha256:{sha256}")
        }
        Content::Download { url: _, sha256 } | Content::File { path: _, sha256 } => {
            format!("sha256:{sha256}")
        }
        Content::Directory { path: _, sha256 } => format!("tree sha256:{sha256}"),
    };
    for (name, value) in [("unpack", unpack), ("subdir", subdir)] {
        if let Some(value) = value {
            let _ = write!(text, " {name}={value}");
        }
    }
    text
}

fn checked_sha256(text: &str) -> Result<String, FetchError> {
    if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(FetchError::Value {
        what: "a sha256",
        value: text.chars().take(200).collect(),
        why: "it is not 64 hexadecimal digits",
    })
}

/// Makes `dir/tree` from a file or directory.
fn lay_out(
    stop: &AtomicBool,
    from: &Path,
    dir: &Path,
    inner: Option<&str>,
    subdir: Option<&str>,
) -> Result<(), FetchError> {
    let raw = dir.join("raw");
    let base = if from.is_dir() {
        from.to_owned()
    } else {
        fs::create_dir(&raw).map_err(io_error("create", &raw))?;
        if Format::of(from).map_err(io_error("read", from))?.is_some() {
            unpack(stop, from, &raw, &from.display().to_string())?;
        } else {
            // A file that is no archive is a tree of one file.
            copy::file(from, &raw.join(from.file_name().unwrap_or(OsStr::new("file"))))?;
        }
        raw.clone()
    };
    let base = match inner {
        None => base,
        Some(inner) => {
            let archive = only_match(&base, inner, "file", Path::is_file)?;
            let unpacked = dir.join("inner");
            fs::create_dir(&unpacked).map_err(io_error("create", &unpacked))?;
            unpack(stop, &archive, &unpacked, inner)?;
            unpacked
        }
    };
    let (chosen, tree) = (pick(&base, subdir)?, dir.join(TREE));
    fs::rename(&chosen, &tree).map_err(io_error("rename", &chosen))?;
    for rest in [raw, dir.join("inner")] {
        if rest.exists() {
            fs::remove_dir_all(&rest).map_err(io_error("remove", &rest))?;
        }
    }
    Ok(())
}

/// The directory that `subdir` names: a relative path whose last component may hold one `*`.
fn pick(base: &Path, subdir: Option<&str>) -> Result<PathBuf, FetchError> {
    match subdir {
        None => Ok(base.to_owned()),
        Some(subdir) => only_match(base, subdir, "directory", Path::is_dir),
    }
}

/// What a relative path names, whose last component may hold one `*`.
fn only_match(
    base: &Path,
    path: &str,
    kind: &str,
    is_kind: fn(&Path) -> bool,
) -> Result<PathBuf, FetchError> {
    let pattern = plain_path(path)?;
    let parent = base.join(pattern.parent().unwrap_or(Path::new("")));
    let last = pattern.file_name().and_then(OsStr::to_str).unwrap_or_default();
    if !contains(base, &parent) || !parent.is_dir() {
        return Err(absent(path, base)?);
    }
    let names = names_in(&parent)?;
    let matching = names.iter().filter(|name| name.to_str().is_some_and(|name| fits(last, name)));
    let mut found =
        matching.map(|name| parent.join(name)).filter(|path| contains(base, path) && is_kind(path));
    match (found.next(), found.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(absent(path, &parent)?),
        (Some(_), Some(_)) => Err(FetchError::Layout {
            wanted: format!("one {kind} {path:?}"),
            what: "the source".to_owned(),
            found: format!("several match among {}", listing(&names)),
        }),
    }
}

fn absent(wanted: &str, dir: &Path) -> Result<FetchError, FetchError> {
    Ok(FetchError::Layout {
        wanted: format!("{wanted:?}"),
        what: "the source".to_owned(),
        found: format!("there is {}", listing(&names_in(dir)?)),
    })
}

/// A relative path of plain components.
fn plain_path(text: &str) -> Result<&Path, FetchError> {
    let path = Path::new(text);
    let plain = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if plain && path.file_name().is_some() {
        return Ok(path);
    }
    Err(FetchError::Value {
        what: "a path inside a source",
        value: text.chars().take(200).collect(),
        why: "it must be relative, without `..`",
    })
}

/// Whether a path, its links followed, is inside the directory.
fn contains(base: &Path, path: &Path) -> bool {
    matches!((fs::canonicalize(base), fs::canonicalize(path)), (Ok(base), Ok(path)) if path.starts_with(&base))
}

/// The names in a directory, sorted.
pub(super) fn names_in(dir: &Path) -> Result<Vec<OsString>, FetchError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        names.push(entry.map_err(io_error("list", dir))?.file_name());
    }
    names.sort();
    Ok(names)
}

/// Names for a message, at most twenty.
pub(super) fn listing(names: &[OsString]) -> String {
    let shown: Vec<_> = names.iter().take(20).map(|name| name.to_string_lossy()).collect();
    match names.len() {
        0 => "nothing".to_owned(),
        count if count > 20 => format!("{} and {} more", shown.join(", "), count - 20),
        _ => shown.join(", "),
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
