//! BTF, the type information of a kernel and of its modules (`include/uapi/linux/btf.h`, `btf_parse_module` in
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
const HEADER_SIZE: usize = 24;
/// Bytes of `struct btf_type`.
const TYPE_SIZE: usize = 12;

/// Kinds of types (`BTF_KIND_*`).
const INT: u32 = 1;
const PTR: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const FWD: u32 = 7;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const RESTRICT: u32 = 11;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;
const VAR: u32 = 14;
const DATASEC: u32 = 15;
const FLOAT: u32 = 16;
const DECL_TAG: u32 = 17;
const TYPE_TAG: u32 = 18;
const ENUM64: u32 = 19;

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

fn points_outside() -> BtfError {
    BtfError("has a header that points outside the section".to_owned())
}

fn unterminated_strings() -> BtfError {
    BtfError("has strings that are not NUL-terminated".to_owned())
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
        let (types, strings) = parse_sections(section)?;
        if strings.first() != Some(&0) {
            return Err(unterminated_strings());
        }
        // Type 0 is `void`, which is implicit.
        let count = Types::of(types).try_fold(1, |count, next| next.map(|_| count + 1))?;
        Ok(Self { types, strings, count })
    }

    /// Returns the sizes at which the numbering of a module's BTF starts, if it was built against this BTF.
    pub fn base(&self) -> BtfBase {
        BtfBase { types: self.count, strings: u32::try_from(self.strings.len()).unwrap_or(u32::MAX) }
    }

    /// Size in bytes of the structure of this name; `None` if there is none.
    pub fn size_of_struct(&self, name: &str) -> Option<u64> {
        let mut types = Types::of(self.types).filter_map(Result::ok);
        let structure = types.find(|next| next.kind == STRUCT && self.has_name(next.name, name))?;
        Some(u64::from(structure.size))
    }

    fn has_name(&self, offset: u32, name: &str) -> bool {
        let rest = self.strings.get(to_index(offset)..).unwrap_or_default();
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
    /// Highest name offset that the kernel validates.
    highest_validated: u32,
    /// Whether a name that the kernel validates is not an identifier. Holds only if the module's strings directly follow those
    /// of the base, which [`Self::fit`] checks.
    has_bad_name: bool,
    /// Type numbers to which functions refer; each must be a prototype.
    functions: Vec<u32>,
    /// Indexes of the prototypes among the module's own types, from 0, ascending.
    prototypes: Vec<u32>,
}

/// Whether a module's BTF can continue a kernel's BTF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The module's BTF was built for a base of this size.
    Matches,
    /// The kernel rejects the module's BTF, for this reason.
    Rejected(&'static str),
    /// The kernel accepts the module's BTF, which was built for a base of another size.
    OtherBase,
}

impl SplitBtf {
    /// Reads and validates a section. Memory: at most the section's size, for its functions and prototypes.
    pub(super) fn read(section: &[u8]) -> Result<Self, BtfError> {
        let (types, strings) = parse_sections(section)?;
        if !is_dense(section) {
            return Err(BtfError("has gaps between its parts, or unknown parts".to_owned()));
        }
        let last = strings.split_last().and_then(|(_, rest)| rest.iter().rposition(|&byte| byte == 0));
        let size = |length: usize| u32::try_from(length).map_err(|_| points_outside());
        let mut split = Self {
            strings: size(strings.len())?,
            last_string: size(last.map_or(0, |zero| zero + 1))?,
            ..Self::default()
        };
        for own_type in Types::of(types) {
            let own_type = own_type?;
            if !own_type.is_valid() {
                return Err(BtfError(format!(
                    "has a type that the kernel does not accept (number {})",
                    split.types + 1
                )));
            }
            split.add(&own_type);
        }
        // Only the kernel's own BTF shows the offset at which the module's strings begin. This is the offset if the highest name
        // is the last string.
        let first_own_string = split.highest_name.saturating_sub(split.last_string);
        let is_bad = |offset: u32| {
            let name = offset.checked_sub(first_own_string).and_then(|own| strings.get(to_index(own)..));
            name.is_some_and(|name| offset != 0 && !is_identifier(name))
        };
        let mut own_types = Types::of(types).filter_map(Result::ok);
        // Without separate strings, all names of the module are names of the kernel.
        split.has_bad_name =
            !strings.is_empty() && own_types.any(|own_type| own_type.identifier_offsets().any(is_bad));
        Ok(split)
    }

