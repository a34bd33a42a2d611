//! `farrier headers import` and `farrier headers collect`.

use std::fs;

use serde::Serialize;

use super::{CliError, Settings, with_store};
use crate::{
    cli::{
        args::{HeadersCollectArgs, HeadersImportArgs, OutputForm},
        printer,
        settings::parse,
    },
    headers::{HeaderImport, ImportSource, ImportedHeaders, Outcome},
    kernel::{Architecture, KernelRelease},
    store::header_tag,
};

/// The running kernel's release, as `uname -r` prints it.
const RUNNING: &str = "/proc/sys/kernel/osrelease";

/// What became of an import, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    release: String,
    arch: String,
    /// `imported`, `known` or `replaced`.
    outcome: &'static str,
    compiler: Option<String>,
    exported_symbols: Option<usize>,
    content: Option<String>,
    size: u64,
    /// The tree in the cache.
    path: Option<String>,
    /// The artifact in the registry.
    reference: Option<String>,
    digest: Option<String>,
    origin: Vec<String>,
}

/// `farrier headers import`.
pub(super) async fn import(
    settings: Settings,
    args: &HeadersImportArgs,
    form: OutputForm,
) -> Result<(), CliError> {
    let HeadersImportArgs { sources, kernel, arch, store, replace } = args;
    let import = HeaderImport {
        sources: sources.iter().cloned().map(ImportSource::Path).collect(),
        release: parse("--kernel", kernel)?,
        arch: parse("--arch", arch.as_deref().unwrap_or(std::env::consts::ARCH))?,
        replace: *replace,
    };
    let imported = with_store(settings, store)?.import_headers(import).await?;
    tell(&imported, form)
}

/// `farrier headers collect`: nothing is read from the node when the store has the headers already.
pub(super) async fn collect(
    settings: Settings,
    args: &HeadersCollectArgs,
    form: OutputForm,
) -> Result<(), CliError> {
    let HeadersCollectArgs { root, kernel, store } = args;
    let release: KernelRelease = if let Some(kernel) = kernel {
        parse("--kernel", kernel)?
    } else {
        let text = fs::read_to_string(RUNNING).map_err(|error| {
            CliError::Usage(format!("read the running kernel's release in {RUNNING}: {error}"))
        })?;
        parse(RUNNING, text.trim())?
    };
    let arch: Architecture = parse("architecture", std::env::consts::ARCH)?;
    let fetcher = with_store(settings, store)?;
    if let Some(stored) = fetcher.stored_headers(&release, arch).await? {
        let reference = format!(
            "{}:{}",
            stored.repository,
            header_tag(&release, arch).map_err(crate::headers::FetchError::from)?
        );
        let told = Told {
            release: release.to_string(),
            arch: arch.to_string(),
            outcome: word(Outcome::Known),
            compiler: None,
            exported_symbols: None,
            content: None,
            size: stored.layer.size,
            path: None,
            reference: Some(reference),
            digest: Some(stored.digest.to_string()),
            origin: Vec::new(),
        };
        return show(&told, form);
    }
    let sources = vec![ImportSource::Node(root.clone())];
    let imported = fetcher.import_headers(HeaderImport { sources, release, arch, replace: false }).await?;
    tell(&imported, form)
}

fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::New => "imported",
        Outcome::Known => "known",
        Outcome::Replaced => "replaced",
    }
}

fn tell(imported: &ImportedHeaders, form: OutputForm) -> Result<(), CliError> {
    let ImportedHeaders { outcome, headers, content, size, stored } = imported;
    let facts = &headers.facts;
    let reference = stored
        .as_ref()
        .map(|stored| Ok(format!("{}:{}", stored.repository, header_tag(&facts.release, facts.arch)?)))
        .transpose()
        .map_err(crate::headers::FetchError::Store)?;
    if facts.symbols.is_none() {
        printer::message(&format!(
            "warning: the headers of {} have no Module.symvers: what the kernel exports is not known, and every check of \
             a module against them ends as unknown. `make modules_prepare` makes none: take it from the full build of \
             this kernel, and import again with --replace",
            facts.release
        ));
    }
    let told = Told {
        release: facts.release.to_string(),
        arch: facts.arch.to_string(),
        outcome: word(*outcome),
        compiler: headers.compiler.map(|compiler| compiler.to_string()),
        exported_symbols: facts.symbols.as_ref().map(crate::kmod::SymbolTable::len),
        content: Some(content.to_string()),
        size: *size,
        path: Some(headers.root.display().to_string()),
        reference,
        digest: stored.as_ref().map(|stored| stored.digest.to_string()),
        origin: headers.origin.clone(),
    };
    show(&told, form)
}

fn show(told: &Told, form: OutputForm) -> Result<(), CliError> {
    let text = match form {
        OutputForm::Json => printer::json(told)?,
        OutputForm::Table => {
            let what = match told.outcome {
                "known" => "known already",
                "replaced" => "imported, in place of others",
                other => other,
            };
            let symbols = told
                .exported_symbols
                .map_or_else(|| "no Module.symvers".to_owned(), |n| format!("{n} symbols"));
            let about = told.compiler.as_ref().map(|compiler| format!(" ({compiler}, {symbols})"));
            let place = match (&told.reference, &told.digest) {
                (Some(reference), Some(digest)) => format!("{reference}@{digest}"),
                _ => told.path.clone().unwrap_or_default(),
            };
            format!(
                "headers of {} for {}{}: {what}\n{place}",
                told.release,
                told.arch,
                about.unwrap_or_default()
            )
        }
    };
    Ok(printer::result(&text)?)
}
