use proptest::prelude::*;

use super::*;
use crate::testing::btf::{BASE, btf, split};

fn fit(base: BtfBase) -> Fit {
    SplitBtf::read(&split()).unwrap().fit(base)
}

#[test]
fn matches_the_base_it_was_built_against() {
    assert_eq!(fit(BASE), Fit::Matches);
}

#[test]
fn another_base_does_not_match() {
    for types in [0, 50, 98, 99, 101, 102, 103, 200] {
        assert_ne!(fit(BtfBase { types, ..BASE }), Fit::Matches, "{types} types");
    }
    for strings in [0, 999, 1001, 5000] {
        assert_ne!(fit(BtfBase { strings, ..BASE }), Fit::Matches, "{strings} bytes of strings");
    }
    // The kernel does not look at the types that types refer to.
    assert_eq!(fit(BtfBase { types: 90, ..BASE }), Fit::OtherBase);
    assert_eq!(
        fit(BtfBase { strings: 900, ..BASE }),
        Fit::Rejected("refers to names beyond its own strings and the kernel's")
    );
    assert_eq!(fit(BtfBase { types: 101, ..BASE }), Fit::OtherBase);
    assert_eq!(fit(BtfBase { strings: 1001, ..BASE }), Fit::OtherBase);
}

#[test]
fn letters_of_names_are_those_of_the_kernel() {
    let of_name = |letter: u8| {
        let mut bytes = split();
        let at = bytes.len() - b"ring\0len\0open\0".len() + 1;
        bytes[at] = letter;
        SplitBtf::read(&bytes).unwrap().fit(BASE)
    };
    for letter in [b'I', b'_', b'9', 0xc0, 0xd6, 0xd8, 0xf6, 0xf8, 0xff] {
        assert_eq!(of_name(letter), Fit::Matches, "{letter:#x}");
    }
    for other in [b'-', b' ', 0x80, 0xbf, 0xd7, 0xf7] {
        assert_eq!(of_name(other), Fit::Rejected("has names that are not identifiers"), "{other:#x}");
    }
}

/// 4 MiB of types, which all have the same name of 4 MiB. Takes minutes if the name is read for each of them.
#[test]
fn names_are_read_up_to_the_maximum_length() {
    const LENGTH: u32 = 4 << 20;
    let forward = |name: u32| [name, FWD << 24, 0];
    // The highest name is the last string, so that the strings follow those of the base.
    let types: Vec<_> = (0..LENGTH / 12).map(|_| forward(BASE.strings)).collect();
    let words = [types.concat(), forward(BASE.strings + LENGTH + 1).to_vec()].concat();
    let of_names = |first: &[u8]| {
        let strings = [first, b"\0x\0"].concat();
        SplitBtf::read(&btf(&words, &strings)).unwrap().fit(BASE)
    };
    let bad = Fit::Rejected("has names that are not identifiers");
    let mut name = vec![b'a'; LENGTH as usize];
    assert_eq!(of_names(&name), bad);
    name[MAX_NAME + 1] = 0;
    assert_eq!(of_names(&name), bad);
    name[MAX_NAME] = 0;
    assert_eq!(of_names(&name), Fit::Matches);
}

/// Linux 7.2 has such modules, whose names are all names of the kernel.
#[test]
fn a_module_without_strings_of_its_own_matches() {
    let last_name = BASE.strings - 4;
    let named = SplitBtf::read(&btf(&[last_name, 8 << 24, 1], b"")).unwrap();
    assert_eq!(named.fit(BASE), Fit::Matches);
    let beyond = SplitBtf::read(&btf(&[BASE.strings, 8 << 24, 1], b"")).unwrap();
    assert_eq!(beyond.fit(BASE), Fit::Rejected("refers to names beyond its own strings and the kernel's"));
}

#[test]
fn base_types_include_void() {
    let base = btf(&[1, 1 << 24, 4, 32, 0, 2 << 24, 1], b"\0int\0");
    assert_eq!(BtfBase::of(&base), Ok(BtfBase { types: 3, strings: 5 }));
}

