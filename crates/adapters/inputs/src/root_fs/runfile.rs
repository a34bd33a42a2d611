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

/// The parts of an installer to put into a root file system.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Selection {
    /// Version of the modules.
    pub(super) version: String,
    pub(super) arch: Architecture,
    /// Whether to include graphics.
    pub(super) graphics: bool,
}

const MANIFEST: &str = ".manifest";
/// Number of lines before the first file: a description, the version, and six that the installer no longer uses.
const HEADER_LINES: usize = 8;
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
/// Libraries of kind `OPENGL` that the container toolkit also provides for compute (`compute_libs` and `utility_libs` of
/// `src/nvc_info.c` in <https://github.com/NVIDIA/libnvidia-container>).
const ALSO_COMPUTE: [&str; 4] =
    ["libnvidia-allocator.", "libnvidia-cfg.", "libnvidia-gpucomp.", "libnvidia-pkcs11"];

/// Kinds that no driver container needs: module sources, manuals, files for desktops or systemd, the installer itself, vGPU
/// guests, Wine.
const IGNORED_KINDS: [&str; 18] = [
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
enum Content {
    /// A file of the installer. `is_code` is set for machine code that must match the architecture.
    File { from: String, mode: u32, is_code: bool },
    /// A symbolic link to this target.
    Link(String),
}

/// Writes the selected files of an unpacked installer as a tar, followed by all files of the archives.
pub(super) fn write(stop: &AtomicBool, trees: &[PathBuf], selection: &Selection, out: &Path) -> Result<()> {
    let mut tar = tar::Builder::new(BufWriter::new(File::create(out)?));
    for (index, tree) in trees.iter().enumerate() {
        let contents = match index {
            0 => installer_contents(tree, selection)?,
            _ => archive_contents(tree, selection.arch)?,
        };
        for (path, content) in &contents {
            append(&mut tar, path, content, tree, selection.arch, stop)?;
        }
    }
    Ok(tar.into_inner()?.flush()?)
}

fn append(
    tar: &mut tar::Builder<impl io::Write>,
    path_in_root: &Path,
    content: &Content,
    tree: &Path,
    arch: Architecture,
    stop: &AtomicBool,
) -> Result<()> {
    let (kind, mode) = match content {
        Content::File { mode, .. } => (EntryType::Regular, *mode),
        Content::Link(_) => (EntryType::Symlink, 0o777),
    };
    let mut header = header(kind, mode, 0);
    header.set_mtime(MTIME);
    match content {
        Content::Link(target) => Ok(tar.append_link(&mut header, path_in_root, target)?),
        Content::File { from, mode: _, is_code } => {
            let path = locate(tree, from)?;
            if *is_code {
                refuse_other_machine(&path, from, arch)?;
            }
            let inner = File::open(path)?;
            header.set_size(inner.metadata()?.len());
            Ok(tar.append_data(&mut header, path_in_root, Stoppable { inner, stop })?)
        }
    }
}

fn installer_contents(tree: &Path, selection: &Selection) -> Result<BTreeMap<PathBuf, Content>> {
    let text = fs::read_to_string(tree.join(MANIFEST)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FetchError::unusable(
            format!(
                "cannot find {MANIFEST} in the source of the runtime base: it is not an NVIDIA driver installer"
            ),
            "name the source with the .run file, or the directory that its `--extract-only` creates",
        ),
        _ => error.into(),
    })?;
    manifest_contents(&text, selection)
}

/// Maps the files of an archive to their locations, as in NVIDIA's own packages
/// (<https://github.com/NVIDIA/apt-packaging-fabric-manager>, `apt-packaging-libnvidia-nscq`).
fn archive_contents(tree: &Path, arch: Architecture) -> Result<BTreeMap<PathBuf, Content>> {
    let library_path = library_dir(arch);
    let destinations = [
        ("bin", "usr/bin"),
        ("etc", "usr/share/nvidia/nvswitch"),
        ("lib", library_path.as_str()),
        ("sbin", "usr/sbin"),
        ("share", "usr/share"),
    ];
    let mut contents = BTreeMap::new();
    for (top, directory) in destinations {
        let directory_in_tree = tree.join(top);
        if !directory_in_tree.is_dir() {
            continue;
        }
        for entry in WalkDir::new(&directory_in_tree) {
            let entry = entry?;
            let relative = entry.path().strip_prefix(&directory_in_tree).unwrap_or(entry.path());
            let content = if entry.path_is_symlink() {
                Content::Link(fs::read_link(entry.path())?.display().to_string())
            } else if entry.file_type().is_file() {
                let mode = entry.metadata()?.permissions().mode() & 0o777;
                let from = Path::new(top).join(relative).display().to_string();
                Content::File { from, mode, is_code: ["bin", "lib", "sbin"].contains(&top) }
            } else {
                continue;
            };
            contents.insert(Path::new(directory).join(relative), content);
        }
    }
    if contents.is_empty() {
        let message =
            format!("cannot find bin, lib or share in {}: it is not an NVIDIA archive", tree.display());
        return Err(FetchError::unusable(message, "name its top directory with `subdir` of the source"));
    }
    Ok(contents)
}

