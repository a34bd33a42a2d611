use proptest::prelude::*;

use super::{Signature, read};
use crate::testing::signature::{message, record, signed};

fn of(file: &[u8]) -> (Signature, u64) {
    read(file, file.len() as u64)
}

fn malformed(file: &[u8]) -> &'static str {
    match of(file).0 {
        Signature::Malformed(what) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_signer_is_read_and_the_object_ends_before_it() {
    let (signature, length) = of(&signed(b"object", &message("Build key", &[0, 0xbe, 0x0f], 1)));
    let Signature::By(signer) = signature else { panic!("{signature:?}") };
    assert_eq!(signer.name.as_deref(), Some("Build key"));
    assert_eq!((signer.key_id.as_str(), signer.hash), ("BE:0F", Some("sha256")));
    assert_eq!(length, 6);
}

#[test]
fn digests_are_named_as_modinfo_names_them() {
    for (number, name) in [(1, Some("sha256")), (2, Some("sha384")), (3, Some("sha512")), (99, None)] {
        let (Signature::By(signer), _) = of(&signed(b"m", &message("k", &[1], number))) else { panic!() };
        assert_eq!(signer.hash, name);
    }
}

#[test]
fn no_marker_is_no_signature() {
    assert_eq!(of(b"object"), (Signature::None, 6));
    assert_eq!(of(b""), (Signature::None, 0));
}

#[test]
fn bytes_after_the_marker_hide_it() {
    let mut file = signed(b"object", &message("k", &[1], 1));
    file.extend(b"garbage");
    assert_eq!(of(&file), (Signature::TrailingBytes(7), file.len() as u64));
    file.extend(vec![0; 5000]);
    assert_eq!(of(&file).0, Signature::None, "only the tail is searched");
}

#[test]
fn records_are_checked_in_the_kernels_order() {
    let with = |change: &dyn Fn(&mut [u8; 12])| {
        let message = message("k", &[1], 1);
        let mut bytes = record(message.len());
        change(&mut bytes);
        [&b"object"[..], &message, &bytes, super::MARKER].concat()
    };
    assert_eq!(of(&with(&|record| record[2] = 1)).0, Signature::Unsupported(1));
    assert_eq!(malformed(&with(&|record| record[0] = 1)), "has a record with unexpected non-zero fields");
    assert_eq!(malformed(&with(&|record| record[7] = 1)), "has a record with unexpected non-zero fields");
    assert_eq!(malformed(&with(&|record| record[8] = 0x7f)), "claims more bytes than the file has");
    // The length is checked before the kind.
    let both = with(&|record| (record[8], record[2]) = (0x7f, 1));
    assert_eq!(malformed(&both), "claims more bytes than the file has");
    assert_eq!(malformed(&[&[0; 12], super::MARKER].concat()), "is shorter than its own record");
}

#[test]
fn invalid_cms_messages_are_rejected() {
    assert_eq!(malformed(&signed(b"object", b"")), "is not a PKCS#7 message that the kernel accepts");
    assert_eq!(
        malformed(&signed(b"object", b"certainly not DER")),
        "is not a PKCS#7 message that the kernel accepts"
    );
    let message = message("k", &[1], 1);
    for length in 0..message.len() {
        let what = malformed(&signed(b"object", &message[..length]));
        assert_eq!(what, "is not a PKCS#7 message that the kernel accepts", "{length} of {}", message.len());
    }
    let mut indefinite = message;
    indefinite[1] = 0x80;
    assert_eq!(of(&signed(b"object", &indefinite)).0, Signature::Unread("has elements of indefinite length"));
}

proptest! {
    #[test]
    fn never_panics_on_changed_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)
    ) {
        let mut file = signed(b"object", &message("Build key", &[1, 2, 3], 1));
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        let (_, length) = of(&file);
        prop_assert!(length <= file.len() as u64);
    }
}
