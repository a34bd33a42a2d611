//! Takes user space and firmware of NVIDIA's driver from its installer, as a tar for a root file system. The installer is never
//! run: its `.manifest` lists each file's kind, and each file is placed where the installer would put it on Debian.
//!
//! The manifest's format and the directories follow `parse_manifest` (`install-from-cwd.c`), `packageEntryFileTypeTable`
//! (`manifest.c`) and `set_destinations` (`files.c`) in <https://github.com/NVIDIA/nvidia-installer>, 590.48.01.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufWriter, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::kernel::Architecture;
use farrier_local::archive::{Stoppable, links};
use fs_err::{self as fs, File};
use oci::plain_path;
use tar::EntryType;
use walkdir::WalkDir;

use super::{MTIME, effects::header};
use crate::{
    FetchError, Result,
    files::{NOT_ELF, describe_unless_native},
};

/// The wanted parts of an installer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    /// Version of the modules.
    pub(super) version: String,
    pub(super) arch: Architecture,
    /// Whether to include graphics.
    pub(super) graphics: bool,
}

const MANIFEST: &str = ".manifest";
/// Number of lines before the first file: a description, the version, and six that the installer no longer uses.
const HEAD: usize = 8;
/// Placeholder for the directory of libraries.
const LIB: &str = "{lib}";
const FIRMWARE: &str = "lib/firmware/nvidia/{version}";
const X_MODULES: &str = "usr/lib/xorg/modules";

/// Kinds of files for compute, with their directories. A library and the links to it share a kind (`CUDA_LIB`, `CUDA_SYMLINK`).
const COMPUTE: [(&str, &str); 14] = [
    ("CUDA", LIB),
    ("CUDA_ICD", "etc/OpenCL/vendors"),
    ("DOCUMENTATION", "usr/share/doc"),
    ("ENCODEAPI", LIB),
    ("EXPLICIT_PATH", ""),
    ("FIRMWARE", FIRMWARE),
    ("NVCUVID", LIB),
    ("NVIDIA_MODPROBE", ""),
    ("OPENCL", LIB),
    ("OPENCL_WRAPPER", LIB),
    ("SANDBOXUTILS_FILELIST_JSON", "usr/share/nvidia/files.d"),
    ("UTILITY", LIB),
    ("UTILITY_BIN", "usr/bin"),
    ("UTILITY_BINARY", "usr/bin"),
];

/// Kinds of files for graphics.
const GRAPHICS: [(&str, &str); 17] = [
    ("APPLICATION_PROFILE", "usr/share/nvidia"),
    ("EGL_CLIENT", LIB),
    ("EGL_EXTERNAL_PLATFORM_JSON", "usr/share/egl/egl_external_platform.d"),
    ("GBM_BACKEND", "{lib}/gbm"),
    ("GLVND", LIB),
    ("GLVND_EGL_ICD_JSON", "usr/share/glvnd/egl_vendor.d"),
    ("GLX_CLIENT", LIB),
    ("GLX_MODULE", X_MODULES),
    ("GLX_MODULE_SHARED", X_MODULES),
    (OPENGL, LIB),
    ("OPENGL_DATA", ""),
    ("TLS", LIB),
    ("VDPAU", LIB),
    ("VULKANSC_ICD_JSON", "etc/vulkansc"),
    ("VULKAN_ICD_JSON", "etc/vulkan"),
    ("XMODULE_SHARED", X_MODULES),
    ("XORG_OUTPUTCLASS_CONFIG", "usr/share/X11/xorg.conf.d"),
];

const OPENGL: &str = "OPENGL";
/// Libraries of that kind that the container toolkit also provides for compute (`compute_libs` and `utility_libs` of
/// `src/nvc_info.c` in <https://github.com/NVIDIA/libnvidia-container>).
const COMPUTE_TOO: [&str; 4] =
    ["libnvidia-allocator.", "libnvidia-cfg.", "libnvidia-gpucomp.", "libnvidia-pkcs11"];

/// Kinds that no driver container needs: module sources, manuals, files for desktops or systemd, the installer itself, vGPU
/// guests, Wine.
const LEFT_OUT: [&str; 18] = [
    "DKMS_CONF",
    "DOT_DESKTOP",
    "FLEXERA",
    "GRID",
    "ICON",
    "INSTALLER_BINARY",
    "INTERNAL_UTILITY",
    "INTERNAL_UTILITY_BINARY",
    "INTERNAL_UTILITY_DATA",
    "KERNEL_MODULE",
    "KERNEL_MODULE_SRC",
    "MANPAGE",
    "MODULE_SIGNING_KEY",
    "NVIDIA_MODPROBE_MANPAGE",
    "SYSTEMD_SLEEP_SCRIPT",
    "SYSTEMD_UNIT",
    "VGX",
    "WINE",
];

/// Content at one path of the root file system.
#[derive(Debug, PartialEq, Eq)]
enum What {
    /// A file of the installer. `is_code` is set for machine code that must match the architecture.
    File { from: String, mode: u32, is_code: bool },
    /// A symbolic link to this target.
    Link(String),
}

