//! ELF structure of a module file, with the same checks as the kernel's loader.

mod checks;
mod symbols;

use std::{cell::Cell, ops::Range};

use object::{
    LittleEndian,
    elf::{self, FileHeader64, SectionHeader64},
};

use super::{ModuleError, error::Result, file::ModuleBytes, relocation};

pub use symbols::StringTableError;
pub(super) use symbols::{Symbol, SymbolLocation, Symbols};

const LE: LittleEndian = LittleEndian;

/// Maximum total size in bytes of the tables that are read into memory. The largest known module with debug information,
/// nvidia.ko, has 6 MB of names. A hostile file may claim any size.
const MAX_TABLES: u64 = 64 << 20;

/// Maximum length of a name in bytes, including the terminating zero (`KSYM_NAME_LEN` in `include/linux/kallsyms.h`).
/// Names may share bytes, so without a limit a small file could contain many long names.
pub(super) const MAX_NAME: usize = 512;

/// Flag of relocation sections that livepatch applies (`SHF_RELA_LIVEPATCH` in `include/uapi/linux/elf.h`).
const LIVEPATCH: elf::SectionFlags = elf::SectionFlags(0x0010_0000);
/// Sections that the loader reads once and drops (`rewrite_section_headers`, `layout_and_allocate`).
const DROPPED: [&str; 4] = [".modinfo", "__versions", "__version_ext_crcs", "__version_ext_names"];

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

/// Section with relocations that the loader applies.
pub(super) struct RelocationSection {
    /// Index of the section that the relocations change.
    pub target: usize,
    /// Range of the relocations in the file.
    pub bytes: Range<u64>,
    /// Whether the entries have addends (`SHT_RELA`).
    pub has_addends: bool,
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
            let is_allocated = section.sh_flags.get(LE).0 & elf::SHF_ALLOC.0 != 0;
            // `move_module` also copies loaded sections without a type.
            let is_copied = is_allocated && section.sh_size.get(LE) > 0;
            if kind == elf::SHT_NOBITS || kind == elf::SHT_NULL && !is_copied {
                continue;
            }
            self.check_range(index, section, length)?;
            let is_named = (section.sh_name.get(LE) as usize) < self.names.len();
            if kind != elf::SHT_NULL && is_allocated && !is_named {
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
        let bytes = self.read_table(index, start, remaining.min(size.saturating_add(MAX_NAME as u64)))?;
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

    /// Relocation sections of loaded sections, and of the symbol table and its names, which `layout_symtab` loads. Without those that
    /// only livepatch applies.
    pub fn relocation_sections(&self) -> impl Iterator<Item = RelocationSection> {
        let tables = [self.symbol_table(), self.symbol_names_index()];
        self.headers.iter().enumerate().skip(1).filter_map(move |(index, header)| {
            let target = usize::try_from(header.sh_info.get(LE)).ok()?;
            let is_loaded = self.is_loaded(target) || tables.contains(&Some(target));
            let is_applied = is_loaded && !self.has_flags(index, LIVEPATCH);
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

    /// Whether a section is writable (`SHF_WRITE`).
    pub fn is_writable(&self, index: usize) -> bool {
        self.has_flags(index, elf::SHF_WRITE)
    }

    /// Size of a section, whether or not the file contains its bytes.
    pub fn size(&self, index: usize) -> u64 {
        self.headers.get(index).map_or(0, |header| header.sh_size.get(LE))
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
