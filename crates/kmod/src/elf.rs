//! ELF structure of a module file, with the same checks as the kernel's loader.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use object::{
    LittleEndian,
    elf::{self, FileHeader64, SectionHeader64, Sym64},
    pod::slice_from_bytes,
};

use super::{
    ModuleError, Verdict, error::Result, file::ModuleBytes, relocation, rules::layout::ARM64_SECTIONS,
};

const LE: LittleEndian = LittleEndian;

/// Maximum total size in bytes of the tables that are read into memory. The largest known module with debug information,
/// nvidia.ko, has 6 MB of names. A hostile file may claim any size.
const MAX_TABLES: u64 = 64 << 20;

/// Maximum length of a name in bytes, including the terminating zero (`KSYM_NAME_LEN` in `include/linux/kallsyms.h`).
/// Names may share bytes, so without a limit a small file could contain many long names.
pub(super) const MAX_NAME: usize = 512;

/// Maximum number of symbols whose names are read outside of the string table.
const MAX_NAMES_BEYOND: usize = 4096;

/// Flag of relocation sections that livepatch applies (`SHF_RELA_LIVEPATCH` in `include/uapi/linux/elf.h`).
const LIVEPATCH: elf::SectionFlags = elf::SectionFlags(0x0010_0000);
/// Size of the smallest page in bytes.
const PAGE: u64 = 4 << 10;
/// Number of bytes after the loader's copy of the file in which other memory may lie.
const MAX_FOLLOWING: u64 = 16 << 20;
/// Sections that the loader reads once and drops (`rewrite_section_headers`, `layout_and_allocate`).
const DROPPED: [&str; 4] = [".modinfo", "__versions", "__version_ext_crcs", "__version_ext_names"];
/// Sections that are not in sysfs: [`DROPPED`], and the per-CPU section, of which each CPU has a copy.
const NOT_IN_SYSFS: [&str; 5] =
    [".modinfo", "__versions", "__version_ext_crcs", "__version_ext_names", ".data..percpu"];
/// Section number of symbols that livepatch resolves (`include/uapi/linux/elf.h`).
const SHN_LIVEPATCH: elf::SymbolSection = elf::SymbolSection(0xff20);

pub(super) const BUILD_FOR_NODE: &str = "build for the node's architecture";
pub(super) const NOT_READ: &str = "inspect the file with readelf; farrier does not read modules of this size";

/// Section headers of a relocatable object. [`Elf::parse`] checks that each section lies within the file.
pub(super) struct Elf<'d, R> {
    data: R,
    /// `e_machine`.
    pub machine: u16,
    headers: &'d [SectionHeader64<LittleEndian>],
    names: &'d [u8],
    /// Numbers of the sections that the loader drops after it has read them.
    dropped: Vec<usize>,
    /// Number of the section with the section names.
    names_index: usize,
    /// Range of the section headers in the file.
    header_range: Range<u64>,
    /// Number of bytes of tables that may still be read.
    table_budget: Cell<u64>,
}

/// Symbol table of a module; a valid module has exactly one.
pub(super) struct Symbols<'d> {
    entries: &'d [Sym64<LittleEndian>],
    names: &'d [u8],
    /// Offset after the last name that ends in `names`.
    end: usize,
    /// Names that do not end in `names`, by offset. Before Linux 6.14, the loader reads them up to the next zero byte of the file.
    names_beyond: BTreeMap<u32, &'d [u8]>,
}

/// Section with relocations that the loader applies.
pub(super) struct RelocationSection {
    /// Index of the section that the relocations change.
    pub target: usize,
    /// Range of the relocations in the file.
    pub bytes: Range<u64>,
    /// Whether the entries have addends (`SHT_RELA`).
    pub has_addends: bool,
}

/// Error in the string table of a module's symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StringTableError {
    /// The table does not begin with a zero byte.
    MissingLeadingNul,
    /// The table does not end with a zero byte.
    MissingTrailingNul,
    /// The name of a symbol lies outside of the table.
    OutOfBounds,
}

