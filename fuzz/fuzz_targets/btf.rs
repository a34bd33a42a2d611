#![no_main]

use farrier_fuzz::kmod::{BtfBase, Btf};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(btf) = Btf::parse(data) {
        let _ = btf.size_of_struct("module");
    }
    let _ = BtfBase::of(data);
});