/// Writes the wanted files of an unpacked installer as a tar, followed by all files of the archives.
pub(super) fn write(stop: &AtomicBool, trees: &[PathBuf], wanted: &Wanted, out: &Path) -> Result<()> {
    let mut tar = tar::Builder::new(BufWriter::new(File::create(out)?));
    for (index, tree) in trees.iter().enumerate() {
        let found = if index == 0 { of_installer(tree, wanted)? } else { of_archive(tree, wanted.arch)? };
        for (place, what) in &found {
            append(&mut tar, place, what, tree, wanted.arch, stop)?;
        }
    }
    Ok(tar.into_inner()?.flush()?)
}

fn append(
    tar: &mut tar::Builder<impl io::Write>,
    place: &Path,
    what: &What,
    tree: &Path,
    arch: Architecture,
    stop: &AtomicBool,
) -> Result<()> {
    let (kind, mode) = match what {
        What::File { mode, .. } => (EntryType::Regular, *mode),
        What::Link(_) => (EntryType::Symlink, 0o777),
    };
    let mut header = header(kind, mode, 0);
    header.set_mtime(MTIME);
    match what {
        What::Link(target) => Ok(tar.append_link(&mut header, place, target)?),
        What::File { from, mode: _, is_code } => {
            let path = locate(tree, from)?;
            if *is_code {
                refuse_other_machine(&path, from, arch)?;
            }
            let inner = File::open(path)?;
            header.set_size(inner.metadata()?.len());
            Ok(tar.append_data(&mut header, place, Stoppable { inner, stop })?)
        }
    }
}

fn of_installer(tree: &Path, wanted: &Wanted) -> Result<BTreeMap<PathBuf, What>> {
    let text = fs::read_to_string(tree.join(MANIFEST)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FetchError::unusable(
            format!(
                "find {MANIFEST} in the source of the runtime base: it is not an NVIDIA driver installer"
            ),
            "name the source with the .run file, or the directory that its `--extract-only` creates",
        ),
        _ => error.into(),
    })?;
    places(&text, wanted)
}

/// Maps the files of an archive to their locations, as in NVIDIA's own packages
/// (<https://github.com/NVIDIA/apt-packaging-fabric-manager>, `apt-packaging-libnvidia-nscq`).
fn of_archive(tree: &Path, arch: Architecture) -> Result<BTreeMap<PathBuf, What>> {
    let lib = lib_of(arch);
    let of_top = [
        ("bin", "usr/bin"),
        ("etc", "usr/share/nvidia/nvswitch"),
        ("lib", lib.as_str()),
        ("sbin", "usr/sbin"),
        ("share", "usr/share"),
    ];
    let mut found = BTreeMap::new();
    for (top, directory) in of_top {
        let below = tree.join(top);
        if !below.is_dir() {
            continue;
        }
        for entry in WalkDir::new(&below) {
            let entry = entry?;
            let inner = entry.path().strip_prefix(&below).unwrap_or(entry.path());
            let what = if entry.path_is_symlink() {
                What::Link(fs::read_link(entry.path())?.display().to_string())
            } else if entry.file_type().is_file() {
                let mode = entry.metadata()?.permissions().mode() & 0o777;
                let from = Path::new(top).join(inner).display().to_string();
                What::File { from, mode, is_code: ["bin", "lib", "sbin"].contains(&top) }
            } else {
                continue;
            };
            found.insert(Path::new(directory).join(inner), what);
        }
    }
    if found.is_empty() {
        let message = format!("find bin, lib or share in {}: it is not an NVIDIA archive", tree.display());
        return Err(FetchError::unusable(message, "name its top directory with `subdir` of the source"));
    }
    Ok(found)
}

fn lib_of(arch: Architecture) -> String {
    format!("usr/lib/{}-linux-gnu", arch.gnu_name())
}

/// Maps the manifest's files to their locations.
fn places(manifest: &str, wanted: &Wanted) -> Result<BTreeMap<PathBuf, What>> {
    let version = manifest.lines().nth(1).unwrap_or_default().trim();
    if version != wanted.version {
        return Err(FetchError::unusable(
            format!(
                "make the runtime base: the installer is version {version:?}, the driver image {:?}, and \
                 its user space works only with modules of the same version",
                wanted.version
            ),
            "set `version` of the image to the version of the .run file, or name the .run file of that \
             version",
        ));
    }
    let (mut found, mut unknown, lib) = (BTreeMap::new(), BTreeSet::new(), lib_of(wanted.arch));
    let lines = manifest.lines().enumerate().skip(HEAD).take_while(|(_, line)| !line.is_empty());
    for (index, line) in lines {
        let malformed = || {
            FetchError::Layout(format!(
                "a known format in line {} of the installer's {MANIFEST}: {line:?}",
                index + 1
            ))
        };
        let entry = Entry::parse(line).ok_or_else(malformed)?;
        let Some(directory) = entry.goes_to(wanted.graphics) else {
            if !knows(entry.kind) {
                unknown.insert(entry.kind);
            }
            continue;
        };
        let directory = directory.replace(LIB, &lib).replace("{version}", version);
        let (place, what) = entry.put(&directory, &lib).ok_or_else(malformed)?;
        found.insert(place, what);
    }
    if !unknown.is_empty() {
        tracing::warn!(kinds = ?unknown, "the installer has file kinds unknown to farrier: skipped");
    }
    Ok(found)
}

