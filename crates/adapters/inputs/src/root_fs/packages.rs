//! Root file systems made from several packages, by purpose.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use farrier_core::{
    image::{
        RunfileSpec, RuntimeBase, SourceSpec,
        checked::{Component, PackageToInstall, RpmName, StreamName, Suite, to_strings},
    },
    kernel::{AptSuites, Architecture, BootstrapSpec, KernelTarget, RpmArchive, RpmToolchain, Toolchain},
};
use farrier_local::blocking::stoppable;
use fs_err as fs;

use super::{
    RootFileSystems,
    assemble::{self, assemble, assemble_rpm},
    bootstrap::{check_can_run, mmdebstrap},
    runfile::{self, Selection},
};
use crate::{
    FetchError, Result, StoredUnder, apt, digest,
    root_fs_layer::{self as layer, RootFs},
    rpm,
};

/// First part of a specification's hash ([`PackageRoot::identity`]). Does not depend on how farrier makes the root file system.
const SPEC_FORMAT: &str = "rootfs-1";
/// First part of a toolchain's cache key. Change it when the same specification gives another toolchain.
const TOOLCHAIN_FORMAT: &str = "rootfs-2";
/// First part of an RPM toolchain's cache key, which is also its identity.
const RPM_TOOLCHAIN_FORMAT: &str = "rootfs-rpm-1";
/// First part of a runtime base's cache key. Change it when the same specification gives another runtime base.
const RUNTIME_BASE_FORMAT: &str = "runtime-base-2";
/// First part of an installer's hash. Change it when the same installer gives another runtime base.
const RUNFILE_FORMAT: &str = "runfile-1";
/// Kind of the cache entries. The older kind "rootfs" used the same keys for root file systems from a registry.
pub(super) const KIND: &str = "packages-root";

/// A root file system made from packages. Its purpose decides how it is made.
#[derive(Clone, Debug, PartialEq)]
pub enum PackageRoot {
    /// A toolchain. farrier unpacks the packages and runs none of their scripts.
    Toolchain(BootstrapSpec),
    /// A toolchain from RPM packages, made in the same way.
    RpmToolchain(RpmRoot),
    /// A base for a driver's user space. Its packages need their scripts, so mmdebstrap installs them.
    RuntimeBase(BootstrapSpec),
    /// A runtime base with a driver from NVIDIA's installer.
    Runfile(BootstrapSpec, Installer),
}

/// An NVIDIA installer, and which parts of the driver to install.
#[derive(Clone, Debug, PartialEq)]
pub struct Installer {
    /// The installer and its accompanying archives, each with the identity of its content.
    sources: Vec<(SourceSpec, String)>,
    version: String,
    graphics: bool,
}

/// RPM packages of one version of a distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct RpmRoot {
    pub(super) packages: Vec<RpmName>,
    /// Selected module streams that differ from the default.
    pub(super) streams: BTreeMap<StreamName, StreamName>,
    pub(super) from: RpmArchive,
    /// Version in the addresses of the repositories.
    pub(super) version: String,
}

