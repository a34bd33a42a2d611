//! Facts that a module file contains, read once and owned.

mod exports;

use std::collections::{BTreeMap, BTreeSet};

use object::elf;

use self::exports::ExportSymbols;
use super::{
    BadRelocation, BtfError, KernelFacts, ModuleError, Signature, SplitBtf, Verdict,
    elf::{
        BUILD_FOR_NODE, Elf, MAX_NAME, NOT_READ, StringTableError, Symbol, SymbolLocation, Symbols, string_at,
    },
    error::Result,
    file::ModuleBytes,
    relocation, signature,
};
use crate::{Architecture, rules::layout::ARM64_SECTIONS};

/// Size of `struct modversion_info` (`include/linux/module.h`) on 64-bit machines: a long and a name.
const VERSION_ENTRY: usize = 64;
/// Offset of `name` in `struct module`: after an enum and a list head, since Linux 2.6.
const NAME_OFFSET: usize = 24;
/// Size of `name` in `struct module` on 64-bit machines (`MODULE_NAME_LEN`).
const NAME_LENGTH: usize = 56;
/// Maximum number of strings that are kept of a file: symbol names, and keys and values of `.modinfo`. Debian's amdgpu.ko has 4,000.
const MAX_ITEMS: usize = 65_536;
/// Maximum total size of these strings in bytes.
const MAX_TEXT: usize = 8 << 20;
/// Section that holds `struct module`.
const THIS_MODULE: &str = ".gnu.linkonce.this_module";

/// Facts about a kernel module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Name as `lsmod` shows it.
    pub name: String,
    /// Architecture that the module is built for.
    pub arch: Architecture,
    /// Entries of `.modinfo` in file order; a key may occur more than once.
    pub info: Vec<(String, String)>,
    /// Versions of the imported symbols that the module was built with, by name (section `__versions`); `None` without that
    /// section.
    pub versions: Option<BTreeMap<String, u32>>,
    /// Versions from the extended table, which allows long names (Linux 6.14); `None` without its sections.
    pub extended_versions: Option<ExtendedVersions>,
    /// Symbols that the module needs, sorted by name.
    pub undefined: Vec<UndefinedSymbol>,
    /// Symbols that the module exports, sorted by name.
    pub exports: Vec<ModuleExport>,
    /// Size of the module's `struct module` in bytes (`.gnu.linkonce.this_module`).
    pub this_module_size: u64,
    /// Whether the module contains DWARF debug information.
    pub debug_info: bool,
    /// Signature at the end of the file.
    pub signature: Signature,
    /// Type information (section `.BTF`), or the error in it.
    pub btf: Option<Result<SplitBtf, BtfError>>,
    /// Whether the module contains the base of its type information (section `.BTF.base`, Linux 6.11).
    pub btf_base: bool,
    /// Names of sections that occur more than once although the kernel uses only one.
    pub duplicate_sections: Vec<&'static str>,
    /// Properties of the module's sections that the loader checks.
    pub layout: Layout,
    /// Whether the file is an xz stream whose integrity check the kernel does not support
    /// ([`Compression::has_unsupported_xz_check`](crate::Compression::has_unsupported_xz_check)). Set by the caller that decompresses
    /// the file; `false` after [`Self::parse`].
    pub has_unsupported_xz_check: bool,
}

/// Extended table of symbol versions, which allows long names (sections `__version_ext_crcs` and `__version_ext_names`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtendedVersions {
    /// Versions by name.
    Complete(BTreeMap<String, u32>),
    /// One of the two sections is missing, or there are fewer names than versions. The loader refuses such a table.
    Broken(&'static str),
}

