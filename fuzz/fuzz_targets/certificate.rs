#![no_main]

use farrier_fuzz::kmod::{Certificate, without_signature};

// The certificate that site.yaml names, and a module whose signature is removed.
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Certificate::parse(data);
    let (module, _) = without_signature(data);
    assert!(module.len() <= data.len());
});
