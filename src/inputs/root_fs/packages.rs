//! Adapter: root file systems of several packages, by what they are for.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use fs_err as fs;

use super::{
    RootFileSystems,
    assemble::{self, assemble, assemble_rpm},
    bootstrap::{mmdebstrap, runs},
    runfile::{self, Wanted},
};
use crate::{
    blocking::stoppable,
    image::{
        RunfileSpec, RuntimeBase, SourceSpec,
        checked::{Component, PackageToInstall, RpmName, StreamName, Suite, texts},
    },
    inputs::{
        CARRY, FetchError, Result, StoredUnder, apt, digest,
        root_fs_layer::{self as layer, RootFs},
        rpm,
    },
    kernel::{AptSuites, Architecture, BootstrapSpec, KernelTarget, RpmArchive, RpmToolchain, Toolchain},
};

/// Stands for what a specification asks for, however that is made: input hashes hold it.
const SPECIFIED: &str = "rootfs-1";
/// Changes when the same specification gives another toolchain.
const ASSEMBLED: &str = "rootfs-2";
/// The same of RPM packages.
const OF_RPM: &str = "rootfs-rpm-1";
/// Changes when the same specification gives another runtime base.
const BOOTSTRAPPED: &str = "rootfs-1";
/// Changes when the same installer gives another base.
const RUNFILE: &str = "runfile-1";
/// The kind of the cache's entries. In an older one, "rootfs", lies under the same keys what came from a registry.
pub(super) const PLACE: &str = "packages-root";

/// A root file system of packages. What it is for decides how it is made.
#[derive(Clone, Debug, PartialEq)]
pub enum PackageRoot {
    /// Compiles. farrier unpacks the packages, and no script of theirs runs.
    Toolchain(BootstrapSpec),
    /// The same of RPM packages.
    RpmToolchain(RpmRoot),
    /// Runs a driver's user space, whose packages need their scripts: mmdebstrap installs them.
    RuntimeBase(BootstrapSpec),
    /// The same with a driver out of NVIDIA's installer.
    Runfile(BootstrapSpec, Installer),
}

/// An installer, and what is wanted of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Installer {
    /// The installer and the archives that go with it, with what is in each.
    sources: Vec<(SourceSpec, String)>,
    version: String,
    graphics: bool,
}

/// RPM packages of one version of a distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct RpmRoot {
    pub(super) packages: Vec<RpmName>,
    /// Of modules whose default stream is not the one.
    pub(super) streams: BTreeMap<StreamName, StreamName>,
    pub(super) from: RpmArchive,
    /// What its repositories have in their addresses.
    pub(super) version: String,
}

impl PackageRoot {
    /// A toolchain for a kernel, unless that is an image. It says where its packages are; their keys are in the directory of
    /// the fetcher's definitions.
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

    /// What apt is asked for, or which packages of RPM repositories it is.
    fn spec(&self) -> Result<&BootstrapSpec, &RpmRoot> {
        match self {
            Self::Toolchain(spec) | Self::RuntimeBase(spec) | Self::Runfile(spec, _) => Ok(spec),
            Self::RpmToolchain(root) => Err(root),
        }
    }

    /// Where its packages are from, for people.
    pub fn name(&self, arch: Architecture) -> String {
        match self.spec() {
            Ok(spec) => spec.suite.to_string(),
            Err(RpmRoot { from, version, .. }) => {
                let first = from.repositories.first();
                first.map(|first| first.address().expand(version, arch.gnu_name())).unwrap_or_default()
            }
        }
    }

    /// The packages that it is asked to have.
    pub fn packages(&self) -> Vec<String> {
        match self.spec() {
            Ok(spec) => texts(&spec.include),
            Err(root) => texts(&root.packages),
        }
    }

    /// A hash over everything that decides what it holds: 64 hexadecimal digits. It is found by it in the cache, the engine and
    /// the registry.
    pub fn key(&self, arch: Architecture) -> String {
        match self {
            Self::Toolchain(spec) => key(ASSEMBLED, spec, arch),
            Self::RuntimeBase(spec) => key(BOOTSTRAPPED, spec, arch),
            Self::Runfile(spec, installer) => installer.hash(&key(BOOTSTRAPPED, spec, arch)),
            Self::RpmToolchain(RpmRoot { packages, streams, from, version }) => {
                let packages: BTreeSet<&str> = packages.iter().map(RpmName::as_str).collect();
                let mut places = rpm::key_parts(from, (version, arch));
                places.extend(streams.iter().map(|(module, stream)| format!("module {module}:{stream}")));
                let head = [OF_RPM, arch.as_str(), "packages"];
                let parts = head.into_iter().chain(packages).chain(["from"]);
                digest::of_parts(parts.chain(places.iter().map(String::as_str)))
            }
        }
    }

    /// A hash over everything in the specification that decides what it holds, whatever the architecture: 64 hexadecimal digits.
    /// The host's mirror is not part of it; one that is written down is. Input hashes hold it: the way in which packages become a
    /// root file system changes nothing in what they compile.
    pub fn identity(&self) -> String {
        match self {
            Self::Toolchain(spec) | Self::RuntimeBase(spec) => key(SPECIFIED, spec, Architecture::Amd64),
            Self::Runfile(spec, installer) => installer.hash(&key(SPECIFIED, spec, Architecture::Amd64)),
            Self::RpmToolchain(_) => self.key(Architecture::Amd64),
        }
    }
}