/// Properties of a module's sections that the loader checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// First relocation that the loader refuses.
    pub bad_relocation: Option<BadRelocation>,
    /// Names of the sections that are both writable and executable.
    pub writable_executable: Vec<String>,
    /// Size in bytes of the per-CPU variables (section `.data..percpu`).
    pub per_cpu_size: u64,
    /// Names of the sections required by arm64 that the module has.
    pub arm64_sections: Vec<&'static str>,
    /// Whether the module has an `init_module` function but no type hashes of functions (`__cfi_` symbols, `CONFIG_CFI_CLANG`).
    pub init_without_cfi: bool,
    /// Section names that would occur more than once in sysfs, because several non-empty sections have them.
    pub duplicate_names: Vec<String>,
    /// Names of loaded sections whose bytes overlap the section headers, which the loader changes in place.
    pub header_overlaps: Vec<String>,
    /// Properties of the string tables.
    pub names: NameTables,
    /// arm64: weak symbols with a PC-relative relocation. If such a symbol is missing, its address is 0, which the relocation
    /// cannot reach.
    pub weak_pc_relative: BTreeSet<String>,
    /// Symbols whose version in `__versions` has more than 32 bits, so that it matches no version of a kernel.
    pub oversized_crcs: BTreeSet<String>,
    /// Names of sections with an alignment that the loader does not support: either the loader may place the section outside of
    /// the module's memory, or the alignment of per-CPU data is not a power of two.
    pub misaligned: Vec<String>,
    /// Whether the module has fields only in a `.modinfo` section that is not loaded (without `SHF_ALLOC`). Kernels before Linux
    /// 6.4 do not read such a section.
    pub has_unloaded_info: bool,
    /// Verdict about relocation sections that refer to a section header beyond the end of the file. The loader for arm64 reads
    /// that header.
    pub targets_beyond_file: Verdict,
    /// Name of a loaded section of at least 1 GiB, and thus larger than the memory for modules.
    pub oversized: Option<String>,
    /// Name of a livepatch relocation section whose name lacks the name of an object.
    pub misnamed_livepatch: Option<String>,
    /// Properties of the module's `struct module`.
    pub this_module: ThisModule,
    /// Sections that describe the exports.
    pub exports: ExportTables,
}

/// Properties of the string tables with the names of a module's sections and symbols.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameTables {
    /// Error in the names of the symbols.
    pub symbols: Option<StringTableError>,
    /// Verdict about unnamed symbols, whose names extend beyond the end of the file, for kernels that do not check the table's
    /// size.
    pub unnamed_symbols: Verdict,
    /// Whether the name of a section that is not loaded lies outside of the table of section names.
    pub has_section_name_out_of_bounds: bool,
    /// Verdict about names of sections beyond the end of the file.
    pub sections_beyond_file: Verdict,
    /// Whether the names of the sections or of the symbols are in a section whose type is not `SHT_STRTAB`.
    pub has_wrong_type: bool,
}

/// Properties of a module's `struct module`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThisModule {
    /// Whether the structure is in a writable section: the kernel writes to it.
    pub is_writable: bool,
    /// Whether the name is empty.
    pub is_unnamed: bool,
    /// Whether other bytes than the name are set.
    pub has_values: bool,
}

/// Sections that describe a module's exports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportTables {
    /// `__ksymtab`, with its versions in `__kcrctab`.
    pub plain: ExportTable,
    /// `__ksymtab_gpl`, with its versions in `__kcrctab_gpl`. Kernels that read `__kflagstab` ignore these two sections.
    pub gpl: ExportTable,
    /// Whether `__kflagstab` exists (Linux 7.2).
    pub has_flags: bool,
}

/// A table of exported symbols.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportTable {
    /// Size in bytes.
    pub size: u64,
    /// Whether the table with the symbols' versions exists.
    pub has_versions: bool,
}

impl ExportTable {
    /// Whether the table has symbols, but no versions.
    pub(crate) fn lacks_versions(self) -> bool {
        self.size > 0 && !self.has_versions
    }
}

/// A symbol that a module needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndefinedSymbol {
    /// Name of the symbol.
    pub name: String,
    /// Whether the module loads without the symbol.
    pub weak: bool,
}

/// A symbol that a module exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleExport {
    /// Name of the symbol.
    pub name: String,
    /// Symbol version (CRC), if the module contains it.
    pub crc: Option<u32>,
    /// Whether the symbol is exported with `EXPORT_SYMBOL_GPL`.
    pub gpl_only: bool,
    /// Namespace that users of the symbol must import.
    pub namespace: Option<String>,
}

/// Module name as `lsmod` shows it, from the path of a file or exporter: `extra/nvidia-uvm.ko.xz` becomes `nvidia_uvm`.
pub fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let uncompressed = [".xz", ".zst", ".gz"].iter().find_map(|end| file.strip_suffix(end)).unwrap_or(file);
    uncompressed.strip_suffix(".ko").unwrap_or(uncompressed).replace('-', "_")
}

