#![no_main]

use farrier_fuzz::kmod::exported_names;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = exported_names(data);
});