#[test]
fn invalid_btf_is_rejected() {
    let error = |bytes: &[u8]| SplitBtf::read(bytes).unwrap_err().to_string();
    let good = split();
    for bytes in [&b""[..], &[0; 24]] {
        assert_eq!(error(bytes), "the type information does not start with the magic number of BTF");
    }
    for length in [20, good.len() - 1] {
        assert_eq!(
            error(&good[..length]),
            "the type information has a header that points outside the section"
        );
    }
    let mut changed = good.clone();
    changed[2] = 2;
    assert_eq!(error(&changed), "the type information has BTF version 2, only 1 is known");
    let unknown = "the type information has a type of an unknown kind (type 1, kind 31)";
    assert_eq!(error(&btf(&[0, 31 << 24, 0], b"")), unknown);
    assert_eq!(error(&btf(&[0, 4 << 24 | 9, 0], b"")), "the type information is truncated in type 1");
    assert_eq!(error(&btf(&[], b"abc")), "the type information has strings that are not NUL-terminated");
    assert_eq!(
        error(&[good, vec![0; 4]].concat()),
        "the type information has gaps between its parts, or unknown parts"
    );
}

#[test]
fn types_that_the_kernel_rejects_are_rejected() {
    const STRUCT: u32 = 4 << 24;
    const FLAG: u32 = 1 << 31;
    let accepts = |words: &[u32]| SplitBtf::read(&btf(words, b"\0n\0")).is_ok();
    // An integer: encoding, offset, bits.
    assert!(accepts(&[1, 1 << 24, 4, 0x0100_0020]));
    for data in [0x0100_0021, 0x0300_0020, 0x1000_0020, 0x0101_0020] {
        assert!(!accepts(&[1, 1 << 24, 4, data]), "{data:#x}");
    }
    assert!(!accepts(&[1, 1 << 24 | 1, 4, 32]) && !accepts(&[1, 1 << 24 | FLAG, 4, 32]));
    // A pointer without, a type name with a name.
    assert!(accepts(&[0, 2 << 24, 1]) && !accepts(&[1, 2 << 24, 1]) && !accepts(&[0, 2 << 24, u32::MAX]));
    assert!(accepts(&[1, 8 << 24, 1]) && !accepts(&[0, 8 << 24, 1]) && !accepts(&[1, 8 << 24 | 1, 1]));
    // An array of something.
    assert!(accepts(&[0, 3 << 24, 0, 1, 1, 5]) && !accepts(&[0, 3 << 24, 0, 0, 1, 5]));
    // Members in order, within the structure, the size of a member in the upper bits.
    assert!(accepts(&[1, STRUCT | 2, 8, 1, 1, 0, 1, 1, 32]));
    assert!(!accepts(&[1, STRUCT | 2, 8, 1, 1, 32, 1, 1, 0]));
    assert!(!accepts(&[1, STRUCT | 1, 8, 1, 1, 65]));
    assert!(!accepts(&[1, STRUCT | 1, 8, 1, 0, 0]));
    assert!(accepts(&[1, STRUCT | 1 | FLAG, 8, 1, 1, 3 << 24 | 8]));
    assert!(!accepts(&[1, 5 << 24 | 1, 8, 1, 1, 8]));
    // Values of an enumeration have names.
    assert!(accepts(&[1, 6 << 24 | 1, 4, 1, 7]) && !accepts(&[1, 6 << 24 | 1, 4, 0, 7]));
    assert!(!accepts(&[1, 6 << 24 | 1, 3, 1, 7]));
    // A function, its prototype, a variable and a section of variables.
    assert!(
        accepts(&[1, FUNC << 24 | 1, 1])
            && !accepts(&[1, FUNC << 24 | 2, 1])
            && !accepts(&[0, FUNC << 24, 1])
    );
    assert!(accepts(&[0, FUNC_PROTO << 24, 0]) && !accepts(&[1, FUNC_PROTO << 24, 0]));
    assert!(
        accepts(&[1, 14 << 24, 1, 1]) && !accepts(&[1, 14 << 24, 0, 1]) && !accepts(&[1, 14 << 24, 1, 2])
    );
    assert!(
        accepts(&[1, 15 << 24 | 2, 8, 1, 0, 4, 1, 4, 4]) && !accepts(&[1, 15 << 24 | 2, 8, 1, 0, 4, 1, 2, 4])
    );
    assert!(!accepts(&[1, 15 << 24 | 1, 8, 1, 4, 8]));
    // A float and a tag.
    assert!(accepts(&[1, 16 << 24, 8]) && !accepts(&[1, 16 << 24, 3]));
    assert!(accepts(&[1, 17 << 24, 1, u32::MAX]) && !accepts(&[1, 17 << 24, 1, u32::MAX - 1]));
}

proptest! {
    #[test]
    fn never_panics_on_changed_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        types in any::<u32>(),
        strings in any::<u32>(),
    ) {
        let mut bytes = split();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(split) = SplitBtf::read(&bytes) {
            let _ = split.fit(BtfBase { types, strings });
        }
    }
}
