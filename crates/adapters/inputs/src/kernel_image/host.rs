//! Reads the facts about a running machine's kernel.

use std::{
    collections::BTreeSet,
    io::{self, BufReader, Read},
    path::Path,
};

use farrier_core::kernel::{Architecture, KernelRelease, ReleaseError};
use fs_err::File;
use kmod::{Btf, ExtraKernelFacts, FactSource, KernelConfig, KernelFacts, Known, exported_names};

use super::{KernelImage, facts::add_modules, unusable};
use crate::{
    FetchError, Result,
    header_tree::{TreeError, read_header_set},
};

/// Maximum size of a file in bytes; the kernel's type information has about 6 MB.
const MAX_FILE: u64 = 64 << 20;

/// Remedy for a machine that does not expose facts about its kernel.
const HINT: &str = "name the kernel with --kernel instead of --host";

/// Reads the facts about the running kernel of the machine whose files are below `root` (`/`, except in tests). Uses the kernel's
/// build tree if that is installed, or else its configuration, and what the running kernel exposes. Blocks.
pub fn read_host(root: &Path, arch: Architecture) -> Result<KernelFacts> {
    let path = root.join("proc/sys/kernel/osrelease");
    let release = read(&path)?.unwrap_or_default();
    let release: KernelRelease =
        String::from_utf8_lossy(&release).trim().parse().map_err(|error: ReleaseError| {
            unusable(&format!("cannot read the release in {}", path.display()), &error, HINT)
        })?;
    let mut facts = match read_header_set(root, &release, arch) {
        Ok((facts, _)) => facts,
        Err(TreeError::NoBuild(_)) => {
            let config = config(root, &release)?;
            KernelFacts::new(release, arch, config)
        }
        Err(error) => return Err(error.into()),
    };
    facts.beyond_headers = beyond_headers(root, &facts.release)?;
    Ok(facts)
}

impl KernelImage {
    /// Returns the image and modules of the kernel that the machine with files below `root` runs.
    pub fn of_host(root: &Path, release: &KernelRelease, arch: Architecture) -> Result<Self> {
        Self::find_below(root, release, arch).ok_or_else(|| {
            let paths = Self::image_paths(root, release);
            let looked_for: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            let looked_for = looked_for.join(", ");
            FetchError::unusable(
                format!("cannot find the image of the running kernel {release}: there is none of {looked_for}"),
                "install the package of the running kernel's image, or name a file with --kernel-image and its release \
                 with --kernel",
            )
        })
    }
}

fn beyond_headers(root: &Path, release: &KernelRelease) -> Result<ExtraKernelFacts> {
    let host = FactSource::Host;
    let mut facts = ExtraKernelFacts::default();
    let modules = ["lib/modules", "usr/lib/modules"].map(|dir| root.join(dir).join(release.as_str()));
    if let Some(directory) = modules.iter().find(|path| path.is_dir()) {
        add_modules(&mut facts, directory)?;
    }
    let path = root.join("sys/kernel/btf/vmlinux");
    if let Some(bytes) = read(&path)? {
        let btf = Btf::parse(&bytes).map_err(|error| {
            unusable(&format!("cannot read the type information (BTF) in {}", path.display()), &error, HINT)
        })?;
        facts.add_btf(&btf, &host);
    }
    facts.exports = exports(root, release)?;
    facts.enforces_signatures = enforces_signatures(root)?.map(|value| Known { value, source: host });
    Ok(facts)
}

/// Returns the exported symbols from the running kernel's own list if it is readable, or else from the installed map.
fn exports(root: &Path, release: &KernelRelease) -> io::Result<Option<Known<BTreeSet<String>>>> {
    let map = format!("boot/System.map-{release}");
    for (path, source) in [("proc/kallsyms", FactSource::Host), (&map, FactSource::SystemMap)] {
        let Some(file) = open(&root.join(path))? else { continue };
        let names = exported_names(BufReader::new(file))?;
        // Accept only complete lists. A kernel has thousands of exports, among them `module_layout` if it has symbol versions.
        // Some kernels leave their table of exports out of kallsyms, except for one or two stray entries.
        if names.contains("module_layout") || names.len() > 1000 {
            return Ok(Some(Known { value: names, source }));
        }
    }
    Ok(None)
}

fn config(root: &Path, release: &KernelRelease) -> Result<KernelConfig> {
    let paths = [
        "proc/config.gz".to_owned(),
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
        format!("usr/lib/modules/{release}/config"),
    ];
    for relative in &paths {
        let path = root.join(relative);
        let Some(mut bytes) = read(&path)? else { continue };
        if bytes.starts_with(b"\x1f\x8b") {
            let mut plain = Vec::new();
            flate2::read::MultiGzDecoder::new(&bytes[..]).take(MAX_FILE).read_to_end(&mut plain)?;
            bytes = plain;
        }
        let text = String::from_utf8_lossy(&bytes);
        return KernelConfig::parse(&text).map_err(|error| {
            unusable(&format!("cannot read the configuration in {}", path.display()), &error, HINT)
        });
    }
    let looked_for = format!("/lib/modules/{release}/build, /{}", paths.join(", /"));
    Err(FetchError::unusable(
        format!(
            "cannot find the configuration of the running kernel {release}: there is none of {looked_for}"
        ),
        "install the kernel's headers, or name the kernel with --kernel instead of --host",
    ))
}

/// Whether the machine enforces module signatures: by `module.sig_enforce`, or by a lockdown of either kind (`security/lockdown`,
/// `LOCKDOWN_MODULE_SIGNATURE`). Returns `None` if the machine does not show whether it is locked down: containers and other roots
/// often lack securityfs.
fn enforces_signatures(root: &Path) -> io::Result<Option<bool>> {
    let parameter = read(&root.join("sys/module/module/parameters/sig_enforce"))?;
    let lockdown = read(&root.join("sys/kernel/security/lockdown"))?;
    let locked = lockdown.map(|value| {
        let text = String::from_utf8_lossy(&value).into_owned();
        ["[integrity]", "[confidentiality]"].iter().any(|mode| text.contains(mode))
    });
    Ok(if parameter.is_some_and(|value| value.starts_with(b"Y")) { Some(true) } else { locked })
}

/// Reads a small file; returns `None` if it does not exist.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open(path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Opens a file; returns `None` if it does not exist or only root may read it. Such facts stay unknown.
fn open(path: &Path) -> io::Result<Option<File>> {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        // On many machines only root may read files below `/boot` and `/sys/kernel/security`. A denied access counts as a missing
        // file.
        Err(error) if matches!(error.kind(), NotFound | NotADirectory | PermissionDenied) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