/// Specification of a root file system, by the format of its packages.
enum PackageSpec<'a> {
    Deb(&'a BootstrapSpec),
    Rpm(&'a RpmRoot),
}

impl PackageRoot {
    /// Returns the root file system of a kernel's toolchain, or `None` if the toolchain is an image.
    pub fn of_toolchain(toolchain: &Toolchain, target: &KernelTarget) -> Option<Self> {
        match toolchain {
            Toolchain::Bootstrap(spec) => Some(Self::Toolchain(spec.clone())),
            Toolchain::Rpm(RpmToolchain { packages, from, module_streams }) => {
                Some(Self::RpmToolchain(RpmRoot {
                    packages: packages.to_vec(),
                    streams: module_streams.clone(),
                    from: from.clone()?,
                    version: target.repository_version().into_owned(),
                }))
            }
            Toolchain::Image(_) => None,
        }
    }

    fn spec(&self) -> PackageSpec<'_> {
        match self {
            Self::Toolchain(spec) | Self::RuntimeBase(spec) | Self::Runfile(spec, _) => {
                PackageSpec::Deb(spec)
            }
            Self::RpmToolchain(root) => PackageSpec::Rpm(root),
        }
    }

    /// Returns the suite of Debian packages, or the address of the first RPM repository.
    pub fn package_source(&self, arch: Architecture) -> String {
        match self.spec() {
            PackageSpec::Deb(spec) => spec.suite.to_string(),
            PackageSpec::Rpm(RpmRoot { from, version, .. }) => {
                let first = from.repositories.first();
                first.map(|first| first.address().expand(version, arch.gnu_name())).unwrap_or_default()
            }
        }
    }

    /// Returns the requested packages.
    pub fn packages(&self) -> Vec<String> {
        match self.spec() {
            PackageSpec::Deb(spec) => to_strings(&spec.include),
            PackageSpec::Rpm(root) => to_strings(&root.packages),
        }
    }

    /// Returns a hash over everything that determines the content: 64 hexadecimal digits. The hash is the key in the cache, the
    /// engine and the registry.
    pub fn key(&self, arch: Architecture) -> String {
        match self {
            Self::Toolchain(spec) => key(TOOLCHAIN_FORMAT, spec, arch),
            Self::RuntimeBase(spec) => key(RUNTIME_BASE_FORMAT, spec, arch),
            Self::Runfile(spec, installer) => installer.hash(&key(RUNTIME_BASE_FORMAT, spec, arch)),
            Self::RpmToolchain(RpmRoot { packages, streams, from, version }) => {
                let packages: BTreeSet<&str> = packages.iter().map(RpmName::as_str).collect();
                let mut repositories = rpm::key_parts(from, (version, arch));
                repositories
                    .extend(streams.iter().map(|(module, stream)| format!("module {module}:{stream}")));
                let head = [RPM_TOOLCHAIN_FORMAT, arch.as_str(), "packages"];
                let parts = head.into_iter().chain(packages).chain(["from"]);
                digest::of_parts(parts.chain(repositories.iter().map(String::as_str)))
            }
        }
    }

    /// Returns a hash over everything in the specification that determines the content, for any architecture: 64 hexadecimal
    /// digits. The hash covers a mirror in the specification, but not the host's mirror. Input hashes contain this hash instead of
    /// one over the root file system: how packages become a root file system does not affect what they compile.
    pub fn identity(&self) -> String {
        match self {
            Self::Toolchain(spec) | Self::RuntimeBase(spec) => key(SPEC_FORMAT, spec, Architecture::Amd64),
            Self::Runfile(spec, installer) => installer.hash(&key(SPEC_FORMAT, spec, Architecture::Amd64)),
            Self::RpmToolchain(_) => self.key(Architecture::Amd64),
        }
    }
}

impl Installer {
    /// Returns the hash of the installer and of the packages that the base has besides the driver: `packages` is their hash.
    fn hash(&self, packages: &str) -> String {
        let Self { sources, version, graphics } = self;
        let part = if *graphics { "graphics" } else { "compute" };
        let contents = sources.iter().map(|(_, identity)| identity.as_str());
        digest::of_parts([RUNFILE_FORMAT, packages, version, part].into_iter().chain(contents))
    }
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

fn suites_of(spec: &BootstrapSpec) -> AptSuites {
    let BootstrapSpec { suite, extra_suites, components, include: _, mirror, signed_by } = spec;
    AptSuites {
        suites: std::iter::once(suite).chain(extra_suites).cloned().collect(),
        components: components.clone(),
        mirror: mirror.clone(),
        signed_by: signed_by.clone(),
    }
}

impl RootFileSystems<'_> {
    /// Returns the root file system of a runtime base for a version of the driver, or `None` if the base is not made from packages.
    /// `sources` contains the NVIDIA installer of a base with one.
    pub async fn packages_of_base(
        self,
        base: &RuntimeBase,
        sources: &[SourceSpec],
        version: &str,
    ) -> Result<Option<PackageRoot>> {
        let runfile = match base {
            RuntimeBase::Bootstrap(spec) => {
                return Ok(Some(PackageRoot::RuntimeBase(spec.for_version(version))));
            }
            RuntimeBase::Runfile(runfile) => runfile.spec(),
            RuntimeBase::Minimal(_) | RuntimeBase::Need(_) | RuntimeBase::Image(_) => return Ok(None),
        };
        let RunfileSpec { source: installer, graphics, archives, bootstrap } = runfile;
        let mut installer_sources = Vec::new();
        for name in [&installer].into_iter().chain(&archives) {
            let source = sources.iter().find(|source| source.name == *name).ok_or_else(|| {
                FetchError::value(
                    "a source of the runtime base",
                    name,
                    "the image has no source of this name",
                )
            })?;
            let whole = if *name == installer { source.without_subdir() } else { source.clone() };
            let identity = Box::pin(self.0.sources().identity(source)).await?.of_another_part(source, &whole);
            installer_sources.push((whole, identity));
        }
        let version = version.to_owned();
        let spec = bootstrap.for_version(&version);
        Ok(Some(PackageRoot::Runfile(spec, Installer { sources: installer_sources, version, graphics })))
    }