impl Module {
    /// Extended table of symbol versions, if the kernel reads it.
    pub(super) fn extended_for(&self, kernel: &KernelFacts) -> Option<&ExtendedVersions> {
        self.extended_versions.as_ref().filter(|_| kernel.since(6, 14))
    }

    /// Symbol versions that a kernel compares: since Linux 6.14 the extended table, if the module has it. `None` if the module
    /// has no table that the kernel reads.
    pub(super) fn versions_for(&self, kernel: &KernelFacts) -> Option<&BTreeMap<String, u32>> {
        match self.extended_for(kernel) {
            Some(ExtendedVersions::Complete(versions)) => Some(versions),
            _ => self.versions.as_ref(),
        }
    }

    /// Whether the module has exports, but no names of them. The kernel reads the names from the section with the exports, and this
    /// parser from symbols, which `strip --strip-unneeded` removes.
    pub(super) fn has_stripped_exports(&self) -> bool {
        let tables = &self.layout.exports;
        self.exports.is_empty() && (tables.plain.size > 0 || tables.gpl.size > 0)
    }

    /// Reads a module's facts. `data` is the decompressed file: bytes in memory, or a [`CachedFile`](crate::CachedFile) over
    /// an open file, of which only the needed tables are read.
    ///
    /// Memory: the tables, which together have at most twice the size of the file and at most 64 MiB, plus 32 MiB for
    /// the facts. The limits are names of 511 bytes, 65,536 names and fields with 8 MiB of text, and 16,384 exports. A
    /// file that exceeds them is `unknown`.
    pub fn parse<'d, R: ModuleBytes<'d>>(data: R) -> Result<Self> {
        let length = data.len().map_err(|()| ModuleError::read("the file's length"))?;
        let (signature, length) = signature::read(data, length);
        let elf = Elf::parse(data, length)?;
        let arch = architecture(elf.machine)?;
        let this_module = find_this_module(&elf)?;
        let mut budget = ParseBudget::default();
        let loaded_info = elf.find(".modinfo");
        let info = match loaded_info.or_else(|| elf.find_all(".modinfo").next()) {
            Some(index) => read_info(elf.strings(index)?, &mut budget)?,
            None => Vec::new(),
        };
        let structure = elf.contents(this_module)?;
        let name = read_name(&info, structure).ok_or_else(|| {
            ModuleError::unknown(
                "the module's name is not printable",
                "give the module a name of ASCII letters",
            )
        })?;
        let symbols = elf.symbols()?;
        // Read the symbols before the relocations: `read_symbols` limits the number of names to which relocations refer.
        let (undefined, exports) = read_symbols(&elf, &symbols, &mut budget)?;
        let mut layout = Layout::read(&elf, arch, &symbols, length)?;
        layout.has_unloaded_info = loaded_info.is_none() && !info.is_empty();
        layout.this_module = ThisModule {
            is_writable: elf.is_writable(this_module),
            is_unnamed: structure.get(NAME_OFFSET) == Some(&0),
            has_values: has_values(structure),
        };
        Ok(Self {
            name,
            arch,
            versions: read_versions(&elf, &mut layout.oversized_crcs, &mut budget)?,
            extended_versions: read_extended_versions(&elf, &mut budget)?,
            undefined,
            exports,
            this_module_size: elf.size(this_module),
            debug_info: [".debug_info", ".zdebug_info"]
                .into_iter()
                .any(|name| elf.find_all(name).next().is_some()),
            signature,
            // The kernel treats an empty section as absent.
            btf: match elf.find_all(".BTF").find(|&index| elf.size(index) > 0) {
                Some(index) => Some(SplitBtf::read(elf.contents(index)?)),
                None => None,
            },
            btf_base: elf.find_all(".BTF.base").next().is_some(),
            duplicate_sections: [THIS_MODULE, ".modinfo"]
                .into_iter()
                .filter(|name| elf.find_all(name).nth(1).is_some())
                .collect(),
            layout,
            info,
            has_unsupported_xz_check: false,
        })
    }

    /// Returns the first value of a `.modinfo` key, which is the one that the loader uses.
    pub fn field(&self, key: &str) -> Option<&str> {
        self.fields(key).next()
    }

