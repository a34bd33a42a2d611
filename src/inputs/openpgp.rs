//! Adapter: when OpenPGP keys end that definitions name (`signedBy`). gpgv, apt and rpm verify with them, and tell only of those
//! that have ended. The form is RFC 9580's, of keys of version 4, which are those that gpgv takes.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use serde_json::Value;

use crate::image::Definitions;

pub(super) const BEGIN: &str = "-----BEGIN PGP PUBLIC KEY BLOCK-----";
const END: &str = "-----END PGP PUBLIC KEY BLOCK-----";
/// The end of what has none.
const NEVER: u64 = u64::MAX;

/// The files of keys that definitions name, and when the last key of each ends. Those that are not there, or cannot be read, are told
/// of where something is to be verified with them. Definitions are looked through as data, so that no field that may come to name
/// keys is forgotten here.
pub fn key_ends(definitions: &Definitions) -> Vec<(String, Timestamp)> {
    let mut files = BTreeMap::new();
    let images = definitions.images.values().map(serde_json::to_value);
    for definition in images.chain(definitions.families.iter().map(serde_json::to_value)) {
        collect(&definition.unwrap_or_default(), &mut files);
    }
    files.retain(|file, end| {
        *end = fs_err::read(definitions.root.join(file)).ok().and_then(|bytes| last_end(&bytes));
        end.is_some()
    });
    files.into_iter().filter_map(|(file, end)| Some((format!("signedBy {file}"), end?))).collect()
}

/// Lists are the keys of prebuilt images, which have no end.
fn collect(value: &Value, files: &mut BTreeMap<String, Option<Timestamp>>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, files)),
        Value::Object(fields) => {
            let file = fields.get("signedBy").and_then(Value::as_str);
            files.extend(file.map(|file| (file.to_owned(), None)));
            fields.values().for_each(|value| collect(value, files));
        }
        _ => {}
    }
}

/// The keys in a text, without their armor (RFC 9580, 6.2).
pub(super) fn dearmored(text: &str) -> Option<Vec<u8>> {
    let mut keys = Vec::new();
    for block in text.split(BEGIN).skip(1) {
        let lines = block.split(END).next()?.lines().map(str::trim);
        // Headers, then an empty line; the checksum at the end begins with `=`.
        let body =
            lines.skip(1).skip_while(|line| line.contains(": ")).take_while(|line| !line.starts_with('='));
        keys.extend(STANDARD.decode(body.collect::<String>()).ok()?);
    }
    (!keys.is_empty()).then_some(keys)
}

/// When the last key of a file may sign no more; `None` where one has no end, or none was found.
fn last_end(file: &[u8]) -> Option<Timestamp> {
    let armored = dearmored(&String::from_utf8_lossy(file));
    let end =
        certificates(armored.as_deref().unwrap_or(file)).iter().filter_map(|keys| signs_until(keys)).max();
    Timestamp::from_second(i64::try_from(end?).ok()?).ok()
}

/// A primary key, or one of its subkeys.
struct Key {
    made: u64,
    /// Can its algorithm sign?
    is_signer: bool,
    id: [u8; 8],
    /// What the newest of its own signatures says.
    newest: Option<OwnSignature>,
    revoked: u64,
}

/// What the primary key says of itself or of a subkey (5.2.3).
#[derive(Default)]
struct OwnSignature {
    made: u64,
    /// Seconds from when the key was made; 0 is for ever.
    lasts: u64,
    /// Its lowest bits: certify, sign.
    flags: Option<u8>,
    by: Option<[u8; 8]>,
}

impl Key {
    fn end(&self) -> u64 {
        let lasts = self.newest.as_ref().map_or(0, |newest| newest.lasts);
        let end = if lasts == 0 { NEVER } else { self.made.saturating_add(lasts) };
        end.min(self.revoked)
    }

    fn may_sign(&self) -> bool {
        let flags = self.newest.as_ref().and_then(|newest| newest.flags);
        self.is_signer && flags.is_none_or(|flags| flags & 2 != 0)
    }
}

