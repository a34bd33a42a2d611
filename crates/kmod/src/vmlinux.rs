//! Reads the type information, the release and the exports of a decompressed kernel.
//!
//! On x86 the kernel is an ELF file with sections. On arm64 the kernel is a raw memory image without sections, in which this
//! module searches for the data.

use std::{
    collections::BTreeSet,
    io::{Read, Seek, SeekFrom, Write},
};

use object::{
    LittleEndian as LE,
    elf::{ET_REL, FileHeader64, SectionHeader64},
    pod::from_bytes,
};

use super::{
    Btf, ExtraKernelFacts, FactSource, Known, VmlinuzError,
    btf::u32_at,
    system_map::{ExportNames, MAX_EXPORTS, MAX_NAME},
    vmlinuz::{self, Result},
};

/// Maximum size in bytes of a section that is read into memory. A distribution kernel's BTF has 6 MB.
const MAX_SECTION: u64 = 64 << 20;
/// Maximum number of bytes that are tried as type information in an image without sections.
const MAX_TRIED: u64 = 4 * MAX_SECTION;
/// Maximum number of sections of a kernel; distribution kernels have about fifty.
const MAX_SECTIONS: u16 = 4096;
/// Number of bytes that are searched at a time.
const CHUNK: usize = 1 << 20;
/// Beginning of `linux_banner` in `init/version.c`.
const BANNER: &[u8] = b"Linux version ";
/// Maximum length of a release in bytes (`__NEW_UTS_LEN`).
const MAX_RELEASE: usize = 64;

/// Maximum length of the user and host that compiled a kernel, in bytes.
const MAX_BUILDER: usize = 192;

/// Facts from the banner, the first message that a kernel prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Banner {
    /// Release of the kernel.
    pub release: String,
    /// User and host that compiled the kernel: `debian-kernel@lists.debian.org`.
    pub builder: Option<String>,
}

/// A decompressed kernel in a file.
///
/// Memory: 4,096 section headers and their names, at most 72 MiB while the file is opened and 4 MiB afterwards. In
/// addition one section at a time, at most twice its size and 128 MiB. Exports need 5 MiB of tables, the section of
/// their names, and 32 MiB of names. None of this depends on the size of the file.
#[derive(Debug)]
pub struct Vmlinux<F> {
    file: F,
    length: u64,
    /// Section headers; empty for a raw image.
    sections: Vec<Section>,
}

#[derive(Clone, Debug)]
struct Section {
    name: String,
    address: u64,
    offset: u64,
    size: u64,
}

impl<F: Read + Write + Seek> Vmlinux<F> {
    /// Decompresses the kernel of a bootable image into `scratch`, and opens it.
    pub fn of_image(image: &mut (impl Read + Seek), mut scratch: F) -> Result<Self> {
        let payload = vmlinuz::locate(image)?;
        vmlinuz::unpack(&mut *vmlinuz::kernel(image, &payload)?, &mut scratch)?;
        Self::open(scratch)
    }
}

impl<F: Read + Seek> Vmlinux<F> {
    /// Opens a kernel and reads its section headers, if it has any.
    pub fn open(mut file: F) -> Result<Self> {
        let length = file.seek(SeekFrom::End(0))?;
        let mut vmlinux = Self { file, length, sections: Vec::new() };
        if vmlinux.read_up_to(0, 4)? == b"\x7fELF" {
            vmlinux.sections = vmlinux.read_sections()?;
        }
        Ok(vmlinux)
    }

    fn read_sections(&mut self) -> Result<Vec<Section>> {
        let start = self.read(0, size_of::<FileHeader64<LE>>() as u64)?;
        let damaged = VmlinuzError::Damaged;
        let (header, _) =
            from_bytes::<FileHeader64<LE>>(&start).map_err(|()| damaged("it ends in its ELF header"))?;
        // Relocatable objects are modules, not kernels.
        if header.e_type.get(LE) == ET_REL {
            return Err(VmlinuzError::UnknownFormat);
        }
        let (offset, count) = (header.e_shoff.get(LE), header.e_shnum.get(LE));
        let names_index = usize::from(header.e_shstrndx.get(LE).0);
        let size = size_of::<SectionHeader64<LE>>();
        if usize::from(header.e_shentsize.get(LE)) != size || count > MAX_SECTIONS {
            return Err(damaged("its ELF section headers have an impossible size"));
        }
        let table = self.read(offset, u64::from(count) * size as u64)?;
        let headers: Vec<&SectionHeader64<LE>> = table
            .chunks_exact(size)
            .filter_map(|bytes| from_bytes(bytes).ok().map(|(header, _)| header))
            .collect();
        let header = headers.get(names_index).ok_or(damaged("it has no table of section names"))?;
        let names = self.read(header.sh_offset.get(LE), header.sh_size.get(LE))?;
        Ok(headers
            .iter()
            .map(|header| Section {
                name: text_at(&names, header.sh_name.get(LE) as usize).unwrap_or_default().to_owned(),
                address: header.sh_addr.get(LE),
                offset: header.sh_offset.get(LE),
                size: header.sh_size.get(LE),
            })
            .collect())
    }