    /// Returns all values of a `.modinfo` key.
    pub fn fields<'a, 'k>(&'a self, key: &'k str) -> impl Iterator<Item = &'a str> + use<'a, 'k> {
        self.info.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Value of `vermagic` in `.modinfo`.
    pub fn vermagic(&self) -> Option<&str> {
        self.field("vermagic")
    }

    /// Whether the module's license permits `EXPORT_SYMBOL_GPL` symbols (`license_is_gpl_compatible` in
    /// `include/linux/license.h`). A module without a license may not use them.
    pub fn is_gpl_compatible(&self) -> bool {
        matches!(
            self.field("license"),
            Some(
                "GPL"
                    | "GPL v2"
                    | "GPL and additional rights"
                    | "Dual BSD/GPL"
                    | "Dual MIT/GPL"
                    | "Dual MPL/GPL"
            )
        )
    }
}

/// Returns the architecture of an ELF machine number.
fn architecture(machine: u16) -> Result<Architecture> {
    match elf::Machine(machine) {
        elf::EM_X86_64 => Ok(Architecture::Amd64),
        elf::EM_AARCH64 => Ok(Architecture::Arm64),
        elf::Machine(other) => {
            let message = format!(
                "the object is for ELF machine {other}, which is neither x86-64 (62) nor arm64 (183)"
            );
            Err(ModuleError::refused(message, BUILD_FOR_NODE))
        }
    }
}

/// Finds the section with `struct module`.
fn find_this_module<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>) -> Result<usize> {
    let index = elf.find(THIS_MODULE).ok_or_else(|| {
        ModuleError::damaged("the object has no .gnu.linkonce.this_module, so it is not a kernel module")
    })?;
    if elf.has_bytes(index) { Ok(index) } else { Err(elf.malformed(index, "has no bytes in the file")) }
}

impl Layout {
    /// Reads the properties that follow from section headers, relocations and string tables. `length` is the length of the
    /// object.
    fn read<'d, R: ModuleBytes<'d>>(
        elf: &Elf<'d, R>,
        arch: Architecture,
        symbols: &Symbols<'d>,
        length: u64,
    ) -> Result<Self> {
        let has_section = |name: &str| elf.find_all(name).next().is_some();
        // The loader takes the size of a missing section from the empty section 0.
        let size = |name| elf.find(name).map_or(0, |index| elf.size(index));
        let table =
            |name, versions| ExportTable { size: size(name), has_versions: elf.find(versions).is_some() };
        let is_init = |symbol: Symbol<'_>| {
            symbol.name == b"init_module" && symbol.location != SymbolLocation::Undefined
        };
        let mut weak_pc_relative = BTreeSet::new();
        Ok(Self {
            bad_relocation: relocation::find_bad_relocation(
                elf,
                arch,
                symbols,
                length,
                &mut weak_pc_relative,
            )?,
            weak_pc_relative,
            names: NameTables {
                symbols: symbols.string_table_error(),
                unnamed_symbols: unnamed_symbols(elf, symbols),
                has_section_name_out_of_bounds: elf.has_section_name_out_of_bounds(),
                sections_beyond_file: elf.section_names_beyond_file(),
                has_wrong_type: elf.has_name_table_of_wrong_type(),
            },
            writable_executable: elf.writable_executable().collect(),
            per_cpu_size: size(".data..percpu"),
            arm64_sections: ARM64_SECTIONS.into_iter().filter(|name| has_section(name)).collect(),
            duplicate_names: elf.duplicate_names(),
            header_overlaps: elf.header_overlaps(),
            misaligned: elf.misaligned(),
            targets_beyond_file: elf.targets_beyond_file(),
            oversized: elf.oversized(),
            init_without_cfi: symbols.iter().any(is_init)
                && !symbols.iter().any(|symbol| symbol.name.starts_with(b"__cfi_")),
            misnamed_livepatch: elf.misnamed_livepatch(),
            exports: ExportTables {
                plain: table("__ksymtab", "__kcrctab"),
                gpl: table("__ksymtab_gpl", "__kcrctab_gpl"),
                has_flags: elf.find("__kflagstab").is_some(),
            },
            ..Self::default()
        })
    }
}

