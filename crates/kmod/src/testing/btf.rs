//! Type information (BTF) for tests.

use crate::BtfBase;

/// Base that [`split`] continues.
pub const BASE: BtfBase = BtfBase { types: 100, strings: 1000 };

/// Builds BTF from the words of types and from strings.
pub fn btf(types: &[u32], strings: &[u8]) -> Vec<u8> {
    let size = |length: usize| u32::try_from(length).unwrap();
    let types: Vec<u8> = types.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut bytes = vec![0x9f, 0xeb, 1, 0];
    for field in [24, 0, size(types.len()), size(types.len()), size(strings.len())] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(types);
    bytes.extend(strings);
    bytes
}

/// Builds a module's BTF: a structure with one member of the kernel's type 7, a prototype with a pointer to that
/// structure as parameter, and a function with that prototype.
pub fn split() -> Vec<u8> {
    let kind = |kind: u32, count: u32| kind << 24 | count;
    let BtfBase { types, strings } = BASE;
    let words = [
        vec![strings, kind(4, 1), 8],
        vec![strings + 5, 7, 0],
        vec![0, kind(2, 0), types],
        vec![0, kind(13, 1), 3, strings + 5, types + 1],
        vec![strings + 9, kind(12, 0), types + 2],
    ];
    btf(&words.concat(), b"ring\0len\0open\0")
}
