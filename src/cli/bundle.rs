//! `farrier bundle`: one file with all that a site needs, written, listed and taken over.

mod progress;
mod select;
mod text;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::progress::Bar;
use super::{
    CliError, Exit,
    args::{BundleCommand, BundleExportArgs, BundleImportArgs, BundleInspectArgs, Global, OutputForm},
    printer, session,
    settings::{self, Settings},
};
use crate::{
    bundle::{
        self, Bundle, BundleError, BundleIndex, Content, ContentKind, Meter, Since, Taken, Target, Verified,
        Wanted, kind_name,
    },
    engine::EngineChoice,
    image::{Digest, ImageReference},
    registry::{self, RegistryLocation, RegistryOptions},
};

/// `farrier bundle export`, `import` and `inspect`.
pub async fn bundle(
    global: &Global,
    command: BundleCommand,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    let work = async {
        match command {
            BundleCommand::Export(args) => export(global, &args, cancel.clone()).await,
            BundleCommand::Import(args) => import(global, &args).await,
            BundleCommand::Inspect(args) => inspect(global, &args).await,
        }
    };
    tokio::select! {
        // What is written or pushed so far is whole, and the next run goes on behind it.
        () = cancel.cancelled() => Ok(Exit::Interrupted),
        done = work => done,
    }
}

/// A bundle, for `-o json`: what `--since` reads again.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listing<'a> {
    id: &'a str,
    file: String,
    /// The file's bytes.
    length: u64,
    /// Bytes of its blobs, each counted once.
    carried: u64,
    /// Bytes of the blobs that only its base has.
    in_base: u64,
    #[serde(flatten)]
    index: &'a BundleIndex,
}

fn listing(bundle: &Bundle) -> Listing<'_> {
    let (carried, in_base) = bundle.index().bytes();
    Listing {
        id: bundle.id().as_str(),
        file: bundle.path().display().to_string(),
        length: bundle.length(),
        carried,
        in_base,
        index: bundle.index(),
    }
}

async fn export(
    global: &Global,
    args: &BundleExportArgs,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    if args.to.exists() {
        return Err(BundleError::Exists(args.to.clone()).into());
    }
    let since = args.since.clone();
    let since = blocking(move || since.as_deref().map(Since::read).transpose()).await?;
    let controller = session::controller(global, Some(&args.registry.registry), EngineChoice::Auto, cancel)?;
    let Some(contents) = select::contents(&controller, args).await? else { return Ok(Exit::Failed) };
    let (location, registry) = (&controller.location, &controller.registry);
    let contents = bundle::with_referrers(contents, location, registry.as_ref()).await?;
    let mut wanted = Vec::new();
    for content in contents {
        let repository = select::repository(location, &content.repository)?;
        wanted.push(Wanted { repository, registry: Arc::clone(registry), content });
    }
    if let Some(reference) = &args.farrier_image {
        wanted.push(farrier_image(global, reference).await?);
    }
    let collection = bundle::collect(&wanted, &location.to_string(), since.as_ref()).await?;
    let exported = bundle::export(collection, &args.to, Arc::new(Bar::new())).await?;
    if exported.kept > 0 {
        printer::message(&format!("{} blobs were written by an earlier run, and kept", exported.kept));
    }
    let path = args.to.clone();
    let written = blocking(move || Bundle::open(&path)).await?;
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&listing(&written))?,
        OutputForm::Table => text::summary(&written),
    })?;
    printer::message(&format!(
        "next: farrier bundle import {} --registry REGISTRY, at the site",
        args.to.display()
    ));
    Ok(Exit::Done)
}

/// farrier's own image, wherever it is.
async fn farrier_image(global: &Global, reference: &str) -> Result<Wanted, CliError> {
    let reference: ImageReference = settings::parse("--farrier-image", reference)?;
    let ImageReference { repository, version } = &reference;
    let Some(host) = repository.host() else {
        return Err(CliError::Usage(format!("--farrier-image: {reference} names no registry")));
    };
    let location = RegistryLocation::Remote { host: host.to_owned(), prefix: None };
    let registry = registry::connect(&location, &Settings::registry_options(global)?)?;
    let found = registry.manifest(repository, version).await?;
    let found = found.ok_or_else(|| BundleError::Absent(reference.to_string()))?;
    let tag = match version {
        crate::image::Version::Tag(tag) => Some(tag.clone()),
        crate::image::Version::Digest(_) => None,
    };
    let content =
        Content { kind: ContentKind::Farrier, repository: "farrier".to_owned(), tag, digest: found.digest };
    Ok(Wanted { content, repository: repository.clone(), registry })
}