/// Location of a symbol's definition (`st_shndx`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SymbolLocation {
    Undefined,
    Absolute,
    Common,
    Section(usize),
    /// Resolved by livepatch (`SHN_LIVEPATCH`).
    Livepatch,
    /// Reserved section number without a meaning for the loader.
    Reserved(u16),
}

/// Entry of the symbol table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol<'d> {
    /// Name, truncated to [`MAX_NAME`] bytes; valid names are shorter. Empty if the name does not end in the file.
    pub name: &'d [u8],
    pub location: SymbolLocation,
    pub value: u64,
    pub weak: bool,
}

impl<'d, R: ModuleBytes<'d>> Elf<'d, R> {
    /// Follows `elf_validity_check` of `kernel/module/main.c` (Linux 6.1), step by step. `length` is the object's
    /// length without a signature, because the loader strips the signature first.
    pub fn parse(data: R, length: u64) -> Result<Self> {
        let header = read_header(data)?;
        let (headers, header_range) = read_section_headers(data, header, length)?;
        // Valid tables do not overlap, except that section names and symbol names may share a table.
        let table_budget = Cell::new(length.saturating_mul(2).min(MAX_TABLES));
        let mut elf = Self {
            data,
            machine: header.e_machine.get(LE).0,
            headers,
            names: &[],
            dropped: Vec::new(),
            names_index: usize::from(header.e_shstrndx.get(LE).0),
            header_range,
            table_budget,
        };
        elf.names = elf.read_section_names(length)?;
        elf.check_sections(length)?;
        elf.dropped = DROPPED.iter().filter_map(|name| elf.find(name)).collect();
        Ok(elf)
    }

    fn read_section_names(&self, length: u64) -> Result<&'d [u8]> {
        let header = self
            .headers
            .get(self.names_index)
            .filter(|_| self.names_index != 0)
            .ok_or_else(|| ModuleError::header("it has no table of section names"))?;
        self.check_range(self.names_index, header, length)?;
        let names = self.contents(self.names_index)?;
        if names.last() != Some(&0) {
            return Err(ModuleError::header("its section names are not NUL-terminated"));
        }
        Ok(names)
    }

    fn check_sections(&self, length: u64) -> Result<()> {
        let first = self.headers.first().ok_or_else(|| ModuleError::header("it has no sections"))?;
        if first.sh_type.get(LE) != elf::SHT_NULL || first.sh_size.get(LE) != 0 || first.sh_addr.get(LE) != 0
        {
            return Err(ModuleError::header("its first section is not empty"));
        }
        for (index, section) in self.headers.iter().enumerate().skip(1) {
            let kind = section.sh_type.get(LE);
            if kind == elf::SHT_NULL || kind == elf::SHT_NOBITS {
                continue;
            }
            self.check_range(index, section, length)?;
            let is_allocated = section.sh_flags.get(LE).0 & elf::SHF_ALLOC.0 != 0;
            if is_allocated && section.sh_name.get(LE) as usize >= self.names.len() {
                return Err(ModuleError::header("the name of a section lies outside the section names"));
            }
        }
        Ok(())
    }

    /// Number of sections, including the empty section 0.
    pub fn count(&self) -> usize {
        self.headers.len()
    }

    /// Name of a section; empty if it has none.
    pub fn name(&self, index: usize) -> &'d [u8] {
        let offset = self.headers.get(index).map_or(0, |header| header.sh_name.get(LE) as usize);
        string_at(self.names, offset).unwrap_or(b"")
    }

    /// Finds the first loaded (`SHF_ALLOC`) section of this name, as the kernel does (`find_sec`).
    pub fn find(&self, name: &str) -> Option<usize> {
        (1..self.headers.len())
            .find(|&index| self.has_flags(index, elf::SHF_ALLOC) && self.name(index) == name.as_bytes())
    }

    /// Lists all sections of this name, loaded or not.
    pub fn find_all(&self, name: &str) -> impl Iterator<Item = usize> {
        (1..self.headers.len()).filter(move |&index| self.name(index) == name.as_bytes())
    }

    /// Whether the file contains the section's bytes.
    pub fn has_bytes(&self, index: usize) -> bool {
        self.headers.get(index).is_some_and(|header| header.sh_type.get(LE) != elf::SHT_NOBITS)
    }

    /// Returns a section's bytes; empty if the file contains none. Intended for tables that are read once, because the bytes
    /// count against the budget.
    pub fn contents(&self, index: usize) -> Result<&'d [u8]> {
        let Some(header) = self.headers.get(index) else { return Ok(&[]) };
        if header.sh_type.get(LE) == elf::SHT_NOBITS {
            return Ok(&[]);
        }
        self.read_table(index, header.sh_offset.get(LE), header.sh_size.get(LE))
    }

    /// Returns the bytes of a section with strings, up to the zero byte that ends the last string. The loader looks for that byte
    /// also after the section.
    pub fn strings(&self, index: usize) -> Result<&'d [u8]> {
        let (Some(start), size) = (self.file_offset(index), self.size(index)) else { return Ok(&[]) };
        let remaining = self.data.len().unwrap_or_default().saturating_sub(start);
        let bytes = self.read_table(index, start, remaining.min(size + MAX_NAME as u64))?;
        let last = usize::try_from(size).unwrap_or(usize::MAX).saturating_sub(1);
        let end = bytes.iter().skip(last).position(|&byte| byte == 0).map_or(bytes.len(), |more| last + more);
        Ok(bytes.get(..end).unwrap_or_default())
    }

    /// Returns bytes of the file that belong to a section, and subtracts their number from the budget.
    fn read_table(&self, index: usize, offset: u64, size: u64) -> Result<&'d [u8]> {
        let table_budget = self.table_budget.get().checked_sub(size).ok_or_else(|| {
            let message = format!(
                "section {} has {size} bytes, more than farrier reads of a module",
                self.label(index)
            );
            ModuleError::unknown(message, NOT_READ)
        })?;
        self.table_budget.set(table_budget);
        self.data.read_bytes_at(offset, size).map_err(|()| ModuleError::read("a section"))
    }

    /// Returns up to `size` bytes of a section from an offset. Symbols may point into thousands of overlapping
    /// sections, so these sections are never read completely.
    pub fn read_at(&self, index: usize, offset: u64, size: u64) -> Result<&'d [u8]> {
        let Some(header) = self.headers.get(index).filter(|_| self.has_bytes(index)) else { return Ok(&[]) };
        let size = header.sh_size.get(LE).saturating_sub(offset).min(size);
        let file_offset = header.sh_offset.get(LE).checked_add(offset).filter(|_| size > 0);
        let Some(file_offset) = file_offset else { return Ok(&[]) };
        self.data.read_bytes_at(file_offset, size).map_err(|()| ModuleError::read("a symbol's value"))
    }

    /// Offset of a section's bytes in the file; `None` if the file contains none.
    pub fn file_offset(&self, index: usize) -> Option<u64> {
        self.headers.get(index).filter(|_| self.has_bytes(index)).map(|header| header.sh_offset.get(LE))
    }

    /// Copies bytes of the file, and subtracts their number from the budget.
    pub fn copy_at(&self, offset: u64, buffer: &mut [u8], budget: &mut u64) -> Result<()> {
        *budget = budget.checked_sub(buffer.len() as u64).ok_or_else(relocation::read_limit_exceeded)?;
        self.data.copy_at(offset, buffer).map_err(|_| ModuleError::read("a section"))
    }

    /// Whether all of these flags are set for a section.
    fn has_flags(&self, index: usize, flags: elf::SectionFlags) -> bool {
        self.headers.get(index).is_some_and(|header| header.sh_flags.get(LE).0 & flags.0 == flags.0)
    }

    /// Names of the sections that are both writable and executable.
    pub fn writable_executable(&self) -> impl Iterator<Item = String> {
        let is_both = |index: &usize| {
            self.has_flags(*index, elf::SHF_WRITE) && self.has_flags(*index, elf::SHF_EXECINSTR)
        };
        (0..self.headers.len()).filter(is_both).map(|index| self.label(index))
    }

    /// Names that several non-empty sections in sysfs have. The loader makes a sysfs file for each loaded section except
    /// [`NOT_IN_SYSFS`], and for the symbol table and its string table.
    pub fn duplicate_names(&self) -> Vec<String> {
        let (symbols, symbol_names) = (self.symbol_table(), self.symbol_names_index());
        let excluded = NOT_IN_SYSFS.map(|name| self.find(name));
        let is_in_sysfs = |index: &usize| {
            let is_loaded = self.has_flags(*index, elf::SHF_ALLOC) && !excluded.contains(&Some(*index));
            // The loader for arm64 enlarges some sections.
            let is_enlarged = self.machine == elf::EM_AARCH64.0
                && ARM64_SECTIONS.iter().any(|name| self.name(*index) == name.as_bytes());
            let is_kept = is_loaded || [symbols, symbol_names].contains(&Some(*index));
            is_kept && (is_enlarged || self.size(*index) > 0)
        };
        let mut seen = BTreeSet::new();
        let duplicates =
            (1..self.headers.len()).filter(is_in_sysfs).filter(|&index| !seen.insert(self.name(index)));
        duplicates.map(|index| self.label(index)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Index of the first symbol table.
    fn symbol_table(&self) -> Option<usize> {
        (1..self.headers.len()).find(|&index| self.is_of_type(index, elf::SHT_SYMTAB))
    }

    /// Index of the section with the symbols' names.
    fn symbol_names_index(&self) -> Option<usize> {
        self.headers.get(self.symbol_table()?).map(|header| header.sh_link.get(LE) as usize)
    }

    /// Relocation sections of loaded sections, except those that only livepatch applies.
    pub fn relocation_sections(&self) -> impl Iterator<Item = RelocationSection> {
        self.headers.iter().enumerate().skip(1).filter_map(|(index, header)| {
            let target = usize::try_from(header.sh_info.get(LE)).ok()?;
            let is_applied = self.is_loaded(target) && !self.has_flags(index, LIVEPATCH);
            let has_addends = match header.sh_type.get(LE) {
                elf::SHT_RELA => true,
                elf::SHT_REL => false,
                _ => return None,
            };
            let start = header.sh_offset.get(LE);
            let bytes = start..start.checked_add(header.sh_size.get(LE))?;
            is_applied.then_some(RelocationSection { target, bytes, has_addends })
        })
    }

    fn is_of_type(&self, index: usize, kind: elf::SectionType) -> bool {
        self.headers.get(index).is_some_and(|header| header.sh_type.get(LE) == kind)
    }

    /// Whether the loader copies a section into the module's memory and keeps it there. Symbols of other sections have addresses
    /// in the loader's temporary copy of the file.
    pub fn is_loaded(&self, index: usize) -> bool {
        self.has_flags(index, elf::SHF_ALLOC) && !self.dropped.contains(&index)
    }

    /// Whether a section contains code (`SHF_EXECINSTR`).
    pub fn is_executable(&self, index: usize) -> bool {
        self.has_flags(index, elf::SHF_EXECINSTR)
    }

    /// Verdict about section headers beyond the file to which relocation sections refer.
    pub fn targets_beyond_file(&self) -> Verdict {
        let is_applied = |header: &&SectionHeader64<LittleEndian>| header.sh_type.get(LE) == elf::SHT_RELA;
        let size = size_of::<SectionHeader64<LittleEndian>>() as u64;
        let targets = self.headers.iter().filter(is_applied).map(|header| u64::from(header.sh_info.get(LE)));
        targets.map(|target| self.reading(self.header_range.start + target * size)).max().unwrap_or_default()
    }

    /// Verdict about a loader that reads a byte at an offset of its copy of the file. The loader faults far beyond the copy. Other
    /// memory may follow the copy directly.
    fn reading(&self, offset: u64) -> Verdict {
        let end = self.data.len().unwrap_or_default().next_multiple_of(PAGE);
        match offset.checked_sub(end) {
            None => Verdict::Loads,
            Some(distance) if distance < MAX_FOLLOWING => Verdict::Unknown,
            Some(_) => Verdict::Refused,
        }
    }

    /// Whether a section is writable (`SHF_WRITE`).
    pub fn is_writable(&self, index: usize) -> bool {
        self.has_flags(index, elf::SHF_WRITE)
    }

    /// Whether the name of a section lies outside of the section names. [`Self::parse`] checks the sections that are loaded.
    pub fn has_section_name_out_of_bounds(&self) -> bool {
        let is_outside = |header: &SectionHeader64<LittleEndian>| {
            header.sh_type.get(LE) != elf::SHT_NULL && header.sh_name.get(LE) as usize >= self.names.len()
        };
        self.headers.iter().skip(1).any(is_outside)
    }

    /// Verdict about the names of sections beyond the file. The loader reads the names of all sections, also of those without a type.
    pub fn section_names_beyond_file(&self) -> Verdict {
        let start = self.file_offset(self.names_index).unwrap_or_default();
        let names = self.headers.iter().map(|header| start + u64::from(header.sh_name.get(LE)));
        names.map(|name| self.reading(name)).max().unwrap_or_default()
    }

    /// Verdict about reading the name of a symbol at an offset from the begin of the string table.
    pub fn reading_symbol_name(&self, offset: u32) -> Verdict {
        let start = self.symbol_names_index().and_then(|index| self.headers.get(index));
        let start = start.map_or(0, |header| header.sh_offset.get(LE));
        self.reading(start.saturating_add(offset.into()))
    }

    /// Whether the section names or the symbol names are in a section of another type than `SHT_STRTAB`.
    pub fn has_names_of_other_type(&self) -> bool {
        let tables = self.symbol_names_index().into_iter().chain([self.names_index]);
        tables.into_iter().any(|index| !self.is_of_type(index, elf::SHT_STRTAB))
    }

    /// Name of a relocation section for livepatch without the name of an object: livepatch expects `.klp.rela.OBJECT.SECTION`
    /// (`klp_apply_section_relocs` in `kernel/livepatch/core.c`).
    pub fn misnamed_livepatch(&self) -> Option<String> {
        let is_misnamed = |&index: &usize| {
            let target = self.headers.get(index).map_or(0, |header| header.sh_info.get(LE) as usize);
            let object = self.name(index).strip_prefix(b".klp.rela.").and_then(<[u8]>::first);
            self.has_flags(index, LIVEPATCH) && self.is_loaded(target) && matches!(object, None | Some(b'.'))
        };
        (1..self.headers.len()).find(is_misnamed).map(|index| self.label(index))
    }

    /// Name of a loaded section that no module area has room for. The loader adds sizes with 32 bits; a sum near the limit may wrap.
    pub fn oversized(&self) -> Option<String> {
        let is_oversized = |&index: &usize| {
            let size = self.size(index) & u64::from(u32::MAX);
            self.is_loaded(index)
                && self.name(index) != b".data..percpu"
                && (1 << 30..0xfc00_0000).contains(&size)
        };
        (1..self.headers.len()).find(is_oversized).map(|index| self.label(index))
    }

    /// Names of sections whose alignment may place them outside of the module's memory, and of per-CPU data whose alignment is no
    /// power of two. The loader accepts other alignments.
    pub fn misaligned(&self) -> Vec<String> {
        let tables = [self.symbol_table(), self.symbol_names_index()];
        let is_misaligned = |&index: &usize| {
            let align = self.headers.get(index).map_or(0, |header| header.sh_addralign.get(LE));
            // `percpu_modalloc` raises smaller alignments to four bytes, and lowers larger ones to a page.
            let is_impossible = match self.name(index) {
                b".data..percpu" => (5..PAGE).contains(&align) && !align.is_power_of_two(),
                _ => align > 0 && !is_placeable(align),
            };
            (self.is_loaded(index) || tables.contains(&Some(index))) && is_impossible
        };
        (1..self.headers.len()).filter(is_misaligned).map(|index| self.label(index)).collect()
    }

    /// Whether the kernel follows the addresses in a section while it loads the module, and trusts them.
    pub fn is_followed_by_the_kernel(&self, index: usize) -> bool {
        let name = self.name(index);
        let is_patched = [&b".retpoline_sites"[..], b".return_sites"].contains(&name);
        is_patched || name.starts_with(b"__ksymtab") || NEEDS_RELOCATIONS.contains(&name)
    }

    /// Returns a section whose addresses the kernel uses without a check, and whose relocation section is wrong: it has another
    /// type, belongs to another section according to `sh_info`, or ends within an entry. In all other sections that the kernel
    /// reads, it skips or tolerates an address without its relocation.
    pub fn misplaced_relocations(&self) -> Option<usize> {
        let sections = (1..self.headers.len()).rev();
        let is_read =
            |index: &usize| self.is_loaded(*index) && NEEDS_RELOCATIONS.contains(&self.name(*index));
        // The first section of a name wins, because it is inserted last.
        let read_sections: BTreeMap<&[u8], usize> =
            sections.filter(is_read).map(|index| (self.name(index), index)).collect();
        (1..self.headers.len()).find_map(|index| {
            let name = self.name(index).strip_prefix(b".rela")?;
            let target = *read_sections.get(name)?;
            let header = self.headers.get(index)?;
            let is_correct = header.sh_type.get(LE) == elf::SHT_RELA
                && header.sh_info.get(LE) as usize == target
                && header.sh_size.get(LE).is_multiple_of(relocation::RELA_SIZE as u64);
            (!is_correct).then_some(target)
        })
    }

    /// Names of loaded sections whose bytes overlap the section headers.
    pub fn header_overlaps(&self) -> Vec<String> {
        let Range { start, end } = self.header_range;
        let overlaps = |index: &usize| {
            let size = self.size(*index);
            let offset =
                self.file_offset(*index).filter(|_| self.has_flags(*index, elf::SHF_ALLOC) && size > 0);
            offset.is_some_and(|offset| offset < end && offset.saturating_add(size) > start)
        };
        (1..self.headers.len()).filter(overlaps).map(|index| self.label(index)).collect()
    }

    /// Size of a section, whether or not the file contains its bytes.
    pub fn size(&self, index: usize) -> u64 {
        self.headers.get(index).map_or(0, |header| header.sh_size.get(LE))
    }

    /// Returns the module's symbols. The kernel accepts only modules with exactly one symbol table
    /// (`elf_validity_cache_index_sym`).
    pub fn symbols(&self) -> Result<Symbols<'d>> {
        let mut tables =
            self.headers.iter().enumerate().filter(|(_, h)| h.sh_type.get(LE) == elf::SHT_SYMTAB);
        let (index, header) = tables.next().ok_or_else(no_symbols)?;
        if tables.next().is_some() {
            return Err(self.malformed(index, "is not the only symbol table"));
        }
        let link = header.sh_link.get(LE) as usize;
        if link == 0 || link >= self.headers.len() {
            return Err(self.malformed(index, "has no table of names"));
        }
        let names = self.contents(link)?;
        let bytes = self.contents(index)?;
        let count = bytes.len() / size_of::<Sym64<LittleEndian>>();
        let (entries, _) = slice_from_bytes::<Sym64<LittleEndian>>(bytes, count)
            .map_err(|()| self.malformed(index, "is not aligned in the file"))?;
        let end = names.iter().rposition(|&byte| byte == 0).map_or(0, |last| last + 1);
        let offsets = entries.iter().map(|entry| entry.st_name.get(LE));
        let mut names_beyond = BTreeMap::new();
        for (count, offset) in offsets.filter(|&offset| offset as usize >= end).enumerate() {
            if count == MAX_NAMES_BEYOND {
                let message = "the module has many names outside of its string table";
                return Err(ModuleError::unknown(message, NOT_READ));
            }
            if let Some(name) = self.name_in_file(link, offset)? {
                names_beyond.insert(offset, name);
            }
        }
        Ok(Symbols { entries, names, end, names_beyond })
    }

    /// Returns the name at an offset from the begin of a section, inside or outside of the section. `None` if the name does not end
    /// in the file.
    fn name_in_file(&self, section: usize, offset: u32) -> Result<Option<&'d [u8]>> {
        let section_start = self.headers.get(section).map_or(0, |header| header.sh_offset.get(LE));
        let start = section_start.saturating_add(offset.into());
        let remaining = self.data.len().unwrap_or_default().saturating_sub(start);
        // Most names are short, and the budget allows few long ones.
        for size in [64, MAX_NAME as u64] {
            let name = match remaining.min(size) {
                0 => None,
                size => string_at(self.read_table(section, start, size)?, 0),
            };
            if name.is_some() {
                return Ok(name);
            }
        }
        Ok(None)
    }

    /// Error about a section, with its name.
    pub fn malformed(&self, index: usize, reason: &'static str) -> ModuleError {
        ModuleError::malformed(&self.label(index), reason)
    }

    /// Name of a section for messages, or its index.
    fn label(&self, index: usize) -> String {
        match self.name(index) {
            b"" => format!("number {index}"),
            name => String::from_utf8_lossy(name).chars().take(64).collect(),
        }
    }

    fn check_range(&self, index: usize, header: &SectionHeader64<LittleEndian>, length: u64) -> Result<()> {
        let (offset, size) = (header.sh_offset.get(LE), header.sh_size.get(LE));
        match offset.checked_add(size) {
            Some(end) if end <= length => Ok(()),
            _ => Err(ModuleError::damaged(format!(
                "section {} lies outside the file: {size} bytes at {offset}, and the file has {length}",
                self.label(index)
            ))),
        }
    }
}

