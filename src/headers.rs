//! `farrier headers`: fetches, imports, collects and lists header sets.

#[cfg(feature = "header-collection")]
mod collect;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use farrier_builder::services::BuildError;
use farrier_core::kernel::{
    Architecture, KernelFamily, KernelRelease, KernelTarget, UNKNOWN_SYSTEM, match_family,
};
use farrier_inputs::{FetchError, HeaderImport, HeaderLookup, ImportSource, ImportedHeaders, ListedHeaders};
use farrier_store::{StoredInput, header_tag};
use kmod::{KernelFacts, SymbolTable};

#[cfg(feature = "header-collection")]
pub use collect::header_routes;

use super::{
    CliError, Exit, Result,
    args::TargetArgs,
    collect_driver::{CollectDriverArgs, collect_driver},
    env_vars as vars,
    output::{self, headers::HeadersReport},
    session::Session,
    settings::{self, Settings, parse},
};

#[derive(Debug, Subcommand)]
pub enum HeadersCommand {
    /// Fetch the header set of a kernel into the cache
    Fetch(TargetArgs),
    /// Import the header set of a kernel that no mirror has, for every farrier that uses the registry
    Import(HeadersImportArgs),
    /// Import the header set of the kernel that this node runs, or send it to a farrier, as the chart's Job does
    #[cfg(feature = "header-collection")]
    Collect(collect::HeadersCollectArgs),
    /// Pack the headers that a host's own driver exposes, for the `tree` of a definition's need
    CollectDriver(CollectDriverArgs),
    /// List the header sets in the cache and the registry
    List {
        #[command(flatten)]
        store: HeadersStoreArg,
    },
}

/// Options for the store of header sets.
#[derive(Debug, Args)]
pub struct HeadersStoreArg {
    /// Registry that keeps header sets beside the images: host[:port]/path, or oci:PATH [default: only the
    /// cache]
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
}

#[derive(Debug, Args)]
pub struct HeadersImportArgs {
    /// Parts of one header set: a tarball or directory of a kernel's build tree (after `make modules_prepare`, with the
    /// Module.symvers of the full build; a separate build directory with the source tree beside it), one that is rooted
    /// at /, or .deb and .rpm files
    #[arg(required = true, value_name = "SOURCE")]
    pub sources: Vec<PathBuf>,
    /// Kernel release, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// Architecture, amd64 or arm64 [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    #[command(flatten)]
    pub store: HeadersStoreArg,
    /// Replace different headers of the same kernel: new builds use the imported headers, and images built
    /// with the old ones count as built from other inputs
    #[arg(long)]
    pub replace: bool,
}

/// Runs `farrier headers`.
pub async fn headers(session: &Session, command: HeadersCommand) -> Result<Exit> {
    match command {
        HeadersCommand::Fetch(args) => {
            let headers = match find(&session.settings()?, &settings::target_of(&args)?).await? {
                HeaderLookup::Found(headers) => headers,
                HeaderLookup::Missing { looked_for, hint } => {
                    return Err(BuildError::headers_missing(&looked_for, hint).into());
                }
            };
            session.show(&[ListedHeaders::from(headers.as_ref())], |sets| output::headers::list(sets))?;
        }
        HeadersCommand::Import(args) => {
            let HeadersImportArgs { sources, kernel, arch, store, replace } = args;
            let import = HeaderImport {
                sources: sources.into_iter().map(ImportSource::Path).collect(),
                release: parse("--kernel", &kernel)?,
                arch: parse("--arch", arch.as_deref().unwrap_or(std::env::consts::ARCH))?,
                replace,
            };
            let settings = session.settings_with_store(store.registry.as_deref())?;
            import_headers(session, &settings, import).await?;
        }
        #[cfg(feature = "header-collection")]
        HeadersCommand::Collect(args) => collect::collect(session, args).await?,
        HeadersCommand::CollectDriver(args) => collect_driver(session, args).await?,
        HeadersCommand::List { store } => {
            let Settings { fetcher, .. } = session.settings_with_store(store.registry.as_deref())?;
            let cached = fetcher.headers().in_cache().await?;
            let stored = fetcher.headers().list_store().await?;
            let sets: Vec<_> = cached.iter().map(ListedHeaders::from).chain(stored).collect();
            session.show(&sets[..], output::headers::list)?;
        }
    }
    Ok(Exit::Done)
}

async fn import_headers(session: &Session, settings: &Settings, import: HeaderImport) -> Result<()> {
    let imported = settings.fetcher.headers().import(import).await?;
    let ImportedHeaders { outcome, headers, content, size, stored } = &imported;
    let KernelFacts { release, arch, symbols, .. } = &headers.facts;
    if symbols.is_none() {
        output::message(&format!(
            "warning: the headers of {release} have no Module.symvers: the kernel's exports are unknown, so every check of a module \
             against these headers ends as unknown. `make modules_prepare` does not create the file: take it from the full build of \
             this kernel, and import again with --replace"
        ));
    }
    let reference = stored.as_ref().map(|stored| reference(stored, release, *arch)).transpose()?;
    let report = HeadersReport {
        release: release.to_string(),
        arch: arch.to_string(),
        outcome: *outcome,
        compiler: headers.compiler.map(|compiler| compiler.to_string()),
        exported_symbols: symbols.as_ref().map(SymbolTable::len),
        content: Some(content.to_string()),
        size: *size,
        path: Some(headers.root.display().to_string()),
        reference,
        digest: stored.as_ref().map(|stored| stored.digest.to_string()),
        origin: headers.origin.clone(),
    };
    session.show(&report, output::headers::report)
}

fn reference(
    stored: &StoredInput,
    release: &KernelRelease,
    arch: Architecture,
) -> Result<String, FetchError> {
    Ok(format!("{}:{}", stored.repository, header_tag(release, arch)?))
}

/// Finds the kernel's header set, as a build would find it.
pub async fn find(settings: &Settings, target: &KernelTarget) -> Result<HeaderLookup> {
    let family = family(settings, target)?;
    let source = family.spec.headers_for(target, &UNKNOWN_SYSTEM);
    Ok(settings.fetcher.headers().find(&source, target).await?)
}

/// Returns the kernel's family, which names the sources of everything for the kernel.
pub fn family<'a>(settings: &'a Settings, target: &KernelTarget) -> Result<&'a KernelFamily> {
    match_family(&settings.definitions.families, target).ok_or_else(|| {
        CliError::usage(format!(
            "no kernel family matches {target}; add one to kernels/ of the definitions directory"
        ))
    })
}
