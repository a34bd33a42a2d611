//! Properties of sections that the loader rejects, or that depend on the memory around its copy of the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use object::{
    LittleEndian,
    elf::{self, SectionHeader64},
};

use super::{Elf, LE, LIVEPATCH};
use crate::{Verdict, file::ModuleBytes, relocation, rules::layout::ARM64_SECTIONS};

/// Size of the smallest page in bytes.
const PAGE: u64 = 4 << 10;
/// Number of bytes after the loader's copy of the file in which other memory may lie.
const MAX_FOLLOWING: u64 = 16 << 20;
/// Sections that are not in sysfs: [`super::DROPPED`], and the per-CPU section, of which each CPU has a copy.
const NOT_IN_SYSFS: [&str; 5] =
    [".modinfo", "__versions", "__version_ext_crcs", "__version_ext_names", ".data..percpu"];
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

impl<'d, R: ModuleBytes<'d>> Elf<'d, R> {
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
        // The loader for arm64 enlarges the last section of some names, and loads it whatever its flags are.
        let names = ARM64_SECTIONS.iter().filter(|_| self.machine == elf::EM_AARCH64.0);
        let enlarged: Vec<usize> = names.filter_map(|name| self.find_all(name).last()).collect();
        let is_in_sysfs = |index: &usize| {
            let is_loaded = self.has_flags(*index, elf::SHF_ALLOC) && !excluded.contains(&Some(*index));
            let is_kept = is_loaded || [symbols, symbol_names].contains(&Some(*index));
            enlarged.contains(index) || is_kept && self.size(*index) > 0
        };
        let mut seen = BTreeSet::new();
        let duplicates =
            (1..self.headers.len()).filter(is_in_sysfs).filter(|&index| !seen.insert(self.name(index)));
        duplicates.map(|index| self.label(index)).collect::<BTreeSet<_>>().into_iter().collect()
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
    pub fn has_name_table_of_wrong_type(&self) -> bool {
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

    /// Returns the names of sections with an alignment that the loader does not support: it may place the section outside of the
    /// module's memory, or it is the alignment of per-CPU data and no power of two.
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
}

/// Whether the loader places a section of this alignment after the sections before, within 32 MiB. `ALIGN` adds a mask of 32 bits to
/// the offset, and clears the mask's bits: the sum stays low if one of the higher bits of the mask is zero.
fn is_placeable(align: u64) -> bool {
    let mask = (align & u64::from(u32::MAX)).wrapping_sub(1);
    mask < 0xfc00_0000 && mask & 0x01c0_0000 != 0x01c0_0000
}