/// Reads and checks the ELF header.
fn read_header<'d, R: ModuleBytes<'d>>(data: R) -> Result<&'d FileHeader64<LittleEndian>> {
    let ident = data.read_bytes_at(0, 6).unwrap_or_default();
    if !ident.starts_with(&elf::ELFMAG) {
        return Err(ModuleError::not_elf(ident));
    }
    let header: &FileHeader64<LittleEndian> =
        data.read_at(0).map_err(|()| ModuleError::header("the file ends in its header"))?;
    let kind = header.e_type.get(LE);
    if kind != elf::ET_REL {
        let message = format!("the object has ELF type {}, not relocatable (1)", kind.0);
        return Err(ModuleError::damaged(message));
    }
    // The loader ignores class and byte order, so they do not matter for its own machines. For other machines they do: the headers
    // may have another layout.
    if ident != [0x7f, b'E', b'L', b'F', elf::ELFCLASS64.0, elf::ELFDATA2LSB.0]
        && ![elf::EM_X86_64, elf::EM_AARCH64].contains(&header.e_machine.get(LE))
    {
        let message = "the object is not 64-bit little-endian";
        return Err(ModuleError::refused(message, BUILD_FOR_NODE));
    }
    Ok(header)
}

/// Section headers, and their range in the file.
type SectionHeaders<'d> = (&'d [SectionHeader64<LittleEndian>], Range<u64>);

