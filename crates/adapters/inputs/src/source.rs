//! Sources of driver images: packages, downloads, commits, files and directories.

use std::{ffi::OsStr, fmt::Write as _, path::PathBuf, sync::atomic::AtomicBool};

use farrier_core::{
    facts::annotations,
    image::{
        AptSource, GitSource, SourceOrigin, SourceSpec, checked::Download, commit_in, is_version_control,
    },
    kernel::Architecture,
};
use farrier_local::{blocking::stoppable, machine::native};
use farrier_store::{InputKind, StoredInput, key_tag};
use fs_err as fs;

use super::{
    FetchError, Fetcher, MIRROR_HINT, Result, TREE,
    apt::{
        package::{self, Package},
        version,
    },
    digest,
    download::{download, name_of},
    git, rpm,
    source_layout::{lay_out, pick, whole},
    stored::{Input, Packed, StoredUnder, content_key, source_tag},
    suspects,
};

/// Kind of the cache entries.
const PLACE: &str = "sources";

/// A fetched source, unpacked in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedSource {
    /// The tree that becomes `sources/<name>/`.
    pub root: PathBuf,
    /// Identity for provenance, such as `package=version sha256:...`.
    pub origin: String,
}

/// Identity of a source, known without fetching all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceIdentity {
    /// Contribution to the input hash: the content's digest, and `unpack` and `subdir` of the definition.
    pub identity: String,
    /// Upstream part of the package's version, for `apt` sources.
    pub version: Option<String>,
}

impl SourceIdentity {
    /// Returns the identity of another part of the same original.
    pub(super) fn of_another_part(&self, spec: &SourceSpec, other: &SourceSpec) -> String {
        let original = self.identity.strip_suffix(&parts_of(spec)).unwrap_or(&self.identity);
        format!("{original}{}", parts_of(other))
    }
}

/// Access to the sources of driver images.
#[derive(Clone, Copy)]
pub struct Sources<'a>(pub(super) &'a Fetcher);

/// Content of a source, before it is fetched.
enum Content {
    Package(Package),
    Rpm(Box<rpm::source::Found>),
    Download { url: Download, sha256: String },
    Commit { source: Box<GitSource>, id: String },
    Local { path: PathBuf, sha256: String, is_dir: bool },
}

