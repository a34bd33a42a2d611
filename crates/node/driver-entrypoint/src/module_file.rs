//! A module's file: its compression and the contents of its `.modinfo`.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use object::{Endian, Endianness, Object, ObjectSection, read::elf::ElfFile64};

use crate::error::Error;

/// Maximum size of a module in bytes, decompressed; decompression stops there.
const MAX_SIZE: u64 = 1 << 30;

/// Hint for an image whose modules no kernel can load.
pub(crate) const REBUILD: &str = "rebuild the image; farrier check shows what is wrong with its modules";

/// Module name as the kernel spells it: `nvidia-uvm` becomes `nvidia_uvm`.
pub(crate) fn kernel_name(name: &str) -> String {
    name.trim().replace('-', "_")
}

/// Compression of a module's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    /// Each compression with the ending of its files and its name in `/sys/module/compression`.
    const ALL: [(Self, &str, &str); 4] = [
        (Self::None, ".ko", "none"),
        (Self::Gzip, ".ko.gz", "gzip"),
        (Self::Xz, ".ko.xz", "xz"),
        (Self::Zstd, ".ko.zst", "zstd"),
    ];

    /// Decompresses the input, truncated at a size limit.
    pub(crate) fn decompress(self, from: impl Read, limit: u64) -> io::Result<Vec<u8>> {
        let (from, mut bytes) = (BufReader::with_capacity(256 << 10, from), Vec::new());
        match self {
            Self::None => from.take(limit).read_to_end(&mut bytes),
            Self::Gzip => flate2::bufread::MultiGzDecoder::new(from).take(limit).read_to_end(&mut bytes),
            Self::Xz => lzma_rust2::XzReader::new(from, true).take(limit).read_to_end(&mut bytes),
            Self::Zstd => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(from).map_err(io::Error::other)?;
                decoder.take(limit).read_to_end(&mut bytes)
            }
        }?;
        Ok(bytes)
    }

    /// Name in `/sys/module/compression`.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(compression, ..)| *compression == self).map_or("", |(.., name)| name)
    }
}

/// Tree that a module comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// The driver image.
    Image,
    /// The host or another driver container.
    Host,
}

/// A module's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModuleFile {
    pub(crate) path: PathBuf,
    pub(crate) compression: Compression,
    pub(crate) origin: Origin,
}

impl ModuleFile {
    /// Returns the module's name and file if the path ends like a module file.
    pub(crate) fn of(path: &Path, origin: Origin) -> Option<(String, Self)> {
        let name = path.file_name()?.to_str()?;
        Compression::ALL.into_iter().find_map(|(compression, ending, _)| {
            let name = name.strip_suffix(ending).filter(|name| !name.is_empty())?;
            Some((kernel_name(name), Self { path: path.to_owned(), compression, origin }))
        })
    }

    /// Reads and decompresses the module.
    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        self.compression.decompress(File::open(&self.path)?, MAX_SIZE)
    }

    /// Reads and parses the module's `.modinfo` and symbol versions.
    pub(crate) fn info(&self) -> Result<ModuleInfo, Error> {
        let path = self.path.to_string_lossy();
        let bytes = self.read().map_err(Error::on("read", path.clone()))?;
        ModuleInfo::parse(&bytes)
            .map_err(|reason| Error::new(format!("{path} is not a kernel module: {reason}"), REBUILD))
    }
}

/// Metadata of a module: `.modinfo`, build ID and symbol versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModuleInfo {
    /// Modules whose symbols the module uses.
    pub(crate) depends: Vec<String>,
    /// Modules to load before and after this module, if they exist.
    pub(crate) soft: SoftDependencies,
    /// Hash of the module's sources (`srcversion`); empty if it was built without one.
    pub(crate) source_version: String,
    /// The linker's build ID note; empty if the module was linked without one.
    pub(crate) build_id: Vec<u8>,
    /// Patterns of the PCI devices that the module drives.
    pub(crate) aliases: Vec<String>,
    /// Names of the module's parameters.
    pub(crate) parameters: Vec<String>,
    /// License, such as `GPL`; the open GPU driver has `Dual MIT/GPL`, the proprietary one `NVIDIA`.
    pub(crate) license: String,
    /// Imported symbols with the versions that the module expects; empty if it was built without modversions.
    pub(crate) versions: Vec<(String, u32)>,
}

/// Parsed `softdep: pre: a b post: c`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SoftDependencies {
    pub(crate) before: Vec<String>,
    pub(crate) after: Vec<String>,
}

impl SoftDependencies {
    /// Adds the modules of a text in the format that `modprobe.d` and `.modinfo` share.
    pub(crate) fn add(&mut self, text: &str) {
        let mut list: Option<&mut Vec<String>> = None;
        for word in text.split_whitespace() {
            match word {
                "pre:" => list = Some(&mut self.before),
                "post:" => list = Some(&mut self.after),
                name => list.iter_mut().for_each(|list| list.push(kernel_name(name))),
            }
        }
    }
}

impl ModuleInfo {
    /// Identifies the module among modules of the same name. Returns its `srcversion`, or else its build ID. Modules
    /// without `MODULE_VERSION` have no `srcversion` on kernels without `CONFIG_MODULE_SRCVERSION_ALL`.
    pub(crate) fn identity(&self) -> Option<String> {
        identity(&self.source_version, &self.build_id)
    }

