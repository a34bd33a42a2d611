#![no_main]

use farrier_fuzz::protocol::parse;
use driver_entrypoint::report::Key;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = parse(data, Key([7; 16]));
});
