//! TLS configuration: system roots, CA files, and client certificates.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use farrier_core::site::Host;
use jiff::Timestamp;
use kmod::Certificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    SupportedProtocolVersion,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
    server::ParsedCertificate,
};

use super::{NetError, Secret};

/// Trusted roots and client certificates.
#[derive(Default)]
pub(super) struct Trusted {
    /// System roots, read for the first connection: reading them takes longer than a reconcile with warm caches.
    system: OnceLock<RootCertStore>,
    /// Roots for every host.
    general: Vec<CertificateDer<'static>>,
    /// Roots and client certificates for each entry of the site's hosts.
    hosts: Vec<HostTls>,
}

#[derive(Default)]
struct HostTls {
    roots: Vec<CertificateDer<'static>>,
    client_chain: Vec<CertificateDer<'static>>,
}

impl Trusted {
    pub(super) fn read(ca_file: Option<&Path>, hosts: &[Host], root: &Path) -> Result<Self, NetError> {
        let general = ca_file.map(|file| certificates("CA file", file)).transpose()?.unwrap_or_default();
        let mut list = Vec::new();
        for Host {
            host,
            ca_file,
            client_certificate,
            client_key: _,
            plain_http: _,
            login: _,
            ssh_key: _,
            known_hosts: _,
            token_servers: _,
            immutable_tags: _,
        } in hosts
        {
            let read = |what: &str, file: Option<&Path>| {
                let read = |file| certificates(&format!("site.yaml, host {host}: {what}"), &root.join(file));
                file.map_or(Ok(Vec::new()), read)
            };
            let roots = read("caFile", ca_file.as_deref())?;
            let client_chain = read("clientCertificate", client_certificate.as_deref())?;
            list.push(HostTls { roots, client_chain });
        }
        Ok(Self { system: OnceLock::new(), general, hosts: list })
    }

    /// Expiry of the certificates in each file. `hosts` must be the list from [`Self::read`].
    pub(super) fn expiries(&self, hosts: &[Host]) -> Vec<(String, Timestamp)> {
        // rustls would reject any certificate that cannot be parsed here.
        fn not_after(certificates: &[CertificateDer<'_>]) -> impl Iterator<Item = Timestamp> {
            certificates
                .iter()
                .filter_map(|der| Certificate::parse(der).ok())
                .map(|certificate| certificate.not_after)
        }
        let mut files = vec![("--ca-file".to_owned(), not_after(&self.general).max())];
        for (Host { host, .. }, HostTls { roots, client_chain }) in hosts.iter().zip(&self.hosts) {
            files.push((format!("caFile of {host}"), not_after(roots).max()));
            files.push((format!("clientCertificate of {host}"), not_after(client_chain).min()));
        }
        files.into_iter().filter_map(|(what, expiry)| Some((what, expiry?))).collect()
    }

    /// Creates a client configuration for the host with this index. Uses ring and not the process-wide default provider. Blocks.
    pub(super) fn config(
        &self,
        host_index: Option<usize>,
        key: Option<&Secret>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Result<ClientConfig, String> {
        let entry = host_index.and_then(|index| self.hosts.get(index));
        let mut roots = self.system.get_or_init(system_roots).clone();
        let for_host = entry.iter().flat_map(|entry| &entry.roots);
        let listed: Vec<_> = self.general.iter().chain(for_host).cloned().collect();
        for certificate in &listed {
            roots.add(certificate.clone()).map_err(|error| format!("a root certificate: {error}"))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|error| error.to_string())?;
        // With no listed certificate the default verifier suffices, and `WebPkiServerVerifier` cannot be built without roots.
        let builder = if listed.is_empty() {
            builder.with_root_certificates(roots)
        } else {
            let issued = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| error.to_string())?;
            let verifier = Arc::new(ListedOrIssued { listed, issued });
            builder.dangerous().with_custom_certificate_verifier(verifier)
        };
        let mut config = match (entry.map(|entry| &entry.client_chain), key) {
            (Some(chain), Some(key)) if !chain.is_empty() => {
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| {
                    format!("clientKey contains no unencrypted private key in PEM form ({error})")
                })?;
                builder
                    .with_client_auth_cert(chain.clone(), key)
                    .map_err(|error| format!("clientCertificate and clientKey: {error}"))?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// Accepts a server's certificate that one of the roots issued, or that is itself in a CA file, as OpenSSL does. rustls rejects a
/// server's self-signed certificate with `CA:TRUE`, which `openssl req -x509` makes by default.
#[derive(Debug)]
struct ListedOrIssued {
    listed: Vec<CertificateDer<'static>>,
    issued: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for ListedOrIssued {
    fn verify_server_cert(
        &self,
        server: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.issued.verify_server_cert(server, intermediates, name, ocsp, now) {
            Err(_) if self.listed.iter().any(|listed| listed == server) => {
                is_valid_at(server, now)?;
                verify_server_name(&ParsedCertificate::try_from(server)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            outcome => outcome,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.issued.verify_tls12_signature(message, server, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.issued.verify_tls13_signature(message, server, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.issued.supported_verify_schemes()
    }
}

fn is_valid_at(der: &CertificateDer<'_>, now: UnixTime) -> Result<(), CertificateError> {
    let certificate = Certificate::parse(der).map_err(|_| CertificateError::BadEncoding)?;
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    if now < certificate.not_before.as_second() {
        Err(CertificateError::NotValidYet)
    } else if now > certificate.not_after.as_second() {
        Err(CertificateError::Expired)
    } else {
        Ok(())
    }
}

/// Loads the system's roots, and ignores errors. A machine without ca-certificates works with loopback hosts and CA
/// files. System bundles may contain certificates that rustls rejects.
fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn certificates(what: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, NetError> {
    let invalid = |reason: String| NetError::Options(format!("{what} {}", file.display()), reason);
    let pem = std::fs::read(file).map_err(|error| invalid(error.to_string()))?;
    let mut parsed = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| invalid(error.to_string()))?;
        // Check that the certificate is a usable root, by adding it to a temporary store.
        RootCertStore::empty().add(certificate.clone()).map_err(|error| invalid(error.to_string()))?;
        parsed.push(certificate);
    }
    if parsed.is_empty() {
        return Err(invalid("contains no certificate in PEM form".to_owned()));
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ca_files_that_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ca.pem");
        let read = || Trusted::read(Some(&file), &[], Path::new("")).err().map(|error| error.to_string());
        assert!(read().unwrap().contains("No such file"));
        std::fs::write(&file, "hello").unwrap();
        let error = read().unwrap();
        assert!(
            error.starts_with("CA file ") && error.ends_with("contains no certificate in PEM form"),
            "{error}"
        );
        let host = r#"{"host": "r.example", "clientCertificate": "ca.pem"}"#;
        let hosts = [serde_json::from_str(host).unwrap()];
        let error = Trusted::read(None, &hosts, directory.path()).err().unwrap().to_string();
        assert!(error.starts_with("site.yaml, host r.example: clientCertificate "), "{error}");
    }
}