/// Returns the verdict about symbols whose names extend beyond the end of the file. The loader reads such a name if the symbol is
/// undefined or stays in memory. The kernel may read the name of a symbol in an init section or an unloaded section when it
/// resolves an address to a symbol (kallsyms).
fn unnamed_symbols<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, symbols: &Symbols<'d>) -> Verdict {
    let verdict = |(location, name)| match location {
        SymbolLocation::Absolute | SymbolLocation::Livepatch | SymbolLocation::Reserved(_) => Verdict::Loads,
        SymbolLocation::Section(index) if !elf.is_loaded(index) || elf.name(index).starts_with(b".init") => {
            Verdict::Unknown
        }
        _ => elf.reading_symbol_name(name).max(Verdict::Unknown),
    };
    symbols.unnamed().map(verdict).max().unwrap_or_default()
}

fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Remaining budget for the strings that the parser keeps of a file.
struct ParseBudget {
    items: usize,
    bytes: usize,
}

impl Default for ParseBudget {
    fn default() -> Self {
        Self { items: MAX_ITEMS, bytes: MAX_TEXT }
    }
}

impl ParseBudget {
    /// Converts a string and subtracts its size from the budget.
    fn text(&mut self, bytes: &[u8]) -> Result<String> {
        // The conversion may triple the length, so check the length before.
        if bytes.len() > self.bytes {
            return Err(over_limit());
        }
        let text = lossy_text(bytes);
        self.items = self.items.checked_sub(1).ok_or_else(over_limit)?;
        self.bytes = self.bytes.checked_sub(text.len()).ok_or_else(over_limit)?;
        Ok(text)
    }

    /// Converts the name of a symbol.
    fn name(&mut self, bytes: &[u8]) -> Result<String> {
        check_name_length(bytes).and_then(|name| self.text(name))
    }
}

/// Returns the name. Fails if the name is longer than the kernel allows.
fn check_name_length(name: &[u8]) -> Result<&[u8]> {
    if name.len() < MAX_NAME {
        return Ok(name);
    }
    let message = format!("a symbol's name has more than {} bytes, the limit of every kernel", MAX_NAME - 1);
    Err(ModuleError::unknown(message, NOT_READ))
}

fn over_limit() -> ModuleError {
    ModuleError::unknown("the module has more names and fields than farrier reads", NOT_READ)
}

/// Parses `key=value` entries, each ended by one or more zero bytes.
fn read_info(bytes: &[u8], budget: &mut ParseBudget) -> Result<Vec<(String, String)>> {
    let entries = bytes.split(|&byte| byte == 0).filter_map(|entry| {
        let equals = entry.iter().position(|&byte| byte == b'=')?;
        Some((entry.get(..equals)?, entry.get(equals + 1..)?))
    });
    entries.map(|(key, value)| Ok((budget.text(key)?, budget.text(value)?))).collect()
}

/// Whether bytes of `struct module` other than the name are set. In a regular module they are zero, because relocations set the
/// function pointers.
fn has_values(this_module: &[u8]) -> bool {
    let is_name = |offset: usize| (NAME_OFFSET..NAME_OFFSET + NAME_LENGTH).contains(&offset);
    this_module.iter().enumerate().any(|(offset, &byte)| byte != 0 && !is_name(offset))
}

/// Returns the `name` field (since Linux 4.13), or else the name in `struct module`. Skips a name that is not printable, or too long
/// for `struct module`.
fn read_name(info: &[(String, String)], this_module: &[u8]) -> Option<String> {
    let is_valid = |name: &String| {
        (1..NAME_LENGTH).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
    };
    let field = info.iter().find(|(key, _)| key == "name").map(|(_, value)| value.clone());
    field.filter(is_valid).or_else(|| {
        let bytes = this_module.get(NAME_OFFSET..NAME_OFFSET + NAME_LENGTH)?;
        string_at(bytes, 0).map(lossy_text).filter(is_valid)
    })
}

