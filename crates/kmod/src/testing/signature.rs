//! Signatures for tests, built element by element.

/// Encodes one DER element of less than 64 KiB.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    let mut bytes = vec![tag];
    match length {
        [0, short] if short < 0x80 => bytes.push(short),
        [0, byte] => bytes.extend([0x81, byte]),
        [high, low] => bytes.extend([0x82, high, low]),
    }
    bytes.extend(content);
    bytes
}

fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    element(0x30, &parts.concat())
}

/// Builds a `SignedData` as `scripts/sign-file` writes it, without certificates and attributes. `digest` is the last
/// number of the digest's identifier under 2.16.840.1.101.3.4.2.
pub fn message(common_name: &str, serial: &[u8], digest: u8) -> Vec<u8> {
    let id = |bytes: &[u8]| element(0x06, bytes);
    let name = |kind: u8, text: &str| {
        let part = sequence(&[id(&[0x55, 0x04, kind]), element(0x0c, text.as_bytes())]);
        element(0x31, &part)
    };
    let algorithm = sequence(&[id(&[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, digest])]);
    let issuer = sequence(&[name(10, "Organisation"), name(3, common_name)]);
    let signer = sequence(&[
        element(0x02, &[1]),
        sequence(&[issuer, element(0x02, serial)]),
        algorithm.clone(),
        sequence(&[id(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01]), element(0x05, &[])]),
        element(0x04, &[0x5a; 256]),
    ]);
    let data = sequence(&[
        element(0x02, &[1]),
        element(0x31, &algorithm),
        sequence(&[id(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x01])]),
        element(0x31, &signer),
    ]);
    sequence(&[id(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x02]), element(0xa0, &data)])
}

/// Builds the `struct module_signature` for a PKCS#7 message of this length.
pub fn record(length: usize) -> [u8; 12] {
    let [a, b, c, d] = u32::try_from(length).unwrap().to_be_bytes();
    [0, 0, 2, 0, 0, 0, 0, 0, a, b, c, d]
}

/// Appends a message, its record and the marker to a module.
pub fn signed(module: &[u8], message: &[u8]) -> Vec<u8> {
    [module, message, &record(message.len()), b"~Module signature appended~\n"].concat()
}
