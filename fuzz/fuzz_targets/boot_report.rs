#![no_main]

use farrier_fuzz::protocol::Transcript;
use driver_entrypoint::report::Key;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    Transcript::new(Key([7; 16])).push(data);
});
