//! `farrier bundle`: exports, inspects and imports one file with everything that a site needs.

mod select;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use clap::{Args, Subcommand};
use farrier_builder::{images, images::ImageSigner};
use farrier_bundle as bundle;
use farrier_bundle::{
    Bundle, BundleError, Collection, Content, ContentKind, ContentRequest, PreviousBundle, Target,
};
use farrier_core::{
    image::{Definitions, Digest, ImageReference, Memory},
    provenance::PublicKey,
};
use farrier_engines::EngineChoice;
use farrier_local::blocking::blocking;
use farrier_store::registry::{self, Registry as _, RegistryLocation, Retrying};
use oci::error_chain;

use super::{
    CliError, Exit, Result,
    args::{Global, RegistryArg},
    error::exit_codes,
    mirror::SelectionArgs,
    output::{
        self, Bar,
        bundle::{ImportReport, Listing},
    },
    session::Session,
    settings::{self, Settings, connect},
};

exit_codes! {
    BundleError: |error| match error {
        BundleError::Registry(error) if error.is_transient() => Exit::Unreachable,
        error if error.is_usage() => Exit::Usage,
        _ => Exit::Failed,
    }, BundleError::hint;
}

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Write a bundle; after an interruption, the same command resumes
    Export(BundleExportArgs),
    /// Verify a bundle, then push what the registry lacks; safe to repeat
    Import(BundleImportArgs),
    /// List the contents of a bundle
    Inspect(BundleInspectArgs),
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").args(["kernel", "cluster", "reference"]).required(true).multiple(true)))]
pub struct BundleExportArgs {
    #[command(flatten)]
    pub selection: SelectionArgs,
    /// Also export this image with its referrers: repository:tag below the registry's prefix (repeatable)
    #[arg(long, value_name = "NAME:TAG")]
    pub reference: Vec<String>,
    /// Write a bundle even if an image is not published, or something that images are made from is missing
    #[arg(long)]
    pub incomplete: bool,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Bundle file to write
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Write parts of at most this size, such as 4G for FAT32: FILE.001, FILE.002, ...
    #[arg(long, value_name = "SIZE")]
    pub split: Option<Memory>,
    /// Omit the contents of this earlier bundle: the bundle file, or the output of `bundle inspect -o json`
    /// for it
    #[arg(long, value_name = "FILE")]
    pub since: Option<PathBuf>,
    /// Name of the exporter, which orders its bundles: a site refuses a bundle that is older than what it
    /// accepted from the same exporter [default: the registry]
    #[arg(long, value_name = "NAME")]
    pub origin: Option<String>,
    /// Also export farrier's own image, from this reference; it becomes `farrier` in the site's registry
    #[arg(long, value_name = "REFERENCE")]
    pub farrier_image: Option<String>,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("trust").args(["key", "insecure_no_signature"]).required(true)))]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct BundleImportArgs {
    /// Bundle file; its parts in any order, or their directory; `-` for standard input; a plain tar or an
    /// unpacked layout
    #[arg(required = true)]
    pub file: Vec<PathBuf>,
    /// Signature of the bundle [default: FILE.sig]
    #[arg(long, value_name = "FILE")]
    pub signature: Option<PathBuf>,
    /// Trusted public key (PEM) of the exporting site; one of the keys must have signed the bundle
    /// (repeatable)
    #[arg(long, value_name = "FILE")]
    pub key: Vec<PathBuf>,
    /// Import the bundle without verifying a signature
    #[arg(long, conflicts_with = "key")]
    pub insecure_no_signature: bool,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Import the bundle even if the site accepted a newer one of the same exporter; tags then move back
    #[arg(long)]
    pub allow_older: bool,
    /// Also write the bundle's definitions into this directory
    #[arg(long, value_name = "DIR")]
    pub definitions_to: Option<PathBuf>,
    /// Replace files in the directory of --definitions-to that differ from the bundle's
    #[arg(long, requires = "definitions_to")]
    pub overwrite: bool,
    /// Accept definitions that contain a command (`key.command`) or a template; without this option they are
    /// shown, and nothing is imported
    #[arg(long, requires = "definitions_to")]
    pub accept: bool,
}

#[derive(Debug, Args)]
pub struct BundleInspectArgs {
    /// Bundle file, or what `farrier bundle import` accepts
    #[arg(required = true)]
    pub file: Vec<PathBuf>,
    /// Signature of the bundle [default: FILE.sig]
    #[arg(long, value_name = "FILE")]
    pub signature: Option<PathBuf>,
    /// Read the whole bundle, as an import does before it pushes anything
    #[arg(long)]
    pub verify: bool,
    /// Fail unless one of these public keys (PEM) signed the bundle (repeatable)
    #[arg(long, value_name = "FILE")]
    pub key: Vec<PathBuf>,
}

