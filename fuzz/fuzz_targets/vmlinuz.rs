#![no_main]

use std::io::{Cursor, Read};

use farrier_fuzz::kmod::{Vmlinux, kernel, locate};

/// Limit on decompressed bytes to read.
const LIMIT: u64 = 1 << 20;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut image = Cursor::new(data);
    let Ok(payload) = locate(&mut image) else { return };
    let Ok(reader) = kernel(&mut image, &payload) else { return };
    let mut plain = Vec::new();
    let _ = reader.take(LIMIT).read_to_end(&mut plain);
    if let Ok(mut vmlinux) = Vmlinux::open(Cursor::new(plain)) {
        let _ = (vmlinux.btf(), vmlinux.release(), vmlinux.exports());
    }
});
