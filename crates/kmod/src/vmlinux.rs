//! Reads a decompressed kernel: its type information, its release, and its exports.
//!
//! On x86 the kernel is an ELF file with sections. On arm64 it is a raw memory image without sections, so the data is
//! searched for.

use std::{
    collections::BTreeSet,
    io::{Read, Seek, SeekFrom},
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
    vmlinuz::Result,
};

/// Maximum size in bytes of a section that is read into memory. A distribution kernel's BTF has 6 MB.
const MAX_SECTION: u64 = 64 << 20;
/// Maximum number of sections of a kernel; usual kernels have about fifty.
const MAX_SECTIONS: u16 = 4096;
/// Bytes that are searched at a time.
const CHUNK: usize = 1 << 20;
/// Beginning of `linux_banner` in `init/version.c`.
const BANNER: &[u8] = b"Linux version ";
/// Maximum length of a release in bytes (`__NEW_UTS_LEN`).
const MAX_RELEASE: usize = 64;

/// Maximum length of the user and host that compiled a kernel, in bytes.
const MAX_BUILDER: usize = 192;

/// The first words of the message that a kernel prints when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Banner {
    /// Release of the kernel.
    pub release: String,
    /// User and host that compiled it: `debian-kernel@lists.debian.org`.
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
        // For example a module.
        if header.e_type.get(LE) == ET_REL {
            return Err(VmlinuzError::Form);
        }
        let (offset, count) = (header.e_shoff.get(LE), header.e_shnum.get(LE));
        let names = usize::from(header.e_shstrndx.get(LE).0);
        let size = size_of::<SectionHeader64<LE>>();
        if usize::from(header.e_shentsize.get(LE)) != size || count > MAX_SECTIONS {
            return Err(damaged("its ELF section headers have an impossible size"));
        }
        let table = self.read(offset, u64::from(count) * size as u64)?;
        let headers: Vec<&SectionHeader64<LE>> = table
            .chunks_exact(size)
            .filter_map(|bytes| from_bytes(bytes).ok().map(|(header, _)| header))
            .collect();
        let names = headers.get(names).ok_or(damaged("it has no table of section names"))?;
        let names = self.read(names.sh_offset.get(LE), names.sh_size.get(LE))?;
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

    /// Reads the first words of the kernel's banner, `Linux version X (BUILDER) ...`: the release and who compiled it.
    pub fn banner(&mut self) -> Result<Option<Banner>> {
        let (start, size) = match self.section(".rodata") {
            Some(section) => (section.offset, section.size),
            None => (0, self.length),
        };
        self.search(start, size, BANNER, |vmlinux, at| {
            let text = vmlinux.read_up_to(at, (BANNER.len() + MAX_RELEASE + MAX_BUILDER) as u64)?;
            let text = String::from_utf8_lossy(text.get(BANNER.len()..).unwrap_or_default()).into_owned();
            // Other messages contain the same words, followed by other text.
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
        if bytes > MAX_EXPORTS as u64 * LARGEST_ENTRY {
            return Err(VmlinuzError::Damaged("its tables of exports are larger than any kernel's"));
        }
        let mut tables = Vec::new();
        for section in sections {
            tables.push((section.address, self.contents(&section)?));
        }
        let names = self.contents(&strings)?;
        Ok(ENTRY_FORMS.iter().find_map(|form| {
            let mut found = ExportNames::default();
            for (address, table) in &tables {
                if table.len() % form.size != 0 {
                    return None;
                }
                for (entry, place) in table.chunks_exact(form.size).zip((*address..).step_by(form.size)) {
                    let name = form.name(entry, place)?.checked_sub(strings.address)?;
                    let name = text_at(&names, usize::try_from(name).ok()?)?;
                    if !is_symbol(name) || !found.add(name) {
                        return None;
                    }
                }
            }
            (!found.names.is_empty()).then_some(found.names)
        }))
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

    /// Searches for these bytes; returns the result of the first occurrence for which `accept` returns one.
    fn search<T>(
        &mut self,
        start: u64,
        size: u64,
        wanted: &[u8],
        mut accept: impl FnMut(&mut Self, u64) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let end = start.saturating_add(size).min(self.length);
        let mut chunk = vec![0; CHUNK];
        let mut at = start;
        while at + (wanted.len() as u64) <= end {
            let count = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let bytes = chunk.get_mut(..count).unwrap_or_default();
            self.file.seek(SeekFrom::Start(at))?;
            self.file.read_exact(bytes)?;
            let mut from = 0;
            while let Some(found) = find(bytes.get(from..).unwrap_or_default(), wanted) {
                if let Some(result) = accept(self, at + (from + found) as u64)? {
                    return Ok(Some(result));
                }
                from += found + 1;
            }
            // Chunks overlap, so that an occurrence across the boundary is found in the next chunk.
            at += (count - (wanted.len() - 1)) as u64;
        }
        Ok(None)
    }

    /// Searches for BTF by its header, for images without sections.
    fn find_btf(&mut self) -> Result<Option<Vec<u8>>> {
        self.search(0, u64::MAX, b"\x9f\xeb\x01\x00\x18\0\0\0", |vmlinux, at| {
            let header = vmlinux.read_up_to(at, 24)?;
            let field = |at| u32_at(&header, at);
            let (Some(0), Some(types), Some(names), Some(size)) = (field(8), field(12), field(16), field(20))
            else {
                return Ok(None);
            };
            let length = 24 + u64::from(names) + u64::from(size);
            if names != types || length > MAX_SECTION || at + length > vmlinux.length {
                return Ok(None);
            }
            let bytes = vmlinux.read(at, length)?;
            Ok(Btf::parse(&bytes).is_ok().then_some(bytes))
        })
    }
}

/// Format of `struct kernel_symbol` (`kernel/module/internal.h`, before Linux 5.19 `include/linux/export.h`).
struct EntryForm {
    size: usize,
    /// Whether fields are offsets from their own address (`CONFIG_HAVE_ARCH_PREL32_RELOCATIONS`, since Linux 4.19);
    /// otherwise they are addresses.
    relative: bool,
}

/// Size of the largest format in bytes.
const LARGEST_ENTRY: u64 = 24;

/// Formats with the namespace's name as third field (since Linux 5.4), and without it.
const ENTRY_FORMS: [EntryForm; 4] = [
    EntryForm { size: 12, relative: true },
    EntryForm { size: 8, relative: true },
    EntryForm { size: 24, relative: false },
    EntryForm { size: 16, relative: false },
];

impl EntryForm {
    /// Address of the symbol's name for an entry at address `place`. The name is the second field.
    fn name(&self, entry: &[u8], place: u64) -> Option<u64> {
        if self.relative {
            let offset = i32::from_le_bytes(entry.get(4..8)?.try_into().ok()?);
            place.checked_add(4)?.checked_add_signed(offset.into())
        } else {
            Some(u64::from_le_bytes(entry.get(8..16)?.try_into().ok()?))
        }
    }
}

fn is_symbol(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
}

fn text_at(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().take(MAX_NAME).position(|&byte| byte == 0)?;
    std::str::from_utf8(rest.get(..end)?).ok()
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = wanted.first()?;
    let starts = bytes.iter().enumerate().filter(|(_, byte)| *byte == first);
    starts.map(|(at, _)| at).find(|&at| bytes.get(at..).is_some_and(|rest| rest.starts_with(wanted)))
}

#[cfg(test)]
#[path = "vmlinux_tests.rs"]
mod tests;
