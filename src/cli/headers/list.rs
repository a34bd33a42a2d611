//! What header sets there are, as people and programs read it.

use serde::Serialize;

use super::{CliError, Settings, with_store};
use crate::{
    cli::{
        args::{HeadersStoreArg, OutputForm},
        printer,
    },
    headers::{HeaderSet, ListedHeaders},
};

/// One header set, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    release: String,
    arch: String,
    compiler: Option<String>,
    exported_symbols: Option<usize>,
    /// `cache` or `registry`.
    place: &'static str,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    origin: Vec<String>,
}

impl From<&HeaderSet> for Listed {
    fn from(headers: &HeaderSet) -> Self {
        Self {
            release: headers.facts.release.to_string(),
            arch: headers.facts.arch.to_string(),
            compiler: headers.compiler.map(|compiler| compiler.to_string()),
            exported_symbols: headers.facts.symbols.as_ref().map(crate::kmod::SymbolTable::len),
            place: "cache",
            path: headers.root.display().to_string(),
            digest: None,
            origin: headers.origin.clone(),
        }
    }
}

impl From<ListedHeaders> for Listed {
    fn from(headers: ListedHeaders) -> Self {
        let ListedHeaders { release, arch, compiler, exported_symbols, reference, digest, origin } = headers;
        Self {
            release,
            arch,
            compiler,
            exported_symbols,
            place: "registry",
            path: reference,
            digest: Some(digest.to_string()),
            origin,
        }
    }
}

/// `farrier headers list`.
pub(super) async fn list(
    settings: Settings,
    store: &HeadersStoreArg,
    form: OutputForm,
) -> Result<(), CliError> {
    let fetcher = with_store(settings, store)?;
    let cached = fetcher.header_sets().await?;
    let stored = fetcher.stored_header_sets().await?;
    let sets: Vec<Listed> =
        cached.iter().map(Listed::from).chain(stored.into_iter().map(Listed::from)).collect();
    show(&sets, form)
}

/// Prints header sets.
pub(super) fn show(sets: &[Listed], form: OutputForm) -> Result<(), CliError> {
    let text = match form {
        OutputForm::Json => printer::json(&sets)?,
        OutputForm::Table => {
            let mut table = printer::table(["KERNEL", "ARCH", "COMPILER", "SYMBOLS", "PLACE"]);
            for Listed { release, arch, compiler, exported_symbols, place: _, path, digest: _, origin: _ } in
                sets
            {
                let symbols = exported_symbols.map_or_else(|| "none".to_owned(), |count| count.to_string());
                table.add_row([release, arch, compiler.as_deref().unwrap_or("unknown"), &symbols, path]);
            }
            table.to_string()
        }
    };
    Ok(printer::result(&text)?)
}
