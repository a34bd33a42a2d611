#![no_main]

use farrier_fuzz::kmod::SymbolTable;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = str::from_utf8(data) {
        let _ = SymbolTable::parse(text);
    }
});