/// A primary key's end is its subkeys', too.
fn signs_until(keys: &[Key]) -> Option<u64> {
    let primary = keys.first()?.end();
    keys.iter().filter(|key| key.may_sign()).map(|key| key.end().min(primary)).max()
}

/// Each primary key with its subkeys; what follows something unreadable is left out.
fn certificates(mut from: &[u8]) -> Vec<Vec<Key>> {
    let mut all: Vec<Vec<Key>> = Vec::new();
    while let Some((tag, body)) = packet(&mut from) {
        match (tag, all.last_mut()) {
            (6, _) => all.push(key(body).into_iter().collect()),
            (14, Some(keys)) if !keys.is_empty() => keys.extend(key(body)),
            (2, Some(keys)) => drop(note_signature(keys, body)),
            _ => {}
        }
    }
    all
}

fn key(body: &[u8]) -> Option<Key> {
    let [4, made @ .., algorithm] = body.get(..6)? else { return None };
    // RSA, DSA, ECDSA and EdDSA (9.1).
    let is_signer = matches!(algorithm, 1 | 3 | 17 | 19 | 22 | 27 | 28);
    let length = u16::try_from(body.len()).ok()?.to_be_bytes();
    let fingerprint = digest(&SHA1_FOR_LEGACY_USE_ONLY, &[&[0x99], &length[..], body].concat());
    let id = fingerprint.as_ref().last_chunk().copied()?;
    Some(Key { made: number(made), is_signer, id, newest: None, revoked: NEVER })
}

/// Notes a signature that the primary key made of itself or of the subkey before.
fn note_signature(keys: &mut [Key], body: &[u8]) -> Option<()> {
    let mut rest = body;
    let [4, kind, _, _] = take(&mut rest, 4)? else { return None };
    let mut found = OwnSignature::default();
    for _ in 0..2 {
        let count = number(take(&mut rest, 2)?);
        let mut area = take(&mut rest, count)?;
        while let Some(length) = length(&mut area) {
            let (kind, value) = take(&mut area, length)?.split_first()?;
            match kind & 0x7f {
                2 => found.made = number(value),
                9 => found.lasts = number(value),
                16 | 33 => found.by = value.last_chunk().copied(),
                27 => found.flags = value.first().copied(),
                _ => {}
            }
        }
    }
    let primary = keys.first()?.id;
    let is_of_subkey = keys.len() > 1;
    let key = keys.last_mut().filter(|_| found.by == Some(primary))?;
    match (kind, is_of_subkey) {
        (0x10..=0x13 | 0x1f, false) | (0x18, true)
            if key.newest.as_ref().is_none_or(|newest| newest.made <= found.made) =>
        {
            key.newest = Some(found);
        }
        (0x20, false) | (0x28, true) => key.revoked = found.made,
        _ => {}
    }
    Some(())
}

/// The next packet's type and content (4.2).
fn packet<'a>(from: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let head = *take(from, 1)?.first()?;
    let (tag, length) = match (head & 0x80, head & 0x40, head & 3) {
        (0, ..) | (_, 0, 3) => return None,
        (_, 0, size) => ((head >> 2) & 0xf, number(take(from, 1 << size)?)),
        _ => (head & 0x3f, length(from)?),
    };
    Some((tag, take(from, length)?))
}

/// A length in the form of subpackets, and of packets that are whole.
fn length(from: &mut &[u8]) -> Option<u64> {
    Some(match number(take(from, 1)?) {
        255 => number(take(from, 4)?),
        first @ 192.. => ((first - 192) << 8) + number(take(from, 1)?) + 192,
        first => first,
    })
}

