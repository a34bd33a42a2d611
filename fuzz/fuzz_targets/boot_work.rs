#![no_main]

use driver_entrypoint::work::Work;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Work::decode(data);
});