impl Sources<'_> {
    /// Returns the current identity of the source. Downloads no source.
    pub async fn identity(self, spec: &SourceSpec) -> Result<SourceIdentity> {
        if let Some(stored) = self.in_place_of(spec).await? {
            let identity = self.stored_identity(spec, &stored).await?;
            let version = stored.annotations.get(annotations::VERSION).cloned();
            return Ok(SourceIdentity { identity, version });
        }
        let content = self.content(&spec.from).await?;
        let version = match &content {
            Content::Package(package) => Some(version::upstream(&package.version).to_owned()),
            _ => None,
        };
        Ok(SourceIdentity { identity: identity(spec, &content), version })
    }

    /// Fetches and unpacks the source.
    pub async fn fetch(self, spec: &SourceSpec) -> Result<FetchedSource> {
        let (Self(fetcher), SourceSpec { name: _, from, unpack, subdir, license: _, redistribute: _ }) =
            (self, spec);
        if let Some(stored) = self.in_place_of(spec).await? {
            let origin = self.stored_identity(spec, &stored).await?;
            let make = |dir| self.lay_out_stored(spec, &stored, &origin, dir);
            let key = tree_key(spec, &self.vouched(spec, &origin).await?)?;
            let place = fetcher.cache.get_or_make(PLACE, &key, make).await?;
            return Ok(FetchedSource { root: place.join(TREE), origin });
        }
        let content = self.content(from).await?;
        let origin = identity(spec, &content);
        if let (Content::Local { path, is_dir: true, .. }, None) = (&content, unpack) {
            // Use the user's own tree in place: builds only read it.
            let (path, subdir) = (path.clone(), subdir.clone());
            let root = stoppable(move |_| pick(&path, subdir.as_ref())).await?;
            return Ok(FetchedSource { root, origin });
        }
        let vouched = self.vouched(spec, &origin).await?;
        let key = content_key(&vouched);
        // A source on this machine is not fetched from the store.
        let is_here = matches!(content, Content::Local { .. });
        let make = |dir| async {
            if !is_here && let Some(stored) = self.stored_content(&content, &key).await? {
                return self.lay_out_stored(spec, &stored, &origin, dir).await;
            }
            let archive = match &content {
                Content::Local { sha256, is_dir: false, .. } => Some(sha256.clone()),
                _ => None,
            };
            let original = self.original(spec, content).await?;
            let suspects = self.lay_out(spec, original, dir, archive.is_some()).await?;
            if let Some(sha256) = archive {
                self.0.cache.write_record(suspects::RECORDS, &sha256, &suspects)?;
            }
            Ok(())
        };
        let root = fetcher.cache.get_or_make(PLACE, &tree_key(spec, &vouched)?, make).await?.join(TREE);
        Ok(FetchedSource { root, origin })
    }

    /// Puts the source into the store, unless it is there.
    pub async fn keep(self, spec: &SourceSpec) -> Result<StoredUnder> {
        let SourceIdentity { identity, version } = self.identity(spec).await?;
        let identity = self.vouched(spec, &identity).await?;
        let input = Input {
            kind: InputKind::Source,
            what: format!("source {} ({identity})", spec.name),
            tag: key_tag(&content_key(&identity))?,
            declared: Some(source_tag(spec)?),
        };
        let content = async {
            let original = self.original(spec, self.content(&spec.from).await?).await?;
            let packed = if original.is_dir() {
                self.0.pack(original).await?
            } else {
                let (sha256, size) =
                    (self.0.digest_of(&original).await?.digest, fs::metadata(&original)?.len());
                Packed::original(original, &sha256, size)?
            };
            let notes = [
                (annotations::TITLE, Some(spec.name.to_string())),
                (annotations::IDENTITY, Some(identity)),
                (annotations::VERSION, version),
            ];
            Ok(packed.with_notes(notes))
        };
        Box::pin(self.0.keep(input, content)).await
    }

    /// Returns the stored source for a definition that is not looked up upstream: one whose path does not exist at this site, one
    /// with fixed content, or, with `--offline`, any package.
    async fn in_place_of(self, spec: &SourceSpec) -> Result<Option<StoredInput>> {
        let (kind, tag) = (InputKind::Source, source_tag(spec)?);
        match &spec.from {
            SourceOrigin::Path { path, .. } if !self.0.root.join(path).exists() => {
                self.0.stored(kind, &tag).await
            }
            SourceOrigin::Apt(source) if package::asks_store(self.0, source, arch_of(source))? => {
                self.0.stored_package(kind, &tag).await
            }
            SourceOrigin::Rpm(_) if self.0.is_offline() => self.0.stored_package(kind, &tag).await,
            SourceOrigin::Git(source) if self.0.is_offline() && source.commit.is_none() => {
                self.0.stored_package(kind, &tag).await
            }
            // The digest identifies a download, whatever its address.
            SourceOrigin::Url { .. }
            | SourceOrigin::Path { .. }
            | SourceOrigin::Git(_)
            | SourceOrigin::Apt(_)
            | SourceOrigin::Rpm(_)
            | SourceOrigin::Image(_) => Ok(None),
        }
    }

    /// Returns the stored source with this content. A digest needs no signature. A commit does not contain the digest of its
    /// archive, so the stored archive is as trusted as a package.
    async fn stored_content(self, content: &Content, key: &str) -> Result<Option<StoredInput>> {
        let (kind, tag) = (InputKind::Source, key_tag(key)?);
        match (content, self.0.store()) {
            (Content::Commit { .. }, _) => self.0.stored_package(kind, &tag).await,
            (_, Some(store)) => Ok(store.find(kind, &tag).await?),
            (_, None) => Ok(None),
        }
    }

    /// Returns the identity with the keys that vouch for the content. Other keys verify again, and do not change the input hash.
    async fn vouched(self, spec: &SourceSpec, identity: &str) -> Result<String> {
        Ok(match &spec.from {
            SourceOrigin::Git(GitSource { signed_by: Some(file), reference, .. }) => {
                let file = self.0.root.join(file);
                if !file.is_file() {
                    return Err(FetchError::Absent(file));
                }
                let keys = self.0.digest_of(&file).await?.digest;
                // A tag does not vouch for another tag of the same commit.
                format!("{identity} signed-by={keys} {}", reference.as_deref().unwrap_or_default())
            }
            _ => identity.to_owned(),
        })
    }

    /// Returns the identity that a stored source claims, if the definition allows it.
    async fn stored_identity(self, spec: &SourceSpec, stored: &StoredInput) -> Result<String> {
        let noted = stored.note(annotations::IDENTITY)?;
        let signers = self.vouched(spec, "").await?;
        let identity = noted.strip_suffix(&signers).filter(|identity| is_identity(spec, identity));
        identity.map(str::to_owned).ok_or_else(|| {
            stored.is_not(&format!("its identity is {noted:?}, which does not match the definition")).into()
        })
    }

    /// Returns the publisher's original: the file or directory whose digest is in the identity.
    async fn original(self, spec: &SourceSpec, content: Content) -> Result<PathBuf> {
        match content {
            Content::Package(found) => {
                let SourceOrigin::Apt(source) = &spec.from else { return Err(FetchError::Interrupted) };
                package::file(self.0, source, &found, arch_of(source)).await
            }
            Content::Rpm(found) => self.0.explain_if_offline(
                Box::pin(found.file()).await,
                || format!("source {}", spec.name),
                MIRROR_HINT,
            ),
            Content::Download { url, sha256 } => {
                let what = format!("source {}", spec.name);
                let downloaded = download(self.0, &what, &url, &sha256).await;
                self.0.explain_if_offline(downloaded, || format!("{what} ({url})"), MIRROR_HINT)
            }
            Content::Commit { source, id } => {
                let key = content_key(&self.vouched(spec, &source.identity(&id)).await?);
                let archive = Box::pin(git::archive(self.0, &source, &id, &key)).await;
                let what = || format!("source {} (commit {id} of {})", spec.name, source.url);
                self.0.explain_if_offline(archive, what, MIRROR_HINT)
            }
            Content::Local { path, .. } => Ok(path),
        }
    }

    /// Makes the source's tree in `dir`. If `suspects` is set, returns files of the original that look like credentials.
    async fn lay_out(
        self,
        spec: &SourceSpec,
        original: PathBuf,
        dir: PathBuf,
        suspects: bool,
    ) -> Result<Vec<String>> {
        let (name, inner, subdir) = (file_name(&spec.from)?, spec.unpack.clone(), spec.subdir.clone());
        let work = move |stop: &AtomicBool| {
            let base = whole(stop, (&original, &name), &dir)?;
            let suspects = if suspects { suspects::of_tree(&base, stop)? } else { Vec::new() };
            lay_out(stop, base, &dir, inner.as_ref(), subdir.as_ref())?;
            Ok(suspects)
        };
        stoppable(work).await
    }

    /// Makes the source's tree from the store. Only the digest counts, and it must match the identity: tag and annotations are
    /// untrusted registry content. The caller has verified a commit's archive.
    async fn lay_out_stored(
        self,
        spec: &SourceSpec,
        stored: &StoredInput,
        identity: &str,
        dir: PathBuf,
    ) -> Result<()> {
        let wanted = match commit_in(identity) {
            Some(_) => Some(OriginalDigest::File(stored.layer.digest.hex())),
            None => OriginalDigest::in_identity(identity),
        };
        let other = |found: &str| stored.is_not(&format!("it holds {found}, and {identity} is wanted"));
        let work = self.0.cache.scratch()?;
        let original = match wanted {
            Some(OriginalDigest::File(sha256)) => {
                if stored.layer.digest.hex() != sha256 {
                    return Err(other(&format!("{}", stored.layer.digest)).into());
                }
                let file = work.path().join(file_name(&spec.from)?);
                self.0.required_store()?.fetch(stored, &file).await?;
                file
            }
            Some(OriginalDigest::Tree(sha256)) => {
                self.0.take_tree(stored, work.path().to_owned()).await?;
                let tree = work.path().join(TREE);
                let path = tree.clone();
                let found = stoppable(move |stop| {
                    Ok::<_, FetchError>((suspects::version_control_in(&path)?, digest::of_tree(&path, stop)?))
                });
                let (unverified, found) = found.await?;
                // No digest covers version-control data, and a definition may name an archive in it.
                if let Some(place) = unverified {
                    let place = place.display();
                    return Err(other(&format!(
                        "version-control data ({place}), which `farrier mirror` no longer stores"
                    ))
                    .into());
                }
                if found != sha256 {
                    return Err(other(&format!("a tree with the digest sha256:{found}")).into());
                }
                tree
            }
            None => return Err(other("something without a digest").into()),
        };
        self.lay_out(spec, original, dir, false).await.map(drop)
    }

    async fn content(self, from: &SourceOrigin) -> Result<Content> {
        match from {
            SourceOrigin::Apt(source) => {
                Ok(Content::Package(package::find(self.0, source, arch_of(source)).await?))
            }
            SourceOrigin::Rpm(source) => {
                let found = Box::pin(rpm::source::Found::find(self.0, source)).await;
                let found = self.0.explain_if_offline(
                    found,
                    || format!("package {}", &*source.package),
                    MIRROR_HINT,
                )?;
                Ok(Content::Rpm(Box::new(found)))
            }
            // Images are excluded: each kernel has its own, and their layers are fetched like any image's.
            SourceOrigin::Image(source) => Err(FetchError::value(
                "a source that is the same for all kernels",
                &source.reference,
                "it is an image",
            )),
            SourceOrigin::Git(source) => {
                let id = self.0.explain_if_offline(
                    Box::pin(git::commit_of(self.0, source)).await,
                    || format!("the commit of {}", source.url),
                    MIRROR_HINT,
                )?;
                Ok(Content::Commit { source: Box::new(source.clone()), id })
            }
            SourceOrigin::Url { url, sha256 } => {
                Ok(Content::Download { url: url.clone(), sha256: sha256.to_ascii_lowercase() })
            }
            SourceOrigin::Path { path, sha256: wanted } => {
                if path.iter().any(is_version_control) {
                    let path = path.to_string_lossy();
                    return Err(FetchError::value("the path of a source", &path, NO_SOURCE));
                }
                let path = self.0.root.join(path);
                let known = self.0.digest_of(&path).await?;
                match wanted {
                    Some(wanted) if known.is_dir => {
                        Err(FetchError::value("the sha256 of a directory", wanted, "only files have one"))
                    }
                    Some(wanted) if wanted.to_ascii_lowercase() != known.digest => {
                        Err(FetchError::Checksum {
                            what: path.display().to_string(),
                            found: format!("sha256:{}", known.digest),
                            wanted: format!("sha256:{}", wanted.to_ascii_lowercase()),
                        })
                    }
                    _ => Ok(Content::Local { path, sha256: known.digest, is_dir: known.is_dir }),
                }
            }
        }
    }
}

