#![no_main]

use driver_entrypoint::work::Work;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = str::from_utf8(data) {
        let _ = Work::parse(text);
    }
});
