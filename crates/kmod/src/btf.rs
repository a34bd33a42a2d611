//! Pure: BTF, the type information of a kernel and of its modules (`include/uapi/linux/btf.h`, `btf_parse_module` in
//! `kernel/bpf/btf.c`). Reads sizes of structures, and checks whether a module's BTF matches its kernel's BTF.
//!
//! This is a custom parser, because existing crates load the whole graph of types into memory. A kernel has 100,000
//! types, of which farrier needs two sizes and one structure.

use serde::{Deserialize, Serialize};

/// `BTF_MAGIC`, little-endian.
const MAGIC: [u8; 2] = 0xeb9f_u16.to_le_bytes();
/// Only version that exists (`BTF_VERSION`).
const VERSION: u8 = 1;
/// Bytes of the first version of `struct btf_header`; later versions may be longer.
const HEADER: usize = 24;
/// Bytes of `struct btf_type`.
const TYPE: usize = 12;

const STRUCT: u32 = 4;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;

/// Sizes of a kernel's type information (BTF). A module's BTF continues its numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BtfBase {
    /// Number of types, including `void`, which is type 0.
    pub types: u32,
    /// Size of the strings in bytes.
    pub strings: u32,
}

/// A validated BTF section of a kernel. Borrows the section's bytes and allocates nothing.
#[derive(Clone, Copy, Debug)]
pub struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    count: u32,
}

/// Error for bytes that a kernel would not accept as BTF.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the type information {0}")]
pub struct BtfError(String);

/// Error for a header that contradicts the section's length.
fn outside() -> BtfError {
    BtfError("has a header that points outside it".to_owned())
}

fn without_end() -> BtfError {
    BtfError("has strings that do not end".to_owned())
}

impl BtfBase {
    /// Measures a kernel's own BTF (section `.BTF` of `vmlinux`, or `/sys/kernel/btf/vmlinux`).
    pub fn of(section: &[u8]) -> Result<Self, BtfError> {
        Btf::parse(section).map(|btf| btf.base())
    }
}

impl<'a> Btf<'a> {
    /// Validates a section: its header, and each type once. Bytes after the strings are ignored. Allocates nothing.
    pub fn parse(section: &'a [u8]) -> Result<Self, BtfError> {
        let (types, strings) = parts(section)?;
        if strings.first() != Some(&0) {
            return Err(without_end());
        }
        // Type 0 is `void`, which is implicit.
        let count = Types::of(types).try_fold(1, |count, found| found.map(|_| count + 1))?;
        Ok(Self { types, strings, count })
    }

    /// Returns the sizes at which the numbering of a module's BTF starts, if it was built against this BTF.
    pub fn base(&self) -> BtfBase {
        BtfBase { types: self.count, strings: u32::try_from(self.strings.len()).unwrap_or(u32::MAX) }
    }

    /// Size in bytes of the structure of this name; `None` if there is none.
    pub fn size_of_struct(&self, name: &str) -> Option<u64> {
        let mut types = Types::of(self.types).filter_map(Result::ok);
        let found = types.find(|found| found.kind == STRUCT && self.is_named(found.name, name))?;
        Some(u64::from(found.size))
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let rest = self.strings.get(place(offset)..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }
}

/// Facts about a module's BTF that can be read without the kernel's BTF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitBtf {
    /// Number of the module's own types.
    types: u32,
    /// Size of the module's own strings in bytes.
    strings: u32,
    /// Offset of the last string within the module's own strings.
    last_string: u32,
    /// Highest type number that the module refers to.
    highest_type: u32,
    /// Highest name offset that the module refers to.
    highest_name: u32,
    /// Type numbers of the functions' types; each must be a prototype.
    functions: Vec<u32>,
    /// Indexes of the prototypes among the module's own types, from 0, ascending.
    prototypes: Vec<u32>,
}

/// Whether a module's BTF can continue a kernel's BTF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The module's BTF was built for a base of this size.
    Yes,
    /// The kernel would reject the module's BTF.
    No(&'static str),
    /// The module's BTF seems valid, but was built for a base of another size.
    Doubtful,
}

impl SplitBtf {
    /// Reads each type once. Memory: at most the section's size, for its functions and prototypes.
    pub(super) fn read(section: &[u8]) -> Result<Self, BtfError> {
        let (types, strings) = parts(section)?;
        let last = strings.split_last().and_then(|(_, rest)| rest.iter().rposition(|&byte| byte == 0));
        let size = |length: usize| u32::try_from(length).map_err(|_| outside());
        let mut found = Self {
            strings: size(strings.len())?,
            last_string: size(last.map_or(0, |zero| zero + 1))?,
            ..Self::default()
        };
        for own in Types::of(types) {
            found.add(&own?);
        }
        Ok(found)
    }

    fn add(&mut self, own: &Type<'_>) {
        self.highest_name = self.highest_name.max(own.name);
        match own.kind {
            FUNC => self.functions.push(own.size),
            FUNC_PROTO => self.prototypes.push(self.types),
            _ => {}
        }
        // Kinds whose `size` field is a type number: pointers, typedefs, qualifiers, functions and their prototypes,
        // variables, tags.
        if matches!(own.kind, 2 | 8..=11 | FUNC | FUNC_PROTO | 14 | 17 | 18) {
            self.highest_type = self.highest_type.max(own.size);
        }
        for (word, bytes) in own.words.iter().cycle().zip(own.rest.chunks_exact(4)) {
            match (word, u32_at(bytes, 0).unwrap_or_default()) {
                (Word::Name, offset) => self.highest_name = self.highest_name.max(offset),
                (Word::Type, number) => self.highest_type = self.highest_type.max(number),
                (Word::Other, _) => {}
            }
        }
        self.types += 1;
    }

