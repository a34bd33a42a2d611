#![no_main]

use farrier_fuzz::template::{fetching_add, steps};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = str::from_utf8(data) {
        let base = steps::Base { name: "base".to_owned(), ..steps::Base::default() };
        let _ = steps::read(text, &base);
        let _ = fetching_add(text);
    }
});
