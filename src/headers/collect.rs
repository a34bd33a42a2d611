//! `farrier headers collect`: imports the headers of the node that it runs on, or sends them to a farrier.

use std::{fs, path::PathBuf};

use axum::Router;
use clap::Args;
use farrier_builder::services::BuildServices;
use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_header_collection::{self as collected, Key, Receipt, Receiver, SendError};
use farrier_inputs::{HeaderImport, ImportSource, Outcome, PackedHeaders};
use kmod::SymbolTable;
use url::Url;

use super::{HeadersStoreArg, import_headers, reference};
use crate::{
    CliError, Result,
    error::exit_codes,
    output::{self, headers::HeadersReport},
    session::Session,
    settings::{Settings, parse},
};

exit_codes! {
    SendError: |error| if error.is_transient() { crate::Exit::Unreachable } else { crate::Exit::Failed }, |_| None;
}

/// File with the running kernel's release, as `uname -r` prints it.
const RUNNING_KERNEL_RELEASE: &str = "/proc/sys/kernel/osrelease";

#[derive(Debug, Args)]
pub struct HeadersCollectArgs {
    /// Mount point of the node's file system
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Kernel release [default: the running kernel's, as `uname -r` prints it]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    /// Send the header set to the farrier at this address, which inspects and stores it, instead of storing
    /// it from here
    #[arg(long, value_name = "URL", requires = "key_file")]
    pub to: Option<Url>,
    /// Key file that an administrator made for this kernel
    #[arg(long, value_name = "FILE", requires = "to")]
    pub key_file: Option<PathBuf>,
    #[command(flatten)]
    pub store: HeadersStoreArg,
}

/// Returns the routes that accept header sets from nodes with a key in this directory.
pub fn header_routes(services: &BuildServices, keys: Option<&PathBuf>) -> Router {
    let receiver = keys.map(|keys| Receiver::new(services.fetcher.clone(), keys.clone()));
    receiver.map(Receiver::router).unwrap_or_default()
}

/// Sends the node's headers, or imports them unless the store already has them.
pub async fn collect(session: &Session, args: HeadersCollectArgs) -> Result<()> {
    let HeadersCollectArgs { root, kernel, to, key_file, store } = args;
    let release: KernelRelease = if let Some(kernel) = kernel {
        parse("--kernel", &kernel)?
    } else {
        let text = fs::read_to_string(RUNNING_KERNEL_RELEASE).map_err(|error| {
            CliError::usage(format!(
                "cannot read the running kernel's release in {RUNNING_KERNEL_RELEASE}: {error}"
            ))
        })?;
        parse(RUNNING_KERNEL_RELEASE, text.trim())?
    };
    let arch: Architecture = parse("architecture", std::env::consts::ARCH)?;
    if let (Some(to), Some(key)) = (to, key_file) {
        let key = Key::read(&key)
            .map_err(|error| CliError::usage(format!("cannot read the key {}: {error}", key.display())))?;
        return send(session, root, release, arch, &to, &key).await;
    }
    let settings = session.settings_with_store(store.registry.as_deref())?;
    let Some(stored) = settings.fetcher.headers().in_store(&release, arch).await? else {
        let sources = vec![ImportSource::Node(root)];
        return import_headers(session, &settings, HeaderImport { sources, release, arch, replace: false })
            .await;
    };
    let report = HeadersReport {
        release: release.to_string(),
        arch: arch.to_string(),
        outcome: Outcome::Known,
        compiler: None,
        exported_symbols: None,
        content: None,
        size: stored.layer.size,
        path: None,
        reference: Some(reference(&stored, &release, arch)?),
        digest: Some(stored.digest.to_string()),
        origin: Vec::new(),
    };
    session.show(&report, output::headers::report)
}

/// Packs the node's headers and sends them to a farrier that inspects and stores them. The node has no
/// credentials of the registry.
async fn send(
    session: &Session,
    root: PathBuf,
    release: KernelRelease,
    arch: Architecture,
    to: &Url,
    key: &Key,
) -> Result<()> {
    let Settings { fetcher, .. } = session.settings()?;
    let packed = fetcher.headers().pack(root, release, arch).await?;
    let Receipt { outcome, content, reference } = collected::send(fetcher.net(), to, key, &packed).await?;
    let PackedHeaders { release, arch, facts, compiler, layer, .. } = &packed;
    let report = HeadersReport {
        release: release.to_string(),
        arch: arch.to_string(),
        outcome,
        compiler: Some(compiler.to_string()),
        exported_symbols: facts.symbols.as_ref().map(SymbolTable::len),
        content: Some(content),
        size: layer.size,
        path: Some(reference.clone().unwrap_or_else(|| to.to_string())),
        reference,
        digest: None,
        origin: Vec::new(),
    };
    session.show(&report, output::headers::report)
}
