//! Adapter: exposed headers that a host's own driver offers, as a directory or archive that the user brings.

use std::{
    fs,
    path::{Component, Path, PathBuf},
    sync::atomic::AtomicBool,
};

use serde::{Deserialize, Serialize};

use super::{
    FetchError, Fetcher, blocking::blocking, copy, digest, header_set::with_release, io_error, unpack,
};
use crate::{
    archive::Format,
    image::Digest,
    kernel::{KernelRelease, KernelTarget},
};

/// Changes when the same content is laid out differently.
const FORMAT: &str = "host-tree-1";
/// The kind of the cache's entries.
const KIND: &str = "host-trees";
/// The tree's name in its cache entry. It has a mode of its own: the entry's is private.
const TREE: &str = "tree";
/// The symbol table of what is exposed.
const SYMVERS: &str = "Module.symvers";
/// Links that are followed before they are taken for a circle, as Linux does.
pub(super) const MOST_LINKS: usize = 40;
/// A `utsrelease.h` is one line.
const MAX_UTSRELEASE: u64 = 4096;

/// A tree of exposed headers in the cache, whole and for the right kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTree {
    /// The tree, rooted at `/`: `usr/src/ofa_kernel/...`. Goes to `needs/<name>/` of the build context.
    pub root: PathBuf,
    /// Digest over its names, modes, links and contents.
    pub digest: Digest,
    /// Its symbol tables, relative to the root, in name order; one at least.
    pub symvers: Vec<PathBuf>,
    /// File name and digest: for provenance.
    pub origin: String,
}

/// What became of a search for a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostTreeLookup {
    /// It is in the cache.
    Found(HostTree),
    /// There is none, which is a finding and not a fault.
    Missing {
        /// The path that was looked at.
        looked_for: String,
        /// How to get one.
        hint: String,
    },
}

/// Why a tree is not one of exposed headers for the kernel.
#[derive(Debug, thiserror::Error)]
pub enum HostTreeError {
    /// Nothing could be linked against it.
    #[error("find a Module.symvers in {tree}: there is none, so the driver's symbols are not known")]
    NoSymvers {
        /// The directory or archive.
        tree: String,
    },
    /// It is what another kernel's driver exposes.
    #[error("use {tree} for kernel {wanted}: it was built for {}", found.join(", "))]
    OtherKernel {
        /// The directory or archive.
        tree: String,
        /// The kernel releases in it.
        found: Vec<String>,
        /// The kernel that it is to be used for.
        wanted: String,
    },
    /// A link to something that is not in it: it would lead into the build container.
    #[error("use {tree}: its link {link} leads out of it, to {target}")]
    Escapes {
        /// The directory or archive.
        tree: String,
        /// The link.
        link: String,
        /// What it says.
        target: String,
    },
}

impl HostTreeError {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NoSymvers { .. } => {
                "collect the directory that the driver exposes, such as /usr/src/ofa_kernel: its kernel-devel package installs it"
            }
            Self::OtherKernel { .. } => {
                "collect it with `farrier collect` on a node that runs this kernel, after the driver was installed for it"
            }
            Self::Escapes { .. } => {
                "collect it with `farrier collect`, which makes links relative, and name the link's target as well"
            }
        }
    }
}

/// What is remembered of a tree that was found good.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    digest: String,
    symvers: Vec<PathBuf>,
}

