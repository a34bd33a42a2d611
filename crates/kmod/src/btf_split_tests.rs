use proptest::prelude::*;

use super::*;
use crate::testing::btf::{BASE, btf, split};

fn fit(base: BtfBase) -> Fit {
    SplitBtf::read(&split()).unwrap().fit(base)
}

#[test]
fn it_fits_the_base_that_it_was_made_for() {
    assert_eq!(fit(BASE), Fit::Yes);
}

#[test]
fn every_other_base_is_told() {
    for types in [0, 50, 98, 99, 101, 102, 103, 200] {
        assert_ne!(fit(BtfBase { types, ..BASE }), Fit::Yes, "{types} types");
    }
    for strings in [0, 999, 1001, 5000] {
        assert_ne!(fit(BtfBase { strings, ..BASE }), Fit::Yes, "{strings} bytes of strings");
    }
    assert_eq!(
        fit(BtfBase { types: 90, ..BASE }),
        Fit::No("mentions types that neither it nor the kernel has")
    );
    assert_eq!(
        fit(BtfBase { strings: 900, ..BASE }),
        Fit::No("mentions names that neither it nor the kernel has")
    );
    assert_eq!(fit(BtfBase { types: 101, ..BASE }), Fit::No("has functions whose types are not prototypes"));
    assert_eq!(fit(BtfBase { strings: 1001, ..BASE }), Fit::Doubtful);
}

#[test]
fn a_kernels_own_is_measured_with_void() {
    let base = btf(&[1, 1 << 24, 4, 32, 0, 2 << 24, 1], b"\0int\0");
    assert_eq!(BtfBase::of(&base), Ok(BtfBase { types: 3, strings: 5 }));
}

#[test]
fn what_is_no_type_information_is_told() {
    let error = |bytes: &[u8]| SplitBtf::read(bytes).unwrap_err().to_string();
    let good = split();
    for bytes in [&b""[..], &[0; 24]] {
        assert_eq!(error(bytes), "the type information does not start as BTF does");
    }
    for length in [20, good.len() - 1] {
        assert_eq!(error(&good[..length]), "the type information has a header that points outside it");
    }
    let mut changed = good.clone();
    changed[2] = 2;
    assert_eq!(error(&changed), "the type information has BTF version 2, only 1 is known");
    let unknown = "the type information has a type of an unknown kind (type 1, kind 31)";
    assert_eq!(error(&btf(&[0, 31 << 24, 0], b"")), unknown);
    assert_eq!(error(&btf(&[0, 4 << 24 | 9, 0], b"")), "the type information ends within a type (1)");
    assert_eq!(error(&btf(&[], b"abc")), "the type information has strings that do not end");
}

proptest! {
    #[test]
    fn no_byte_can_make_it_panic(
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
