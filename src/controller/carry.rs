//! Adapter: what images are made from, put into the store of the registry where they go, and the list of all that a
//! site must get to build and run them.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    Controller, TargetError,
    copies::{Copied, copy_tag},
    observe::Resolved,
    retry::{chain, with_retry},
    root_fs::root_fs_tag,
};
use crate::{
    bundle::{Content, ContentKind, Needed, contents, needed},
    headers::{FetchError, Kept, KeptHeaders, bootstrap_key},
    image::{ImageName, ImageReference, RuntimeBase, Version},
    kernel::{Architecture, KernelTarget, Toolchain},
    store::{Kind, Stored},
};

/// One thing in the store.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Carried {
    /// What it is, for people.
    pub what: String,
    /// Where it stands.
    #[serde(flatten)]
    pub content: Content,
    /// Was it put there now?
    pub new: bool,
}

/// What became of one thing.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum CarryReport {
    /// The registry has it.
    Kept(Carried),
    /// It could not be put there.
    Failed(Lacking),
}

/// What is missing, and why.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Lacking {
    /// What it is, for people.
    pub what: String,
    /// Why it is missing.
    pub error: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Was an outside system out of reach?
    #[serde(skip)]
    pub unreachable: bool,
}

/// Images and kernels that are carried to another site.
#[derive(Clone, Debug)]
pub struct Carrying {
    /// The driver images, without those that they need.
    pub images: BTreeSet<ImageName>,
    /// The kernels.
    pub kernels: BTreeSet<KernelTarget>,
}

