//! Validates `site.yaml` across fields: dependent fields and duplicate names.

use farrier_core::site::{Host, MirrorRule, SiteSpec};

use super::error::Report;

/// Reports settings with which farrier would sign content that anyone could have stored in the registry.
pub(super) fn signing(report: &mut Report<'_>, site: &SiteSpec) {
    if site.module_signing.is_some() && site.image_signing.is_none() && site.policy.require_signed.is_empty()
    {
        let message = "modules are signed, but no key for images is set: farrier re-signs published modules when the key changes, \
                       so anyone who may write to the registry could have their own modules signed. Add imageSigning, so that \
                       farrier recognizes its own images";
        report.add(&["spec", "moduleSigning"], message);
    }
    if site.image_signing.as_ref().is_some_and(|signing| signing.contradicts(&site.policy)) {
        let message = "farrier would sign any image under a tag, and policy.requireSigned would accept the signature: remove `existing`, \
                       or set `trustRegistryWriters: true` if everyone who may write to the registry is trusted";
        report.add(&["spec", "imageSigning", "existing"], message);
    }
    for (index, revoked) in site.revoked.iter().enumerate() {
        if revoked.key.is_some() == revoked.fingerprint.is_some() {
            let message = "set either `key` or `fingerprint`";
            report.add(&["spec", "revoked", &index.to_string()], message);
        }
    }
}

/// Reports mistakes in the site's network settings.
pub(super) fn network(report: &mut Report<'_>, site: &SiteSpec) {
    for (index, rule) in site.mirrors.iter().enumerate() {
        let index_text = index.to_string();
        let MirrorRule { from, to } = rule;
        if site.mirrors[..index].iter().any(|earlier| earlier.from == *from) {
            let message = format!("there is already a rule for {from}: list all mirrors in one rule");
            report.add(&["spec", "mirrors", &index_text, "from"], message);
        }
        for (number, mirror) in to.iter().enumerate() {
            if mirror.is_of_images() != from.is_of_images() {
                let message = if from.is_of_images() {
                    format!("{mirror} is an address, but {from} is a prefix of image references")
                } else {
                    format!("{mirror} is a prefix of image references, but {from} is an address")
                };
                report.add(&["spec", "mirrors", &index_text, "to", &number.to_string()], message);
            }
        }
    }
    for (index, host) in site.hosts.iter().enumerate() {
        let index_text = index.to_string();
        let Host {
            host: name,
            ca_file,
            client_certificate,
            client_key,
            plain_http,
            login: _,
            ssh_key: _,
            known_hosts: _,
            token_servers: _,
            immutable_tags: _,
        } = host;
        if site.hosts[..index].iter().any(|earlier| earlier.host == *name) {
            report.add(&["spec", "hosts", &index_text, "host"], format!("host {name} is already listed"));
        }
        match (client_certificate, client_key) {
            (Some(_), None) => {
                let message = format!("{name} has a clientCertificate, but no clientKey");
                report.add(&["spec", "hosts", &index_text, "clientCertificate"], message);
            }
            (None, Some(_)) => {
                let message = format!("{name} has a clientKey, but no clientCertificate");
                report.add(&["spec", "hosts", &index_text, "clientKey"], message);
            }
            _ => {}
        }
        if *plain_http && (ca_file.is_some() || client_certificate.is_some()) {
            let message = format!("certificates for {name} have no effect without TLS");
            report.add(&["spec", "hosts", &index_text, "plainHttp"], message);
        }
    }
}
