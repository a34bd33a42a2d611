#![no_main]

use farrier_fuzz::kmod::Module;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Module::parse(data);
});