    /// Checks whether the module's BTF continues a base of this size.
    ///
    /// Type numbers and name offsets continue where the base's end, so a base of another size shifts all of them. Some
    /// then point beyond the end, or a function's type is no longer a prototype, and the kernel rejects the BTF. Every
    /// string is used by some type. The highest name offset is therefore the last string's, which reveals the exact
    /// size of the base's strings.
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
            return Fit::No("has functions whose types are not prototypes");
        }
        // Every prototype is used as some type, so the highest type number is at least the last prototype's.
        let last = prototypes.last().map_or(0, |own| u64::from(base.types) + u64::from(*own));
        let ends = *strings == 0 || highest_name.checked_sub(*last_string) == Some(base.strings);
        if u64::from(*highest_type) >= last && ends { Fit::Yes } else { Fit::Doubtful }
    }
}

/// Meaning of a word that follows a type.
enum Word {
    /// Offset of a name.
    Name,
    /// Number of a type.
    Type,
    /// Size, value or linkage.
    Other,
}

/// A type, with the words that follow it.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// Size of structures and the like, or the number of a type.
    size: u32,
    /// Meaning of the words of `rest`, repeated.
    words: &'static [Word],
    rest: &'a [u8],
}

/// Returns the words that follow a type of this kind, and whether they repeat for each of its elements (`btf_type_size`
/// in libbpf's `btf.c`).
fn following(kind: u32) -> Option<(&'static [Word], bool)> {
    use Word::{Name, Other, Type};
    Some(match kind {
        // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG
        2 | 7..=FUNC | 16 | 18 => (&[], false),
        // INT, VAR, DECL_TAG: encoding of the bits, linkage, index of the tagged component.
        1 | 14 | 17 => (&[Other], false),
        // ARRAY: element type, index type, number of elements.
        3 => (&[Type, Type, Other], false),
        // STRUCT, UNION: name, type and offset of each member.
        STRUCT | 5 => (&[Name, Type, Other], true),
        // ENUM: name, value.
        6 => (&[Name, Other], true),
        // FUNC_PROTO: name and type of each parameter.
        FUNC_PROTO => (&[Name, Type], true),
        // DATASEC: type, offset, size.
        15 => (&[Type, Other, Other], true),
        // ENUM64: name, low half, high half.
        19 => (&[Name, Other, Other], true),
        _ => return None,
    })
}

/// Iterator over the types; it ends after the first type that cannot be read.
struct Types<'a> {
    rest: &'a [u8],
    id: u32,
}

impl<'a> Types<'a> {
    fn of(types: &'a [u8]) -> Self {
        Self { rest: types, id: 1 }
    }

    fn read(&mut self) -> Result<Type<'a>, BtfError> {
        // Type numbers count from 1.
        let id = self.id;
        let truncated = || BtfError(format!("ends within a type ({id})"));
        let field = |at| u32_at(self.rest, at).ok_or_else(truncated);
        let (name, info, size) = (field(0)?, field(4)?, field(8)?);
        let kind = info >> 24 & 0x1f;
        let (words, repeated) = following(kind)
            .ok_or_else(|| BtfError(format!("has a type of an unknown kind (type {id}, kind {kind})")))?;
        let count = if repeated { place(info & 0xffff) } else { 1 };
        let (whole, after) =
            self.rest.split_at_checked(TYPE + 4 * words.len() * count).ok_or_else(truncated)?;
        self.rest = after;
        self.id += 1;
        Ok(Type { name, kind, size, words, rest: whole.get(TYPE..).unwrap_or_default() })
    }
}

impl<'a> Iterator for Types<'a> {
    type Item = Result<Type<'a>, BtfError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let found = self.read();
        if found.is_err() {
            self.rest = &[];
        }
        Some(found)
    }
}

/// Returns the types and the strings of a section, validated as `btf_parse_hdr` does. A module may have no strings.
fn parts(section: &[u8]) -> Result<(&[u8], &[u8]), BtfError> {
    if !section.starts_with(&MAGIC) {
        return Err(BtfError("does not start as BTF does".to_owned()));
    }
    match section.get(2..4) {
        Some([VERSION, 0]) => {}
        Some(&[version, _]) if version != VERSION => {
            return Err(BtfError(format!("has BTF version {version}, only {VERSION} is known")));
        }
        _ => return Err(outside()),
    }
    let field = |at: usize| u32_at(section, at).map(place).ok_or_else(outside);
    let header = field(4)?;
    let part = |offset: usize, size: usize| {
        let start = header.checked_add(offset)?;
        section.get(start..start.checked_add(size)?)
    };
    let types = part(field(8)?, field(12)?).filter(|_| header >= HEADER).ok_or_else(outside)?;
    let strings = part(field(16)?, field(20)?).ok_or_else(outside)?;
    if strings.last().is_some_and(|&last| last != 0) { Err(without_end()) } else { Ok((types, strings)) }
}

/// Reads a little-endian number.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// Converts an offset for use as an index.
fn place(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "btf_split_tests.rs"]
mod split_tests;
#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
