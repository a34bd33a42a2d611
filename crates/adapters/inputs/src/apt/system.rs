//! The packages of a whole root file system, as chosen by apt itself.

use farrier_core::image::checked::PackageToInstall;
use farrier_local::cache::LockMode;

use super::{AptArchive, KIND, control::PackageRecord};
use crate::{FetchError, Result, process};

/// apt-patterns(7) pattern for all essential packages of a suite (Debian Policy 3.8).
const ESSENTIAL: &str = "?essential";

impl AptArchive {
    /// Returns the essential packages, the packages in `include`, and the dependencies of both, in name order. Recommended
    /// packages are excluded.
    pub async fn packages_with_dependencies(
        &self,
        include: &[PackageToInstall],
    ) -> Result<Vec<PackageRecord>> {
        self.ensure_no_suite_is_missing("choose the packages of a root file system").await?;
        let packages = match self.resolve(include).await {
            // A package may have appeared since the last refresh.
            Err(FetchError::Program { .. }) if self.renew().await? => self.resolve(include).await,
            outcome => outcome,
        }?;
        let records = self.show(packages.iter().map(|(name, _)| name.as_str()).collect()).await?;
        let find_record = |(name, version): &(String, String)| {
            let record = records.iter().find(|record| record.name == *name && record.version == *version);
            record
                .cloned()
                .ok_or_else(|| FetchError::NoPackage(format!("{name}={version}"), self.suites.clone()))
        };
        packages.iter().map(find_record).collect()
    }

    /// Returns the names and versions of all packages to install, in name order. apt lists the whole system, because the apt
    /// state has no installed packages.
    async fn resolve(&self, include: &[PackageToInstall]) -> Result<Vec<(String, String)>> {
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-get");
        // By default, apt counts itself as essential. Package caches store that flag, so no package cache is used.
        command.args(["--option", "pkgCacheGen::ForceEssential=,", "--option", "Dir::Cache::pkgcache="]);
        command.args(["--quiet", "--quiet", "--simulate", "--no-install-recommends", "install", "--"]);
        command.arg(ESSENTIAL).args(include.iter().map(PackageToInstall::as_str));
        let action = || format!("choose the packages of a root file system of {}", self.suites);
        let mut packages = parse_simulation(&process::run(command, "apt-get", action).await?.stdout);
        packages.sort();
        Ok(packages)
    }
}

/// Parses the names and versions of packages to install from the output of `apt-get --simulate`, which has lines such as
/// `Inst make (4.3-4.1 Debian:12.1/stable [amd64])`.
fn parse_simulation(output: &str) -> Vec<(String, String)> {
    let package = |line: &str| {
        let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
        Some((name.to_owned(), rest.split([' ', ')']).next()?.to_owned()))
    };
    output.lines().filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_simulated_installations() {
        let output = "NOTE: This is only a simulation!\n\
            Inst libc6 (2.36-9+deb12u14 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64]) []\n\
            Inst gcc-12-base (1:12.2~x)\nConf libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])\nInst odd\n";
        let found = parse_simulation(output);
        let found: Vec<_> = found.iter().map(|(name, version)| (name.as_str(), version.as_str())).collect();
        assert_eq!(found, [("libc6", "2.36-9+deb12u14"), ("gcc-12-base", "1:12.2~x")]);
    }
}
