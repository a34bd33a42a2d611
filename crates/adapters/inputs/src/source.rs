//! Sources of driver images: packages, downloads, commits, files and directories.

use std::{
    ffi::OsStr,
    fmt::Write as _,
    path::{Path, PathBuf},
    pin::Pin,
    sync::atomic::AtomicBool,
};

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
    FetchError, Fetcher, Result, TREE,
    apt::{
        package::{self, Package},
        version,
    },
    digest,
    download::{download, name_of},
    git, rpm,
    source_layout::{lay_out, original_tree, select_directory},
    stored::{Input, Packed, StoredUnder, content_key, source_tag},
    suspects,
};

/// Kind of the cache entries.
const KIND: &str = "sources";

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
    Rpm(Box<rpm::source::FoundPackage>),
    Download { url: Download, sha256: String },
    Commit { source: Box<GitSource>, id: String },
    Local { path: PathBuf, sha256: String, is_dir: bool },
}

impl Sources<'_> {
    /// Returns the current identity of the source. Downloads no source.
    pub async fn identity(self, spec: &SourceSpec) -> Result<SourceIdentity> {
        if let Some(stored) = self.stored_instead(spec).await? {
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
        if let Some(stored) = self.stored_instead(spec).await? {
            let origin = self.stored_identity(spec, &stored).await?;
            let make = |dir| self.lay_out_stored(spec, &stored, &origin, dir);
            let key = self.tree_key(spec, &self.identity_with_signers(spec, &origin).await?)?;
            let entry = self.0.cache.get_or_make_intact(KIND, &key, has_tree, make).await?;
            return Ok(FetchedSource { root: entry.join(TREE), origin });
        }
        let content = self.content(&spec.from).await?;
        // Erase the type, because the nested futures of a build's inputs exceed the compiler's recursion limit.
        let fetched: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(self.fetch_content(spec, content));
        fetched.await
    }

    async fn fetch_content(self, spec: &SourceSpec, content: Content) -> Result<FetchedSource> {
        let origin = identity(spec, &content);
        if let (Content::Local { path, is_dir: true, .. }, None) = (&content, &spec.unpack) {
            // Use the user's own tree in place: builds only read it.
            let (path, subdir) = (path.clone(), spec.subdir.clone());
            let root = stoppable(move |_| select_directory(&path, subdir.as_ref())).await?;
            return Ok(FetchedSource { root, origin });
        }
        let signed = self.identity_with_signers(spec, &origin).await?;
        let key = content_key(&signed);
        let local_digest = match &content {
            Content::Local { sha256, .. } => Some(sha256.clone()),
            _ => None,
        };
        let make = |dir| async {
            // A source on this machine is not fetched from the store.
            if local_digest.is_none()
                && let Some(stored) = self.stored_content(&content, &key).await?
            {
                return self.lay_out_stored(spec, &stored, &origin, dir).await;
            }
            let original = self.original(spec, content).await?;
            let finds_credentials = local_digest.is_some() && original.is_file();
            let credential_files = self.lay_out(spec, original.clone(), dir, finds_credentials).await?;
            if let Some(sha256) = local_digest {
                self.0.ensure_unchanged(&original, &sha256).await?;
                self.0.cache.write_record(suspects::RECORDS, &sha256, &credential_files)?;
            }
            Ok(())
        };
        let tree_key = self.tree_key(spec, &signed)?;
        let root = self.0.cache.get_or_make_intact(KIND, &tree_key, has_tree, make).await?.join(TREE);
        Ok(FetchedSource { root, origin })
    }

    /// Puts the source into the store, unless the store already has it.
    pub async fn keep(self, spec: &SourceSpec) -> Result<StoredUnder> {
        let SourceIdentity { identity, version } = self.identity(spec).await?;
        let identity = self.identity_with_signers(spec, &identity).await?;
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
            let values = [
                (annotations::TITLE, Some(spec.name.to_string())),
                (annotations::IDENTITY, Some(identity)),
                (annotations::VERSION, version),
            ];
            Ok(packed.with_annotations(values))
        };
        Box::pin(self.0.keep(input, content)).await
    }

    /// Returns the stored source for a definition that is not looked up upstream: for a path that does not exist at this site, for a
    /// package of a fixed version, and with `--offline` for any package or commit.
    async fn stored_instead(self, spec: &SourceSpec) -> Result<Option<StoredInput>> {
        let (kind, tag) = (InputKind::Source, source_tag(spec)?);
        match &spec.from {
            SourceOrigin::Path { path, .. } if !self.0.root.join(path).exists() => {
                self.0.stored(kind, &tag).await
            }
            SourceOrigin::Apt(source) if package::needs_store_lookup(self.0, source, arch_of(source))? => {
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

    /// Returns the identity with the keys that must sign the content: other keys require a new verification, but no other input hash.
    async fn identity_with_signers(self, spec: &SourceSpec, identity: &str) -> Result<String> {
        Ok(match &spec.from {
            SourceOrigin::Git(GitSource { signed_by: Some(file), reference, .. }) => {
                let file = self.0.root.join(file);
                if !file.is_file() {
                    return Err(FetchError::Absent(file));
                }
                let keys = self.0.digest_of(&file).await?.digest;
                // The signature of a tag does not count for another tag of the same commit.
                format!("{identity} signed-by={keys} {}", reference.as_deref().unwrap_or_default())
            }
            _ => identity.to_owned(),
        })
    }

    /// Returns the cache key of a source's tree. The key includes the file name, because a tree with one file contains that name, and
    /// the keys that verified an RPM package.
    fn tree_key(self, spec: &SourceSpec, identity: &str) -> Result<String> {
        let keys = match &spec.from {
            SourceOrigin::Rpm(source) => self.0.keys_digest(Some(&source.from.signed_by))?,
            _ => None,
        };
        Ok(content_key(&format!("{identity} file={}{}", file_name(&spec.from)?, keys.unwrap_or_default())))
    }

    /// Returns the identity that a stored source claims, if the definition allows it.
    async fn stored_identity(self, spec: &SourceSpec, stored: &StoredInput) -> Result<String> {
        let value = stored.annotation(annotations::IDENTITY)?;
        let signers = self.identity_with_signers(spec, "").await?;
        let identity = value.strip_suffix(&signers).filter(|identity| is_identity(spec, identity));
        identity.map(str::to_owned).ok_or_else(|| {
            stored.invalid(&format!("its identity is {value:?}, which does not match the definition")).into()
        })
    }

    /// Returns the publisher's original: the file or directory whose digest is in the identity.
    async fn original(self, spec: &SourceSpec, content: Content) -> Result<PathBuf> {
        match content {
            Content::Package(found) => {
                let SourceOrigin::Apt(source) = &spec.from else { return Err(FetchError::Interrupted) };
                package::file(self.0, source, &found, arch_of(source)).await
            }
            Content::Rpm(found) => {
                let file = Box::pin(found.file()).await;
                self.0.explain_if_offline(file, || format!("source {}", spec.name))
            }
            Content::Download { url, sha256 } => {
                let what = format!("source {}", spec.name);
                let downloaded = download(self.0, &what, &url, &sha256).await;
                self.0.explain_if_offline(downloaded, || format!("{what} ({url})"))
            }
            Content::Commit { source, id } => {
                let key = content_key(&self.identity_with_signers(spec, &source.identity(&id)).await?);
                let archive = Box::pin(git::archive(self.0, &source, &id, &key)).await;
                let what = || format!("source {} (commit {id} of {})", spec.name, source.url);
                self.0.explain_if_offline(archive, what)
            }
            Content::Local { path, .. } => Ok(path),
        }
    }

    /// Creates the source's tree in `dir`. With `finds_credentials`, returns the files of the original that look like credentials.
    async fn lay_out(
        self,
        spec: &SourceSpec,
        original: PathBuf,
        dir: PathBuf,
        finds_credentials: bool,
    ) -> Result<Vec<String>> {
        let (name, inner, subdir) = (file_name(&spec.from)?, spec.unpack.clone(), spec.subdir.clone());
        let work = move |stop: &AtomicBool| {
            let base = original_tree(stop, (&original, &name), &dir)?;
            let credentials = if finds_credentials { suspects::of_tree(&base, stop)? } else { Vec::new() };
            lay_out(stop, base, &dir, inner.as_ref(), subdir.as_ref())?;
            Ok(credentials)
        };
        stoppable(work).await
    }

    /// Creates the source's tree from the store. The digest must match the identity: tag and annotations are untrusted registry
    /// content. The caller has verified the archive of a commit.
    async fn lay_out_stored(
        self,
        spec: &SourceSpec,
        stored: &StoredInput,
        identity: &str,
        dir: PathBuf,
    ) -> Result<()> {
        let expected = match commit_in(identity) {
            Some(_) => Some(OriginalDigest::File(stored.layer.digest.hex())),
            None => OriginalDigest::in_identity(identity),
        };
        let mismatch =
            |found: &str| stored.invalid(&format!("it has {found}, but the definition requires {identity}"));
        let work = self.0.cache.scratch()?;
        let original = match expected {
            Some(OriginalDigest::File(sha256)) => {
                if stored.layer.digest.hex() != sha256 {
                    return Err(mismatch(&format!("{}", stored.layer.digest)).into());
                }
                let file = work.path().join(file_name(&spec.from)?);
                self.0.required_store()?.fetch(stored, &file).await?;
                file
            }
            Some(OriginalDigest::Tree(sha256)) => {
                self.0.unpack_stored_tree(stored, work.path().to_owned()).await?;
                let tree = work.path().join(TREE);
                let path = tree.clone();
                let inspection = stoppable(move |stop| {
                    Ok::<_, FetchError>((suspects::version_control_in(&path)?, digest::of_tree(&path, stop)?))
                });
                let (unverified, actual) = inspection.await?;
                // The digest does not cover version-control data, but a definition may name an archive in that data.
                if let Some(path_in_tree) = unverified {
                    let path_in_tree = path_in_tree.display();
                    return Err(mismatch(&format!(
                        "version-control data ({path_in_tree}), which `farrier mirror` no longer stores"
                    ))
                    .into());
                }
                if actual != sha256 {
                    return Err(mismatch(&format!("a tree with the digest sha256:{actual}")).into());
                }
                tree
            }
            None => return Err(mismatch("something without a digest").into()),
        };
        self.lay_out(spec, original, dir, false).await.map(drop)
    }

    async fn content(self, from: &SourceOrigin) -> Result<Content> {
        match from {
            SourceOrigin::Apt(source) => {
                Ok(Content::Package(package::find(self.0, source, arch_of(source)).await?))
            }
            SourceOrigin::Rpm(source) => {
                let found = Box::pin(rpm::source::FoundPackage::find(self.0, source)).await;
                let describe = || format!("package {}", &*source.package);
                let found = self.0.explain_if_offline(found, describe)?;
                Ok(Content::Rpm(Box::new(found)))
            }
            // Each kernel has its own image, which farrier fetches like other images.
            SourceOrigin::Image(source) => Err(FetchError::value(
                "a source that is the same for all kernels",
                &source.reference,
                "it is an image",
            )),
            SourceOrigin::Git(source) => {
                let id = Box::pin(git::commit_of(self.0, source)).await;
                let id = self.0.explain_if_offline(id, || format!("the commit of {}", source.url))?;
                Ok(Content::Commit { source: Box::new(source.clone()), id })
            }
            SourceOrigin::Url { url, sha256 } => {
                Ok(Content::Download { url: url.clone(), sha256: sha256.to_ascii_lowercase() })
            }
            SourceOrigin::Path { path, sha256: expected } => {
                if path.iter().any(is_version_control) {
                    let path = path.to_string_lossy();
                    return Err(FetchError::value("the path of a source", &path, NOT_A_SOURCE));
                }
                let path = self.0.root.join(path);
                let record = self.0.digest_of(&path).await?;
                match expected {
                    Some(expected) if record.is_dir => {
                        Err(FetchError::value("the sha256 of a directory", expected, "only files have one"))
                    }
                    Some(expected) if expected.to_ascii_lowercase() != record.digest => {
                        let (what, expected) = (path.display().to_string(), expected.to_ascii_lowercase());
                        Err(FetchError::sha256(what, &record.digest, &expected))
                    }
                    _ => Ok(Content::Local { path, sha256: record.digest, is_dir: record.is_dir }),
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

/// Whether an entry has its tree. Version 0.2.0 moved a link into the entry instead of the directory that `subdir` names.
fn has_tree(entry: &Path) -> bool {
    entry.join(TREE).is_dir()
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
                && source.commit.as_ref().is_none_or(|required| *required == commit)
        }),
        SourceOrigin::Apt(source) => match &source.version {
            Some(version) => original.starts_with(&format!("{}={version} sha256:", source.package)),
            None => original.starts_with(&format!("{}=", source.package)),
        },
        SourceOrigin::Rpm(source) => rpm::source::matches_identity(source, original),
        SourceOrigin::Image(_) => false,
    })
}

/// Reason why version-control data is refused.
const NOT_A_SOURCE: &str = "version-control data is not a source";

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