    /// Reads the kernel's type information; `None` if it was built without.
    pub fn btf(&mut self) -> Result<Option<Vec<u8>>> {
        if self.sections.is_empty() {
            return self.find_btf();
        }
        self.section(".BTF").map(|section| self.contents(&section)).transpose()
    }

    /// Reads the kernel's facts beyond its header set.
    pub fn facts(&mut self) -> Result<ExtraKernelFacts> {
        let mut facts = ExtraKernelFacts::default();
        if let Some(section) = self.btf()? {
            facts.add_btf(&Btf::parse(&section)?, &FactSource::Btf);
        }
        facts.exports = self.exports()?.map(|value| Known { value, source: FactSource::KernelImage });
        let builder = self.banner()?.and_then(|banner| banner.builder);
        facts.builder = builder.map(|value| Known { value, source: FactSource::KernelImage });
        Ok(facts)
    }

    /// Reads the kernel's release.
    pub fn release(&mut self) -> Result<Option<String>> {
        Ok(self.banner()?.map(|banner| banner.release))
    }

    /// Reads the kernel's banner, `Linux version RELEASE (BUILDER) ...`.
    pub fn banner(&mut self) -> Result<Option<Banner>> {
        let (start, size) = match self.section(".rodata") {
            Some(section) => (section.offset, section.size),
            None => (0, self.length),
        };
        self.search(start, size, BANNER, |vmlinux, offset| {
            let text = vmlinux.read_up_to(offset, (BANNER.len() + MAX_RELEASE + MAX_BUILDER) as u64)?;
            let text = String::from_utf8_lossy(text.get(BANNER.len()..).unwrap_or_default()).into_owned();
            // Other texts also contain `Linux version `, but no release after it.
            let release = text.split_once(' ').filter(|(release, _)| {
                release.len() <= MAX_RELEASE && release.starts_with(|c: char| c.is_ascii_digit())
            });
            Ok(release.map(|(release, rest)| {
                let builder = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
                Banner {
                    release: release.to_owned(),
                    builder: builder.map(|(builder, _)| builder.to_owned()),
                }
            }))
        })
    }

    /// Reads the names that the kernel exports from its own table of exports. `None` for a raw image, and for a table
    /// of an unknown format.
    pub fn exports(&mut self) -> Result<Option<BTreeSet<String>>> {
        let Some(strings) = self.section("__ksymtab_strings") else { return Ok(None) };
        // `__ksymtab`, `__ksymtab_gpl`, and up to Linux 5.11 `__ksymtab_unused` and similar.
        let is_table =
            |section: &&Section| section.name.starts_with("__ksymtab") && section.name != "__ksymtab_strings";
        let sections: Vec<Section> = self.sections.iter().filter(is_table).cloned().collect();
        // Limit the total size, because tables of a hostile file may overlap.
        let bytes = sections.iter().fold(0_u64, |sum, section| sum.saturating_add(section.size));
        if bytes > MAX_EXPORTS as u64 * MAX_ENTRY_SIZE {
            return Err(VmlinuzError::Damaged("its tables of exports are larger than any kernel's"));
        }
        let mut tables = Vec::new();
        for section in sections {
            tables.push((section.address, self.contents(&section)?));
        }
        let names = self.contents(&strings)?;
        let table = ExportTable { tables, names, names_address: strings.address };
        Ok(ENTRY_FORMATS.iter().find_map(|format| table.read(format)))
    }

    fn section(&self, name: &str) -> Option<Section> {
        self.sections.iter().find(|section| section.name == name).cloned()
    }

    fn contents(&mut self, section: &Section) -> Result<Vec<u8>> {
        self.read(section.offset, section.size)
    }

    /// Reads exactly `size` bytes.
    fn read(&mut self, offset: u64, size: u64) -> Result<Vec<u8>> {
        if size > MAX_SECTION {
            return Err(VmlinuzError::TooLarge(MAX_SECTION));
        }
        let bytes = self.read_up_to(offset, size)?;
        if (bytes.len() as u64) < size {
            return Err(VmlinuzError::Damaged("it is shorter than its headers say"));
        }
        Ok(bytes)
    }

