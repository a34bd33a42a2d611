//! One RPM package that a definition names, with a kernel's modules.

use std::path::PathBuf;

use farrier_core::{
    image::{RpmSource, checked::matches_glob},
    kernel::KernelTarget,
};

use super::{HINT, ListedPackage, Repositories, key_parts, package::names_for};
use crate::{FetchError, Fetcher, Result, apt::Packages};

/// A package and its repositories.
pub struct FoundPackage {
    archive: Repositories,
    listed: ListedPackage,
}

impl FoundPackage {
    /// Finds the package for the source's kernel.
    pub async fn find(fetcher: &Fetcher, source: &RpmSource) -> Result<Self> {
        let (kernel, groups) = (kernel(source)?, std::slice::from_ref(&source.package));
        let version = kernel.repository_version();
        let system = (&*version, kernel.arch);
        let archive = Repositories::open(fetcher, &source.from, system, groups)?.map_err(|missing| {
            FetchError::unusable(
                format!("cannot find package {}: there is no {missing}", &*source.package),
                HINT,
            )
        })?;
        let archive = Repositories { requires_all: true, ..archive };
        let names = names_for(&source.package, kernel.release.as_str());
        match Box::pin(archive.choose(&[names], &kernel.release)).await? {
            Packages::Found(mut found) => {
                let listed = found.pop().ok_or(FetchError::Interrupted)?;
                Ok(Self { archive, listed })
            }
            Packages::Missing(names) => {
                Err(FetchError::NoPackage(names, format!("its repositories for kernel {}", kernel.release)))
            }
        }
    }

    /// Returns `name=version.arch sha256:...`.
    pub fn identity(&self) -> String {
        self.listed.package.identity()
    }

    /// Returns the package's verified file in the cache.
    pub async fn file(self) -> Result<PathBuf> {
        let files = self.archive.download(&[self.listed]).await;
        if files.is_err() {
            // A mirror drops a package when a newer one replaces it. Refreshing makes the next lookup find the new one.
            self.archive.renew().await?;
        }
        files?.pop().ok_or(FetchError::Interrupted)
    }
}

fn kernel(source: &RpmSource) -> Result<&KernelTarget> {
    let none = "each of its packages is for one kernel";
    source
        .kernel
        .as_ref()
        .ok_or_else(|| FetchError::value("a source that is the same for all kernels", &source.package, none))
}

/// Returns the parts that identify a definition's package for a kernel.
pub fn identity_parts(source: &RpmSource) -> Result<Vec<String>> {
    let kernel = kernel(source)?;
    let head = ["rpm", &source.package, kernel.release.as_str()].map(str::to_owned);
    let version = kernel.repository_version();
    let system = (&*version, kernel.arch);
    Ok(head.into_iter().chain(key_parts(&source.from, system)).collect())
}

/// Whether a package with this identity can be the source's package.
pub fn matches_identity(source: &RpmSource, identity: &str) -> bool {
    let release = source.kernel.as_ref().map_or("", |kernel| kernel.release.as_str());
    let name = identity.split_once('=').map_or("", |(name, _)| name);
    names_for(&source.package, release).iter().any(|pattern| matches_glob(pattern, name))
}
