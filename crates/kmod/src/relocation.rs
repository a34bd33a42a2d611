//! Relocations that the kernel's loader refuses (`apply_relocations` in `kernel/module/main.c`, and `apply_relocate_add` in
//! `arch/*/kernel/module.c`).

use std::{collections::BTreeSet, ops::Range};

use object::elf;

use super::{
    Architecture, ModuleError,
    elf::{Elf, NOT_READ, Symbol, SymbolLocation, Symbols},
    error::Result,
    file::ModuleBytes,
};

/// Size of `Elf64_Rela` in bytes: an offset, a type with a symbol, and an addend.
pub(super) const RELA_SIZE: usize = 24;
/// Number of entries that are read at once.
const BATCH: usize = 2048;
/// Number of bytes of a target section that are read at once.
const WINDOW: u64 = 64 << 10;
/// Maximum number of bytes to read, as a multiple of the file's length. Linkers order relocations by offset, so a factor of two
/// would suffice.
const MAX_READ_FACTOR: u64 = 16;

/// First relocation of a module that the loader refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRelocation {
    /// Name of the section that the relocation changes.
    pub section: String,
    /// Offset of the changed bytes in the section.
    pub offset: u64,
    /// Type, such as 42 for `R_X86_64_REX_GOTPCRELX`.
    pub kind: u32,
    /// Reason for the refusal.
    pub problem: RelocationProblem,
}

/// Reason why the loader refuses a relocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelocationProblem {
    /// The loader does not implement the type.
    Unsupported,
    /// The relocation section has no addends (`SHT_REL`).
    WithoutAddends,
    /// x86-64: the bytes to change are not zero.
    TargetNotZero,
    /// The address of the symbol does not fit into the field that this type changes.
    Overflow,
    /// The loader has changed some of the bytes before. On x86-64 they may no longer be zero. On arm64 this applies to the symbol table
    /// only: later relocations use the changed symbols.
    Overlap,
    /// A section that the kernel itself reads refers to a section that the loader drops.
    NotLoaded,
    /// A section that the kernel itself reads lacks its relocations, or its last relocation is incomplete.
    Misplaced,
    /// x86-64: a static call refers to a symbol of the kernel that is neither a key nor a trampoline.
    NoStaticCall,
    /// arm64: the distance depends on the memory of the machine, and may be too long. The loader reserves no jump for calls from
    /// sections that are not executable.
    MayOverflow,
    /// The relocation names a symbol beyond the symbol table. The loader does not check that, and reads other memory.
    NoSymbol,
    /// The relocation names a symbol so far beyond the symbol table that the loader faults.
    DistantSymbol,
    /// The bytes to change lie outside of the section. The loader does not check that, and overwrites other memory.
    OutsideSection,
}

/// Finds the first relocation that the loader refuses or does not check. Ignores relocations of sections that are not loaded. Adds
/// weak symbols with a PC-relative relocation to `weak_pc_relative`: the module does not load without them (0 is out of range).
pub(super) fn find_bad_relocation<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    arch: Architecture,
    symbols: &Symbols<'d>,
    length: u64,
    weak_pc_relative: &mut BTreeSet<String>,
) -> Result<Option<BadRelocation>> {
    let mut budget = length.saturating_mul(MAX_READ_FACTOR);
    let mut targets = BTreeSet::new();
    let mut buffer = vec![0; BATCH * RELA_SIZE];
    let symbol_table = elf.symbol_table();
    for section in elf.relocation_sections() {
        if !section.has_addends {
            return Ok(Some(bad_relocation(elf, section.target, 0, 0, RelocationProblem::WithoutAddends)));
        }
        let mut target = Target::of(elf, section.target, symbol_table == Some(section.target));
        let is_again = !targets.insert(section.target);
        let (mut position, end) = (section.bytes.start, section.bytes.end);
        while let Some(remaining) = end.checked_sub(position).filter(|&size| size >= RELA_SIZE as u64) {
            let entries = usize::try_from(remaining / RELA_SIZE as u64).unwrap_or(BATCH).min(BATCH);
            let bytes = buffer.get_mut(..entries * RELA_SIZE).unwrap_or_default();
            elf.copy_at(position, bytes, &mut budget)?;
            position += bytes.len() as u64;
            for entry in bytes.chunks_exact(RELA_SIZE) {
                let relocation = Relocation::parse(entry);
                let problem = match arch {
                    _ if symbols.get(relocation.symbol).is_none() => Some(missing_symbol(&relocation)),
                    Architecture::Amd64 => {
                        let problem = amd64(&relocation, symbols, elf, &mut target, &mut budget)?;
                        problem.or(is_again.then_some(RelocationProblem::Overlap))
                    }
                    Architecture::Arm64 => arm64(&relocation, symbols, elf, &target, weak_pc_relative),
                };
                if let Some(problem) = problem {
                    let Relocation { offset, kind, .. } = relocation;
                    return Ok(Some(bad_relocation(elf, section.target, offset, kind, problem)));
                }
            }
        }
    }
    let misplaced = elf.misplaced_relocations();
    Ok(misplaced.map(|section| bad_relocation(elf, section, 0, 0, RelocationProblem::Misplaced)))
}