/// Reads the section headers of a file of this length.
fn read_section_headers<'d, R: ModuleBytes<'d>>(
    data: R,
    header: &FileHeader64<LittleEndian>,
    length: u64,
) -> Result<SectionHeaders<'d>> {
    let entry_size = size_of::<SectionHeader64<LittleEndian>>();
    if usize::from(header.e_shentsize.get(LE)) != entry_size {
        return Err(ModuleError::header("its section headers have an impossible size"));
    }
    let count = usize::from(header.e_shnum.get(LE));
    let size = (count * entry_size) as u64;
    let offset = header.e_shoff.get(LE);
    if offset >= length || size > length - offset {
        return Err(ModuleError::header("its section headers lie outside the file: it is truncated"));
    }
    let headers = data
        .read_slice_at(offset, count)
        .map_err(|()| ModuleError::header("its section headers cannot be read"))?;
    Ok((headers, offset..offset + size))
}

impl<'d> Symbols<'d> {
    /// Returns a symbol by its index; `None` if there is no such symbol.
    pub fn get(&self, number: u32) -> Option<Symbol<'d>> {
        self.entries.get(usize::try_from(number).ok()?).map(|entry| self.symbol(entry))
    }

    /// Iterates over all symbols except the null symbol.
    pub fn iter(&self) -> impl Iterator<Item = Symbol<'d>> {
        self.entries.iter().skip(1).map(|entry| self.symbol(entry))
    }

    fn symbol(&self, entry: &Sym64<LittleEndian>) -> Symbol<'d> {
        let offset = entry.st_name.get(LE);
        let rest = self.names_beyond.get(&offset).copied();
        let rest = rest.or_else(|| self.names.get(offset as usize..)).unwrap_or_default();
        let name = rest.get(..MAX_NAME).unwrap_or(rest);
        let name = string_at(name, 0).unwrap_or(name);
        let weak = entry.st_info.st_bind() == elf::STB_WEAK;
        Symbol { name, location: symbol_location(entry), value: entry.st_value.get(LE), weak }
    }

    /// Locations of the symbols whose names do not end in the file, with the offsets of the names.
    pub fn unnamed(&self) -> impl Iterator<Item = (SymbolLocation, u32)> {
        let is_unnamed = |entry: &&Sym64<LittleEndian>| {
            let offset = entry.st_name.get(LE);
            offset as usize >= self.end && !self.names_beyond.contains_key(&offset)
        };
        let unnamed = self.entries.iter().skip(1).filter(is_unnamed);
        unnamed.map(|entry| (symbol_location(entry), entry.st_name.get(LE)))
    }

    /// Returns the error in the string table, if there is one (`elf_validity_cache_strtab`).
    pub fn string_table_error(&self) -> Option<StringTableError> {
        let is_outside = |entry: &Sym64<LittleEndian>| entry.st_name.get(LE) as usize >= self.names.len();
        match self.names {
            [] => Some(StringTableError::OutOfBounds),
            [.., last] if *last != 0 => Some(StringTableError::MissingTrailingNul),
            _ if self.entries.iter().any(is_outside) => Some(StringTableError::OutOfBounds),
            [first, ..] => (*first != 0).then_some(StringTableError::MissingLeadingNul),
        }
    }
}