fn library_dir(arch: Architecture) -> String {
    format!("usr/lib/{}-linux-gnu", arch.gnu_name())
}

/// Maps the manifest's files to their locations.
fn manifest_contents(manifest: &str, selection: &Selection) -> Result<BTreeMap<PathBuf, Content>> {
    let version = manifest.lines().nth(1).unwrap_or_default().trim();
    if version != selection.version {
        return Err(FetchError::unusable(
            format!(
                "cannot make the runtime base: the installer has version {version:?}, the driver image {:?}, and the \
                 installer's user space works only with modules of the same version",
                selection.version
            ),
            "set `version` of the image to the version of the .run file, or name the .run file of that \
             version",
        ));
    }
    let (mut contents, mut unknown, lib) = (BTreeMap::new(), BTreeSet::new(), library_dir(selection.arch));
    let lines = manifest.lines().enumerate().skip(HEADER_LINES).take_while(|(_, line)| !line.is_empty());
    for (index, line) in lines {
        let malformed = || {
            FetchError::Layout(format!(
                "a known format in line {} of the installer's {MANIFEST}: {line:?}",
                index + 1
            ))
        };
        let entry = Entry::parse(line).ok_or_else(malformed)?;
        let Some(directory) = entry.directory_of_kind(selection.graphics) else {
            if !is_known_kind(entry.kind) {
                unknown.insert(entry.kind);
            }
            continue;
        };
        let directory = directory.replace(LIB, &lib).replace("{version}", version);
        let (path, content) = entry.to_content(&directory, &lib).ok_or_else(malformed)?;
        contents.insert(path, content);
    }
    if !unknown.is_empty() {
        tracing::warn!(kinds = ?unknown, "the installer has file kinds unknown to farrier: skipped");
    }
    Ok(contents)
}

fn is_known_kind(kind: &str) -> bool {
    IGNORED_KINDS.contains(&kind) || COMPUTE.iter().chain(&GRAPHICS).any(|(known, _)| *known == kind)
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
        let mut tail: Vec<&str> = words.filter(|word| !word.starts_with("MODULE:")).collect();
        let mut remove_word = |word: &str| {
            let index = tail.iter().position(|field| *field == word);
            index.map(|index| tail.remove(index)).is_some()
        };
        // `CLASSIC` is for kernels before 2.6.
        let is_other = ["COMPAT32", "NON_GLVND", "CLASSIC"].map(&mut remove_word).contains(&true);
        for word in ["NATIVE", "GLVND", "NEW"] {
            remove_word(word);
        }
        let link_kind = word.strip_suffix("_SYMLINK");
        let target = if link_kind.is_some() { Some(tail.pop()?) } else { None };
        let kind = link_kind.unwrap_or(word);
        let directory = match tail.first().map(|path| path.strip_prefix("INHERIT_PATH_DEPTH:").ok_or(path)) {
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

    /// Returns the directory for the entry's kind, or `None` if a root file system does not need the entry.
    fn directory_of_kind(&self, graphics: bool) -> Option<&'static str> {
        // Keep only the license of the documentation. A link to the installer would dangle.
        let is_needed = (self.kind != "DOCUMENTATION" || self.name == "LICENSE")
            && self.target.is_none_or(|target| target != "nvidia-installer");
        if self.is_other || !is_needed {
            return None;
        }
        let is_compute = self.kind == OPENGL && ALSO_COMPUTE.iter().any(|start| self.name.starts_with(start));
        let graphical = GRAPHICS.iter().filter(|_| graphics || is_compute);
        COMPUTE.iter().chain(graphical).find(|(kind, _)| *kind == self.kind).map(|(_, directory)| *directory)
    }

    /// Returns the path below the kind's directory, with the content; `None` if the path leaves the root.
    fn to_content(&self, directory: &str, lib: &str) -> Option<(PathBuf, Content)> {
        let Self { file, name, mode, kind, is_code, directory: subdirectory, target, is_other: _ } = self;
        let path = plain_path(Path::new(&format!("{directory}/{}/{name}", subdirectory.display())))?;
        let content = match target {
            // For this kind, the installer makes the link point into its library directory.
            Some(target) if *kind == "GBM_BACKEND" => Content::Link(format!("/{lib}/{target}")),
            Some(target) => Content::Link((*target).to_owned()),
            // Drop set-id bits: everything in a driver container runs as root.
            None => Content::File { from: file.to_str()?.to_owned(), mode: mode & 0o777, is_code: *is_code },
        };
        Some((path, content))
    }
}

/// Returns the path of a file in the installer; links do not lead out of it.
fn locate(installer: &Path, name: &str) -> Result<PathBuf> {
    let path = links::resolve(installer, Path::new(name))?.map(|path| installer.join(path));
    path.filter(|path| path.is_file()).ok_or_else(|| {
        FetchError::Layout(format!(
            "{name:?} in the installer: its {MANIFEST} names it, but it does not exist"
        ))
    })
}

fn refuse_other_machine(path: &Path, name: &str, arch: Architecture) -> Result<()> {
    match describe_unless_native(path, arch)? {
        Some(found) if found != NOT_ELF => Err(FetchError::unusable(
            format!("cannot make the runtime base for {arch}: {name} of the installer is {found}"),
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
