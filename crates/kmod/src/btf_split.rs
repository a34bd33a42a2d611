//! Pure: a module's type information (BTF), which counts on from that of its kernel, and whether it can.
//!
//! Facts: `include/uapi/linux/btf.h`, `btf_parse_module` in `kernel/bpf/btf.c`.

use super::BtfBase;

const MAGIC: [u8; 2] = 0xeb9f_u16.to_le_bytes();
/// Magic, version, flags, length of the header; offset and length of the types; the same of the strings.
const HEADER: usize = 24;

const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;

/// Why bytes are no BTF that a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the type information {0}")]
pub struct BtfFault(pub &'static str);

/// What can be told of a module's BTF without its kernel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitBtf {
    /// Types of its own.
    types: u32,
    /// Bytes of its own strings.
    strings: u32,
    /// Where the last of its own strings starts among them.
    last_string: u32,
    /// The greatest number of a type that it mentions.
    highest_type: u32,
    /// The greatest offset of a name that it mentions.
    highest_name: u32,
    /// The types of its functions: each must be a prototype.
    functions: Vec<u32>,
    /// Which of its own types are prototypes, counted from 0, ascending.
    prototypes: Vec<u32>,
}

/// Whether a module's BTF can count on from a kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// It was made for a base of this size.
    Yes,
    /// The kernel would find it invalid.
    No(&'static str),
    /// Valid as far as can be seen, and made for a base of another size.
    Doubtful,
}

impl BtfBase {
    /// Measures a kernel's own BTF (section `.BTF` of `vmlinux`, `/sys/kernel/btf/vmlinux`).
    pub fn of(btf: &[u8]) -> Result<Self, BtfFault> {
        let own = SplitBtf::read(btf)?;
        Ok(Self { types: own.types.saturating_add(1), strings: own.strings })
    }
}

impl SplitBtf {
    /// Walks over all types once.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, BtfFault> {
        let (types, strings) = sections(bytes)?;
        if strings.last().is_some_and(|&last| last != 0) {
            return Err(BtfFault("has strings that do not end"));
        }
        let last_string = strings
            .split_last()
            .and_then(|(_, rest)| rest.iter().rposition(|&byte| byte == 0))
            .map_or(0, |zero| zero + 1);
        let size = |length: usize| u32::try_from(length).map_err(|_| BtfFault("has more than 4 GiB"));
        let mut found = Self {
            types: 0,
            strings: size(strings.len())?,
            last_string: size(last_string)?,
            highest_type: 0,
            highest_name: 0,
            functions: Vec::new(),
            prototypes: Vec::new(),
        };
        let mut words = types.chunks_exact(4).map(word);
        while let Some(name) = words.next() {
            found.add(name, &mut words)?;
        }
        Ok(found)
    }

    /// One type: `struct btf_type` and what follows it.
    fn add(&mut self, name: u32, words: &mut impl Iterator<Item = u32>) -> Result<(), BtfFault> {
        let mut next = || words.next().ok_or(BtfFault("ends within a type"));
        let (info, size_or_type) = (next()?, next()?);
        let (kind, count) = (info >> 24 & 0x1f, info & 0xffff);
        self.name(name);
        match kind {
            // Pointers, typedefs, qualifiers, functions and their prototypes, variables, tags.
            2 | 8..=11 | FUNC | FUNC_PROTO | 14 | 17 | 18 => self.mention(size_or_type),
            1 | 3..=7 | 15 | 16 | 19 => {}
            _ => return Err(BtfFault("has a type of an unknown kind")),
        }
        match kind {
            FUNC => self.functions.push(size_or_type),
            FUNC_PROTO => self.prototypes.push(self.types),
            _ => {}
        }
        match kind {
            // What an integer's bits mean, a variable's linkage, which part a tag is for.
            1 | 14 | 17 => drop(next()?),
            // An array: element, index, how many.
            3 => {
                self.mention(next()?);
                self.mention(next()?);
                next()?;
            }
            // Members: name, type, offset.
            4 | 5 => {
                for _ in 0..count {
                    self.name(next()?);
                    self.mention(next()?);
                    next()?;
                }
            }
            // Enumerators: name, value.
            6 => {
                for _ in 0..count {
                    self.name(next()?);
                    next()?;
                }
            }
            // Parameters: name, type.
            FUNC_PROTO => {
                for _ in 0..count {
                    self.name(next()?);
                    self.mention(next()?);
                }
            }
            // What lies in a section: type, offset, size.
            15 => {
                for _ in 0..count {
                    self.mention(next()?);
                    next()?;
                    next()?;
                }
            }
            // 64-bit enumerators: name, low half, high half.
            19 => {
                for _ in 0..count {
                    self.name(next()?);
                    next()?;
                    next()?;
                }
            }
            _ => {}
        }
        self.types += 1;
        Ok(())
    }

    fn name(&mut self, offset: u32) {
        self.highest_name = self.highest_name.max(offset);
    }

    fn mention(&mut self, number: u32) {
        self.highest_type = self.highest_type.max(number);
    }

    /// Numbers and offsets go on where the base's end, so a base of another size shifts them all: they point
    /// beyond the end, or functions no longer have prototypes, and the kernel finds that out. Every string is
    /// mentioned by somebody, so the highest offset is the last string's, and tells the size of the base's
    /// strings exactly.
    pub(super) fn fit(&self, base: BtfBase) -> Fit {
        let Self { types, strings, last_string, highest_type, highest_name, functions, prototypes } = self;
        let beyond =
            |highest: u32, base: u32, own: u32| u64::from(highest) >= u64::from(base) + u64::from(own);
        if beyond(*highest_type, base.types, *types) {
            return Fit::No("mentions types that neither it nor the kernel has");
        }
        if *highest_name > 0 && beyond(*highest_name, base.strings, *strings) {
            return Fit::No("mentions names that neither it nor the kernel has");
        }
        let own = functions.iter().filter_map(|function| function.checked_sub(base.types));
        if own.into_iter().any(|own| prototypes.binary_search(&own).is_err()) {
            return Fit::No("has functions whose types are no prototypes");
        }
        // A prototype is there because something is of its type.
        let last = prototypes.last().map_or(0, |own| u64::from(base.types) + u64::from(*own));
        if u64::from(*highest_type) < last {
            return Fit::Doubtful;
        }
        if *strings == 0 || highest_name.checked_sub(*last_string) == Some(base.strings) {
            Fit::Yes
        } else {
            Fit::Doubtful
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

/// The types and the strings, checked as `btf_parse_hdr` does.
fn sections(bytes: &[u8]) -> Result<(&[u8], &[u8]), BtfFault> {
    let header = bytes.get(..HEADER).ok_or(BtfFault("is shorter than its header"))?;
    if header.get(..2) != Some(&MAGIC) {
        return Err(BtfFault("does not start as BTF does"));
    }
    if header.get(2..4) != Some(&[1, 0]) {
        return Err(BtfFault("is of an unknown version"));
    }
    let mut fields = header.chunks_exact(4).skip(1).map(|field| word(field) as usize);
    let mut field = || fields.next().unwrap_or_default();
    let (length, types_at, types_size, strings_at, strings_size) =
        (field(), field(), field(), field(), field());
    if length < HEADER || types_size % 4 != 0 {
        return Err(BtfFault("has a damaged header"));
    }
    let part = |start: usize, size: usize| {
        let start = length.checked_add(start)?;
        bytes.get(start..start.checked_add(size)?)
    };
    let parts = part(types_at, types_size).zip(part(strings_at, strings_size));
    parts.ok_or(BtfFault("has sections outside itself"))
}

#[cfg(test)]
mod tests;
