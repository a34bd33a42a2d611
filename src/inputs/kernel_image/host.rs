//! Adapter: what a running machine tells about its own kernel.

use std::{
    collections::BTreeSet,
    io::{self, BufReader, Read},
    path::Path,
};

use fs_err::File;

use super::{
    KernelImage,
    facts::{add_btf, add_modules},
    unfit,
};
use crate::{
    inputs::{
        FetchError, Result,
        header_tree::{TreeError, read_header_set},
    },
    kernel::{Architecture, KernelRelease, ReleaseError},
    kmod::{BeyondHeaders, Btf, FactSource, KernelConfig, KernelFacts, Known, exported_names},
};

/// Bytes of one file that is read; the kernel's types have some 6 MB.
const MAX_FILE: u64 = 64 << 20;

/// What to do where a machine does not tell about its kernel.
const HINT: &str = "name the kernel with --kernel instead of --host";

/// The kernel that the machine whose files lie below `root` (`/`, but for tests) runs: from its build tree where that
/// is installed, else from the configuration that it was built with, and from what it says itself. Blocks.
pub fn read_host(root: &Path, arch: Architecture) -> Result<KernelFacts> {
    let path = root.join("proc/sys/kernel/osrelease");
    let release = read(&path)?.unwrap_or_default();
    let release: KernelRelease =
        String::from_utf8_lossy(&release).trim().parse().map_err(|error: ReleaseError| {
            unfit(&format!("read the release in {}", path.display()), &error, HINT)
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
    /// The image and modules of the kernel that the machine whose files lie below `root` runs.
    pub fn of_host(root: &Path, release: &KernelRelease, arch: Architecture) -> Result<Self> {
        Self::below(root, release, arch).ok_or_else(|| {
            let places = Self::places(root, release);
            let looked_for: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
            let looked_for = looked_for.join(", ");
            FetchError::unusable(
                format!("find the image of the running kernel {release}: there is none of {looked_for}"),
                "install the package of the running kernel's image, or name a file with --kernel-image and its release \
                 with --kernel",
            )
        })
    }
}

fn beyond_headers(root: &Path, release: &KernelRelease) -> Result<BeyondHeaders> {
    let host = FactSource::Host;
    let mut facts = BeyondHeaders::default();
    let modules = ["lib/modules", "usr/lib/modules"].map(|dir| root.join(dir).join(release.as_str()));
    if let Some(directory) = modules.iter().find(|path| path.is_dir()) {
        add_modules(&mut facts, directory)?;
    }
    let path = root.join("sys/kernel/btf/vmlinux");
    if let Some(bytes) = read(&path)? {
        let btf = Btf::parse(&bytes).map_err(|error| {
            unfit(&format!("read the type information (BTF) in {}", path.display()), &error, HINT)
        })?;
        add_btf(&mut facts, &btf, &host);
    }
    facts.exports = exports(root, release)?;
    facts.enforces_signatures = enforces_signatures(root)?.map(|value| Known { value, source: host });
    Ok(facts)
}

/// The running kernel's own list, where it has one and shows it; else the map that was installed with it.
fn exports(root: &Path, release: &KernelRelease) -> io::Result<Option<Known<BTreeSet<String>>>> {
    let map = format!("boot/System.map-{release}");
    for (path, source) in [("proc/kallsyms", FactSource::Host), (&map, FactSource::SystemMap)] {
        let Some(file) = open(&root.join(path))? else { continue };
        let names = exported_names(BufReader::new(file))?;
        // Some kernels list a stray one or two: their own table is left out.
        if names.contains("module_layout") || names.len() > 1000 {
            return Ok(Some(Known { value: names, source }));
        }
    }
    Ok(None)
}

fn config(root: &Path, release: &KernelRelease) -> Result<KernelConfig> {
    let places = [
        "proc/config.gz".to_owned(),
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
        format!("usr/lib/modules/{release}/config"),
    ];
    for place in &places {
        let path = root.join(place);
        let Some(mut bytes) = read(&path)? else { continue };
        if bytes.starts_with(b"\x1f\x8b") {
            let mut plain = Vec::new();
            flate2::read::MultiGzDecoder::new(&bytes[..]).take(MAX_FILE).read_to_end(&mut plain)?;
            bytes = plain;
        }
        let text = String::from_utf8_lossy(&bytes);
        return KernelConfig::parse(&text)
            .map_err(|error| unfit(&format!("read the configuration in {}", path.display()), &error, HINT));
    }
    let looked_for = format!("/lib/modules/{release}/build, /{}", places.join(", /"));
    Err(FetchError::unusable(
        format!("find the configuration of the running kernel {release}: there is none of {looked_for}"),
        "install the kernel's headers, or name the kernel with --kernel instead of --host",
    ))
}

/// `module.sig_enforce`, and a lockdown of either kind, which enforces signatures as well (`security/lockdown`,
/// `LOCKDOWN_MODULE_SIGNATURE`). `None` when the machine does not say.
fn enforces_signatures(root: &Path) -> io::Result<Option<bool>> {
    let parameter = read(&root.join("sys/module/module/parameters/sig_enforce"))?;
    let lockdown = read(&root.join("sys/kernel/security/lockdown"))?;
    let enforced = parameter.as_deref().map(|value| value.starts_with(b"Y"));
    let locked = lockdown.map(|value| {
        let text = String::from_utf8_lossy(&value).into_owned();
        ["[integrity]", "[confidentiality]"].iter().any(|mode| text.contains(mode))
    });
    Ok(match (enforced, locked) {
        (None, None) => None,
        (enforced, locked) => Some(enforced.unwrap_or_default() || locked.unwrap_or_default()),
    })
}

/// A small file's bytes; `None` when it is not there.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open(path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// A file; `None` when it is not there. A root that is not ours may hide what only root reads; what it does not tell is
/// unknown.
fn open(path: &Path) -> io::Result<Option<File>> {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        // Files below `/boot` and `/sys/kernel/security` are root's alone on many machines: not being let in is the
        // same as not being told.
        Err(error) if matches!(error.kind(), NotFound | NotADirectory | PermissionDenied) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
