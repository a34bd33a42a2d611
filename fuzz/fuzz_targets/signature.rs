#![no_main]

use farrier_fuzz::kmod::Module;

/// A module without a signature.
const MODULE: &[u8] = include_bytes!("../corpus/module/plain.ko");

// The input is the PKCS#7 message. The record and the marker around it are valid.
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Ok(length) = u32::try_from(data.len()) else { return };
    let record = [&[0, 0, 2, 0, 0, 0, 0, 0], &length.to_be_bytes()[..]].concat();
    let _ = Module::parse(&[MODULE, data, &record, b"~Module signature appended~\n"].concat()[..]);
});
