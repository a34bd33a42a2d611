//! Pure: relocations that the kernel's loader refuses (`apply_relocations` in `kernel/module/main.c`, and `apply_relocate_add`
//! in `arch/*/kernel/module.c`).

use std::ops::Range;

use object::elf;

use super::{
    Architecture, ModuleError,
    elf::{Elf, NOT_READ, Place, Symbols},
    error::Result,
    file::ModuleBytes,
};

/// Size of `Elf64_Rela` in bytes: an offset, a symbol with a type, and an addend.
const ENTRY: usize = 24;
/// Number of entries that are read at once.
const ENTRIES: usize = 2048;
/// Number of bytes of a changed section that are read at once.
const WINDOW: u64 = 64 << 10;
/// Limit for the bytes that are read, as a multiple of the file's length. Linkers order relocations by offset, so two suffices.
const READS: u64 = 16;

/// First relocation of a module that the loader refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRelocation {
    /// Section that the relocation changes.
    pub section: String,
    /// Offset in that section.
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
    /// x86-64: the address of the symbol does not fit into 32 unsigned bits.
    Overflow,
    /// The bytes to change lie outside of the section. The loader does not check that, and overwrites other memory.
    OutsideSection,
}

/// Finds the first relocation that the loader refuses. Relocations of sections that are not loaded do not count.
pub(super) fn first_bad<'d, R: ModuleBytes<'d>>(
    elf: &Elf<'d, R>,
    arch: Architecture,
    symbols: &Symbols<'d>,
    length: u64,
) -> Result<Option<BadRelocation>> {
    let mut budget = length.saturating_mul(READS);
    let mut buffer = vec![0; ENTRIES * ENTRY];
    for section in elf.relocation_sections() {
        let bad = |offset, kind, problem| {
            let section = String::from_utf8_lossy(elf.name(section.target)).into_owned();
            Ok(Some(BadRelocation { section, offset, kind, problem }))
        };
        if !section.has_addends {
            return bad(0, 0, RelocationProblem::WithoutAddends);
        }
        let mut target = Target::of(elf, section.target);
        let mut at = section.bytes.start;
        while let Some(rest) = section.bytes.end.checked_sub(at).filter(|&rest| rest >= ENTRY as u64) {
            let entries = usize::try_from(rest / ENTRY as u64).unwrap_or(ENTRIES).min(ENTRIES);
            let bytes = buffer.get_mut(..entries * ENTRY).unwrap_or_default();
            elf.copy_at(at, bytes, &mut budget)?;
            at += bytes.len() as u64;
            for entry in bytes.chunks_exact(ENTRY) {
                let relocation = Relocation::parse(entry);
                let problem = match arch {
                    Architecture::Amd64 => amd64(&relocation, symbols, elf, &mut target, &mut budget)?,
                    Architecture::Arm64 => arm64(&relocation, &target),
                };
                if let Some(problem) = problem {
                    return bad(relocation.offset, relocation.kind, problem);
                }
            }
        }
    }
    Ok(None)
}

struct Relocation {
    offset: u64,
    kind: u32,
    symbol: u32,
}

impl Relocation {
    fn parse(entry: &[u8]) -> Self {
        let (words, _) = entry.as_chunks::<4>();
        let word = |index: usize| words.get(index).map_or(0, |&bytes| u32::from_le_bytes(bytes));
        let offset = u64::from(word(0)) | u64::from(word(1)) << 32;
        Self { offset, kind: word(2), symbol: word(3) }
    }
}

/// Section that relocations change, with the part of it that was read last.
struct Target {
    /// Size of the section.
    size: u64,
    /// Position of its bytes in the file; `None` if the file holds none, so that all of them are zero.
    start: Option<u64>,
    read: Range<u64>,
    bytes: Vec<u8>,
}

impl Target {
    fn of<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, section: usize) -> Self {
        let size = elf.size(section);
        Self { size, start: elf.start(section), read: 0..0, bytes: Vec::new() }
    }

    fn holds(&self, offset: u64, size: u64) -> bool {
        offset.checked_add(size).is_some_and(|end| end <= self.size)
    }

    /// Whether the bytes are zero. The section holds them ([`Target::holds`]).
    fn is_zero<'d, R: ModuleBytes<'d>>(
        &mut self,
        elf: &Elf<'d, R>,
        offset: u64,
        size: u64,
        budget: &mut u64,
    ) -> Result<bool> {
        let Some(start) = self.start else { return Ok(true) };
        if offset < self.read.start || offset + size > self.read.end {
            let length = (self.size - offset).min(WINDOW);
            self.bytes.resize(usize::try_from(length).unwrap_or_default(), 0);
            elf.copy_at(start + offset, &mut self.bytes, budget)?;
            self.read = offset..offset + length;
        }
        let first = usize::try_from(offset - self.read.start).unwrap_or_default();
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
    let &Relocation { offset, kind, symbol } = relocation;
    let size = match elf::RelocationType(kind) {
        elf::R_X86_64_NONE => return Ok(None),
        elf::R_X86_64_64 | elf::R_X86_64_PC64 => 8,
        elf::R_X86_64_32 | elf::R_X86_64_32S | elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => 4,
        _ => return Ok(Some(RelocationProblem::Unsupported)),
    };
    // The kernel and its modules are in the upper half of the address space. Other symbols may have small values.
    let is_high = || match symbols.place(symbol) {
        Some((Place::Section(index), _)) => elf.name(index) != b".data..percpu",
        Some((Place::Undefined, is_weak)) => symbol != 0 && !is_weak,
        _ => false,
    };
    if kind == elf::R_X86_64_32.0 && is_high() {
        return Ok(Some(RelocationProblem::Overflow));
    }
    if !target.holds(offset, size) {
        return Ok(Some(RelocationProblem::OutsideSection));
    }
    let is_zero = target.is_zero(elf, offset, size, budget)?;
    Ok((!is_zero).then_some(RelocationProblem::TargetNotZero))
}

/// Follows `apply_relocate_add` in `arch/arm64/kernel/module.c`, whose types are the same from Linux 5.10 to 7.2.
fn arm64(relocation: &Relocation, target: &Target) -> Option<RelocationProblem> {
    let &Relocation { offset, kind, .. } = relocation;
    let size = match elf::RelocationType(kind) {
        // R_ARM_NONE, too.
        elf::R_AARCH64_NONE | elf::RelocationType(256) => return None,
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
    (!target.holds(offset, size)).then_some(RelocationProblem::OutsideSection)
}

/// Error for a file whose relocations make the parser read too much.
pub(super) fn too_much() -> ModuleError {
    ModuleError::unknown("the module's relocations are in no order", NOT_READ)
}