fn knows(kind: &str) -> bool {
    LEFT_OUT.contains(&kind) || COMPUTE.iter().chain(&GRAPHICS).any(|(known, _)| *known == kind)
}

/// A line of the manifest: a file, its mode, its kind, and further fields of that kind: the target programs, a directory, a
/// link's target, and the installer's module.
struct Entry<'m> {
    file: &'m Path,
    name: &'m str,
    mode: u32,
    /// Kind without `_LIB` or `_SYMLINK`.
    kind: &'m str,
    is_code: bool,
    directory: PathBuf,
    target: Option<&'m str>,
    /// Whether the file is for 32-bit programs, or an alternative to another line's file.
    is_other: bool,
}

impl<'m> Entry<'m> {
    fn parse(line: &'m str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (file, mode, word) = (Path::new(words.next()?), words.next()?, words.next()?);
        let mut rest: Vec<&str> = words.filter(|word| !word.starts_with("MODULE:")).collect();
        let mut take = |mark: &str| {
            let place = rest.iter().position(|word| *word == mark);
            place.map(|place| rest.remove(place)).is_some()
        };
        // `CLASSIC` is for kernels before 2.6.
        let is_other = ["COMPAT32", "NON_GLVND", "CLASSIC"].map(&mut take).contains(&true);
        for mark in ["NATIVE", "GLVND", "NEW"] {
            take(mark);
        }
        let of_link = word.strip_suffix("_SYMLINK");
        let target = if of_link.is_some() { Some(rest.pop()?) } else { None };
        let kind = of_link.unwrap_or(word);
        let directory = match rest.first().map(|path| path.strip_prefix("INHERIT_PATH_DEPTH:").ok_or(path)) {
            None => PathBuf::new(),
            Some(Err(path)) => Path::new(path).to_owned(),
            Some(Ok(depth)) => file.parent()?.iter().skip(depth.parse().ok()?).collect(),
        };
        let library = kind.strip_suffix("_LIB");
        Some(Self {
            file,
            name: file.file_name()?.to_str()?,
            mode: u32::from_str_radix(mode, 8).ok()?,
            kind: library.unwrap_or(kind),
            // A GPU's firmware is an ELF file too, but for the GPU's own processor.
            is_code: library.is_some() || kind.ends_with("_BINARY") || kind == "NVIDIA_MODPROBE",
            directory,
            target,
            is_other,
        })
    }

    /// Returns the directory for the entry's kind, if the entry is wanted.
    fn goes_to(&self, graphics: bool) -> Option<&'static str> {
        // Of the documentation only the license is kept. A link to the installer would dangle.
        let is_of_use = (self.kind != "DOCUMENTATION" || self.name == "LICENSE")
            && self.target.is_none_or(|target| target != "nvidia-installer");
        if self.is_other || !is_of_use {
            return None;
        }
        let computes = self.kind == OPENGL && COMPUTE_TOO.iter().any(|start| self.name.starts_with(start));
        let drawing = GRAPHICS.iter().filter(|_| graphics || computes);
        COMPUTE.iter().chain(drawing).find(|(kind, _)| *kind == self.kind).map(|(_, directory)| *directory)
    }

    /// Returns the path below the kind's directory, with the content; `None` if the path leaves the root.
    fn put(&self, directory: &str, lib: &str) -> Option<(PathBuf, What)> {
        let Self { file, name, mode, kind, is_code, directory: own, target, is_other: _ } = self;
        let place = plain_path(Path::new(&format!("{directory}/{}/{name}", own.display())))?;
        let what = match target {
            // For this kind, the installer makes the link point into its library directory.
            Some(target) if *kind == "GBM_BACKEND" => What::Link(format!("/{lib}/{target}")),
            Some(target) => What::Link((*target).to_owned()),
            // Drop set-id bits: everything in a driver container runs as root.
            None => What::File { from: file.to_str()?.to_owned(), mode: mode & 0o777, is_code: *is_code },
        };
        Some((place, what))
    }
}

/// Returns the path of a file in the installer; links do not lead out of it.
fn locate(installer: &Path, name: &str) -> Result<PathBuf> {
    let found = links::resolve(installer, Path::new(name))?.map(|found| installer.join(found));
    found.filter(|found| found.is_file()).ok_or_else(|| {
        FetchError::Layout(format!(
            "{name:?} in the installer: its {MANIFEST} names it, but it does not exist"
        ))
    })
}

fn refuse_other_machine(path: &Path, name: &str, arch: Architecture) -> Result<()> {
    match describe_unless_native(path, arch)? {
        Some(found) if found != NOT_ELF => Err(FetchError::unusable(
            format!("make the runtime base for {arch}: {name} of the installer is {found}"),
            format!(
                "name NVIDIA-Linux-{}-VERSION.run, in a definition for nodes of this architecture",
                arch.gnu_name()
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "runfile_tests.rs"]
mod tests;