fn bad_relocation<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    section: usize,
    offset: u64,
    kind: u32,
    problem: RelocationProblem,
) -> BadRelocation {
    let section = String::from_utf8_lossy(elf.name(section)).into_owned();
    BadRelocation { section, offset, kind, problem }
}

struct Relocation {
    offset: u64,
    kind: u32,
    symbol: u32,
    addend: u64,
}

impl Relocation {
    fn parse(entry: &[u8]) -> Self {
        let (words, _) = entry.as_chunks::<4>();
        let word = |index: usize| words.get(index).map_or(0, |&bytes| u32::from_le_bytes(bytes));
        let long = |index: usize| u64::from(word(index)) | u64::from(word(index + 1)) << 32;
        Self { offset: long(0), kind: word(2), symbol: word(3), addend: long(4) }
    }
}

fn missing_symbol(relocation: &Relocation) -> RelocationProblem {
    // Each symbol has 24 bytes, so this one is at least 24 MiB away.
    if relocation.symbol < 1 << 20 { RelocationProblem::NoSymbol } else { RelocationProblem::DistantSymbol }
}

/// Section that relocations change, with a window of its bytes.
struct Target {
    section: usize,
    is_executable: bool,
    /// Whether the kernel follows the section's addresses while it loads the module.
    is_followed: bool,
    /// Whether the section describes static calls, with addresses of the calls and their keys in turns.
    has_static_calls: bool,
    /// Size of the section.
    size: u64,
    /// Offset of the section's bytes in the file; `None` if the file contains none, so that all bytes are zero.
    file_offset: Option<u64>,
    /// Range of `bytes` in the section.
    window: Range<u64>,
    bytes: Vec<u8>,
    /// Range that the previous relocation has changed and in which no byte can be zero.
    nonzero: Range<u64>,
    /// Bytes of the section that relocations have changed, one bit each. Empty if the file contains no bytes of the section. `None` for
    /// the symbol table, which the loader itself changes (`simplify_symbols`).
    changed: Option<Vec<u8>>,
}

impl Target {
    fn of<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, section: usize, is_symbol_table: bool) -> Self {
        let is_followed = elf.is_followed_by_the_kernel(section);
        let size = elf.size(section);
        let file_offset = elf.file_offset(section);
        let bits = file_offset.map_or(0, |_| size.div_ceil(8));
        let changed = (!is_symbol_table).then(|| vec![0; usize::try_from(bits).unwrap_or_default()]);
        let has_static_calls = elf.name(section) == b".static_call_sites";
        let is_executable = elf.is_executable(section);
        Self {
            section,
            is_executable,
            is_followed,
            has_static_calls,
            size,
            file_offset,
            window: 0..0,
            bytes: Vec::new(),
            nonzero: 0..0,
            changed,
        }
    }

    /// Marks bytes as changed. Returns whether the loader has changed one of them before.
    fn change(&mut self, range: Range<u64>) -> bool {
        let Some(changed) = &mut self.changed else { return true };
        let mut overlaps = false;
        for offset in range {
            let byte = usize::try_from(offset / 8).ok().and_then(|index| changed.get_mut(index));
            let bit = 1 << (offset % 8);
            overlaps |= byte.map_or(0, |byte| std::mem::replace(byte, *byte | bit)) & bit != 0;
        }
        overlaps
    }

    /// Returns the problem of a relocation of type "none": it takes the place of one that sets an address.
    fn without_effect(&self) -> Option<RelocationProblem> {
        self.is_followed.then_some(RelocationProblem::Misplaced)
    }

    fn contains(&self, offset: u64, size: u64) -> bool {
        offset.checked_add(size).is_some_and(|end| end <= self.size)
    }

    /// Whether the bytes are zero. The caller has checked that the section contains them ([`Target::contains`]).
    fn is_zero<'d, R: ModuleBytes<'d>>(
        &mut self,
        elf: &Elf<'d, R>,
        offset: u64,
        size: u64,
        budget: &mut u64,
    ) -> Result<bool> {
        let Some(start) = self.file_offset else { return Ok(true) };
        if offset < self.window.start || offset + size > self.window.end {
            let length = (self.size - offset).min(WINDOW);
            self.bytes.resize(usize::try_from(length).unwrap_or_default(), 0);
            elf.copy_at(start + offset, &mut self.bytes, budget)?;
            self.window = offset..offset + length;
        }
        let first = usize::try_from(offset - self.window.start).unwrap_or_default();
        let bytes = self.bytes.get(first..).unwrap_or_default();
        Ok(bytes.iter().take(usize::try_from(size).unwrap_or_default()).all(|&byte| byte == 0))
    }
}

