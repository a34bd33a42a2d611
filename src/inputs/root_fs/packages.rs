//! Adapter: root file systems of several packages, by what they are for.

use std::{collections::BTreeSet, path::PathBuf};

use super::{RootFileSystems, assemble::assemble, bootstrap::mmdebstrap};
use crate::{
    image::checked::{Component, PackageToInstall, Suite},
    inputs::{
        CARRY, FetchError, Result, StoredUnder, digest,
        root_fs_layer::{self as layer, RootFs},
    },
    kernel::{AptSuites, Architecture, BootstrapSpec},
};

/// Stands for what a specification asks for, however that is made: input hashes hold it.
const SPECIFIED: &str = "rootfs-1";
/// Changes when the same specification gives another toolchain.
const ASSEMBLED: &str = "rootfs-2";
/// Changes when the same specification gives another runtime base.
const BOOTSTRAPPED: &str = "rootfs-1";
/// The kind of the cache's entries. In an older one, "rootfs", lies under the same keys what came from a registry.
pub(super) const PLACE: &str = "packages-root";

/// A root file system of packages. What it is for decides how it is made.
#[derive(Clone, Debug, PartialEq)]
pub enum PackageRoot {
    /// Compiles. farrier unpacks the packages, and no script of theirs runs.
    Toolchain(BootstrapSpec),
    /// Runs a driver's user space, whose packages need their scripts: mmdebstrap installs them.
    RuntimeBase(BootstrapSpec),
}

impl PackageRoot {
    /// What it holds.
    pub fn spec(&self) -> &BootstrapSpec {
        let (Self::Toolchain(spec) | Self::RuntimeBase(spec)) = self;
        spec
    }

    /// A hash over everything that decides what it holds: 64 hexadecimal digits. It is found by it in the cache, the engine and
    /// the registry.
    pub fn key(&self, arch: Architecture) -> String {
        let format = match self {
            Self::Toolchain(_) => ASSEMBLED,
            Self::RuntimeBase(_) => BOOTSTRAPPED,
        };
        key(format, self.spec(), arch)
    }
}

/// A hash over everything in the specification that decides what the root file system holds: 64
/// hexadecimal digits. The host's mirror is not part of it; one that is written down is. Input hashes hold it: the way
/// in which packages become a root file system changes nothing in what they compile.
pub fn bootstrap_key(spec: &BootstrapSpec, arch: Architecture) -> String {
    key(SPECIFIED, spec, arch)
}

fn key(format: &str, spec: &BootstrapSpec, arch: Architecture) -> String {
    let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = spec;
    let include: BTreeSet<&str> = include.iter().map(PackageToInstall::as_str).collect();
    let signed_by = signed_by.as_ref().map(|path| path.to_string_lossy().into_owned());
    let mut parts = vec![format, arch.as_str(), suite];
    parts.push("suites");
    parts.extend(extra_suites.iter().map(Suite::as_str));
    parts.push("components");
    parts.extend(components.iter().map(Component::as_str));
    parts.push("include");
    parts.extend(include);
    parts.extend(["mirror", mirror.as_deref().unwrap_or_default()]);
    parts.extend(["signed-by", signed_by.as_deref().unwrap_or_default()]);
    digest::of_parts(parts)
}

impl RootFileSystems<'_> {
    /// Makes the root file system, or finds it made.
    pub async fn bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<RootFs> {
        let make = |dir: PathBuf| async move {
            let what = || format!("root file system of {} ({arch})", root.spec().suite);
            self.0.unless_kept(self.make(root, arch, dir).await, what, CARRY)
        };
        let place = self.0.obtain_root_fs(PLACE, &root.key(arch), make).await?;
        layer::read(&place, arch)
    }

    /// Puts the root file system into the store, unless it is there.
    pub async fn keep_bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<StoredUnder> {
        let spec = root.spec();
        let what = format!("root file system of {} ({arch})", spec.suite);
        let root_fs = async { Ok((self.bootstrap(root, arch).await?, spec.include.join(" "))) };
        Box::pin(self.keep(what, &root.key(arch), None, root_fs)).await
    }

    async fn make(self, root: &PackageRoot, arch: Architecture, dir: PathBuf) -> Result<()> {
        let BootstrapSpec { suite, extra_suites, components, include, mirror, signed_by } = root.spec();
        for name in include {
            if name.parse::<PackageToInstall>().is_err() || name.contains("{{") {
                return Err(FetchError::value("a package to include", name, "no package can have this name"));
            }
        }
        let suites = AptSuites {
            suites: std::iter::once(suite).chain(extra_suites).cloned().collect(),
            components: components.clone(),
            mirror: mirror.clone(),
            signed_by: signed_by.clone(),
        };
        match root {
            PackageRoot::Toolchain(spec) => assemble(self.0, spec, suites, arch, dir).await,
            PackageRoot::RuntimeBase(spec) => mmdebstrap(self.0, spec, suites, arch, dir).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> BootstrapSpec {
        BootstrapSpec {
            suite: "bookworm".parse().unwrap(),
            extra_suites: vec![],
            components: vec![],
            include: vec!["make".parse().unwrap(), "gcc-12".parse().unwrap()],
            mirror: None,
            signed_by: None,
        }
    }

    #[test]
    fn every_field_is_in_the_key_and_the_order_of_packages_is_not() {
        let key = |spec: &BootstrapSpec| bootstrap_key(spec, Architecture::Amd64);
        let plain = key(&spec());
        assert_eq!(plain.len(), 64);
        assert_eq!(
            plain,
            key(&BootstrapSpec {
                include: vec!["gcc-12".parse().unwrap(), "make".parse().unwrap()],
                ..spec()
            })
        );
        assert_ne!(plain, bootstrap_key(&spec(), Architecture::Arm64));
        // What compiles, and what only says so, are apart: their layers are not the same.
        let toolchain = PackageRoot::Toolchain(spec()).key(Architecture::Amd64);
        assert_ne!(toolchain, plain);
        assert_eq!(PackageRoot::RuntimeBase(spec()).key(Architecture::Amd64), plain);
        // Images that were published have it in their input hashes.
        assert_eq!(plain, "21528ff58dd9a5443b2293a55ea22588cb98c5cbfbb984743bf635080dbe6b73");
        for other in [
            BootstrapSpec { suite: "sid".parse().unwrap(), ..spec() },
            BootstrapSpec { extra_suites: vec!["x".parse().unwrap()], ..spec() },
            BootstrapSpec { components: vec!["x".parse().unwrap()], ..spec() },
            BootstrapSpec { include: vec!["make".parse().unwrap()], ..spec() },
            BootstrapSpec { mirror: Some("http://x".parse().unwrap()), ..spec() },
            BootstrapSpec { signed_by: Some("/x".parse().unwrap()), ..spec() },
        ] {
            assert_ne!(plain, key(&other), "{other:?}");
        }
    }
}
