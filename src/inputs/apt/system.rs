//! Adapter: the packages of a whole root file system, as chosen by apt itself.

use farrier_core::image::checked::PackageToInstall;

use super::{AptArchive, KIND, control::PackageRecord};
use crate::{
    cache::LockMode,
    inputs::{FetchError, Result, process},
};

/// apt's pattern for the packages that are essential by Debian policy (3.8), whichever they are in a suite.
const ESSENTIAL: &str = "?essential";

impl AptArchive {
    /// Returns the essential packages, the ones in `include`, and all their dependencies without recommendations, in name order.
    pub async fn system(&self, include: &[PackageToInstall]) -> Result<Vec<PackageRecord>> {
        self.update(self.refresh).await?;
        // A missing suite would give another root file system, and the result is kept.
        let without = self.without()?;
        if !without.is_empty() {
            return Err(FetchError::Program {
                action: format!("choose the packages of a root file system of {}", self.suites),
                message: format!("the archives do not have all of them{without}"),
                transient: false,
            });
        }
        let packages = match self.resolve(include).await {
            // A package may have appeared since the last refresh.
            Err(FetchError::Program { .. }) if self.renew().await? => self.resolve(include).await,
            outcome => outcome,
        }?;
        let known = self.show(packages.iter().map(|(name, _)| name.as_str()).collect()).await?;
        let record = |(name, version): &(String, String)| {
            let found = known.iter().find(|known| known.name == *name && known.version == *version);
            found
                .cloned()
                .ok_or_else(|| FetchError::NoPackage(format!("{name}={version}"), self.suites.clone()))
        };
        packages.iter().map(record).collect()
    }

    /// Returns names and versions in name order. The apt state has no installed packages, so apt lists the whole system.
    async fn resolve(&self, include: &[PackageToInstall]) -> Result<Vec<(String, String)>> {
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-get");
        // Keeps apt from counting itself among the essential packages, and from using a package cache that does.
        command.args(["--option", "pkgCacheGen::ForceEssential=,", "--option", "Dir::Cache::pkgcache="]);
        command.args(["--quiet", "--quiet", "--simulate", "--no-install-recommends", "install", "--"]);
        command.arg(ESSENTIAL).args(include.iter().map(PackageToInstall::as_str));
        let action = || format!("choose the packages of a root file system of {}", self.suites);
        let mut packages = installed(&process::run(command, "apt-get", action).await?.stdout);
        packages.sort();
        Ok(packages)
    }
}

/// Parses names and versions from the output of `apt-get --simulate`: `Inst make (4.3-4.1 Debian:12.1/stable [amd64])`.
fn installed(said: &str) -> Vec<(String, String)> {
    let package = |line: &str| {
        let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
        Some((name.to_owned(), rest.split([' ', ')']).next()?.to_owned()))
    };
    said.lines().filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_apt_would_install() {
        let said = "NOTE: This is only a simulation!\n\
            Inst libc6 (2.36-9+deb12u14 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64]) []\n\
            Inst gcc-12-base (1:12.2~x)\nConf libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])\nInst odd\n";
        let found = installed(said);
        let found: Vec<_> = found.iter().map(|(name, version)| (name.as_str(), version.as_str())).collect();
        assert_eq!(found, [("libc6", "2.36-9+deb12u14"), ("gcc-12-base", "1:12.2~x")]);
    }
}