impl Fetcher {
    /// The tree of exposed headers at a path of the definitions (`{{release}}` stands for the kernel release, relative
    /// paths start at `root`), for one kernel.
    ///
    /// # Errors
    /// It cannot be read or unpacked, has no `Module.symvers`, was built for another kernel, or has links that lead
    /// out of it.
    pub async fn host_tree(
        &self,
        tree: &Path,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<HostTreeLookup, FetchError> {
        let path = root.join(with_release(&tree.to_string_lossy(), target));
        if !path.exists() {
            let (looked_for, release) = (path.display().to_string(), &target.release);
            let hint = format!(
                "collect it on a node that runs this kernel, in a pod that mounts the host: \
                 farrier collect --root /host --kernel {release} /usr/src/ofa_kernel --to {looked_for}"
            );
            return Ok(HostTreeLookup::Missing { looked_for, hint });
        }
        let (cache, from) = (self.cache.clone(), path.clone());
        let file = blocking(move |stop| digest::remembered(&cache, &from, stop)).await?;
        let key = digest::of_parts([FORMAT, target.release.as_str(), &file.digest]);
        let what = path.display().to_string();
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let release = target.release.clone();
        let make = |dir: PathBuf| {
            let (what, release) = (what.clone(), release.clone());
            blocking(move |stop| {
                let tree = dir.join(TREE);
                bring(stop, &path, &tree)?;
                verify(&tree, &release, &what).map(drop)
            })
        };
        let place = self.cache.get_or_make(KIND, &key, make).await?.join(TREE);
        let known = if let Some(known) = self.cache.read_record::<Known>(KIND, &key)? {
            known
        } else {
            let tree = place.clone();
            let known = blocking(move |stop| {
                let symvers = verify(&tree, &release, &what)?;
                Ok(Known { digest: digest::of_tree(&tree, stop)?, symvers })
            });
            let known = known.await?;
            self.cache.write_record(KIND, &key, &known)?;
            known
        };
        let digest = format!("sha256:{}", known.digest).parse().map_err(|_| FetchError::Interrupted)?;
        let origin = format!("{name} sha256:{}", file.digest);
        Ok(HostTreeLookup::Found(HostTree { root: place, digest, symvers: known.symvers, origin }))
    }
}

/// Puts the user's tree into a directory that is not there yet.
fn bring(stop: &AtomicBool, from: &Path, tree: &Path) -> Result<(), FetchError> {
    if from.is_dir() {
        return copy::tree(from, tree, stop);
    }
    let what = from.display().to_string();
    if Format::of(from).map_err(io_error("read", from))?.is_none() {
        return Err(FetchError::Layout {
            wanted: "a directory or an archive of exposed headers".to_owned(),
            what,
            found: "its first bytes are those of no archive that farrier knows".to_owned(),
        });
    }
    fs::create_dir(tree).map_err(io_error("create", tree))?;
    unpack(stop, from, tree, &what)
}

/// Only exposed headers for the kernel pass; gives their symbol tables. `what` names the tree in errors.
pub(super) fn verify(tree: &Path, release: &KernelRelease, what: &str) -> Result<Vec<PathBuf>, FetchError> {
    let mut symvers = Vec::new();
    let mut kernels: Vec<String> = Vec::new();
    for entry in walkdir::WalkDir::new(tree).min_depth(1).sort_by_file_name() {
        let entry = entry.map_err(|error| FetchError::Io {
            action: "list",
            path: error.path().unwrap_or(tree).to_owned(),
            source: error.into(),
        })?;
        let path = entry.path();
        let relative = path.strip_prefix(tree).unwrap_or(path);
        if entry.file_type().is_symlink() {
            check_link(tree, relative, what)?;
        } else if entry.file_type().is_file() && entry.file_name() == SYMVERS {
            let kernel = kernel_in(relative);
            // A host may keep what its driver was built for before; those symbols are of other versions.
            if kernel.as_deref().is_none_or(|kernel| kernel == release.as_str()) {
                symvers.push(relative.to_owned());
            }
            kernels.extend(kernel);
        } else if relative.ends_with("include/generated/utsrelease.h") {
            kernels.extend(utsrelease(path)?);
        }
    }
    if !kernels.is_empty() && !kernels.iter().any(|kernel| kernel == release.as_str()) {
        kernels.sort();
        kernels.dedup();
        let (tree, wanted) = (what.to_owned(), release.to_string());
        return Err(HostTreeError::OtherKernel { tree, found: kernels, wanted }.into());
    }
    if symvers.is_empty() {
        return Err(HostTreeError::NoSymvers { tree: what.to_owned() }.into());
    }
    Ok(symvers)
}

/// The kernel that a symbol table's path names: OFED's is `ofa_kernel/<arch>/<release>/Module.symvers`. Directories
/// like `nvidia-535.261.03` are none.
fn kernel_in(symvers: &Path) -> Option<String> {
    let directories = symvers.parent().into_iter().flat_map(Path::components);
    let mut names = directories.filter_map(|component| component.as_os_str().to_str());
    let is_release = |name: &&str| {
        let numbers = name.split(|c: char| !c.is_ascii_digit()).take(3);
        name.matches('.').count() >= 2
            && numbers.filter(|number| !number.is_empty()).count() == 3
            && name.parse::<KernelRelease>().is_ok()
    };
    names.find(is_release).map(str::to_owned)
}

/// What `#define UTS_RELEASE "..."` says.
fn utsrelease(path: &Path) -> Result<Option<String>, FetchError> {
    use std::io::Read as _;
    let mut text = Vec::new();
    let file = fs::File::open(path).map_err(io_error("open", path))?;
    file.take(MAX_UTSRELEASE).read_to_end(&mut text).map_err(io_error("read", path))?;
    let text = String::from_utf8_lossy(&text);
    let said = text.split_once("UTS_RELEASE").and_then(|(_, rest)| rest.split('"').nth(1));
    Ok(said.map(str::to_owned))
}

/// A link must be relative and stay in the tree, by its words: nothing else would be the same in the build.
fn check_link(tree: &Path, link: &Path, what: &str) -> Result<(), FetchError> {
    let place = tree.join(link);
    let target = fs::read_link(&place).map_err(io_error("read link", &place))?;
    if stays_inside(link, &target) {
        return Ok(());
    }
    Err(HostTreeError::Escapes {
        tree: what.to_owned(),
        link: link.display().to_string(),
        target: target.display().to_string(),
    }
    .into())
}

/// Does a link at this relative path, followed by its words, stay in the tree?
fn stays_inside(link: &Path, target: &Path) -> bool {
    let mut depth = link.components().count().saturating_sub(1);
    for component in target.components() {
        match component {
            Component::RootDir | Component::Prefix(_) => return false,
            Component::ParentDir if depth == 0 => return false,
            Component::ParentDir => depth -= 1,
            Component::Normal(_) => depth += 1,
            Component::CurDir => {}
        }
    }
    true
}

#[cfg(test)]
#[path = "host_tree_tests.rs"]
mod tests;