    /// Returns the root file system, making it if needed.
    pub async fn bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<RootFs> {
        let make = |dir: PathBuf| async move {
            let describe = || format!("root file system of {} ({arch})", root.package_source(arch));
            self.0.explain_if_offline(self.make(root, arch, dir).await, describe)
        };
        let entry = self.0.obtain_root_fs(KIND, &root.key(arch), make).await?;
        layer::read(&entry)
    }

    /// Puts the root file system into the store, unless the store already has it.
    pub async fn keep_bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<StoredUnder> {
        let what = format!("root file system of {} ({arch})", root.package_source(arch));
        let root_fs = async { Ok((self.bootstrap(root, arch).await?, root.packages().join(" "))) };
        Box::pin(self.keep(what, &root.key(arch), arch, None, root_fs)).await
    }

    /// Checks without network access that the root file system can be made.
    pub fn can_make(self, root: &PackageRoot, arch: Architecture) -> Result<()> {
        let describe = || format!("root file system of {} ({arch})", root.package_source(arch));
        let spec = match root.spec() {
            PackageSpec::Deb(spec) => spec,
            PackageSpec::Rpm(rpm) => {
                return assemble::open(self.0, rpm, &root.package_source(arch), arch).map(drop);
            }
        };
        if matches!(root, PackageRoot::RuntimeBase(_) | PackageRoot::Runfile(..)) {
            check_can_run(arch)?;
        }
        let entries = apt::entries(&self.0.net, &self.0.options.apt_dir, &suites_of(spec))?;
        let uris = entries.iter().flat_map(|entry| &entry.uris).map(String::as_str);
        let permitted = self.0.net.check_archives_allowed(uris, &format!("suite {}", spec.suite));
        self.0.explain_if_offline(permitted.map_err(FetchError::from), describe)
    }

    async fn make(self, root: &PackageRoot, arch: Architecture, dir: PathBuf) -> Result<()> {
        let spec = match root.spec() {
            PackageSpec::Deb(spec) => spec,
            PackageSpec::Rpm(rpm) => {
                return assemble_rpm(self.0, rpm, &root.package_source(arch), arch, dir).await;
            }
        };
        for name in &spec.include {
            if name.parse::<PackageToInstall>().is_err() || name.contains("{{") {
                return Err(FetchError::value("a package to include", name, "no package can have this name"));
            }
        }
        let suites = suites_of(spec);
        match root {
            PackageRoot::RuntimeBase(_) => mmdebstrap(self.0, spec, suites, arch, None, dir).await,
            // Boxed: nested futures make large types, and the compiler has a limit.
            PackageRoot::Runfile(_, installer) => {
                let tar = Box::pin(self.write_driver_tar(installer, arch, &dir)).await?;
                mmdebstrap(self.0, spec, suites, arch, Some(&tar), dir).await?;
                Ok(fs::remove_file(tar)?)
            }
            _ => assemble(self.0, spec, suites, arch, dir).await,
        }
    }

