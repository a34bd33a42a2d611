//! `farrier version`: the versions of the program and of the formats that it reads and writes.

use std::collections::BTreeMap;

use farrier_core::plan::{BUILD_FORMAT, ENTRYPOINT_FORMAT, SIGNING_FORMAT};
use serde::Serialize;

use super::{Exit, Result, env_vars, session::Session};

/// JSON output of `farrier version`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    version: &'static str,
    /// Commit that the program was built from, if known.
    commit: Option<&'static str>,
    /// Version of each format: a difference means that definitions, images or bundles differ.
    formats: BTreeMap<&'static str, String>,
    /// Optional features that are compiled in.
    features: Vec<&'static str>,
}

/// Prints the versions.
pub fn version(session: &Session) -> Result<Exit> {
    let formats = [
        ("definitions", "farrier.dev/v1alpha1".to_owned()),
        ("build", BUILD_FORMAT.to_owned()),
        ("entrypoint", ENTRYPOINT_FORMAT.to_owned()),
        ("signing", SIGNING_FORMAT.to_owned()),
        #[cfg(feature = "bundle")]
        ("bundle", farrier_bundle::FORMAT.to_string()),
    ];
    let formats = BTreeMap::from(formats);
    let features = [
        ("bootcheck", cfg!(feature = "bootcheck")),
        ("bundle", cfg!(feature = "bundle")),
        ("dashboard", cfg!(feature = "dashboard")),
        ("gc", cfg!(feature = "gc")),
        ("header-collection", cfg!(feature = "header-collection")),
        ("host-artifacts", cfg!(feature = "host-artifacts")),
        ("migrate", cfg!(feature = "migrate")),
        ("radar", cfg!(feature = "radar")),
        ("startup-taint", cfg!(feature = "startup-taint")),
    ];
    let features = features.into_iter().filter_map(|(name, is_enabled)| is_enabled.then_some(name)).collect();
    let version =
        Report { version: env!("CARGO_PKG_VERSION"), commit: env_vars::FARRIER_COMMIT, formats, features };
    session.show(&version, |Report { version, commit, formats: _, features }| {
        let commit = commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
        format!("farrier {version}{commit}, features: {}", features.join(", "))
    })?;
    Ok(Exit::Done)
}
