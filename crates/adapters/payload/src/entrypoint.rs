//! `driver-entrypoint`, the static binary that farrier adds to driver images as a separate layer.

use std::{
    env,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use farrier_core::{
    image::{DRIVER_ENTRYPOINTS, Digest},
    kernel::Architecture,
};
use farrier_local::machine::program_for;
use object::{
    Endianness, elf,
    read::elf::{FileHeader as _, ProgramHeader as _},
};
use oci::{EntryKind, Layer, LayerWriter};

use super::error::{PayloadError, Result};

/// Name of the static binary next to farrier's executable. It is also init of the boot check.
pub const ENTRYPOINT: &str = "driver-entrypoint";
/// Path of the binary in images. `/usr` is a directory on every base, usr-merged or not.
const BINARY: &str = "usr/bin/driver-entrypoint";
/// Maximum size in bytes, ten times the binary's size: a larger file is not the binary.
const MAX_SIZE: u64 = 64 << 20;
const MTIME: u64 = 0;

/// Returns the path of the static binary for an architecture: the configured path, or else the path next to farrier's executable.
pub fn find_entrypoint(configured: Option<&Path>, arch: Architecture) -> Result<PathBuf> {
    let beside = || Some(env::current_exe().ok()?.parent()?.join(ENTRYPOINT));
    let path = configured.map(Path::to_owned).or_else(beside).unwrap_or_else(|| PathBuf::from(ENTRYPOINT));
    let path = program_for(&path, arch);
    if path.is_file() { Ok(path) } else { Err(PayloadError::NoEntrypoint(path)) }
}

/// The `driver-entrypoint` binary.
#[derive(Debug)]
pub struct Entrypoint {
    /// File of the binary.
    pub path: PathBuf,
    /// Digest of the binary.
    pub digest: Digest,
    /// Architecture of the binary.
    pub arch: Architecture,
    bytes: Vec<u8>,
}

impl Entrypoint {
    /// Reads the binary and checks that it is statically linked. Blocks.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |source| PayloadError::Entrypoint(path.to_owned(), source);
        let unusable = |why: &str| PayloadError::UnusableEntrypoint(path.to_owned(), why.to_owned());
        let mut bytes = Vec::new();
        File::open(path).map_err(failed)?.take(MAX_SIZE + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_SIZE {
            return Err(unusable("it is larger than 64 MiB"));
        }
        let arch = static_program(&bytes).map_err(unusable)?;
        Ok(Self { path: path.to_owned(), digest: Digest::of(&bytes), arch, bytes })
    }

    /// Fails if an image or a kernel has another architecture.
    pub fn check_arch(&self, expected: Architecture) -> Result<()> {
        if self.arch == expected {
            return Ok(());
        }
        let why = format!("it is for {}, not for {expected}", self.arch);
        Err(PayloadError::UnusableEntrypoint(self.path.clone(), why))
    }

    /// Returns the binary's content.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the layer and its bytes, which are the same for every image and kernel.
    pub fn layer(&self) -> Result<(Layer, Vec<u8>)> {
        let mut writer = LayerWriter::new(Vec::new(), MTIME);
        for directory in ["usr", "usr/bin"] {
            writer.entry(Path::new(directory), 0o755, EntryKind::Directory)?;
        }
        let mut content = self.bytes.as_slice();
        let kind = EntryKind::File { size: content.len() as u64, content: &mut content };
        writer.entry(Path::new(BINARY), 0o755, kind)?;
        // Names that operators' manifests and people use; the binary checks the name it was called by.
        let [program, links @ ..] = DRIVER_ENTRYPOINTS;
        for link in links {
            let target = Path::new(program);
            writer.entry(&Path::new("usr/bin").join(link), 0o777, EntryKind::Symlink(target))?;
        }
        Ok(writer.finish()?)
    }
}

/// Returns the architecture of a statically linked program.
fn static_program(bytes: &[u8]) -> Result<Architecture, &'static str> {
    const NOT_A_PROGRAM: &str = "it is not a 64-bit ELF program";
    let header = elf::FileHeader64::<Endianness>::parse(bytes).map_err(|_| NOT_A_PROGRAM)?;
    let endian = header.endian().map_err(|_| NOT_A_PROGRAM)?;
    if ![elf::ET_EXEC, elf::ET_DYN].contains(&header.e_type(endian)) {
        return Err(NOT_A_PROGRAM);
    }
    let segments = header.program_headers(endian, bytes).map_err(|_| NOT_A_PROGRAM)?;
    if segments.is_empty() {
        return Err(NOT_A_PROGRAM);
    }
    if segments.iter().any(|segment| segment.p_type(endian) == elf::PT_INTERP) {
        return Err("it is linked dynamically, and a runtime base may lack its loader and libraries");
    }
    match header.e_machine(endian) {
        elf::EM_X86_64 => Ok(Architecture::Amd64),
        elf::EM_AARCH64 => Ok(Architecture::Arm64),
        _ => Err("it is for an architecture that farrier does not know"),
    }
}