    /// Writes the selected files of an installer as a tar in `dir`.
    async fn write_driver_tar(
        self,
        installer: &Installer,
        arch: Architecture,
        dir: &Path,
    ) -> Result<PathBuf> {
        let Installer { sources, version, graphics } = installer;
        let mut unpacked = Vec::new();
        for (source, identity) in sources {
            let fetched = self.0.sources().fetch(source).await?;
            if fetched.origin != *identity {
                let (what, actual) = (format!("source {}", source.name), fetched.origin);
                return Err(FetchError::Checksum { what, actual, expected: identity.clone() });
            }
            unpacked.push(fetched.root);
        }
        let selection = Selection { version: version.clone(), arch, graphics: *graphics };
        let tar = dir.join("driver.tar");
        let out = tar.clone();
        stoppable(move |stop| runfile::write(stop, &unpacked, &selection, &out)).await?;
        Ok(tar)
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
        let key = |spec: &BootstrapSpec| PackageRoot::Toolchain(spec.clone()).identity();
        let plain = key(&spec());
        assert_eq!(plain.len(), 64);
        assert_eq!(
            plain,
            key(&BootstrapSpec {
                include: vec!["gcc-12".parse().unwrap(), "make".parse().unwrap()],
                ..spec()
            })
        );
        let base = PackageRoot::RuntimeBase(spec());
        assert_eq!(base.identity(), plain);
        assert_ne!(base.key(Architecture::Arm64), base.key(Architecture::Amd64));
        // Toolchain and base have different keys, because their layers differ. Keys of older formats differ, too.
        let toolchain = PackageRoot::Toolchain(spec()).key(Architecture::Amd64);
        let base = base.key(Architecture::Amd64);
        assert!(toolchain != plain && base != plain && base != toolchain);
        // Published images have this hash in their input hashes.
        assert_eq!(plain, PackageRoot::Toolchain(spec()).identity());
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

    #[test]
    fn rpm_packages_of_another_version_or_place_are_another_toolchain() {
        let toolchain = |packages: &[&str], place: &str| -> Toolchain {
            let from = serde_json::json!({"repositories": [{"url": place}], "signedBy": "acme.asc"});
            serde_json::from_value(serde_json::json!({"rpm": {"packages": packages, "from": from}})).unwrap()
        };
        let root = |toolchain: &Toolchain, version: &str| {
            let target = KernelTarget {
                os: "rocky".parse().unwrap(),
                os_version: version.parse().unwrap(),
                release: "5.14.0-503.el9.x86_64".parse().unwrap(),
                arch: Architecture::Amd64,
            };
            PackageRoot::of_toolchain(toolchain, &target).unwrap()
        };
        let place = "https://acme.invalid/{{releasever}}/{{basearch}}/";
        let plain = root(&toolchain(&["gcc", "make"], place), "9.5");
        assert_eq!(plain.package_source(Architecture::Arm64), "https://acme.invalid/9.5/aarch64/");
        assert_eq!(plain.identity(), root(&toolchain(&["make", "gcc"], place), "9.5").identity());
        assert_ne!(plain.key(Architecture::Arm64), plain.key(Architecture::Amd64));
        let mut with_stream = toolchain(&["gcc", "make"], place);
        if let Toolchain::Rpm(spec) = &mut with_stream {
            spec.module_streams.insert("perl".parse().unwrap(), "5.32".parse().unwrap());
        }
        for other in [
            root(&toolchain(&["gcc", "make"], place), "9.4"),
            root(&toolchain(&["gcc"], place), "9.5"),
            root(&toolchain(&["gcc", "make"], "https://acme.invalid/"), "9.5"),
            root(&with_stream, "9.5"),
        ] {
            assert_ne!(plain.identity(), other.identity(), "{other:?}");
        }
    }

    #[test]
    fn all_that_decides_what_is_taken_of_an_installer_is_in_the_key() {
        let source: SourceSpec =
            serde_json::from_str(r#"{"name": "nvidia", "from": {"path": {"path": "a.run"}}}"#).unwrap();
        let installer = || Installer {
            sources: vec![(source.clone(), "sha256:1".to_owned())],
            version: "580.95.05".to_owned(),
            graphics: false,
        };
        let key = |spec: BootstrapSpec, installer: Installer| {
            let root = PackageRoot::Runfile(spec, installer);
            (root.key(Architecture::Amd64), root.identity())
        };
        let plain = key(spec(), installer());
        assert_ne!(plain.0, PackageRoot::RuntimeBase(spec()).key(Architecture::Amd64));
        for other in [
            key(BootstrapSpec { suite: "sid".parse().unwrap(), ..spec() }, installer()),
            key(spec(), Installer { sources: vec![(source.clone(), "sha256:2".to_owned())], ..installer() }),
            key(spec(), Installer { version: "580.95.06".to_owned(), ..installer() }),
            key(spec(), Installer { graphics: true, ..installer() }),
        ] {
            assert!(plain.0 != other.0 && plain.1 != other.1);
        }
    }
}
