//! Pure: BTF, the type information of a kernel and of its modules (`include/uapi/linux/btf.h`, `btf_parse_module` in
//! `kernel/bpf/btf.c`): sizes of structures, and whether a module's counts on from its kernel's.
//!
//! A reader of our own: a kernel has 100,000 types, of which two sizes and one structure are asked for, and crates that read
//! BTF take a whole graph of types into memory.

use serde::{Deserialize, Serialize};

/// `BTF_MAGIC`, little-endian.
const MAGIC: [u8; 2] = 0xeb9f_u16.to_le_bytes();
/// The one version that there is (`BTF_VERSION`).
const VERSION: u8 = 1;
/// Bytes of `struct btf_header` since its first version; later ones may be longer.
const HEADER: usize = 24;
/// Bytes of `struct btf_type`.
const TYPE: usize = 12;

const STRUCT: u32 = 4;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;

/// The measures of a kernel's type information (BTF).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BtfBase {
    /// How many types it has, with `void`, which is number 0.
    pub types: u32,
    /// Bytes of its strings.
    pub strings: u32,
}

/// A kernel's checked BTF section. It borrows the section's bytes and holds nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    count: u32,
}

/// Why bytes are no BTF that a kernel takes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the type information {0}")]
pub struct BtfError(String);

/// The header contradicts the section's length.
fn outside() -> BtfError {
    BtfError("has a header that points outside it".to_owned())
}

fn without_end() -> BtfError {
    BtfError("has strings that do not end".to_owned())
}

impl BtfBase {
    /// Measures a kernel's own BTF (section `.BTF` of `vmlinux`, `/sys/kernel/btf/vmlinux`).
    pub fn of(section: &[u8]) -> Result<Self, BtfError> {
        Btf::parse(section).map(|btf| btf.base())
    }
}

impl<'a> Btf<'a> {
    /// Reads a section: its header, and every type once. What follows the strings is passed over. It takes no memory.
    pub fn parse(section: &'a [u8]) -> Result<Self, BtfError> {
        let (types, strings) = parts(section)?;
        if strings.first() != Some(&0) {
            return Err(without_end());
        }
        // Type 0 is `void`, which is not written down.
        let count = Types::of(types).try_fold(1, |count, found| found.map(|_| count + 1))?;
        Ok(Self { types, strings, count })
    }

    /// What a module's BTF that was made against this one continues: its types and strings are numbered from here.
    pub fn base(&self) -> BtfBase {
        BtfBase { types: self.count, strings: u32::try_from(self.strings.len()).unwrap_or(u32::MAX) }
    }

    /// Bytes of the structure of this name; `None` when there is none.
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

/// What can be told of a module's BTF without its kernel's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

impl SplitBtf {
    /// Walks over all types once. Memory: at most as much as the section, for its functions and prototypes.
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
        // Pointers, typedefs, qualifiers, functions and their prototypes, variables, tags.
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

    /// Numbers and offsets go on where the base's end, so a base of another size shifts them all: they point
    /// beyond the end, or functions no longer have prototypes, and the kernel finds that out. Every string is
    /// mentioned by some type, so the highest offset is the last string's, and tells the size of the base's
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
        let ends = *strings == 0 || highest_name.checked_sub(*last_string) == Some(base.strings);
        if u64::from(*highest_type) >= last && ends { Fit::Yes } else { Fit::Doubtful }
    }
}

/// What a word behind a type is.
enum Word {
    /// The offset of a name.
    Name,
    /// The number of a type.
    Type,
    /// A size, a value, a linkage.
    Other,
}

/// One type, with what follows it.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// `size` of structures and the like, a type's number in others.
    size: u32,
    /// What the words of `rest` are, over and over.
    words: &'static [Word],
    rest: &'a [u8],
}

/// The words that follow a type of this kind, and whether they follow once for each of its elements (`btf_type_size` in
/// libbpf's `btf.c`).
fn following(kind: u32) -> Option<(&'static [Word], bool)> {
    use Word::{Name, Other, Type};
    Some(match kind {
        // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG
        2 | 7..=FUNC | 16 | 18 => (&[], false),
        // INT, VAR, DECL_TAG: what the bits mean, the linkage, which part the tag is for.
        1 | 14 | 17 => (&[Other], false),
        // ARRAY: element, index, how many.
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

/// Walks the types; the first that cannot be read is the last.
struct Types<'a> {
    rest: &'a [u8],
    id: u32,
}

impl<'a> Types<'a> {
    fn of(types: &'a [u8]) -> Self {
        Self { rest: types, id: 1 }
    }

    fn read(&mut self) -> Result<Type<'a>, BtfError> {
        // Own types are counted from 1.
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

/// The types and the strings of a section, checked as `btf_parse_hdr` does. A module's strings may be none.
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

/// A little-endian number.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// An offset as a place in memory.
fn place(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "btf_split_tests.rs"]
mod split_tests;
#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
