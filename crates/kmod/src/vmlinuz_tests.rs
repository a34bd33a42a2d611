use std::io::{Cursor, Write as _};

use proptest::prelude::*;

use super::*;

fn kernel_text() -> Vec<u8> {
    (0..40_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    liblzma::read::XzEncoder::new(bytes, 1).read_to_end(&mut out).unwrap();
    out
}

fn lzma(bytes: &[u8]) -> Vec<u8> {
    let options = liblzma::stream::LzmaOptions::new_preset(1).unwrap();
    let stream = Stream::new_lzma_encoder(&options).unwrap();
    let mut out = Vec::new();
    liblzma::read::XzEncoder::new_stream(bytes, stream).read_to_end(&mut out).unwrap();
    out
}

fn zstd_of(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

/// Compresses blocks of the legacy format of LZ4.
fn lz4_of(bytes: &[u8]) -> Vec<u8> {
    let block = |plain: &[u8]| {
        let packed = lz4_flex::block::compress(plain);
        [&u32::try_from(packed.len()).unwrap().to_le_bytes()[..], &packed].concat()
    };
    [lz4::MAGIC.to_vec(), bytes.chunks(64 << 10).flat_map(block).collect()].concat()
}

/// Builds a bzImage with two setup sectors and the payload 100 bytes behind them, followed by the kernel's size, as in
/// the kernel's build.
fn bz_image_of(payload: &[u8], size: usize) -> Vec<u8> {
    let mut image = vec![0; 3 * 512 + 100];
    image[..2].copy_from_slice(b"MZ");
    image[0x1f1] = 2;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len() + 4).unwrap().to_le_bytes());
    image.extend(payload);
    image.extend(u32::try_from(size).unwrap().to_le_bytes());
    image.resize(image.len() + 333, 0xcc);
    image
}

fn zboot_of(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 64];
    image[..2].copy_from_slice(b"MZ");
    image[4..8].copy_from_slice(b"zimg");
    image[8..12].copy_from_slice(&64_u32.to_le_bytes());
    image[12..16].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend(payload);
    image
}

fn unpack(image: &[u8]) -> Result<(Method, Vec<u8>), VmlinuzError> {
    let mut file = Cursor::new(image);
    let payload = locate(&mut file)?;
    let mut out = Vec::new();
    kernel(&mut file, &payload)?.read_to_end(&mut out)?;
    Ok((payload.method, out))
}

#[test]
fn every_format_and_compression_is_unpacked() {
    let text = kernel_text();
    let packed = [
        (Method::Gzip, gzip(&text)),
        (Method::Xz, xz(&text)),
        (Method::Lzma, lzma(&text)),
        (Method::Zstd, zstd_of(&text)),
        (Method::Lz4, lz4_of(&text)),
    ];
    for (method, payload) in packed {
        for image in [bz_image_of(&payload, text.len()), zboot_of(&payload), payload.clone()] {
            let (found, kernel) = unpack(&image).unwrap();
            assert_eq!(found, method);
            assert!(kernel == text, "{method:?}: {} bytes", kernel.len());
        }
    }
}

#[test]
fn an_uncompressed_image_is_returned_unchanged() {
    let mut elf = kernel_text();
    elf[..4].copy_from_slice(b"\x7fELF");
    assert_eq!(unpack(&elf).unwrap(), (Method::Plain, elf.clone()));
    let in_bz_image = unpack(&bz_image_of(&elf, elf.len())).unwrap();
    assert!(in_bz_image.1.starts_with(&elf));
    let mut arm = kernel_text();
    arm[..2].copy_from_slice(b"MZ");
    arm[56..60].copy_from_slice(b"ARM\x64");
    assert_eq!(unpack(&arm).unwrap(), (Method::Plain, arm.clone()));
}

#[test]
fn unpacking_errors_name_the_cause() {
    let error_message = |image: &[u8]| unpack(image).unwrap_err().to_string();
    for (magic, name) in [(&b"BZh9"[..], "bzip2"), (b"\x89LZO\0\r\n\x1a\n", "lzo")] {
        assert_eq!(
            error_message(&bz_image_of(magic, 1)),
            format!("the kernel in the image is compressed with {name}, which farrier does not unpack")
        );
    }
    assert_eq!(error_message(b"#!/bin/sh\n"), VmlinuzError::UnknownFormat.to_string());
    assert_eq!(error_message(b""), VmlinuzError::UnknownFormat.to_string());
    let mut old = bz_image_of(&xz(b"x"), 1);
    old[0x206] = 7;
    old[0x207] = 2;
    assert!(error_message(&old).contains("older than 2.08"), "{}", error_message(&old));
    let mut outside = bz_image_of(&xz(b"x"), 1);
    outside[0x24f] = 0xff;
    assert!(error_message(&outside).contains("outside the file"), "{}", error_message(&outside));
    assert!(error_message(&bz_image_of(b"no method", 1)).contains("no known compression"));
    for packed in [xz(&kernel_text()), lz4_of(&kernel_text())] {
        let whole = bz_image_of(&packed, 1);
        assert!(unpack(&whole[..whole.len() / 2]).is_err());
        assert!(unpack(&packed[..packed.len() / 2]).is_err());
    }
}

/// Takes minutes if the buffer of 8 MiB is cleared for each block.
#[test]
fn blocks_of_one_byte_are_decompressed() {
    let blocks = [2, 0, 0, 0, 0x10, b'a'].repeat(1 << 18);
    let mut bytes = Vec::new();
    Lz4Reader::new(&[lz4::MAGIC, &blocks].concat()[..]).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"a".repeat(1 << 18));
}

proptest! {
    #[test]
    fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = unpack(&bytes);
    }

    #[test]
    fn never_panics_when_flipped(at in 0_usize..700, value: u8) {
        for mut image in [bz_image_of(&zstd_of(b"kernel"), 6), zboot_of(&xz(b"kernel"))] {
            let at = at % image.len();
            image[at] = value;
            let _ = unpack(&image);
        }
    }
}
