#![no_main]

use std::io::Cursor;

use farrier_fuzz::kmod::Vmlinux;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(mut vmlinux) = Vmlinux::open(Cursor::new(data)) {
        let _ = (vmlinux.btf(), vmlinux.release(), vmlinux.exports());
    }
});
