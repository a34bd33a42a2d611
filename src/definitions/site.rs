//! Adapter: validates `site.yaml` across fields: dependent fields and duplicate names.

use super::error::Report;
use crate::site::{Host, MirrorRule, SiteSpec};

/// Reports settings that would sign whatever anyone stored in the registry.
pub(super) fn signing(report: &mut Report<'_>, site: &SiteSpec) {
    if site.module_signing.is_some() && site.image_signing.is_none() && site.policy.is_empty() {
        let message = "modules are signed, and no key for images is named: published modules are signed anew when the key \
                       changes, and whoever may write to the registry could then have modules of their own signed. Add \
                       imageSigning, so that farrier knows its own images";
        report.wrong(&["spec", "moduleSigning"], message);
    }
    if site.image_signing.as_ref().is_some_and(|signing| signing.belies(&site.policy)) {
        let message = "it signs what anyone put under a tag, and policy.requireSigned would take that for proof: leave it \
                       out, or say `trustRegistryWriters: true` where all who may write to the registry are trusted";
        report.wrong(&["spec", "imageSigning", "existing"], message);
    }
}

/// Reports mistakes in the site's network settings.
pub(super) fn network(report: &mut Report<'_>, site: &SiteSpec) {
    for (index, rule) in site.mirrors.iter().enumerate() {
        let at = index.to_string();
        let MirrorRule { from, to } = rule;
        if site.mirrors[..index].iter().any(|earlier| earlier.from == *from) {
            let message = format!("there is a rule for {from} already: name all candidates in one");
            report.wrong(&["spec", "mirrors", &at, "from"], message);
        }
        for (number, place) in to.iter().enumerate() {
            if place.is_of_images() != from.is_of_images() {
                let message = if from.is_of_images() {
                    format!("{place} is an address, and {from} is the beginning of image references")
                } else {
                    format!("{place} is the beginning of image references, and {from} is an address")
                };
                report.wrong(&["spec", "mirrors", &at, "to", &number.to_string()], message);
            }
        }
    }
    for (index, host) in site.hosts.iter().enumerate() {
        let at = index.to_string();
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
        } = host;
        if site.hosts[..index].iter().any(|earlier| earlier.host == *name) {
            report.wrong(&["spec", "hosts", &at, "host"], format!("there is a host {name} already"));
        }
        match (client_certificate, client_key) {
            (Some(_), None) => {
                let message = format!("{name} has a clientCertificate, and no clientKey for it");
                report.wrong(&["spec", "hosts", &at, "clientCertificate"], message);
            }
            (None, Some(_)) => {
                let message = format!("{name} has a clientKey, and no clientCertificate for it");
                report.wrong(&["spec", "hosts", &at, "clientKey"], message);
            }
            _ => {}
        }
        if *plain_http && (ca_file.is_some() || client_certificate.is_some()) {
            let message = format!("without TLS, certificates for {name} have no meaning");
            report.wrong(&["spec", "hosts", &at, "plainHttp"], message);
        }
    }
}
