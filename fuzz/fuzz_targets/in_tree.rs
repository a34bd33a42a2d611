#![no_main]

use farrier_fuzz::kmod::InTree;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let mut index = InTree::default();
    index.add_modules(&text);
    index.add_builtin(&text);
});