/// Runs `farrier bundle export`, `import` or `inspect`. An interrupted export or import leaves only complete
/// parts behind, and the next run continues after them.
pub async fn bundle(session: &Session, command: BundleCommand) -> Result<Exit> {
    match command {
        BundleCommand::Export(args) => export(session, &args).await,
        BundleCommand::Import(args) => import(session, &args).await,
        BundleCommand::Inspect(args) => inspect(session, &args).await,
    }
}

async fn export(session: &Session, args: &BundleExportArgs) -> Result<Exit> {
    if args.to.exists() && bundle::is_complete(&args.to) {
        return Err(BundleError::Exists(args.to.clone()).into());
    }
    let since = args.since.clone();
    let since = blocking(move || since.as_deref().map(PreviousBundle::read).transpose()).await?;
    let services = session.publisher(&args.registry, EngineChoice::Auto)?;
    // Fail fast, not after gigabytes.
    let signer = ImageSigner::load(&services).await?;
    let key = signer.as_ref().map(|signer| signer.public.fingerprint());
    let Some((contents, licenses)) = select::contents(session, &services, args).await? else {
        return Ok(Exit::Failed);
    };
    let (location, registry) = (&services.images.location, &services.images.registry);
    let contents = bundle::with_referrers(contents, location, registry.as_ref()).await?;
    let mut requests = Vec::new();
    for content in contents {
        let repository = select::repository(location, &content.repository)?;
        requests.push(ContentRequest { repository, registry: Arc::clone(registry), content });
    }
    if let Some(reference) = &args.farrier_image {
        requests.push(farrier_image(session, reference).await?);
    }
    let from = location.to_string();
    let mut collection = bundle::collect(&requests, &from, since.as_ref()).await?;
    collection.index.licenses = licenses;
    // If the site does not have this key, the error of the import names the key.
    collection.index.signer = key.clone();
    let target = Target { location: location.clone(), registry: Arc::clone(registry) };
    let origin = args.origin.as_ref().unwrap_or(&from);
    if let Some(error) = collection.assign_order(&target, origin, since.as_ref()).await? {
        output::message(&format!(
            "note: the bundle's order comes from the clock alone: {}",
            error_chain(&error)
        ));
        let (index, path) = (collection.index.clone(), args.to.clone());
        if let Some(order) = blocking(move || bundle::earlier_order(&index, &path)).await {
            collection.index.order = Some(order);
        }
    }
    let exported_bundle = write(collection, args).await?;
    match &signer {
        Some(signer) => {
            let signature = signer.sign(exported_bundle.signed_bytes()?).await?;
            let path = exported_bundle.write_signature(&signature)?;
            output::message(&format!("signed: copy {} along with the bundle", path.display()));
        }
        None => output::message("note: the bundle is not signed, because site.yaml has no imageSigning"),
    }
    let summed_bundle = exported_bundle.clone();
    let (checksum_file, sha256) = blocking(move || summed_bundle.write_checksums()).await?;
    output::message(&format!("checksum: {}, for sha256sum -c", checksum_file.display()));
    session.show(&Listing::of(&exported_bundle, key, sha256), Listing::summary)?;
    output::message(&format!(
        "next: farrier bundle import {} --key PUBLIC-KEY --registry REGISTRY, at the site",
        args.to.display()
    ));
    Ok(Exit::Done)
}

/// Writes the bundle, unless an interrupted run has written all of it.
async fn write(collection: Collection, args: &BundleExportArgs) -> Result<Bundle> {
    let (index, path) = (collection.index.clone(), args.to.clone());
    if let Some(finished) = blocking(move || bundle::find_finished(&index, &path)).await {
        output::message("kept the bundle that an earlier run wrote");
        return Ok(finished);
    }
    let split = args.split.map(Memory::bytes);
    let exported = bundle::export(collection, &args.to, split, Arc::new(Bar::new())).await?;
    if exported.resumed_blobs > 0 {
        output::message(&format!("kept {} blobs that an earlier run wrote", exported.resumed_blobs));
    }
    let path = args.to.clone();
    Ok(blocking(move || Bundle::open(&path)).await?)
}

/// Finds farrier's own image in its registry.
async fn farrier_image(session: &Session, reference: &str) -> Result<ContentRequest> {
    let reference: ImageReference = settings::parse("--farrier-image", reference)?;
    let ImageReference { repository, version } = &reference;
    let Some(host) = repository.host() else {
        return Err(CliError::usage(format!("--farrier-image: {reference} names no registry")));
    };
    let location = RegistryLocation::Remote { host: host.to_owned(), prefix: None };
    let definitions = definitions(&session.global, None)?;
    let options = Settings::registry_options(&session.global, &definitions)?;
    let registry = registry::connect(&location, &options);
    let registry = Arc::new(Retrying::new(registry, session.stop.cancel.clone()));
    let manifest = registry.manifest(repository, version).await?;
    let digest = manifest.ok_or_else(|| BundleError::Absent(reference.to_string()))?.digest;
    let tag = version.tag().cloned();
    let content = Content { kind: ContentKind::Farrier, repository: "farrier".to_owned(), tag, digest };
    Ok(ContentRequest { content, repository: repository.clone(), registry })
}