/// Reads the extended table.
fn read_extended_versions<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    budget: &mut ParseBudget,
) -> Result<Option<ExtendedVersions>> {
    let (crcs, names) = match (elf.find("__version_ext_crcs"), elf.find("__version_ext_names")) {
        (None, None) => return Ok(None),
        (Some(crcs), Some(names)) => (elf.contents(crcs)?, elf.contents(names)?),
        _ => return Ok(Some(ExtendedVersions::Broken("has only one of its two sections"))),
    };
    let (crcs, _) = crcs.as_chunks::<4>();
    let mut names = names.split_inclusive(|&byte| byte == 0).map_while(|name| name.strip_suffix(&[0]));
    let mut versions = BTreeMap::new();
    for crc in crcs {
        let Some(name) = names.next() else {
            return Ok(Some(ExtendedVersions::Broken("has fewer names than versions")));
        };
        // The loader uses the first entry of a name.
        versions.entry(budget.name(name)?).or_insert(u32::from_le_bytes(*crc));
    }
    Ok(Some(ExtendedVersions::Complete(versions)))
}

/// Reads the basic table, whose entries have a fixed size. Adds symbols whose version has more than 32 bits to `oversized`.
fn read_versions<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    oversized: &mut BTreeSet<String>,
    budget: &mut ParseBudget,
) -> Result<Option<BTreeMap<String, u32>>> {
    let Some(index) = elf.find("__versions") else { return Ok(None) };
    let mut versions = BTreeMap::new();
    for entry in elf.contents(index)?.chunks_exact(VERSION_ENTRY) {
        let (crc, name) = entry.split_at(8);
        let (low, high) = crc.split_at(4);
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        let name = budget.name(name.get(..end).unwrap_or(name))?;
        // The loader uses the first entry of a name.
        if high != [0; 4] && !versions.contains_key(&name) {
            oversized.insert(name.clone());
        }
        versions.entry(name).or_insert(u32_le(low));
    }
    Ok(Some(versions))
}

fn u32_le(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

/// Reads the undefined symbols and the exports in one pass over the symbol table.
fn read_symbols<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    symbols: &Symbols<'d>,
    budget: &mut ParseBudget,
) -> Result<(Vec<UndefinedSymbol>, Vec<ModuleExport>)> {
    let mut undefined = BTreeMap::new();
    let mut export_symbols = ExportSymbols::default();
    for symbol in symbols.iter() {
        match symbol.location {
            SymbolLocation::Undefined if is_ignored_undefined(elf.machine, symbol.name) => {}
            SymbolLocation::Undefined => {
                // One strong use makes the symbol required.
                let weak = undefined.entry(check_name_length(symbol.name)?).or_insert(true);
                *weak &= symbol.weak;
                if undefined.len() > MAX_ITEMS {
                    return Err(over_limit());
                }
            }
            // Slim LTO objects contain one such marker, which the loader tolerates.
            SymbolLocation::Common if !symbol.name.starts_with(b"__gnu_lto") => {
                let name = lossy_text(symbol.name);
                let message = format!("symbol {name} is a common symbol, which the loader refuses");
                let remedy = "compile with the kernel's own flags, which have -fno-common";
                return Err(ModuleError::refused(message, remedy));
            }
            SymbolLocation::Common | SymbolLocation::Livepatch => {}
            SymbolLocation::Reserved(index) => return Err(no_section(&symbol, usize::from(index))),
            SymbolLocation::Section(index) if index >= elf.count() => return Err(no_section(&symbol, index)),
            SymbolLocation::Absolute | SymbolLocation::Section(_) => export_symbols.add(symbol)?,
        }
    }
    let undefined = undefined
        .into_iter()
        .map(|(name, weak)| Ok(UndefinedSymbol { name: budget.name(name)?, weak }))
        .collect::<Result<_>>()?;
    Ok((undefined, export_symbols.exports(elf, budget)?))
}

/// Error for a symbol in a section that does not exist (`simplify_symbols`).
fn no_section(symbol: &Symbol<'_>, index: usize) -> ModuleError {
    ModuleError::damaged(format!("symbol {} has an invalid section index {index}", lossy_text(symbol.name)))
}

/// Whether the kernel ignores an undefined symbol that the assembler or linker generates (`ignore_undef_symbol` in
/// `kernel/module/main.c`).
fn is_ignored_undefined(machine: u16, name: &[u8]) -> bool {
    machine == elf::EM_X86_64.0 && name == b"_GLOBAL_OFFSET_TABLE_"
}

/// Formats a version for messages, as the kernel prints it.
pub(super) fn format_crc(crc: u32) -> String {
    format!("{crc:#010x}")
}

#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod tests;