/// Digest of a source's original: 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OriginalDigest<'a> {
    /// Digest of a file's bytes.
    File(&'a str),
    /// Digest of a directory's files.
    Tree(&'a str),
}

impl<'a> OriginalDigest<'a> {
    /// Parses the output of [`identity`]: `sha256:...`, `tree sha256:...` or `package=version sha256:...`, and suffixes.
    fn in_identity(identity: &'a str) -> Option<Self> {
        let mut words = identity.split(' ');
        let first = words.next()?;
        let (is_tree, digest) = match first.strip_prefix("sha256:") {
            Some(digest) => (false, digest),
            None => (first == "tree", words.next()?.strip_prefix("sha256:")?),
        };
        Some(if is_tree { Self::Tree(digest) } else { Self::File(digest) })
    }
}

/// Returns the name of a source's file, which is part of a tree with one file.
fn file_name(from: &SourceOrigin) -> Result<String> {
    let name = match from {
        SourceOrigin::Url { url, .. } => return name_of(url),
        SourceOrigin::Path { path, .. } => path.file_name().and_then(OsStr::to_str),
        SourceOrigin::Apt(source) => Some(source.package.as_str()),
        SourceOrigin::Git(_) => Some(git::ARCHIVE),
        SourceOrigin::Rpm(_) | SourceOrigin::Image(_) => None,
    };
    Ok(name.unwrap_or("file").to_owned())
}

/// Returns the cache key of a source's tree. The key includes the file name, because a tree with one file contains that name.
fn tree_key(spec: &SourceSpec, identity: &str) -> Result<String> {
    Ok(content_key(&format!("{identity} file={}", file_name(&spec.from)?)))
}

/// Returns the architecture of a source's package.
pub(super) fn arch_of(source: &AptSource) -> Architecture {
    source.arch.unwrap_or_else(native)
}

fn identity(spec: &SourceSpec, content: &Content) -> String {
    let original = match content {
        Content::Package(package) => package.identity(),
        Content::Rpm(found) => found.identity(),
        Content::Commit { source, id } => source.identity(id),
        Content::Local { path: _, sha256, is_dir: true } => format!("tree sha256:{sha256}"),
        Content::Download { sha256, .. } | Content::Local { sha256, .. } => format!("sha256:{sha256}"),
    };
    original + &parts_of(spec)
}

/// Returns the suffix of the identity that names the used part of the original.
fn parts_of(spec: &SourceSpec) -> String {
    let SourceSpec { name: _, from: _, unpack, subdir, license: _, redistribute: _ } = spec;
    let mut text = String::new();
    for (name, value) in [("unpack", unpack), ("subdir", subdir)] {
        if let Some(value) = value {
            let _ = write!(text, " {name}={value}");
        }
    }
    text
}

/// Whether a definition allows a source with this identity.
fn is_identity(spec: &SourceSpec, identity: &str) -> bool {
    let original = identity.strip_suffix(&parts_of(spec));
    original.is_some_and(|original| match &spec.from {
        SourceOrigin::Url { sha256, .. } | SourceOrigin::Path { sha256: Some(sha256), .. } => {
            original == format!("sha256:{}", sha256.to_ascii_lowercase())
        }
        SourceOrigin::Path { sha256: None, .. } => true,
        SourceOrigin::Git(source) => commit_in(original).is_some_and(|commit| {
            original == source.identity(commit)
                && source.commit.as_ref().is_none_or(|wanted| *wanted == commit)
        }),
        SourceOrigin::Apt(source) => match &source.version {
            Some(version) => original.starts_with(&format!("{}={version} sha256:", source.package)),
            None => original.starts_with(&format!("{}=", source.package)),
        },
        SourceOrigin::Rpm(source) => rpm::source::is_wanted(source, original),
        SourceOrigin::Image(_) => false,
    })
}

/// Reason why version-control data is refused.
const NO_SOURCE: &str = "version-control data is not a source";

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