    fn add(&mut self, own_type: &Type<'_>) {
        self.highest_name = self.highest_name.max(own_type.name);
        self.highest_validated = self.highest_validated.max(own_type.name);
        // The kernel does not validate the names of parameters.
        let validates_members = own_type.kind != FUNC_PROTO;
        match own_type.kind {
            FUNC => self.functions.push(own_type.size),
            FUNC_PROTO => self.prototypes.push(self.types),
            _ => {}
        }
        // Kinds whose `size` field is a type number.
        if matches!(own_type.kind, PTR | TYPEDEF..=FUNC_PROTO | VAR | DECL_TAG | TYPE_TAG) {
            self.highest_type = self.highest_type.max(own_type.size);
        }
        for (word, bytes) in own_type.words.iter().cycle().zip(own_type.trailing.chunks_exact(4)) {
            match (word, u32_at(bytes, 0).unwrap_or_default()) {
                (Word::Name, offset) => {
                    self.highest_name = self.highest_name.max(offset);
                    if validates_members {
                        self.highest_validated = self.highest_validated.max(offset);
                    }
                }
                (Word::Type, number) => self.highest_type = self.highest_type.max(number),
                (Word::Other, _) => {}
            }
        }
        self.types += 1;
    }

    /// Checks whether the module's BTF continues a base of this size.
    ///
    /// A module's type numbers begin after the last type of the base, and its name offsets after the last string. A base of another
    /// size therefore shifts every number.
    ///
    /// - Names: the kernel rejects name offsets beyond the last string. Some type uses the last string, so the highest name offset
    ///   reveals the exact size of the base's strings.
    /// - Types: the kernel does not validate references to other types. A reference beyond the last type, or a function whose
    ///   type is not a prototype, reveals another base.
    pub(super) fn fit(&self, base: BtfBase) -> Fit {
        let Self { types, strings, last_string, highest_type, highest_name, functions, prototypes, .. } =
            self;
        let is_beyond =
            |highest: u32, base: u32, own: u32| u64::from(highest) >= u64::from(base) + u64::from(own);
        if self.highest_validated > 0 && is_beyond(self.highest_validated, base.strings, *strings) {
            return Fit::Rejected("refers to names beyond its own strings and the kernel's");
        }
        let has_base_strings = *strings == 0 || highest_name.checked_sub(*last_string) == Some(base.strings);
        if has_base_strings && self.has_bad_name {
            return Fit::Rejected("has names that are not identifiers");
        }
        let mut own_types = functions.iter().filter_map(|function| function.checked_sub(base.types));
        if is_beyond(*highest_type, base.types, *types)
            || own_types.any(|own| prototypes.binary_search(&own).is_err())
        {
            return Fit::OtherBase;
        }
        // Each prototype is referred to, so the highest referenced type number is at least the number of the last prototype.
        let last = prototypes.last().map_or(0, |own| u64::from(base.types) + u64::from(*own));
        if u64::from(*highest_type) >= last && has_base_strings { Fit::Matches } else { Fit::OtherBase }
    }
}

/// Maximum length of an identifier (`KSYM_NAME_LEN`).
const MAX_NAME: usize = 512;
/// Highest number of a type (`BTF_MAX_TYPE`).
const MAX_TYPE: u32 = 0x000f_ffff;

/// Meaning of a 32-bit word that follows a type's fixed part.
enum Word {
    /// Offset of a name.
    Name,
    /// Number of a type.
    Type,
    /// Size, value or linkage.
    Other,
}

/// A type (`struct btf_type`), with the words that follow its fixed part.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// Number of elements, or the linkage of a function.
    count: u32,
    /// `kind_flag`: the members of a structure have sizes, or an enumeration has signed values.
    flag: bool,
    /// Whether bits are set that have no meaning before Linux 7.2. Linux 7.2 uses them for the number of elements.
    has_unknown_bits: bool,
    /// Size in bytes, or the number of another type, depending on the kind.
    size: u32,
    /// Meaning of the words of `trailing`; repeats for each element.
    words: &'static [Word],
    trailing: &'a [u8],
}

/// Whether a name that ends with a zero byte is an identifier (`btf_name_valid_identifier`). The kernel's letters include those
/// of Latin-1 (`lib/ctype.c`).
fn is_identifier(name: &[u8]) -> bool {
    // Many types may have the same long name.
    let end = name.iter().take(MAX_NAME + 1).position(|&byte| byte == 0);
    let is_letter =
        |byte: u8| byte.is_ascii_alphabetic() || matches!(byte, 0xc0..=0xd6 | 0xd8..=0xf6 | 0xf8..);
    let may_begin = |byte: u8| is_letter(byte) || matches!(byte, b'_' | b'.');
    match end.and_then(|end| name.get(..end)) {
        Some([first, rest @ ..]) => {
            may_begin(*first) && rest.iter().all(|&byte| may_begin(byte) || byte.is_ascii_digit())
        }
        _ => false,
    }
}