/// What another site needs to know of something: what it is called, and how the store comes to have it.
enum Part<'a> {
    Source(&'a crate::image::SourceSpec),
    Bootstrap(crate::kernel::BootstrapSpec, Architecture),
    Minimal(&'a crate::image::MinimalSpec, Architecture),
    Headers(&'a KernelTarget, &'a crate::kernel::HeaderSource),
    Copy(&'a str),
}

impl Controller {
    /// Puts what the images are made from into the store, one after the other; one that fails does not stop the others.
    /// What is there is not sent again. `tell` hears of each as it is done.
    pub async fn fill_store(
        &self,
        carrying: &Carrying,
        tell: &mut (dyn FnMut(&CarryReport) + Send),
    ) -> Vec<CarryReport> {
        let needed = needed(&self.definitions, &carrying.images, &carrying.kernels);
        // Their versions, by which bases differ; of toolchains only the definition counts here.
        let resolved = self.resolve(&needed.images, &BTreeSet::new()).await;
        let (parts, lacking) = Self::parts(&needed, &resolved);
        let mut reports: Vec<CarryReport> = lacking.into_iter().map(CarryReport::Failed).collect();
        reports.iter().for_each(&mut *tell);
        for part in &parts {
            if self.cancel.is_cancelled() {
                return reports;
            }
            let report = match self.keep_part(part).await {
                Ok(kept) => CarryReport::Kept(kept),
                Err(error) => CarryReport::Failed(lacking_of(part.what(), &error)),
            };
            tell(&report);
            reports.push(report);
        }
        if let Some(report) = self.keep_own_definitions().await {
            tell(&report);
            reports.push(report);
        }
        reports
    }

    /// What the images are made from, as it stands in the registry, and what is missing of it. The images themselves are
    /// not among it.
    pub async fn made_from(&self, carrying: &Carrying) -> (Vec<Content>, Vec<Lacking>) {
        let needed = needed(&self.definitions, &carrying.images, &carrying.kernels);
        // Their versions, by which bases differ; of toolchains only the definition counts here.
        let resolved = self.resolve(&needed.images, &BTreeSet::new()).await;
        let (parts, mut lacking) = Self::parts(&needed, &resolved);
        let mut found = Vec::new();
        for part in &parts {
            match self.find_part(part).await {
                Ok(contents) if contents.is_empty() => lacking.push(Lacking {
                    what: part.what(),
                    error: "the registry does not have it".to_owned(),
                    hint: Some("farrier mirror puts it there".to_owned()),
                    unreachable: false,
                }),
                Ok(contents) => found.extend(contents),
                Err(error) => lacking.push(lacking_of(part.what(), &error)),
            }
        }
        match self
            .named(ContentKind::Definitions, Kind::Definitions.repository(), crate::headers::LATEST)
            .await
        {
            Ok(definitions) => found.extend(definitions),
            Err(error) => lacking.push(lacking_of("definitions".to_owned(), &error)),
        }
        (contents::in_order(found), lacking)
    }

    /// What is put into the store, and what cannot be because it is not known.
    fn parts<'a>(needed: &Needed<'a>, resolved: &Resolved) -> (Vec<Part<'a>>, Vec<Lacking>) {
        let Needed { images: _, sources, bases, families, kernels, strangers } = needed;
        let arches: BTreeSet<Architecture> = kernels.iter().map(|(kernel, _)| kernel.arch).collect();
        let mut parts: Vec<Part<'a>> = sources.iter().map(|source| Part::Source(source)).collect();
        let mut lacking: Vec<Lacking> = strangers.iter().map(|kernel| no_family(kernel)).collect();
        let mut root_fs = BTreeSet::new();
        let mut bootstrap = |spec: crate::kernel::BootstrapSpec, arch: Architecture| {
            root_fs.insert(bootstrap_key(&spec, arch)).then_some(Part::Bootstrap(spec, arch))
        };
        for family in families {
            let Toolchain::Bootstrap(spec) = &family.spec.toolchain else { continue };
            parts.extend(arches.iter().filter_map(|arch| bootstrap(spec.clone(), *arch)));
        }
        for (image, base) in bases {
            match (base, resolved.images.get(&image.metadata.name)) {
                (RuntimeBase::Bootstrap(spec), Some(Ok(found))) => {
                    let spec = spec.for_version(&found.version);
                    parts.extend(arches.iter().filter_map(|arch| bootstrap(spec.clone(), *arch)));
                }
                (RuntimeBase::Minimal(spec), _) => {
                    parts.extend(arches.iter().map(|arch| Part::Minimal(spec, *arch)));
                }
                (RuntimeBase::Bootstrap(_), Some(Err(error))) => lacking.push(Lacking {
                    what: format!("runtime base of {}", image.metadata.name),
                    error: error.clone(),
                    hint: None,
                    unreachable: resolved.unreachable,
                }),
                (RuntimeBase::Bootstrap(_) | RuntimeBase::Image(_) | RuntimeBase::Need(_), _) => {}
            }
        }
        parts.extend(needed.foreign().into_iter().map(Part::Copy));
        parts.extend(kernels.iter().map(|(kernel, family)| Part::Headers(kernel, &family.spec.headers)));
        (parts, lacking)
    }

    async fn keep_part(&self, part: &Part<'_>) -> Result<Carried, TargetError> {
        self.may_write()?;
        let root = &self.definitions.root;
        let keep = "put into the store";
        let kept = match part {
            Part::Source(spec) => {
                with_retry(keep, &self.cancel, || self.fetcher.keep_source(spec, root)).await?
            }
            Part::Bootstrap(spec, arch) => {
                with_retry(keep, &self.cancel, || self.fetcher.keep_bootstrap(spec, *arch)).await?
            }
            Part::Minimal(spec, arch) => {
                with_retry(keep, &self.cancel, || self.fetcher.keep_minimal(spec, *arch)).await?
            }
            Part::Headers(kernel, source) => {
                let put = || self.fetcher.keep_headers(source, root, kernel);
                match with_retry(keep, &self.cancel, put).await? {
                    KeptHeaders::Kept(kept) => *kept,
                    KeptHeaders::Missing { looked_for, hint } => {
                        return Err(TargetError::HeadersMissing { looked_for, hint });
                    }
                }
            }
            Part::Copy(text) => {
                let Copied { reference, digest, new } = self.copy_image(text).await?;
                let tag = Some(copy_tag(&reference)?);
                let repository = self.name_of(&reference);
                let content = Content { kind: ContentKind::Mirror, repository, tag, digest };
                return Ok(Carried { what: part.what(), content, new });
            }
        };
        Ok(carried(&kept))
    }

    async fn keep_own_definitions(&self) -> Option<CarryReport> {
        let root = &self.definitions.root;
        // The built-in ones are in every farrier.
        if root.as_os_str().is_empty() {
            return None;
        }
        let secrets = self.definitions.site.secret_files();
        Some(match self.fetcher.keep_definitions(root, secrets).await {
            Ok((kept, left_out)) => {
                for path in &left_out {
                    let text =
                        "holds a private key or credentials: it stays here, and is not in the registry";
                    self.reporter.note(&path.display().to_string(), text);
                }
                CarryReport::Kept(carried(&kept))
            }
            Err(error) => CarryReport::Failed(lacking_of("definitions".to_owned(), &error.into())),
        })
    }

    /// A part as it stands in the registry; nothing where it does not.
    async fn find_part(&self, part: &Part<'_>) -> Result<Vec<Content>, TargetError> {
        let (kind, store_kind, tags) = match part {
            Part::Source(spec) => {
                let tags = vec![crate::headers::source_tag(spec)?];
                (ContentKind::Source, Kind::Source, tags)
            }
            Part::Minimal(spec, arch) => {
                (ContentKind::RootFs, Kind::RootFs, vec![crate::headers::minimal_tag(spec, *arch)?])
            }
            Part::Bootstrap(spec, arch) => {
                let tag = crate::store::key_tag(&bootstrap_key(spec, *arch)).map_err(FetchError::from)?;
                (ContentKind::RootFs, Kind::RootFs, vec![tag])
            }
            Part::Headers(kernel, _) => {
                let tag = crate::store::header_tag(&kernel.release, kernel.arch).map_err(FetchError::from)?;
                (ContentKind::Headers, Kind::Headers, vec![tag])
            }
            Part::Copy(text) => {
                let reference: ImageReference = text.parse()?;
                let Some(place) = self.place_of_copy(&reference)? else {
                    let reference = self.resolve_reference(text).await?;
                    return self.at(ContentKind::Mirror, &reference).await;
                };
                let version = Version::Tag(copy_tag(&reference)?);
                let copy = ImageReference { repository: place, version };
                return self.at(ContentKind::Mirror, &copy).await;
            }
        };
        let mut found = Vec::new();
        for tag in tags {
            let named = self.named(kind, store_kind.repository(), tag.as_str()).await?;
            // The tag that never changes goes with the one that does.
            for content in named.clone() {
                found.extend(self.further_tag(kind, store_kind, &content).await?);
            }
            found.extend(named);
        }
        if let Part::Bootstrap(spec, arch) = part {
            let key = bootstrap_key(spec, *arch);
            found.extend(self.published_root_fs_content(&key).await?);
        }
        Ok(found)
    }

    async fn further_tag(
        &self,
        kind: ContentKind,
        store_kind: Kind,
        content: &Content,
    ) -> Result<Option<Content>, TargetError> {
        let (Some(store), Some(tag)) = (self.fetcher.store(), &content.tag) else { return Ok(None) };
        let stored = store.find(store_kind, tag).await.map_err(FetchError::from)?;
        let Some(tag) = stored.and_then(|stored| crate::headers::content_tag(&stored)) else {
            return Ok(None);
        };
        Ok(Some(Content { kind, tag: Some(tag), ..content.clone() }))
    }

    /// The image that a bootstrapped root file system was published as, where it was.
    async fn published_root_fs_content(&self, key: &str) -> Result<Vec<Content>, TargetError> {
        let (name, tag) = root_fs_tag(key)?;
        self.named(ContentKind::RootFs, name, tag.as_str()).await
    }

    /// What stands under a tag of a repository below the prefix; nothing where nothing does.
    async fn named(&self, kind: ContentKind, name: &str, tag: &str) -> Result<Vec<Content>, TargetError> {
        let repository = self.location.repository(name)?;
        self.at(kind, &ImageReference { repository, version: Version::Tag(tag.parse()?) }).await
    }

    async fn at(&self, kind: ContentKind, reference: &ImageReference) -> Result<Vec<Content>, TargetError> {
        let ImageReference { repository, version } = reference;
        let found = self.registry.manifest(repository, version).await?;
        let tag = match version {
            Version::Tag(tag) => Some(tag.clone()),
            Version::Digest(_) => None,
        };
        let repository = self.name_of(reference);
        Ok(found
            .into_iter()
            .map(|found| Content {
                kind,
                repository: repository.clone(),
                tag: tag.clone(),
                digest: found.digest,
            })
            .collect())
    }

    fn name_of(&self, reference: &ImageReference) -> String {
        let repository = &reference.repository;
        self.location.name_of(repository).unwrap_or(repository.as_str()).to_owned()
    }
}

impl Part<'_> {
    fn what(&self) -> String {
        match self {
            Self::Source(spec) => format!("source {}", spec.name),
            Self::Bootstrap(spec, arch) => format!("root file system of {} ({arch})", spec.suite),
            Self::Minimal(spec, arch) => format!("minimal base of {} ({arch})", spec.package),
            Self::Headers(kernel, _) => format!("headers of {} ({})", kernel.release, kernel.arch),
            Self::Copy(text) => format!("image {text}"),
        }
    }
}

fn carried(kept: &Kept) -> Carried {
    let Kept { what, stored: Stored { kind, digest, .. }, tags, new } = kept;
    let content_kind = match kind {
        Kind::Headers => ContentKind::Headers,
        Kind::Source => ContentKind::Source,
        Kind::RootFs => ContentKind::RootFs,
        Kind::Definitions => ContentKind::Definitions,
    };
    let content = Content {
        kind: content_kind,
        repository: kind.repository().to_owned(),
        tag: tags.first().cloned(),
        digest: digest.clone(),
    };
    Carried { what: what.clone(), content, new: *new }
}

fn no_family(kernel: &KernelTarget) -> Lacking {
    Lacking {
        what: format!("headers of {kernel}"),
        error: "no kernel family matches it".to_owned(),
        hint: Some("add one to kernels/ of the definitions directory".to_owned()),
        unreachable: false,
    }
}

fn lacking_of(what: String, error: &TargetError) -> Lacking {
    Lacking { what, error: chain(error), hint: error.hint(), unreachable: error.is_unreachable() }
}