/// Follows `__write_relocate_add` in `arch/x86/kernel/module.c`.
fn amd64<'d, R: ModuleBytes<'d>>(
    relocation: &Relocation,
    symbols: &Symbols<'d>,
    elf: &Elf<'d, R>,
    target: &mut Target,
    budget: &mut u64,
) -> Result<Option<RelocationProblem>> {
    let &Relocation { offset, kind, symbol, addend } = relocation;
    let kind = elf::RelocationType(kind);
    let size = match kind {
        elf::R_X86_64_NONE => return Ok(target.without_effect()),
        elf::R_X86_64_64 | elf::R_X86_64_PC64 => 8,
        elf::R_X86_64_32 | elf::R_X86_64_32S | elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => 4,
        _ => return Ok(Some(RelocationProblem::Unsupported)),
    };
    let value = symbols.get(symbol).map_or(Value::Unknown, |symbol| Value::of(&symbol, elf));
    if !value.fits(kind, addend) {
        return Ok(Some(RelocationProblem::Overflow));
    }
    // Elsewhere only the module's own code uses the address.
    if value == Value::LoaderCopy && target.is_followed {
        return Ok(Some(RelocationProblem::NotLoaded));
    }
    if target.has_static_calls && offset % 8 == 4 && is_no_static_call(symbols.get(symbol)) {
        return Ok(Some(RelocationProblem::NoStaticCall));
    }
    if !target.contains(offset, size) {
        return Ok(Some(RelocationProblem::OutsideSection));
    }
    let end = offset + size;
    if target.nonzero.start < end && offset < target.nonzero.end {
        return Ok(Some(RelocationProblem::TargetNotZero));
    }
    if target.change(offset..end) {
        return Ok(Some(RelocationProblem::Overlap));
    }
    // The upper half of a kernel address has all bits set.
    let is_kernel_address = kind == elf::R_X86_64_64
        && matches!(value, Value::Kernel(_))
        && value.fits(elf::R_X86_64_32S, addend);
    target.nonzero = if is_kernel_address { offset + 4..end } else { 0..0 };
    let is_zero = target.is_zero(elf, offset, size, budget)?;
    Ok((!is_zero).then_some(RelocationProblem::TargetNotZero))
}

/// Whether a symbol of the kernel is neither the key nor the trampoline of a static call.
fn is_no_static_call(symbol: Option<Symbol<'_>>) -> bool {
    symbol.is_some_and(|symbol| {
        symbol.location == SymbolLocation::Undefined && !symbol.name.starts_with(b"__SC")
    })
}

/// Value of a symbol, as far as it follows from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// Distance from an address in the kernel or a module, on x86-64 in the upper 1.5 GiB of the address space.
    Kernel(u64),
    /// Address in the loader's temporary copy of the file, far from the kernel and its modules.
    LoaderCopy,
    /// Constant, independent of addresses.
    Number(u64),
    Unknown,
}