impl Installer {
    /// With the packages that the driver is installed over.
    fn hash(&self, packages: &str) -> String {
        let Self { sources, version, graphics } = self;
        let part = if *graphics { "graphics" } else { "compute" };
        let contents = sources.iter().map(|(_, identity)| identity.as_str());
        digest::of_parts([RUNFILE, packages, version, part].into_iter().chain(contents))
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
    /// The root file system of packages that a base is, for a version of the driver; none where it is another base. The installer
    /// is one of `sources`, whose relative paths start at `root`.
    pub async fn of_base(
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
        let mut found = Vec::new();
        for name in [&installer].into_iter().chain(&archives) {
            let source = sources.iter().find(|source| source.name == *name).ok_or_else(|| {
                FetchError::value("a source of the runtime base", name, "the image has none of this name")
            })?;
            let whole = if *name == installer { source.without_part() } else { source.clone() };
            let identity = Box::pin(self.0.sources().identity(source)).await?.of_another_part(source, &whole);
            found.push((whole, identity));
        }
        let version = version.to_owned();
        let spec = bootstrap.for_version(&version);
        Ok(Some(PackageRoot::Runfile(spec, Installer { sources: found, version, graphics })))
    }

    /// Makes the root file system, or finds it made.
    pub async fn bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<RootFs> {
        let make = |dir: PathBuf| async move {
            let what = || format!("root file system of {} ({arch})", root.name(arch));
            self.0.unless_kept(self.make(root, arch, dir).await, what, CARRY)
        };
        let place = self.0.obtain_root_fs(PLACE, &root.key(arch), make).await?;
        layer::read(&place, arch)
    }

    /// Puts the root file system into the store, unless it is there.
    pub async fn keep_bootstrap(self, root: &PackageRoot, arch: Architecture) -> Result<StoredUnder> {
        let what = format!("root file system of {} ({arch})", root.name(arch));
        let root_fs = async { Ok((self.bootstrap(root, arch).await?, root.packages().join(" "))) };
        Box::pin(self.keep(what, &root.key(arch), None, root_fs)).await
    }

    /// Is there something to make it from, as far as is known without asking anyone?
    pub fn can_make(self, root: &PackageRoot, arch: Architecture) -> Result<()> {
        let what = || format!("root file system of {} ({arch})", root.name(arch));
        let spec = match root.spec() {
            Ok(spec) => spec,
            Err(rpm) => return assemble::open(self.0, rpm, &root.name(arch), arch).map(drop),
        };
        if matches!(root, PackageRoot::RuntimeBase(_) | PackageRoot::Runfile(..)) {
            runs(arch)?;
        }
        let entries = apt::entries(&self.0.net, &self.0.options.apt_dir, &suites_of(spec))?;
        let uris = entries.iter().flat_map(|entry| &entry.uris).map(String::as_str);
        let permitted = self.0.net.permit_archives(uris, &format!("suite {}", spec.suite));
        self.0.unless_kept(permitted.map_err(FetchError::from), what, CARRY)
    }

    async fn make(self, root: &PackageRoot, arch: Architecture, dir: PathBuf) -> Result<()> {
        let spec = match root.spec() {
            Ok(spec) => spec,
            Err(rpm) => return assemble_rpm(self.0, rpm, &root.name(arch), arch, dir).await,
        };
        for name in &spec.include {
            if name.parse::<PackageToInstall>().is_err() || name.contains("{{") {
                return Err(FetchError::value("a package to include", name, "no package can have this name"));
            }
        }
        let suites = suites_of(spec);
        match root {
            PackageRoot::RuntimeBase(_) => mmdebstrap(self.0, spec, suites, arch, None, dir).await,
            // In a box: each future in another makes a larger type, and the compiler has a limit.
            PackageRoot::Runfile(_, installer) => {
                let tar = Box::pin(self.driver(installer, arch, &dir)).await?;
                mmdebstrap(self.0, spec, suites, arch, Some(&tar), dir).await?;
                Ok(fs::remove_file(tar)?)
            }
            _ => assemble(self.0, spec, suites, arch, dir).await,
        }
    }

    /// What is wanted of an installer as a tar in `dir`.
    async fn driver(self, installer: &Installer, arch: Architecture, dir: &Path) -> Result<PathBuf> {
        let Installer { sources, version, graphics } = installer;
        let mut unpacked = Vec::new();
        for (source, identity) in sources {
            let found = self.0.sources().fetch(source).await?;
            if found.origin != *identity {
                let (what, found) = (format!("source {}", source.name), found.origin);
                return Err(FetchError::Checksum { what, found, wanted: identity.clone() });
            }
            unpacked.push(found.root);
        }
        let wanted = Wanted { version: version.clone(), arch, graphics: *graphics };
        let tar = dir.join("driver.tar");
        let out = tar.clone();
        stoppable(move |stop| runfile::write(stop, &unpacked, &wanted, &out)).await?;
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
        // What compiles, and what only says so, are apart: their layers are not the same.
        let toolchain = PackageRoot::Toolchain(spec()).key(Architecture::Amd64);
        assert_ne!(toolchain, plain);
        assert_eq!(base.key(Architecture::Amd64), plain);
        // Images that were published have it in their input hashes.
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
        assert_eq!(plain.name(Architecture::Arm64), "https://acme.invalid/9.5/aarch64/");
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