/// Makes an ELF header with one program header, enough to look like a program for a machine (62 is x86-64).
#[cfg(any(test, feature = "testing"))]
pub fn elf_program(machine: u16, segment: u32) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend([2u16, machine].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(1u32.to_le_bytes());
    bytes.extend([0u64, 64, 0].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(0u32.to_le_bytes());
    bytes.extend([64u16, 56, 1, 0, 0, 0].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(segment.to_le_bytes());
    bytes.resize(64 + 56, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read as _};

    use oci::LayerReader;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Entrypoint, PayloadError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("driver-entrypoint");
        fs::write(&path, bytes).unwrap();
        Entrypoint::read(&path)
    }

    #[test]
    fn the_layer_holds_the_binary_and_its_other_names() {
        let binary = elf_program(62, 1);
        let entrypoint = read(&binary).unwrap();
        let (layer, bytes) = entrypoint.layer().unwrap();
        assert_eq!(layer, read(&binary).unwrap().layer().unwrap().0);
        assert_eq!((&layer.digest, layer.size), (&Digest::of(&bytes), bytes.len() as u64));
        let mut archive = tar::Archive::new(LayerReader::new(&bytes[..]).unwrap());
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let link = entry.link_name().unwrap().map(|target| target.display().to_string());
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.push((path, entry.header().mode().unwrap(), link, content.len()));
        }
        let links = found.split_off(3);
        assert_eq!(
            found,
            [
                ("usr/".to_owned(), 0o755, None, 0),
                ("usr/bin/".to_owned(), 0o755, None, 0),
                ("usr/bin/driver-entrypoint".to_owned(), 0o755, None, binary.len()),
            ]
        );
        let link = |name: &str| (format!("usr/bin/{name}"), 0o777, Some("driver-entrypoint".to_owned()), 0);
        assert_eq!(links, DRIVER_ENTRYPOINTS[1..].iter().map(|name| link(name)).collect::<Vec<_>>());
    }

    #[test]
    fn what_would_not_run_in_an_image_is_refused() {
        let said = |bytes: &[u8]| {
            let error = read(bytes).unwrap_err();
            assert!(error.hint().unwrap().contains("--entrypoint"));
            let text = error.to_string();
            text.split_once("as a static program: ").unwrap().1.to_owned()
        };
        assert_eq!(said(b"#!/bin/sh\n"), "it is not a 64-bit ELF program");
        assert_eq!(said(&elf_program(62, 1)[..80]), "it is not a 64-bit ELF program");
        assert_eq!(
            said(&elf_program(62, 3)),
            "it is linked dynamically, and a runtime base may lack its loader and libraries"
        );
        assert_eq!(said(&elf_program(3, 1)), "it is for an architecture that farrier does not know");
        let arm = read(&elf_program(183, 1)).unwrap();
        assert!(arm.check_arch(Architecture::Arm64).is_ok());
        let error = arm.check_arch(Architecture::Amd64).unwrap_err().to_string();
        assert!(error.ends_with("it is for arm64, not for amd64"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Entrypoint::read(Path::new("/nonexistent/driver-entrypoint")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the static program /nonexistent/driver-entrypoint");
    }

    #[test]
    fn a_missing_entrypoint_is_named_with_the_way_to_build_it() {
        let error = find_entrypoint(Some(Path::new("/nonexistent/driver-entrypoint")), Architecture::Amd64)
            .unwrap_err();
        assert_eq!(error.to_string(), "cannot find driver-entrypoint at /nonexistent/driver-entrypoint");
        assert!(error.hint().unwrap().contains("cargo build --profile entrypoint"), "{error}");
    }
}