impl Value {
    fn of<'d, R: ModuleBytes<'d>>(symbol: &Symbol<'d>, elf: &Elf<'d, R>) -> Self {
        match symbol.location {
            SymbolLocation::Section(index) if index == 0 || index >= elf.count() => Self::Unknown,
            SymbolLocation::Section(index) if !elf.is_loaded(index) => Self::LoaderCopy,
            SymbolLocation::Section(index) if elf.name(index) == b".data..percpu" => Self::Unknown,
            SymbolLocation::Section(_) => Self::Kernel(symbol.value),
            SymbolLocation::Absolute | SymbolLocation::Livepatch => Self::Number(symbol.value),
            // The null symbol.
            SymbolLocation::Undefined if symbol.name.is_empty() => Self::Number(symbol.value),
            SymbolLocation::Undefined if !symbol.weak => Self::Kernel(0),
            _ => Self::Unknown,
        }
    }

    /// Whether the value fits into the field of a relocation of this type.
    fn fits(self, kind: elf::RelocationType, addend: u64) -> bool {
        match (kind, self) {
            (elf::R_X86_64_32, Self::Kernel(_) | Self::LoaderCopy)
            | (elf::R_X86_64_32S, Self::LoaderCopy) => false,
            (elf::R_X86_64_32S, Self::Kernel(distance)) => {
                (-1 << 31..7 << 29).contains(&distance.wrapping_add(addend).cast_signed())
            }
            (elf::R_X86_64_32, Self::Number(value)) => u32::try_from(value.wrapping_add(addend)).is_ok(),
            (elf::R_X86_64_32S, Self::Number(value)) => {
                i32::try_from(value.wrapping_add(addend).cast_signed()).is_ok()
            }
            _ => true,
        }
    }
}

/// Types whose field has fewer bits than a kernel address.
const NARROW: [elf::RelocationType; 7] = [
    elf::R_AARCH64_ABS32,
    elf::R_AARCH64_ABS16,
    elf::R_AARCH64_MOVW_UABS_G0,
    elf::R_AARCH64_MOVW_UABS_G1,
    elf::R_AARCH64_MOVW_UABS_G2,
    elf::R_AARCH64_MOVW_SABS_G0,
    elf::R_AARCH64_MOVW_SABS_G1,
];
/// PC-relative types whose range is shorter than the distance between a module and the kernel.
const NEAR: [elf::RelocationType; 6] = [
    elf::R_AARCH64_PREL16,
    elf::R_AARCH64_MOVW_PREL_G0,
    elf::R_AARCH64_LD_PREL_LO19,
    elf::R_AARCH64_ADR_PREL_LO21,
    elf::R_AARCH64_TSTBR14,
    elf::R_AARCH64_CONDBR19,
];

/// Other PC-relative types that check their range, of up to 4 GiB.
const RANGED: [elf::RelocationType; 5] = [
    elf::R_AARCH64_PREL32,
    elf::R_AARCH64_ADR_PREL_PG_HI21,
    elf::R_AARCH64_MOVW_SABS_G2,
    elf::R_AARCH64_MOVW_PREL_G1,
    elf::R_AARCH64_MOVW_PREL_G2,
];