async fn import(session: &Session, args: &BundleImportArgs) -> Result<Exit> {
    let BundleImportArgs { file, signature, key, registry, definitions_to, overwrite, accept, .. } = args;
    let definitions = definitions(&session.global, definitions_to.as_deref())?;
    let keys = images::named_keys(&definitions, key).await?;
    // The directory that the import writes to can revoke keys, too. Definitions that do not load are skipped, because the import
    // replaces them.
    if let Some(to) = definitions_to.as_deref().filter(|to| to.exists())
        && let Ok(existing) = Settings::definitions(Some(to))
    {
        images::named_keys(&existing, key).await?;
    }
    let options = Settings::registry_options(&session.global, &definitions)?;
    let (location, registry) = connect(&registry.registry, &options)?;
    let bar = Arc::new(Bar::new());
    let (bundle, _) = open(file, keys, signature.as_deref()).await?;
    let progress = Arc::clone(&bar);
    let verified = Arc::new(blocking(move || bundle.verify(progress.as_ref())).await?);
    // An import may take hours, in which a registry restarts or asks for pauses.
    let registry = Arc::new(Retrying::new(registry, session.stop.cancel.clone()));
    let target = Target { location: location.clone(), registry };
    if let Some(older) = target.older(&verified).await? {
        if !args.allow_older {
            return Err(BundleError::Older(Box::new(older)).into());
        }
        output::message(&format!("note: {older}"));
    }
    // Before anything is pushed, conflicting files stop the import. An import that fails changes no definitions.
    let (overwrite, accept) = (*overwrite, *accept);
    if let Some(to) = definitions_to.clone() {
        let from = Arc::clone(&verified);
        blocking(move || bundle::check_definitions(&from, &to, overwrite, accept)).await?;
    }
    let imported = bundle::import(&verified, &target, args.allow_older, bar.as_ref()).await?;
    let (from, to) = (Arc::clone(&verified), definitions_to.clone());
    let written = blocking(move || match to {
        Some(to) => bundle::write_definitions(&from, &to, overwrite, accept),
        None => Ok(None),
    })
    .await?;
    let report = ImportReport {
        id: verified.bundle().id(),
        registry: location.to_string(),
        imported: &imported,
        definitions_written: written,
    };
    session.show(&report, |_| output::bundle::imported(&imported))?;
    match (definitions_to, written) {
        (Some(to), Some(count)) => {
            output::message(&format!("definitions: {count} files written to {}", to.display()));
        }
        (Some(_), None) => output::message("definitions: the bundle contains none"),
        (None, _) => {}
    }
    if !imported.is_complete() {
        output::message(
            "error: some tags hold other content and were not changed\n\
             hint: a published tag never changes: delete it in the registry if the bundle's content is right, or use \
             another prefix with --registry",
        );
        return Ok(Exit::Failed);
    }
    let definitions =
        definitions_to.as_ref().map(|to| format!(" --definitions {}", to.display())).unwrap_or_default();
    output::message(&format!("next: farrier plan --registry {location} --cluster kube{definitions}"));
    Ok(Exit::Done)
}

/// Returns the site's definitions, or the built-in ones if the import has yet to create their directory.
fn definitions(global: &Global, definitions_to: Option<&Path>) -> Result<Definitions> {
    let is_target = |path: &Path| match (definitions_to.map(std::path::absolute), std::path::absolute(path)) {
        (Some(Ok(to)), Ok(path)) => to == path,
        _ => false,
    };
    Settings::definitions(global.definitions.as_deref().filter(|path| path.exists() || !is_target(path)))
}

async fn inspect(session: &Session, args: &BundleInspectArgs) -> Result<Exit> {
    let BundleInspectArgs { file, signature, verify, key } = args;
    let definitions = definitions(&session.global, session.global.definitions.as_deref())?;
    let keys = images::named_keys(&definitions, key).await?;
    let (bundle, signed_by) = open(file, keys, signature.as_deref()).await?;
    if *verify {
        let (bundle, bar) = (bundle.clone(), Bar::new());
        blocking(move || bundle.verify(&bar)).await?;
    }
    session.show(&Listing::of(&bundle, signed_by, String::new()), Listing::table)?;
    if *verify {
        output::message(&format!("{} is complete", bundle.path().display()));
    }
    Ok(Exit::Done)
}

/// Opens a bundle. If keys are given, one of them must have signed it; also returns its fingerprint.
async fn open(
    files: &[PathBuf],
    keys: Vec<PublicKey>,
    signature: Option<&Path>,
) -> Result<(Bundle, Option<Digest>)> {
    let (files, signature) = (files.to_owned(), signature.map(Path::to_owned));
    Ok(blocking(move || Bundle::receive(&files, &keys, signature.as_deref())).await?)
}
