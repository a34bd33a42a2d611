//! Reads when the OpenPGP keys that definitions name (`signedBy`) expire. gpgv, apt and rpm verify with these keys, but only
//! report keys that have already expired; gpg reports the expiry time.

use std::{collections::BTreeMap, path::Path, process::Command};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use farrier_core::image::Definitions;
use jiff::Timestamp;
use serde_json::Value;

pub(super) const BEGIN: &str = "-----BEGIN PGP PUBLIC KEY BLOCK-----";
const END: &str = "-----END PGP PUBLIC KEY BLOCK-----";
/// Expiry time of a key without one.
const NEVER: i64 = i64::MAX;

/// Returns the key files that definitions name, each with the expiry time of its last key. Skips missing and unreadable files, which
/// verification reports. Searches the definitions as JSON, so that the search also covers `signedBy` in fields added later.
pub fn key_expiries(definitions: &Definitions) -> Vec<(String, Timestamp)> {
    let mut files = BTreeMap::new();
    let images = definitions.images.values().map(serde_json::to_value);
    for definition in images.chain(definitions.families.iter().map(serde_json::to_value)) {
        collect_key_files(&definition.unwrap_or_default(), &mut files);
    }
    files.retain(|file, expiry| {
        *expiry = last_expiry(&definitions.root.join(file));
        expiry.is_some()
    });
    files.into_iter().filter_map(|(file, expiry)| Some((format!("signedBy {file}"), expiry?))).collect()
}

/// Collects `signedBy` files. A `signedBy` list holds the keys of prebuilt images, which do not expire.
fn collect_key_files(value: &Value, files: &mut BTreeMap<String, Option<Timestamp>>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect_key_files(item, files)),
        Value::Object(fields) => {
            let file = fields.get("signedBy").and_then(Value::as_str);
            files.extend(file.map(|file| (file.to_owned(), None)));
            fields.values().for_each(|value| collect_key_files(value, files));
        }
        _ => {}
    }
}

/// Returns the keys in a text, without their armor (RFC 9580, 6.2).
pub(super) fn dearmored(text: &str) -> Option<Vec<u8>> {
    let mut keys = Vec::new();
    for block in text.split(BEGIN).skip(1) {
        let lines = block.split(END).next()?.lines().map(str::trim);
        // Headers come first, then an empty line; the checksum at the end begins with `=`.
        let body =
            lines.skip(1).skip_while(|line| line.contains(": ")).take_while(|line| !line.starts_with('='));
        keys.extend(STANDARD.decode(body.collect::<String>()).ok()?);
    }
    (!keys.is_empty()).then_some(keys)
}

/// Returns the latest expiry of a file's signing keys. Returns `None` if a key never expires, if there is no key, or without gpg.
fn last_expiry(file: &Path) -> Option<Timestamp> {
    // These options keep gpg from reading configuration or other keys, and from writing files.
    let output = Command::new("gpg")
        .args(["--batch", "--no-options", "--homedir", "/nonexistent", "--trust-model", "always"])
        .args(["--with-colons", "--show-keys", "--"])
        .arg(file)
        .output()
        .inspect_err(|error| {
            tracing::warn!(%error, file = %file.display(), "install gpg: without it, the expiry date of this key is unknown");
        })
        .ok()?;
    let expiry = signing_key_expiries(&String::from_utf8_lossy(&output.stdout)).max()?;
    Timestamp::from_second(expiry).ok()
}

/// Returns the expiry time of each signing key, in seconds since the Unix epoch (GnuPG's doc/DETAILS, "Format of the colon
/// listings"). A primary key's expiry also limits its subkeys.
fn signing_key_expiries(listing: &str) -> impl Iterator<Item = i64> {
    let mut primary_expiry = NEVER;
    listing.lines().filter_map(move |line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [kind @ ("pub" | "sub"), validity, _, _, _, _, expiry, _, _, _, _, uses, ..] = *fields else {
            return None;
        };
        let mut expiry = expiry.parse().unwrap_or(NEVER);
        if kind == "pub" {
            primary_expiry = expiry;
        }
        expiry = expiry.min(primary_expiry);
        // Capital letters apply to the whole key. A revoked key signs nothing.
        (uses.contains('s') && validity != "r").then_some(expiry)
    })
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
    /// A version of the key whose subkey expires at the end of 2027.
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
    /// A version of the key without any expiry.
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
        let key_file = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(key_file.path(), file).unwrap();
        last_expiry(key_file.path()).map(|end| end.to_string())
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
    fn the_newest_signature_has_the_expiry_of_a_key() {
        let [both, subkey, without] = [BOTH_UNTIL_2030, SUBKEY_UNTIL_2028, WITHOUT_END];
        assert_eq!(end(both.as_bytes()).unwrap(), "2030-01-01T00:00:00Z");
        assert_eq!(end(subkey.as_bytes()).unwrap(), "2028-01-01T00:00:00Z");
        assert_eq!(end(&dearmored(subkey).unwrap()).unwrap(), "2028-01-01T00:00:00Z");
        assert_eq!(end(without.as_bytes()), None);
        // The last expiry in a file counts, in any order; a key without expiry hides the others.
        assert_eq!(end([subkey, both].concat().as_bytes()).unwrap(), "2030-01-01T00:00:00Z");
        assert_eq!(end([without, both].concat().as_bytes()), None);
    }

    #[test]
    fn a_file_without_valid_keys_has_no_expiry() {
        assert_eq!((end(b""), end(b"no key")), (None, None));
        let revoked = "pub:r:255:22:DBEF83C24AE9CBA3:1767225600:1893456000::-:::scSC:::::ed25519:::0:";
        assert_eq!(signing_key_expiries(revoked).count(), 0);
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
        let expiries = key_expiries(&definitions);
        assert_eq!(expiries, [("signedBy acme.asc".to_owned(), "2028-01-01T00:00:00Z".parse().unwrap())]);
    }
}
