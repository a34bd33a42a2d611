use proptest::prelude::*;

use super::*;

const STRINGS: &[u8] = b"\0module_kobject\0module\0list_head\0";

fn type_of(name: u32, kind: u32, elements: u32, size: u32, more: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in [name, kind << 24 | elements, size] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.resize(bytes.len() + more, 0xee);
    bytes
}

fn section(types: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x9f, 0xeb, 1, 0];
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
    for field in [24, 0, length(types), length(types), length(STRINGS)] {
        bytes.extend(field.to_le_bytes());
    }
    [&bytes, types, STRINGS].concat()
}

/// One type of each kind. `struct module` comes last, after a forward declaration and a union of the same name.
fn every_kind() -> Vec<u8> {
    let more = [4, 0, 12, 24, 24, 16, 0, 0, 0, 0, 0, 0, 16, 4, 24, 0, 4, 0, 24];
    let mut types: Vec<u8> =
        (1..=19).zip(more).flat_map(|(kind, more)| type_of(0, kind, 2, 1, more)).collect();
    types.extend(type_of(16, 7, 0, 0, 0));
    types.extend(type_of(16, 5, 1, 99, 12));
    types.extend(type_of(1, 4, 1, 98, 12));
    types.extend(type_of(16, 4, 3, 896, 36));
    types
}

#[test]
fn every_kind_is_walked() {
    let bytes = section(&every_kind());
    let btf = Btf::parse(&bytes).unwrap();
    assert_eq!(btf.base(), BtfBase { types: 24, strings: 33 });
    assert_eq!(btf.size_of_struct("module"), Some(896));
    assert_eq!(btf.size_of_struct("module_kobject"), Some(98));
    // A name that starts in the middle of a string does not match; `list_head` exists as a name only.
    assert_eq!(btf.size_of_struct("list_head"), None);
    assert_eq!(btf.size_of_struct("kobject"), None);
}

#[test]
fn damaged_btf_is_rejected() {
    let good = section(&every_kind());
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        Btf::parse(&bytes).unwrap_err().to_string()
    };
    assert_eq!(refused(&|b| b[0] = 0), "the type information does not start with the magic number of BTF");
    assert_eq!(
        refused(&|b| b.truncate(1)),
        "the type information does not start with the magic number of BTF"
    );
    assert_eq!(refused(&|b| b[2] = 2), "the type information has BTF version 2, only 1 is known");
    assert_eq!(refused(&|b| b[3] = 1), "the type information has a header that points outside the section");
    assert_eq!(
        refused(&|b| b.truncate(20)),
        "the type information has a header that points outside the section"
    );
    assert_eq!(refused(&|b| b[4] = 8), "the type information has a header that points outside the section");
    assert_eq!(
        refused(&|b| b[8..16].fill(0xff)),
        "the type information has a header that points outside the section"
    );
    assert_eq!(
        refused(&|b| *b.last_mut().unwrap() = b'x'),
        "the type information has strings that are not NUL-terminated"
    );
    assert_eq!(
        refused(&|b| b[24 + 7] = 20),
        "the type information has a type of an unknown kind (type 1, kind 20)"
    );
    // The first type claims the maximum number of members.
    assert_eq!(
        refused(&|b| b[24 + 4..24 + 8].copy_from_slice(&0x0400_ffff_u32.to_le_bytes())),
        "the type information is truncated in type 1"
    );
    let unstarted = |b: &mut Vec<u8>| {
        let at = b.len() - STRINGS.len();
        b[at] = b'x';
    };
    assert_eq!(refused(&unstarted), "the type information has strings that are not NUL-terminated");
}

#[test]
fn a_longer_header_and_trailing_bytes_are_skipped() {
    let mut bytes = section(&every_kind());
    bytes[4] = 32;
    bytes.splice(24..24, [0xaa; 8]);
    bytes.extend([1, 2, 3]);
    assert_eq!(Btf::parse(&bytes).unwrap().size_of_struct("module"), Some(896));
}

proptest! {
    #[test]
    fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Btf::parse(&bytes);
    }

    #[test]
    fn never_panics_behind_a_good_header(types in prop::collection::vec(any::<u8>(), 0..200), name in "[a-z]{0,8}") {
        if let Ok(btf) = Btf::parse(&section(&types)) {
            let _ = btf.size_of_struct(&name);
        }
    }

    #[test]
    fn never_panics_when_flipped(at in 0_usize..300, value: u8) {
        let mut bytes = section(&every_kind());
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(btf) = Btf::parse(&bytes) {
            let _ = btf.size_of_struct("module");
        }
    }
}