    /// Reads up to `size` bytes.
    fn read_up_to(&mut self, offset: u64, size: u64) -> Result<Vec<u8>> {
        self.file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        (&mut self.file).take(size).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Searches for bytes. Returns the result of `accept` for the first occurrence that it accepts.
    fn search<T>(
        &mut self,
        start: u64,
        size: u64,
        pattern: &[u8],
        mut accept: impl FnMut(&mut Self, u64) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let end = start.saturating_add(size).min(self.length);
        let mut chunk = vec![0; CHUNK];
        let mut position = start;
        while position + (pattern.len() as u64) <= end {
            let count = usize::try_from(end - position).unwrap_or(CHUNK).min(CHUNK);
            let bytes = chunk.get_mut(..count).unwrap_or_default();
            self.file.seek(SeekFrom::Start(position))?;
            self.file.read_exact(bytes)?;
            let mut searched = 0;
            while let Some(index) = find(bytes.get(searched..).unwrap_or_default(), pattern) {
                if let Some(result) = accept(self, position + (searched + index) as u64)? {
                    return Ok(Some(result));
                }
                searched += index + 1;
            }
            // Chunks overlap, so that an occurrence across the boundary is found in the next chunk.
            position += (count - (pattern.len() - 1)) as u64;
        }
        Ok(None)
    }

    /// Searches for BTF in an image without sections, by the start of the header: magic number, version 1, no flags, size 24.
    fn find_btf(&mut self) -> Result<Option<Vec<u8>>> {
        let mut budget = MAX_TRIED;
        self.search(0, u64::MAX, b"\x9f\xeb\x01\x00\x18\0\0\0", |vmlinux, offset| {
            let header = vmlinux.read_up_to(offset, 24)?;
            let field = |offset| u32_at(&header, offset);
            let (Some(0), Some(types), Some(names), Some(size)) = (field(8), field(12), field(16), field(20))
            else {
                return Ok(None);
            };
            let length = 24 + u64::from(names) + u64::from(size);
            if names != types || length > MAX_SECTION || offset + length > vmlinux.length {
                return Ok(None);
            }
            // A hostile image may have a million of such headers, each before megabytes.
            let Some(remaining) = budget.checked_sub(length) else { return Ok(None) };
            budget = remaining;
            let bytes = vmlinux.read(offset, length)?;
            Ok(Btf::parse(&bytes).is_ok().then_some(bytes))
        })
    }
}

/// Contents of the sections that describe a kernel's exports.
struct ExportTable {
    /// Address and contents of each section with entries.
    tables: Vec<(u64, Vec<u8>)>,
    /// Names of the symbols, each NUL-terminated.
    names: Vec<u8>,
    names_address: u64,
}

impl ExportTable {
    /// Reads the exported names. Returns `None` if the entries do not have this format.
    fn read(&self, format: &EntryFormat) -> Option<BTreeSet<String>> {
        let mut exports = ExportNames::default();
        for (address, table) in &self.tables {
            if table.len() % format.size != 0 {
                return None;
            }
            let addresses = (*address..).step_by(format.size);
            for (entry, address) in table.chunks_exact(format.size).zip(addresses) {
                let offset = format.name_address(entry, address)?.checked_sub(self.names_address)?;
                let name = text_at(&self.names, usize::try_from(offset).ok()?)?;
                if !is_symbol(name) || !exports.add(name) {
                    return None;
                }
            }
        }
        (!exports.names.is_empty()).then_some(exports.names)
    }
}

/// Format of `struct kernel_symbol` (`kernel/module/internal.h`, before Linux 5.19 `include/linux/export.h`).
struct EntryFormat {
    size: usize,
    /// Whether fields are offsets from their own address (`CONFIG_HAVE_ARCH_PREL32_RELOCATIONS`, since Linux 4.19).
    /// Otherwise fields are addresses.
    relative: bool,
}

/// Size of the largest format in bytes.
const MAX_ENTRY_SIZE: u64 = 24;

/// Formats with the namespace's name as third field (since Linux 5.4), and without it.
const ENTRY_FORMATS: [EntryFormat; 4] = [
    EntryFormat { size: 12, relative: true },
    EntryFormat { size: 8, relative: true },
    EntryFormat { size: 24, relative: false },
    EntryFormat { size: 16, relative: false },
];

impl EntryFormat {
    /// Address of the symbol's name, which is the second field of an entry.
    fn name_address(&self, entry: &[u8], entry_address: u64) -> Option<u64> {
        if self.relative {
            let offset = i32::from_le_bytes(entry.get(4..8)?.try_into().ok()?);
            entry_address.checked_add(4)?.checked_add_signed(offset.into())
        } else {
            Some(u64::from_le_bytes(entry.get(8..16)?.try_into().ok()?))
        }
    }
}

fn is_symbol(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
}

fn text_at(bytes: &[u8], offset: usize) -> Option<&str> {
    let rest = bytes.get(offset..)?;
    let end = rest.iter().take(MAX_NAME).position(|&byte| byte == 0)?;
    std::str::from_utf8(rest.get(..end)?).ok()
}

fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    let first = pattern.first()?;
    let mut starts = bytes.iter().enumerate().filter(|(_, byte)| *byte == first).map(|(index, _)| index);
    starts.find(|&index| bytes.get(index..).is_some_and(|rest| rest.starts_with(pattern)))
}

#[cfg(test)]
#[path = "vmlinux_tests.rs"]
mod tests;
