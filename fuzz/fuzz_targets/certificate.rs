#![no_main]

use farrier_fuzz::kmod::{Certificate, without_signature};

// The certificate that site.yaml names, and a module whose signature is to be taken off.
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(certificate) = Certificate::parse(data) {
        let _ = (certificate.issuer_name(), certificate.key_id(), certificate.subject(), certificate.public_key());
    }
    let (module, _) = without_signature(data);
    assert!(module.len() <= data.len());
});
