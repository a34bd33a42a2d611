//! Pure: BTF, the kernel's type information (`include/uapi/linux/btf.h`): sizes of structures, and what the
//! BTF of modules is based on.

use super::BtfBase;

/// `BTF_MAGIC`, little-endian.
const MAGIC: u16 = 0xeb9f;
/// The one version that there is (`BTF_VERSION`).
const VERSION: u8 = 1;
/// Bytes of `struct btf_header` since its first version; later ones may be longer.
const HEADER: usize = 24;
/// Bytes of `struct btf_type`.
const TYPE: usize = 12;

/// A checked BTF section. It borrows the section's bytes and holds nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    count: u32,
}

/// Why bytes are no BTF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// Another magic number.
    #[error("it does not start with BTF's magic number")]
    Magic,
    /// A version that is not known.
    #[error("its BTF version is {0}, only {VERSION} is known")]
    Version(u8),
    /// The header contradicts the section's length.
    #[error("its BTF header points outside the section")]
    Header,
    /// The strings do not start and end with a zero byte.
    #[error("its BTF strings are not ended by zero bytes")]
    Strings,
    /// A type of a kind that is not known: what follows it cannot be found.
    #[error("BTF type {id} is of kind {kind}, which is not known")]
    Kind {
        /// The type's number.
        id: u32,
        /// `BTF_KIND_...`.
        kind: u32,
    },
    /// The types end in the middle of one.
    #[error("the BTF types end in the middle of type {id}")]
    Truncated {
        /// The type's number.
        id: u32,
    },
}

/// One type, without what follows it.
#[derive(Clone, Copy, Debug)]
struct Type {
    name: u32,
    kind: u32,
    /// `size` of structures and the like, a type's number in others.
    size: u32,
}

/// `BTF_KIND_STRUCT`.
const STRUCT: u32 = 4;

impl<'a> Btf<'a> {
    /// Reads a section: its header, and every type once. What follows the strings is passed over.
    pub fn parse(section: &'a [u8]) -> Result<Self, BtfError> {
        let u32_at = |at: usize| number(section, at).ok_or(BtfError::Header);
        let magic = section.get(..2).ok_or(BtfError::Magic)?;
        if magic != MAGIC.to_le_bytes() {
            return Err(BtfError::Magic);
        }
        match section.get(2) {
            Some(&VERSION) => {}
            Some(&other) => return Err(BtfError::Version(other)),
            None => return Err(BtfError::Header),
        }
        let header = place(u32_at(4)?);
        let body = section.get(header..).filter(|_| header >= HEADER).ok_or(BtfError::Header)?;
        let part = |offset: u32, length: u32| {
            let start = place(offset);
            body.get(start..start.checked_add(place(length))?)
        };
        let types = part(u32_at(8)?, u32_at(12)?).ok_or(BtfError::Header)?;
        let strings = part(u32_at(16)?, u32_at(20)?).ok_or(BtfError::Header)?;
        if strings.first() != Some(&0) || strings.last() != Some(&0) {
            return Err(BtfError::Strings);
        }
        // Type 0 is `void`, which is not written down.
        let mut count = 1;
        for found in (Types { rest: types, id: 1 }) {
            found?;
            count += 1;
        }
        Ok(Self { types, strings, count })
    }

    /// What a module's BTF that was made against this one continues: its types and strings are numbered from here.
    pub fn base(&self) -> BtfBase {
        BtfBase { types: self.count, strings: u32::try_from(self.strings.len()).unwrap_or(u32::MAX) }
    }

    /// Bytes of the structure of this name; `None` when there is none.
    pub fn size_of_struct(&self, name: &str) -> Option<u64> {
        Types { rest: self.types, id: 1 }
            .filter_map(Result::ok)
            .find(|found| found.kind == STRUCT && self.is_named(found.name, name))
            .map(|found| u64::from(found.size))
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let rest = self.strings.get(place(offset)..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }
}

/// Walks the types.
struct Types<'a> {
    rest: &'a [u8],
    id: u32,
}

impl Types<'_> {
    fn read(&mut self) -> Result<Type, BtfError> {
        let truncated = BtfError::Truncated { id: self.id };
        let field = |at| number(self.rest, at).ok_or(truncated);
        let (name, info, size) = (field(0)?, field(4)?, field(8)?);
        let (kind, elements) = (info >> 24 & 0x1f, place(info & 0xffff));
        let more = following(kind, elements).ok_or(BtfError::Kind { id: self.id, kind })?;
        self.rest = self.rest.get(TYPE + more..).ok_or(truncated)?;
        self.id += 1;
        Ok(Type { name, kind, size })
    }
}

impl Iterator for Types<'_> {
    type Item = Result<Type, BtfError>;

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

/// Bytes that follow a type of this kind with so many elements (`btf_type_size` in libbpf's `btf.c`).
fn following(kind: u32, elements: usize) -> Option<usize> {
    Some(match kind {
        // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG
        2 | 7..=12 | 16 | 18 => 0,
        // INT, VAR, DECL_TAG
        1 | 14 | 17 => 4,
        // ARRAY
        3 => 12,
        // STRUCT, UNION, DATASEC, ENUM64
        4 | 5 | 15 | 19 => 12 * elements,
        // ENUM, FUNC_PROTO
        6 | 13 => 8 * elements,
        _ => return None,
    })
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// An offset as a place in memory.
fn place(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