    /// Parses a 64-bit module; all kernels that farrier supports are 64-bit.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let elf = ElfFile64::<Endianness>::parse(bytes).map_err(|_| "not a 64-bit ELF file")?;
        let section = elf.section_by_name(".modinfo").ok_or("it has no .modinfo section")?;
        let data = section.data().map_err(|_| "its .modinfo is cut off")?;
        let build_id = elf.section_by_name(".note.gnu.build-id").and_then(|section| section.data().ok());
        let (build_id, versions) = (build_id.unwrap_or_default().to_vec(), read_versions(&elf));
        let mut info = Self { build_id, versions, ..Self::default() };
        for entry in data.split(|&byte| byte == 0) {
            let entry = String::from_utf8_lossy(entry);
            let Some((field, value)) = entry.split_once('=') else { continue };
            match field {
                "depends" => {
                    let names = value.split(',').filter(|name| !name.trim().is_empty());
                    info.depends.extend(names.map(kernel_name));
                }
                "alias" if value.starts_with("pci:") => info.aliases.push(value.to_owned()),
                "license" => value.clone_into(&mut info.license),
                "parmtype" => info.parameters.extend(value.split(':').next().map(str::to_owned)),
                "softdep" => info.soft.add(value),
                "srcversion" => value.trim().clone_into(&mut info.source_version),
                _ => {}
            }
        }
        Ok(info)
    }
}

/// Reads symbol versions from `__version_ext_*`, the only sections that hold long names, or else from `__versions`. An
/// entry of `__versions` has 64 bytes and starts with the version (`include/linux/module.h`, `struct modversion_info`).
/// Malformed entries are skipped.
fn read_versions(elf: &ElfFile64<'_, Endianness>) -> Vec<(String, u32)> {
    /// Limits above those of any kernel: its exported symbols, and the length of a name (`KSYM_NAME_LEN`).
    const MAX_SYMBOLS: usize = 65_536;
    const MAX_NAME_LENGTH: usize = 512;
    let data = |name| elf.section_by_name(name).and_then(|section| section.data().ok());
    let number = |bytes: &[u8]| elf.endian().read_u32(bytes.first_chunk().copied().unwrap_or_default());
    let extended = data("__version_ext_crcs").zip(data("__version_ext_names"));
    let entries: Vec<(&[u8], u32)> = if let Some((crcs, names)) = extended {
        names.split(|&byte| byte == 0).zip(crcs.chunks_exact(4).map(number)).take(MAX_SYMBOLS).collect()
    } else {
        let entries = data("__versions").unwrap_or_default().chunks_exact(64).take(MAX_SYMBOLS);
        let entries = entries.map(|entry| entry.split_at(8));
        let name_length = |name: &[u8]| name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        entries.map(|(crc, name)| (&name[..name_length(name)], number(crc))).collect()
    };
    let valid = entries.into_iter().filter(|(name, _)| !name.is_empty() && name.len() <= MAX_NAME_LENGTH);
    valid.map(|(name, crc)| (String::from_utf8_lossy(name).into_owned(), crc)).collect()
}

/// Implements [`ModuleInfo::identity`].
pub(crate) fn identity(source_version: &str, build_id: &[u8]) -> Option<String> {
    match (source_version, build_id) {
        ("", []) => None,
        ("", build_id) => Some(hex::encode(build_id)),
        (source_version, _) => Some(source_version.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write};

    use super::*;
    use crate::testing::elf_module;

    const INFO: &str = "license=GPL\0parmtype=debug_mask:uint\0depends=ib-core,mlx_compat\0softdep=pre: crc32c post: mlx5-ib\0\
                        srcversion=ABC123\0version=25.10\0";

    fn expected() -> ModuleInfo {
        ModuleInfo {
            depends: vec!["ib_core".into(), "mlx_compat".into()],
            soft: SoftDependencies { before: vec!["crc32c".into()], after: vec!["mlx5_ib".into()] },
            source_version: "ABC123".into(),
            parameters: vec!["debug_mask".into()],
            license: "GPL".into(),
            ..ModuleInfo::default()
        }
    }

    #[test]
    fn a_module_is_read_in_each_compression() {
        let directory = tempfile::tempdir().unwrap();
        let module = elf_module(INFO);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gzip.write_all(&module).unwrap();
        let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(&module).unwrap();
        let zstd =
            ruzstd::encoding::compress_to_vec(module.as_slice(), ruzstd::encoding::CompressionLevel::Fastest);
        for (ending, compression, bytes) in [
            ("ko", Compression::None, module.clone()),
            ("ko.gz", Compression::Gzip, gzip.finish().unwrap()),
            ("ko.xz", Compression::Xz, xz.finish().unwrap()),
            ("ko.zst", Compression::Zstd, zstd),
        ] {
            let path = directory.path().join(format!("mlx5-core.{ending}"));
            fs::write(&path, &bytes).unwrap();
            let (name, file) = ModuleFile::of(&path, Origin::Image).unwrap();
            assert_eq!((name.as_str(), file.compression), ("mlx5_core", compression));
            assert_eq!(file.read().unwrap(), module, "{ending}");
            assert_eq!(file.info().unwrap(), expected(), "{ending}");
            // Truncated data gives an error that names the file.
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            assert!(file.info().unwrap_err().to_string().contains(&*path.to_string_lossy()), "{ending}");
        }
    }

    #[test]
    fn other_files_are_rejected() {
        for name in ["x.ko.debug", ".ko", "modules.dep", "x.ko.bz2"] {
            assert_eq!(ModuleFile::of(Path::new(name), Origin::Image), None, "{name}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.ko");
        fs::write(&path, "text").unwrap();
        let error = ModuleFile::of(&path, Origin::Image).unwrap().1.info().unwrap_err();
        assert!(error.to_string().ends_with("x.ko is not a kernel module: not a 64-bit ELF file"), "{error}");
    }
}