fn take<'a>(from: &mut &'a [u8], count: u64) -> Option<&'a [u8]> {
    let (head, tail) = from.split_at_checked(usize::try_from(count).ok()?)?;
    *from = tail;
    Some(head)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key that only certifies, made in 2026 for four years, and a subkey that signs, as GnuPG 2.2 exports them.
    const BOTH_UNTIL_2030: &str = "\
-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaVW5ABYJKwYBBAHaRw8BAQdA3IXbJPhO/2+bMmo/K+mgYUvYOBbHVLatvz/p
rH0OlUK0BGFjbWWIlgQTFggAPhYhBEich8KrUmFSBrOh6Nvvg8JK6cujBQJpVbkA
AhsBBQkHhh+ABQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJENvvg8JK6cujW7gA
/09fy9/LQemTsYe/y4ghUlScHUf4Tkcdn47lUI/zIb5GAQCymPx8j0vD8tQqoMZ3
6RZi9mfDiWSPv+f55fQQQT+GBrgzBGlVuQAWCSsGAQQB2kcPAQEHQFeSQUU7erdE
yQkQKY/VkCsVSBRCywN9xwLY1dg2v4C0iPUEGBYIACYWIQRInIfCq1JhUgazoejb
74PCSunLowUCaVW5AAIbAgUJB4YfgACBCRDb74PCSunLo3YgBBkWCAAdFiEEW/NB
XRkilOAoR9wpAfFbUmZ/JXEFAmlVuQAACgkQAfFbUmZ/JXHM/QD/T2GOciT1FcLI
yBMbo60MNZfzPKciJ7xqv1K0/A0/i6YA/0gu0jCIQ4oiGYLTFffZHu9RknzCQ9fr
VNzBza5ble8FcFUBAK6QVxmSOMafS+ntBpnTphA/N8qh0R5RTgCX2POAiF+XAP9L
0uBF2W0TMzeMDOByrZ3p5iyj1r9rHCKKCZcggExzDg==
=2M3E
-----END PGP PUBLIC KEY BLOCK-----\n";
    /// The same, when the subkey was to end with 2027.
    const SUBKEY_UNTIL_2028: &str = "\
-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaVW5ABYJKwYBBAHaRw8BAQdA3IXbJPhO/2+bMmo/K+mgYUvYOBbHVLatvz/p
rH0OlUK0BGFjbWWIlgQTFggAPhYhBEich8KrUmFSBrOh6Nvvg8JK6cujBQJpVbkA
AhsBBQkHhh+ABQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJENvvg8JK6cujW7gA
/09fy9/LQemTsYe/y4ghUlScHUf4Tkcdn47lUI/zIb5GAQCymPx8j0vD8tQqoMZ3
6RZi9mfDiWSPv+f55fQQQT+GBrgzBGlVuQAWCSsGAQQB2kcPAQEHQFeSQUU7erdE
yQkQKY/VkCsVSBRCywN9xwLY1dg2v4C0iPUEGBYIACYCGwIWIQRInIfCq1JhUgaz
oejb74PCSunLowUCaX6XgAUJA8JnAACBdiAEGRYIAB0WIQRb80FdGSKU4ChH3CkB
8VtSZn8lcQUCaVW5AAAKCRAB8VtSZn8lccz9AP9PYY5yJPUVwsjIExujrQw1l/M8
pyInvGq/UrT8DT+LpgD/SC7SMIhDiiIZgtMV99ke71GSfMJD1+tU3MHNrluV7wUJ
ENvvg8JK6cuj02oBAL8s7eZmxfe7flTUcEqq0f18xzuz8u7nr0//2UlIl5MWAP9P
tbqtpA3TceP4P3/ybSjSp+QFaO9+mmFS0mz8eDcEAQ==
=CCry
-----END PGP PUBLIC KEY BLOCK-----\n";
    /// The same, when both were to have no end any more.
    const WITHOUT_END: &str = "\
-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaVW5ABYJKwYBBAHaRw8BAQdA3IXbJPhO/2+bMmo/K+mgYUvYOBbHVLatvz/p
rH0OlUK0BGFjbWWIkAQTFggAOAIbAQULCQgHAgYVCgkICwIEFgIDAQIeAQIXgBYh
BEich8KrUmFSBrOh6Nvvg8JK6cujBQJpo4GAAAoJENvvg8JK6cujB8oA/1jkSEya
0Tzd7TNCt4S29KmZT3bGiqpIo6knJ/qQRk88AQCLuXWkLNnCTplI2dqffa7dE+5S
yOkvXU/+7/HKXUOtBbgzBGlVuQAWCSsGAQQB2kcPAQEHQFeSQUU7erdEyQkQKY/V
kCsVSBRCywN9xwLY1dg2v4C0iO8EGBYIACACGwIWIQRInIfCq1JhUgazoejb74PC
SunLowUCaaOBgACBdiAEGRYIAB0WIQRb80FdGSKU4ChH3CkB8VtSZn8lcQUCaVW5
AAAKCRAB8VtSZn8lccz9AP9PYY5yJPUVwsjIExujrQw1l/M8pyInvGq/UrT8DT+L
pgD/SC7SMIhDiiIZgtMV99ke71GSfMJD1+tU3MHNrluV7wUJENvvg8JK6cujGhMB
AKFKtWBvQGzqwgz0C+E5uBVAWCUX5t8B5wVLJuL/gmrmAP9wfjeSi9mXEZmzH4e5
kUu/Q3sdoRR9x/5H+VF4jMDiDA==
=PMZa
-----END PGP PUBLIC KEY BLOCK-----\n";

    fn end(file: &[u8]) -> Option<String> {
        last_end(file).map(|end| end.to_string())
    }

    #[test]
    fn armor_is_taken_off() {
        let block = |body: &str| format!("a comment\n{BEGIN}\nVersion: x 1\n\n{body}\n=abcd\n{END}\n");
        assert_eq!(dearmored(&block("Zm9v\nYmFy")).unwrap(), b"foobar");
        assert_eq!(
            dearmored(&[block("Zm9v"), format!("{BEGIN}\n\nYmFy\n{END}")].concat()).unwrap(),
            b"foobar"
        );
        assert_eq!(dearmored("foobar"), None);
        assert_eq!(dearmored(&block("!")), None);
    }

    #[test]
    fn the_newest_signature_says_when_a_key_ends() {
        let [both, subkey, without] = [BOTH_UNTIL_2030, SUBKEY_UNTIL_2028, WITHOUT_END];
        assert_eq!(end(both.as_bytes()).unwrap(), "2030-01-01T00:00:00Z");
        assert_eq!(end(subkey.as_bytes()).unwrap(), "2028-01-01T00:00:00Z");
        assert_eq!(end(&dearmored(subkey).unwrap()).unwrap(), "2028-01-01T00:00:00Z");
        assert_eq!(end(without.as_bytes()), None);
        // The last one of a file, whatever their order; one without an end hides the others'.
        assert_eq!(end([subkey, both].concat().as_bytes()).unwrap(), "2030-01-01T00:00:00Z");
        assert_eq!(end([without, both].concat().as_bytes()), None);
    }

    #[test]
    fn what_is_no_key_has_no_end() {
        let key = dearmored(BOTH_UNTIL_2030).unwrap();
        for length in 0..key.len() {
            let _ = last_end(&key[..length]);
        }
        for (at, bit) in (0..key.len()).flat_map(|at| [1, 0x80].map(|bit| (at, bit))) {
            let mut damaged = key.clone();
            damaged[at] ^= bit;
            let _ = last_end(&damaged);
        }
        assert_eq!((end(b""), end(b"no key")), (None, None));
    }

    #[test]
    fn definitions_name_files_of_keys() {
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("acme.asc"), SUBKEY_UNTIL_2028).unwrap();
        fs_err::write(root.path().join("other.asc"), "none").unwrap();
        let family = |key: &str| {
            let text = format!(
                r#"{{"apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {{"name": "f"}}, "spec": {{
                "match": {{}}, "toolchain": {{"image": "debian:12"}}, "headers": {{"rpm": {{"packages": ["kernel-devel"],
                "from": {{"signedBy": "{key}", "repositories": [{{"url": "https://a.test/"}}]}}}}}}}}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let families = ["acme.asc", "acme.asc", "other.asc", "absent.asc"].map(family).into();
        let definitions = Definitions { families, root: root.path().into(), ..Definitions::default() };
        let ends = key_ends(&definitions);
        assert_eq!(ends, [("signedBy acme.asc".to_owned(), "2028-01-01T00:00:00Z".parse().unwrap())]);
    }
}