/// Whether the loader places a section of this alignment after the sections before, within 32 MiB. `ALIGN` adds a mask of 32 bits to
/// the offset, and clears the mask's bits: the sum stays low if one of the higher bits of the mask is zero.
fn is_placeable(align: u64) -> bool {
    let mask = (align & u64::from(u32::MAX)).wrapping_sub(1);
    mask < 0xfc00_0000 && mask & 0x01c0_0000 != 0x01c0_0000
}

/// Sections with addresses that the kernel uses while it loads the module, also without a relocation (`find_module_sections`,
/// `module_finalize`).
const NEEDS_RELOCATIONS: [&[u8]; 9] = [
    b".altinstructions",
    b".ctors",
    b".init_array",
    b".parainstructions",
    b".static_call_sites",
    b"___srcu_struct_ptrs",
    b"__param",
    b"_ftrace_eval_map",
    b"_ftrace_events",
];

fn symbol_location(entry: &Sym64<LittleEndian>) -> SymbolLocation {
    match entry.st_shndx.get(LE) {
        elf::SHN_UNDEF => SymbolLocation::Undefined,
        elf::SHN_ABS => SymbolLocation::Absolute,
        elf::SHN_COMMON => SymbolLocation::Common,
        SHN_LIVEPATCH => SymbolLocation::Livepatch,
        index if index.0 < elf::SHN_LORESERVE => SymbolLocation::Section(usize::from(index.0)),
        index => SymbolLocation::Reserved(index.0),
    }
}

/// Error for a module without a symbol table.
pub(super) fn no_symbols() -> ModuleError {
    let remedy = "strip it with --strip-debug, never with --strip-all";
    ModuleError::refused("the module has no symbols", remedy)
}

/// Returns the zero-terminated string at an offset; `None` if it has [`MAX_NAME`] bytes or more.
pub(super) fn string_at(bytes: &[u8], offset: usize) -> Option<&[u8]> {
    let rest = bytes.get(offset..)?;
    let end = rest.iter().take(MAX_NAME).position(|&byte| byte == 0)?;
    rest.get(..end)
}
