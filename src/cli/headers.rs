//! `farrier headers`: fetch, import, collect and list header sets.

mod import;
mod list;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, HeadersCommand, HeadersStoreArg},
    settings::{self, Settings},
};
use crate::{
    controller::TargetError,
    headers::{Fetcher, HeaderLookup, HeaderSet},
    kernel::{KernelTarget, match_family},
    registry::{self, RegistryLocation},
    store::Store,
};

/// `farrier headers ...`.
pub async fn headers(
    global: &Global,
    command: &HeadersCommand,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let settings = Settings::resolve(global)?;
    let work = async {
        match command {
            HeadersCommand::Fetch(args) => {
                let target = settings::target(&args.kernel, &args.platform)?;
                list::show(&[(&find(&settings, &target).await?).into()], global.output)
            }
            HeadersCommand::Import(args) => import::import(settings, args, global.output).await,
            HeadersCommand::Collect(args) => import::collect(settings, args, global.output).await,
            HeadersCommand::List { store } => list::list(settings, store, global.output).await,
        }
    };
    tokio::select! {
        () = cancel.cancelled() => Ok(Exit::Interrupted),
        done = work => done.map(|()| Exit::Done),
    }
}

/// A fetcher with the registry that the argument names, if it names one.
fn with_store(settings: Settings, arg: &HeadersStoreArg) -> Result<Fetcher, CliError> {
    let Some(location) = &arg.registry else { return Ok(settings.fetcher) };
    let location: RegistryLocation = settings::parse("--registry", location)?;
    let registry = registry::connect(&location, &settings.registry)?;
    Ok(settings.fetcher.with_store(Store::new(location, registry)))
}

/// The kernel's header set, as a build would find it.
pub async fn find(settings: &Settings, target: &KernelTarget) -> Result<HeaderSet, CliError> {
    let family = match_family(&settings.definitions.families, target).ok_or_else(|| no_family(target))?;
    match settings.fetcher.header_set(&family.spec.headers, &settings.definitions.root, target).await? {
        HeaderLookup::Found(headers) => Ok(*headers),
        HeaderLookup::Missing { looked_for, hint } => {
            Err(TargetError::HeadersMissing { looked_for, hint }.into())
        }
    }
}

/// No family: where headers would come from is not known.
pub fn no_family(target: &KernelTarget) -> CliError {
    CliError::Usage(format!(
        "no kernel family matches {target}; add one to kernels/ of the definitions directory"
    ))
}