/// Follows `apply_relocate_add` in `arch/arm64/kernel/module.c`, whose types are the same from Linux 5.10 to 7.2.
fn arm64<'d, R: ModuleBytes<'d>>(
    relocation: &Relocation,
    symbols: &Symbols<'d>,
    elf: &Elf<'d, R>,
    target: &Target,
    weak_pc_relative: &mut BTreeSet<String>,
) -> Option<RelocationProblem> {
    let &Relocation { offset, kind, symbol, addend } = relocation;
    let kind = elf::RelocationType(kind);
    let size = match kind {
        // 256 is R_ARM_NONE.
        elf::R_AARCH64_NONE | elf::RelocationType(256) => return target.without_effect(),
        elf::R_AARCH64_ABS64 | elf::R_AARCH64_PREL64 => 8,
        elf::R_AARCH64_ABS16 | elf::R_AARCH64_PREL16 => 2,
        elf::R_AARCH64_ABS32
        | elf::R_AARCH64_PREL32
        | elf::R_AARCH64_MOVW_UABS_G0
        | elf::R_AARCH64_MOVW_UABS_G0_NC
        | elf::R_AARCH64_MOVW_UABS_G1
        | elf::R_AARCH64_MOVW_UABS_G1_NC
        | elf::R_AARCH64_MOVW_UABS_G2
        | elf::R_AARCH64_MOVW_UABS_G2_NC
        | elf::R_AARCH64_MOVW_UABS_G3
        | elf::R_AARCH64_MOVW_SABS_G0
        | elf::R_AARCH64_MOVW_SABS_G1
        | elf::R_AARCH64_MOVW_SABS_G2
        | elf::R_AARCH64_MOVW_PREL_G0
        | elf::R_AARCH64_MOVW_PREL_G0_NC
        | elf::R_AARCH64_MOVW_PREL_G1
        | elf::R_AARCH64_MOVW_PREL_G1_NC
        | elf::R_AARCH64_MOVW_PREL_G2
        | elf::R_AARCH64_MOVW_PREL_G2_NC
        | elf::R_AARCH64_MOVW_PREL_G3
        | elf::R_AARCH64_LD_PREL_LO19
        | elf::R_AARCH64_ADR_PREL_LO21
        | elf::R_AARCH64_ADR_PREL_PG_HI21
        | elf::R_AARCH64_ADR_PREL_PG_HI21_NC
        | elf::R_AARCH64_ADD_ABS_LO12_NC
        | elf::R_AARCH64_LDST8_ABS_LO12_NC
        | elf::R_AARCH64_LDST16_ABS_LO12_NC
        | elf::R_AARCH64_LDST32_ABS_LO12_NC
        | elf::R_AARCH64_LDST64_ABS_LO12_NC
        | elf::R_AARCH64_LDST128_ABS_LO12_NC
        | elf::R_AARCH64_TSTBR14
        | elf::R_AARCH64_CONDBR19
        | elf::R_AARCH64_JUMP26
        | elf::R_AARCH64_CALL26 => 4,
        _ => return Some(RelocationProblem::Unsupported),
    };
    if let Some(symbol) = symbols.get(symbol) {
        let value = Value::of(&symbol, elf);
        let is_far = value == Value::LoaderCopy || symbol.location == SymbolLocation::Undefined;
        let is_small = |number: u64| number.cast_signed().unsigned_abs() < 1 << 33;
        let is_distant = matches!(value, Value::Kernel(distance) if !is_small(distance.wrapping_add(addend)));
        let is_ranged = RANGED.contains(&kind) || NEAR.contains(&kind);
        let is_call = [elf::R_AARCH64_CALL26, elf::R_AARCH64_JUMP26].contains(&kind);
        // The loader reserves jumps for calls of other sections.
        let is_local = symbol.location == SymbolLocation::Section(target.section);
        match value {
            _ if is_distant && (is_ranged || is_call && is_local) => {
                return Some(RelocationProblem::Overflow);
            }
            _ if is_call && (is_far || is_distant) && !target.is_executable => {
                return Some(RelocationProblem::MayOverflow);
            }
            Value::Number(number) if is_ranged && is_small(number.wrapping_add(addend)) => {
                return Some(RelocationProblem::Overflow);
            }
            Value::Kernel(_) | Value::LoaderCopy if NARROW.contains(&kind) => {
                return Some(RelocationProblem::Overflow);
            }
            Value::Kernel(_) | Value::LoaderCopy if is_far && NEAR.contains(&kind) => {
                return Some(RelocationProblem::Overflow);
            }
            Value::Kernel(_) if NEAR.contains(&kind) && !is_local => {
                return Some(RelocationProblem::MayOverflow);
            }
            // The distance to the loader's copy may be too long for these types.
            Value::LoaderCopy if target.is_followed || RANGED.contains(&kind) => {
                return Some(RelocationProblem::NotLoaded);
            }
            _ => {}
        }
        if kind == elf::R_AARCH64_ADR_PREL_PG_HI21
            && symbol.weak
            && symbol.location == SymbolLocation::Undefined
        {
            weak_pc_relative.insert(String::from_utf8_lossy(symbol.name).into_owned());
        }
    }
    if !target.contains(offset, size) {
        return Some(RelocationProblem::OutsideSection);
    }
    target.changed.is_none().then_some(RelocationProblem::Overlap)
}

/// Error for a module whose relocations make the parser read the same bytes again and again.
pub(super) fn read_limit_exceeded() -> ModuleError {
    ModuleError::unknown("the module's relocations are not ordered by offset", NOT_READ)
}
