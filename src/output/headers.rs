//! Output of `farrier headers`.

use farrier_inputs::{ListedHeaders, Outcome};
use serde::Serialize;

use super::indented_table;

/// Result of an import, for `-o json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeadersReport {
    pub release: String,
    pub arch: String,
    pub outcome: Outcome,
    pub compiler: Option<String>,
    pub exported_symbols: Option<usize>,
    pub content: Option<String>,
    pub size: u64,
    /// The tree in the cache; after a transfer, the reference or the receiver's address.
    pub path: Option<String>,
    /// Reference of the artifact in the registry.
    pub reference: Option<String>,
    pub digest: Option<String>,
    pub origin: Vec<String>,
}

/// Formats a table of header sets.
pub fn list(sets: &[ListedHeaders]) -> String {
    let rows = sets.iter().map(|set| {
        let ListedHeaders { release, arch, os, compiler, exported_symbols, reference, .. } = set;
        let system = os.as_deref().unwrap_or("-").to_owned();
        let compiler = compiler.as_deref().unwrap_or("unknown").to_owned();
        let symbols = exported_symbols.map_or_else(|| "none".to_owned(), |count| count.to_string());
        [release.clone(), arch.clone(), system, compiler, symbols, reference.clone()]
    });
    indented_table(["KERNEL", "ARCH", "SYSTEM", "COMPILER", "SYMBOLS", "PLACE"], rows)
}

/// Formats the outcome of an import, and the location of the header set.
pub fn report(report: &HeadersReport) -> String {
    let HeadersReport { release, arch, outcome, compiler, exported_symbols, path, reference, digest, .. } =
        report;
    let action = match outcome {
        Outcome::New => "imported",
        Outcome::Known => "already known",
        Outcome::Replaced => "imported, replacing others",
    };
    let symbols =
        exported_symbols.map_or_else(|| "no Module.symvers".to_owned(), |count| format!("{count} symbols"));
    let details = compiler.as_ref().map(|compiler| format!(" ({compiler}, {symbols})")).unwrap_or_default();
    let location = match (reference, digest) {
        (Some(reference), Some(digest)) => format!("{reference}@{digest}"),
        _ => path.clone().unwrap_or_default(),
    };
    format!("headers of {release} for {arch}{details}: {action}\n{location}")
}