impl Type<'_> {
    /// Offsets of the names that must be identifiers.
    fn identifier_offsets(&self) -> impl Iterator<Item = u32> {
        let own = matches!(self.kind, STRUCT..=TYPEDEF | FUNC | VAR | ENUM64).then_some(self.name);
        let has_named_members = matches!(self.kind, STRUCT..=ENUM | ENUM64);
        let member_size = 4 * self.words.len().max(1);
        let members = self
            .trailing
            .chunks_exact(member_size)
            .filter(move |_| has_named_members)
            .filter_map(|member| u32_at(member, 0));
        own.into_iter().chain(members)
    }

    /// Whether the kernel accepts the type (`btf_check_meta`), as far as that does not depend on names.
    fn is_valid(&self) -> bool {
        let word = |index: usize| u32_at(self.trailing, 4 * index).unwrap_or_default();
        let is_type = |number: u32| (1..=MAX_TYPE).contains(&number);
        let is_named = self.name != 0;
        let is_plain = self.count == 0 && !self.flag;
        if self.has_unknown_bits {
            return false;
        }
        match self.kind {
            INT => is_plain && self.is_integer(word(0)),
            PTR | VOLATILE..=RESTRICT => is_plain && !is_named && self.size <= MAX_TYPE,
            ARRAY => is_plain && !is_named && self.size == 0 && is_type(word(0)) && is_type(word(1)),
            STRUCT | UNION => self.has_valid_members(),
            ENUM | ENUM64 => {
                let names = self.trailing.chunks_exact(4 * self.words.len());
                let mut names = names.map(|value| u32_at(value, 0).unwrap_or_default());
                self.size <= 8 && self.size.is_power_of_two() && names.all(|name| name != 0)
            }
            FWD => self.count == 0 && self.size == 0 && is_named,
            TYPEDEF => is_plain && is_named && self.size <= MAX_TYPE,
            // Static or global.
            FUNC => is_named && self.count <= 1 && !self.flag,
            FUNC_PROTO => !is_named && !self.flag,
            VAR => is_plain && is_named && is_type(self.size) && word(0) <= 1,
            DATASEC => self.size != 0 && !self.flag && is_named && self.has_valid_variables(),
            FLOAT => is_plain && matches!(self.size, 2 | 4 | 8 | 12 | 16),
            DECL_TAG => self.count == 0 && is_named && word(0).cast_signed() >= -1,
            TYPE_TAG => self.count == 0 && is_named && self.size <= MAX_TYPE,
            _ => true,
        }
    }

    /// Checks the encoding, the offset and the number of bits of an integer (`btf_int_check_meta`).
    fn is_integer(&self, data: u32) -> bool {
        let bits = (data & 0xff) + (data >> 16 & 0xff);
        // Bits without a meaning are zero (`BTF_INT_MASK`).
        data & 0xf000_ff00 == 0
            && matches!(data >> 24 & 0xf, 0 | 1 | 2 | 4)
            && bits <= 128
            && bits.div_ceil(8) <= self.size
    }

    /// Checks the types and offsets of the members of a structure or union (`btf_struct_check_meta`).
    fn has_valid_members(&self) -> bool {
        let mut last = 0;
        self.trailing.chunks_exact(12).all(|member| {
            let (number, position) =
                (u32_at(member, 4).unwrap_or_default(), u32_at(member, 8).unwrap_or_default());
            // Members with a size have it in the upper bits.
            let offset = if self.flag { position & 0x00ff_ffff } else { position };
            let previous = std::mem::replace(&mut last, offset);
            let fits = offset.div_ceil(8) <= self.size && (self.kind == STRUCT || offset == 0);
            (1..=MAX_TYPE).contains(&number) && offset >= previous && fits
        })
    }

    /// Checks the offsets and sizes of the variables of a section (`btf_datasec_check_meta`).
    fn has_valid_variables(&self) -> bool {
        let mut end = 0_u64;
        self.trailing.chunks_exact(12).all(|variable| {
            let word = |at| u32_at(variable, at).unwrap_or_default();
            let (number, offset, size) = (word(0), u64::from(word(4)), u64::from(word(8)));
            let previous = std::mem::replace(&mut end, offset + size);
            (1..=MAX_TYPE).contains(&number) && size > 0 && offset >= previous && end <= u64::from(self.size)
        })
    }
}

