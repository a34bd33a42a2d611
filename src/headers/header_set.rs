//! Adapter: header sets from packages and from files that the user brings.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use serde::{Deserialize, Serialize};

use super::{
    FetchError, Fetcher, HeaderLookup, HeaderSet,
    apt::{AptArchive, Closure, control},
    blocking::blocking,
    copy, digest, io_error, layout,
    stored::CARRY,
    tree, unpack,
};
use crate::kernel::{AptHeaders, Architecture, HeaderSource, KernelTarget, TarballHeaders};

/// Changes when the same packages or file are laid out differently.
const FORMAT: &str = "header-set-1";

/// The kind of the cache's entries.
pub(super) const KIND: &str = "headers";

/// Remembers what a search came to. It holds for as long as the tree is in the cache: the headers of a
/// kernel release do not change in what they mean, and the input hash should not change with the day.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Found {
    pub release: String,
    pub arch: Architecture,
    pub key: String,
    pub origin: Vec<String>,
}

impl Found {
    fn new(target: &KernelTarget, key: String, origin: Vec<String>) -> Self {
        Self { release: target.release.to_string(), arch: target.arch, key, origin }
    }
}

impl Fetcher {
    /// Looks for the target's headers, relative paths starting at `root` (the definitions directory).
    pub async fn header_set(
        &self,
        source: &HeaderSource,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<HeaderLookup, FetchError> {
        if let Some(brought) = self.brought(target).await? {
            return self.load_brought(&brought, target).await;
        }
        let lookup = match source {
            HeaderSource::Apt(apt) => {
                let what = || format!("headers of {} ({})", target.release, target.arch);
                self.unless_kept(self.apt_headers(apt, target).await, what, CARRY)?
            }
            HeaderSource::Tarball(tarball) => self.tarball_headers(tarball, root, target).await?,
        };
        let HeaderLookup::Missing { looked_for, hint } = lookup else { return Ok(lookup) };
        self.forget_answer(target)?;
        let release = &target.release;
        let hint = format!(
            "{hint}; or import them: `farrier headers import SOURCE... --kernel {release}`, or on a node that runs this \
             kernel `farrier headers collect`, both with --registry"
        );
        Ok(HeaderLookup::Missing { looked_for, hint })
    }

    /// What decides the content of the target's headers beyond the definition and the release: the digest
    /// of what was imported, or of the file that the user brings. `None` for packages, whose release says it all
    /// (decision 0002), and where there is no file yet.
    pub async fn header_identity(
        &self,
        source: &HeaderSource,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<Option<String>, FetchError> {
        if let Some(brought) = self.brought(target).await? {
            return Ok(brought.identity);
        }
        let HeaderSource::Tarball(tarball) = source else { return Ok(None) };
        let path = root.join(with_release(&tarball.path, target));
        if !path.exists() {
            return Ok(None);
        }
        let cache = self.cache.clone();
        let known = blocking(move |stop| digest::remembered(&cache, &path, stop)).await?;
        Ok(Some(known.digest))
    }

    async fn apt_headers(&self, apt: &AptHeaders, target: &KernelTarget) -> Result<HeaderLookup, FetchError> {
        let names: Vec<String> = apt.packages.iter().map(|name| with_release(name, target)).collect();
        let suites = apt.from.suites.join(", ");
        let missing = |name: &str, hint: &str| {
            let looked_for = format!("package {name} ({}) in {suites}", target.arch);
            Ok(HeaderLookup::Missing { looked_for, hint: hint.to_owned() })
        };
        if let Some(name) = names.iter().find(|name| !control::is_package_name(name)) {
            return missing(
                name,
                "no package can have this name: bring the headers as a tarball, for a family of their own",
            );
        }
        let search = search_key(apt, &names, target);
        if let Some(found) = self.cache.read_record::<Found>(KIND, &search)?
            && self.cache.get(KIND, &found.key)?.is_some()
        {
            return self.load(found, target).await;
        }
        let AptHeaders { packages: _, from } = apt;
        let archive = AptArchive::open(
            &self.cache,
            &self.net,
            &self.options.apt_dir,
            from,
            target.arch,
            self.options.refresh,
        )
        .await?;
        let packages = match archive.closure(&names).await? {
            Closure::Found(packages) => packages,
            Closure::Missing(name) => {
                return missing(
                    &name,
                    "add the suite that has it to the family's `suites`, or bring the headers as a tarball",
                );
            }
        };
        let origin: Vec<String> = packages.iter().map(control::PackageRecord::identity).collect();
        let found = Found::new(target, tree_key(target, &origin), origin);
        if self.cache.get(KIND, &found.key)?.is_none() {
            let files = match archive.download(&packages).await {
                Ok(files) => files,
                // A mirror drops a package when a newer one replaces it: the lists may be too old. New
                // ones are not fetched twice, so this ends.
                Err(_) if archive.renew().await? => return Box::pin(self.apt_headers(apt, target)).await,
                Err(e) => return Err(e),
            };
            let target = target.clone();
            let make = |dir: PathBuf| {
                blocking(move |stop| {
                    let root = dir.join(TREE);
                    fs::create_dir(&root).map_err(io_error("create", &root))?;
                    for (file, package) in files.iter().zip(&packages) {
                        unpack(stop, file, &root, &format!("package {}={}", package.name, package.version))?;
                    }
                    layout::merge_usr(&root)?;
                    verify(&root, &target)
                })
            };
            self.cache.get_or_make(KIND, &found.key, make).await?;
        }
        self.cache.write_record(KIND, &search, &found)?;
        self.load(found, target).await
    }

    async fn tarball_headers(
        &self,
        tarball: &TarballHeaders,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<HeaderLookup, FetchError> {
        let path = root.join(with_release(&tarball.path, target));
        if !path.exists() {
            return Ok(HeaderLookup::Missing {
                looked_for: path.display().to_string(),
                hint: format!("put the headers of {} there, as a directory or a tarball", target.release),
            });
        }
        let (cache, from) = (self.cache.clone(), path.clone());
        let known = blocking(move |stop| digest::remembered(&cache, &from, stop)).await?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let origin = vec![format!("{name} sha256:{}", known.digest)];
        let found = Found::new(target, tree_key(target, &[known.digest]), origin);
        let wanted = target.clone();
        let make = |dir: PathBuf| {
            blocking(move |stop| {
                let (raw, root) = (dir.join("raw"), dir.join(TREE));
                bring(stop, &path, &raw, known.is_dir)?;
                layout::arrange(&raw, &root, &wanted.release, &path.display().to_string())?;
                if raw.exists() {
                    fs::remove_dir_all(&raw).map_err(io_error("remove", &raw))?;
                }
                verify(&root, &wanted)
            })
        };
        self.cache.get_or_make(KIND, &found.key, make).await?;
        self.cache.write_record(KIND, &found.key, &found)?;
        self.load(found, target).await
    }

    /// The header sets in the cache, by release. One that cannot be read any more is left out.
    pub async fn header_sets(&self) -> Result<Vec<HeaderSet>, FetchError> {
        let cache = self.cache.clone();
        blocking(move |_| {
            let mut sets = Vec::new();
            for found in cache.records::<Found>(KIND)? {
                let Ok(release) = found.release.parse() else { continue };
                let Some(place) = cache.get(KIND, &found.key)? else { continue };
                let root = place.join(TREE);
                if let Ok((facts, compiler)) = tree::read_header_set(&root, &release, found.arch) {
                    sets.push(HeaderSet { root, facts, compiler, origin: found.origin, identity: found.key });
                }
            }
            sets.sort_by(|a, b| (&a.facts.release, &a.identity).cmp(&(&b.facts.release, &b.identity)));
            sets.dedup_by(|a, b| a.identity == b.identity);
            Ok(sets)
        })
        .await
    }

    pub(super) async fn load(&self, found: Found, target: &KernelTarget) -> Result<HeaderLookup, FetchError> {
        let Found { release: _, arch: _, key, origin } = found;
        let root = self.cache.place(KIND, &key)?.join(TREE);
        let (place, KernelTarget { release, arch, .. }) = (root.clone(), target.clone());
        let (facts, compiler) = blocking(move |_| Ok(tree::read_header_set(&place, &release, arch)?)).await?;
        Ok(HeaderLookup::Found(Box::new(HeaderSet { root, facts, compiler, origin, identity: key })))
    }
}

/// The tree's name in its cache entry. It has a mode of its own: the entry's is private.
pub(super) const TREE: &str = "tree";

fn bring(stop: &AtomicBool, from: &Path, raw: &Path, is_dir: bool) -> Result<(), FetchError> {
    if is_dir {
        return copy::tree(from, raw, stop);
    }
    fs::create_dir(raw).map_err(io_error("create", raw))?;
    unpack(stop, from, raw, &from.display().to_string())
}

/// Only what is the target's header set becomes an entry.
pub(super) fn verify(root: &Path, target: &KernelTarget) -> Result<(), FetchError> {
    tree::read_header_set(root, &target.release, target.arch)?;
    Ok(())
}

fn tree_key(target: &KernelTarget, content: &[String]) -> String {
    let head = [FORMAT, target.release.as_str(), target.arch.as_str()];
    digest::of_parts(head.into_iter().chain(content.iter().map(String::as_str)))
}

fn search_key(apt: &AptHeaders, names: &[String], target: &KernelTarget) -> String {
    let suites = super::apt::key_parts(&apt.from);
    let head = [FORMAT, target.release.as_str(), target.arch.as_str()];
    digest::of_parts(
        head.into_iter().chain(names.iter().map(String::as_str)).chain(suites.iter().map(String::as_str)),
    )
}

/// `{{release}}` is the one variable that names of a kernel's packages and files have. The release is a
/// checked type: it holds no separator.
pub(super) fn with_release(text: &str, target: &KernelTarget) -> String {
    text.replace("{{release}}", target.release.as_str()).replace("{{ release }}", target.release.as_str())
}
