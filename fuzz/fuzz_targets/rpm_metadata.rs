#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farrier_fuzz::rpm_metadata(data));
