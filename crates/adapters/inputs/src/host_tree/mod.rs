//! Headers exposed by a host's own driver, as a directory or archive that the user provides.

pub mod collect;

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    image::{Digest, checked::HeadersPath},
    kernel::{KernelRelease, KernelTarget},
};
use farrier_local::{
    archive::{Format, links},
    blocking::stoppable,
    files::walk_source,
};
use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::{
    FetchError, Fetcher, Lookup, Result, TREE, digest,
    files::{copy_tree, name_of, read_start},
    unpack, with_release,
};

/// Format version; change it when the same content is laid out differently.
const FORMAT: &str = "host-tree-1";
/// Kind of the cache entries.
const KIND: &str = "host-trees";
/// File name of the exposed headers' symbol table.
const SYMVERS: &str = "Module.symvers";
/// Maximum size of a `utsrelease.h`, which has one line.
const MAX_UTSRELEASE: u64 = 4096;

/// A verified tree of exposed headers in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTree {
    /// The tree, rooted at `/`: `usr/src/ofa_kernel/...`. It becomes `needs/<name>/` in the build context.
    pub root: PathBuf,
    /// Digest over names, modes, links and contents.
    pub digest: Digest,
    /// Symbol tables, relative to the root, in name order; at least one.
    pub symvers: Vec<PathBuf>,
    /// File name and digest, for provenance.
    pub origin: String,
}

/// Result of a search for a tree.
pub type HostTreeLookup = Lookup<HostTree>;

/// Record of a verified tree.
#[derive(Debug, Serialize, Deserialize)]
struct VerifiedTree {
    digest: String,
    symvers: Vec<PathBuf>,
}

impl Fetcher {
    /// Returns the tree of exposed headers at a path in the definitions, for one kernel. `{{release}}` is replaced by the kernel
    /// release; relative paths start in the definitions directory.
    ///
    /// # Errors
    /// The tree cannot be read or unpacked, has no `Module.symvers`, was built for another kernel, or has links that lead out of
    /// it.
    pub async fn host_tree(&self, tree: &HeadersPath, target: &KernelTarget) -> Result<HostTreeLookup> {
        let path = self.root.join(with_release(tree, target));
        if !path.exists() {
            let (looked_for, release) = (path.display().to_string(), &target.release);
            let hint = format!(
                "collect it on a node that runs this kernel, in a pod that mounts the host: \
                 farrier collect --root /host --kernel {release} /usr/src/ofa_kernel --to {looked_for}"
            );
            return Ok(Lookup::Missing { looked_for, hint });
        }
        let file = self.digest_of(&path).await?;
        let key = digest::of_parts([FORMAT, target.release.as_str(), &file.digest]);
        let origin = format!("{} sha256:{}", name_of(&path), file.digest);
        let what = path.display().to_string();
        let make = |dir: PathBuf| async {
            let (from, what, release) = (path.clone(), what.clone(), target.release.clone());
            let copy = stoppable(move |stop| {
                let tree = dir.join(TREE);
                copy_or_unpack(stop, &from, &tree)?;
                verify(&tree, &release, &what).map(drop)
            });
            copy.await?;
            self.ensure_unchanged(&path, &file.digest).await
        };
        let root = self.cache.get_or_make(KIND, &key, make).await?.join(TREE);
        let verified = if let Some(verified) = self.cache.read_record::<VerifiedTree>(KIND, &key)? {
            verified
        } else {
            let (tree, release) = (root.clone(), target.release.clone());
            let verified = stoppable(move |stop| {
                let symvers = verify(&tree, &release, &what)?;
                Ok::<_, FetchError>(VerifiedTree { digest: digest::of_tree(&tree, stop)?, symvers })
            });
            let verified = verified.await?;
            self.cache.write_record(KIND, &key, &verified)?;
            verified
        };
        let digest = format!("sha256:{}", verified.digest).parse().map_err(|_| FetchError::Interrupted)?;
        Ok(Lookup::Found(HostTree { root, digest, symvers: verified.symvers, origin }))
    }
}

/// Copies or unpacks the user's tree into a new directory.
fn copy_or_unpack(stop: &AtomicBool, from: &Path, tree: &Path) -> Result<()> {
    if from.is_dir() {
        return copy_tree(from, tree, stop);
    }
    let what = from.display().to_string();
    if Format::of(from)?.is_none() {
        return Err(FetchError::Layout(format!(
            "a directory or an archive of exposed headers in {what}: it is not an archive in a supported \
             format"
        )));
    }
    fs::create_dir(tree)?;
    unpack(stop, from, tree, &what)
}

/// Verifies that a tree holds exposed headers for the kernel, and returns their symbol tables. `what` names the tree in errors.
fn verify(tree: &Path, release: &KernelRelease, what: &str) -> Result<Vec<PathBuf>> {
    let mut symvers = Vec::new();
    let mut kernels: Vec<String> = Vec::new();
    for entry in walk_source(walkdir::WalkDir::new(tree).min_depth(1).sort_by_file_name()) {
        let entry = entry?;
        let path = entry.path();
        let relative = path.strip_prefix(tree).unwrap_or(path);
        if entry.file_type().is_symlink() {
            check_link(tree, relative, what)?;
        } else if entry.file_type().is_file() && entry.file_name() == SYMVERS {
            let kernel = kernel_in(relative);
            // A host may also have symbol tables of kernels for which its driver was built earlier, with other versions.
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
        return Err(FetchError::unusable(
            format!("cannot use {what} for kernel {release}: it was built for {}", kernels.join(", ")),
            "collect it with `farrier collect` on a node that runs this kernel, after the driver was installed for it",
        ));
    }
    if symvers.is_empty() {
        return Err(FetchError::unusable(
            format!(
                "cannot find a Module.symvers in {what}: there is none, so the driver's symbols are unknown"
            ),
            "collect the directory that the driver exposes, such as /usr/src/ofa_kernel: its kernel-devel package \
             installs it",
        ));
    }
    Ok(symvers)
}

/// Returns the kernel named in a symbol table's path: OFED's is `ofa_kernel/<arch>/<release>/Module.symvers`. Directories such as
/// `nvidia-535.261.03` are not kernel releases.
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

/// Returns the value of `#define UTS_RELEASE "..."`.
fn utsrelease(path: &Path) -> Result<Option<String>> {
    let text = read_start(path, MAX_UTSRELEASE)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let release = text.split_once("UTS_RELEASE").and_then(|(_, rest)| rest.split('"').nth(1));
    Ok(release.map(str::to_owned))
}

/// Checks that a link is relative and stays in the tree: other links would lead elsewhere in the build.
fn check_link(tree: &Path, link: &Path, what: &str) -> Result<()> {
    let target = fs::read_link(tree.join(link))?;
    if links::stays_below(Path::new(""), link, &target) {
        return Ok(());
    }
    let (link, target) = (link.display(), target.display());
    Err(FetchError::unusable(
        format!("cannot use {what}: its link {link} leads out of it, to {target}"),
        "collect it with `farrier collect`, which makes links relative, and name the link's target as well",
    ))
}

#[cfg(test)]
mod tests;
