//! Adapter: TLS for registries: the system's roots and a CA file of the user's.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};

use super::RegistryError;

/// Client configuration with ring named explicitly, so that it does not depend on a process-wide default.
pub(super) fn client_config(ca_file: Option<&Path>) -> Result<ClientConfig, RegistryError> {
    let mut roots = RootCertStore::empty();
    // Machines without ca-certificates are fine as long as only loopback or the CA file is used, and
    // system bundles do hold certificates that rustls refuses; neither is an error by itself.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(file) = ca_file {
        let refused =
            |reason: String| RegistryError::Options { what: format!("CA file {}", file.display()), reason };
        let pem = std::fs::read(file).map_err(|error| refused(error.to_string()))?;
        let mut found = false;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| refused(error.to_string()))?;
            roots.add(certificate).map_err(|error| refused(error.to_string()))?;
            found = true;
        }
        if !found {
            return Err(refused("holds no certificate in PEM form".to_owned()));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| RegistryError::Options { what: "TLS".to_owned(), reason: error.to_string() })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ca_files_that_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ca.pem");
        assert!(client_config(Some(&file)).unwrap_err().to_string().contains("No such file"));
        std::fs::write(&file, "hello").unwrap();
        let error = client_config(Some(&file)).unwrap_err().to_string();
        assert!(error.ends_with("holds no certificate in PEM form"), "{error}");
    }
}