/// Returns the meaning of the words that follow a type of this kind, and whether they repeat for each element (`btf_type_size`
/// in libbpf's `btf.c`).
fn trailing_words(kind: u32) -> Option<(&'static [Word], bool)> {
    use Word::{Name, Other, Type};
    Some(match kind {
        PTR | FWD..=FUNC | FLOAT | TYPE_TAG => (&[], false),
        // Encoding of the bits, linkage, index of the tagged component.
        INT | VAR | DECL_TAG => (&[Other], false),
        // Element type, index type, number of elements.
        ARRAY => (&[Type, Type, Other], false),
        // Name, type and offset of each member.
        STRUCT | UNION => (&[Name, Type, Other], true),
        // Name, value.
        ENUM => (&[Name, Other], true),
        // Name and type of each parameter.
        FUNC_PROTO => (&[Name, Type], true),
        // Type, offset, size.
        DATASEC => (&[Type, Other, Other], true),
        // Name, low half, high half.
        ENUM64 => (&[Name, Other, Other], true),
        _ => return None,
    })
}

/// Iterator over the types; ends after the first type that cannot be read.
struct Types<'a> {
    remaining: &'a [u8],
    /// Number of the next type.
    id: u32,
}

impl<'a> Types<'a> {
    fn of(types: &'a [u8]) -> Self {
        Self { remaining: types, id: 1 }
    }

    fn read(&mut self) -> Result<Type<'a>, BtfError> {
        // Type numbers count from 1.
        let id = self.id;
        let truncated = || BtfError(format!("is truncated in type {id}"));
        let field = |at| u32_at(self.remaining, at).ok_or_else(truncated);
        let (name, info, size) = (field(0)?, field(4)?, field(8)?);
        let kind = info >> 24 & 0x1f;
        let (words, is_repeated) = trailing_words(kind)
            .ok_or_else(|| BtfError(format!("has a type of an unknown kind (type {id}, kind {kind})")))?;
        let count = if is_repeated { to_index(info & 0xffff) } else { 1 };
        let (whole, after) =
            self.remaining.split_at_checked(TYPE_SIZE + 4 * words.len() * count).ok_or_else(truncated)?;
        self.remaining = after;
        self.id += 1;
        let (elements, flag) = (info & 0xffff, info >> 31 == 1);
        let trailing = whole.get(TYPE_SIZE..).unwrap_or_default();
        let has_unknown_bits = info & 0x60ff_0000 != 0;
        Ok(Type { name, kind, count: elements, flag, has_unknown_bits, size, words, trailing })
    }
}

impl<'a> Iterator for Types<'a> {
    type Item = Result<Type<'a>, BtfError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.remaining.is_empty() {
            return None;
        }
        let next = self.read();
        if next.is_err() {
            self.remaining = &[];
        }
        Some(next)
    }
}

/// Returns the types and the strings of a section, validated as `btf_parse_hdr` does. A module may have no strings.
fn parse_sections(section: &[u8]) -> Result<(&[u8], &[u8]), BtfError> {
    if !section.starts_with(&MAGIC) {
        return Err(BtfError("does not start with the magic number of BTF".to_owned()));
    }
    match section.get(2..4) {
        Some([VERSION, 0]) => {}
        Some(&[version, _]) if version != VERSION => {
            return Err(BtfError(format!("has BTF version {version}, only {VERSION} is known")));
        }
        _ => return Err(points_outside()),
    }
    let field = |offset: usize| u32_at(section, offset).map(to_index).ok_or_else(points_outside);
    let header = field(4)?;
    let part = |offset: usize, size: usize| {
        let start = header.checked_add(offset)?;
        section.get(start..start.checked_add(size)?)
    };
    let types = part(field(8)?, field(12)?).filter(|_| header >= HEADER_SIZE).ok_or_else(points_outside)?;
    let strings = part(field(16)?, field(20)?).ok_or_else(points_outside)?;
    if strings.last().is_some_and(|&last| last != 0) {
        Err(unterminated_strings())
    } else {
        Ok((types, strings))
    }
}

/// Whether the types, strings and further parts follow each other without gaps up to the end of the section
/// (`btf_check_sec_info`). Linux 7.2 has one more part, which a longer header describes.
fn is_dense(section: &[u8]) -> bool {
    let field = |offset: usize| u32_at(section, offset).map_or(0, to_index);
    let header = field(4);
    let mut parts = vec![(field(8), field(12)), (field(16), field(20))];
    if header >= HEADER_SIZE + 8 && field(28) > 0 {
        parts.push((field(24), field(28)));
    }
    parts.sort_unstable();
    let end = parts.iter().try_fold(0, |end, &(offset, size)| (offset == end).then_some(end + size));
    end.is_some_and(|end| header.saturating_add(end) == section.len())
}

/// Reads a little-endian number.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let bytes = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn to_index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "btf_split_tests.rs"]
mod split_tests;
#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
