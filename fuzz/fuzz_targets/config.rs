#![no_main]

use farrier_fuzz::kmod::KernelConfig;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = str::from_utf8(data) {
        let _ = KernelConfig::parse(text);
    }
});