/// One of the contents after an import, for `-o json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    kind: &'static str,
    repository: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
    digest: &'a str,
    /// `pushed`, `present`, `moved` or `conflict`.
    outcome: &'static str,
    /// What the tag holds instead, or held before it moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<&'a str>,
}

fn row((content, taken): &(Content, Taken)) -> Row<'_> {
    let Content { kind, repository, tag, digest } = content;
    let (outcome, holds) = match taken {
        Taken::Pushed => ("pushed", None),
        Taken::Present => ("present", None),
        Taken::Moved { held } => ("moved", Some(held.as_str())),
        Taken::Conflict { holds } => ("conflict", Some(Digest::as_str(holds))),
    };
    let tag = tag.as_ref().map(crate::image::Tag::as_str);
    Row { kind: kind_name(*kind), repository, tag, digest: digest.as_str(), outcome, holds }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ImportReport<'a> {
    id: &'a str,
    registry: String,
    contents: Vec<Row<'a>>,
    sent_blobs: usize,
    sent_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    definitions_written: Option<usize>,
}

async fn import(global: &Global, args: &BundleImportArgs) -> Result<Exit, CliError> {
    let BundleImportArgs { file, registry, definitions_to, overwrite } = args;
    let location: RegistryLocation = settings::parse("--registry", &registry.registry)?;
    let registry = registry::connect(&location, &registry_options(global, definitions_to.as_deref())?)?;
    let bar = Arc::new(Bar::new());
    let verified = verify(file.clone(), Arc::clone(&bar)).await?;
    let verified = Arc::new(verified);
    // Before anything is pushed: files that are in the way are told first.
    let (from, to, overwrite) = (Arc::clone(&verified), definitions_to.clone(), *overwrite);
    let written = blocking(move || match to {
        Some(to) => bundle::write_definitions(&from, &to, overwrite),
        None => Ok(None),
    })
    .await?;
    let target = Target { location: location.clone(), registry };
    let imported = bundle::import(&verified, &target, bar.as_ref()).await?;
    let report = ImportReport {
        id: verified.bundle().id().as_str(),
        registry: location.to_string(),
        contents: imported.contents.iter().map(row).collect(),
        sent_blobs: imported.blobs,
        sent_bytes: imported.sent,
        definitions_written: written,
    };
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&report)?,
        OutputForm::Table => text::imported(&imported),
    })?;
    match (definitions_to, written) {
        (Some(to), Some(count)) => {
            printer::message(&format!("definitions: {count} files written to {}", to.display()));
        }
        (Some(_), None) => printer::message("definitions: the bundle holds none"),
        (None, _) => {}
    }
    if !imported.is_complete() {
        printer::message(
            "error: some tags hold other content, and keep it\n\
             hint: a published tag never changes: delete it in the registry if the bundle's content is right, or use \
             another prefix with --registry",
        );
        return Ok(Exit::Failed);
    }
    let definitions =
        definitions_to.as_ref().map(|to| format!(" --definitions {}", to.display())).unwrap_or_default();
    printer::message(&format!("next: farrier plan --registry {location} --cluster kube{definitions}"));
    Ok(Exit::Done)
}

/// How the registry is reached. Where the definitions directory is the one that the import is to make, only the built-in
/// definitions can say it.
fn registry_options(global: &Global, definitions_to: Option<&Path>) -> Result<RegistryOptions, CliError> {
    let is_to = |path: &Path| match (definitions_to.map(std::path::absolute), std::path::absolute(path)) {
        (Some(Ok(to)), Ok(path)) => to == path,
        _ => false,
    };
    let definitions = global.definitions.as_deref().filter(|path| path.exists() || !is_to(path));
    Settings::registry_options_from(global, definitions)
}

async fn inspect(global: &Global, args: &BundleInspectArgs) -> Result<Exit, CliError> {
    let BundleInspectArgs { file, verify: all } = args;
    let bundle = if *all {
        verify(file.clone(), Arc::new(Bar::new())).await?.bundle().clone()
    } else {
        let path = file.clone();
        blocking(move || Bundle::open(&path)).await?
    };
    printer::result(&match global.output {
        OutputForm::Json => printer::json(&listing(&bundle))?,
        OutputForm::Table => text::listing(&bundle),
    })?;
    if *all {
        printer::message(&format!("{} is whole", file.display()));
    }
    Ok(Exit::Done)
}

async fn verify(file: PathBuf, meter: Arc<impl Meter + 'static>) -> Result<Verified, CliError> {
    blocking(move || Bundle::open(&file)?.verify(meter.as_ref())).await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BundleError> + Send + 'static,
) -> Result<T, CliError> {
    let stopped = |error| CliError::Output(std::io::Error::other(error));
    Ok(tokio::task::spawn_blocking(work).await.map_err(stopped)??)
}
