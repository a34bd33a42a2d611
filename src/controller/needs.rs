//! Adapter: what an image is compiled against: exposed trees of published images, fetched by digest and verified.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{Controller, Stage, TargetError};
use crate::{
    blocking::blocking,
    engine::ContextEntry,
    fault::chain,
    image::{Digest, DriverImage, ImageName, ImageReference, Version},
    kmod::{NeededTable, SymbolTable},
    oci::{ImageFacts, ImageManifest},
    payload,
    plan::Cell,
};

/// Kinds of cache entries: exposed trees by their own digest, modules by their image's.
const EXPOSED: &str = "exposed";
const MODULES: &str = "needed-modules";

/// What a cell is compiled against, checked against and loaded after.
#[derive(Default)]
pub(super) struct Needed {
    /// Its part of the build context.
    pub(super) context: Vec<ContextEntry>,
    /// Symbol tables: of what it is compiled against, then of what these need when they are loaded.
    pub(super) tables: Vec<NeededTable>,
    /// Directories with the modules that must be loaded before, where the definition asks for a boot check.
    pub(super) modules: Vec<PathBuf>,
}

/// A published image whose exposed trees are wanted.
struct Wanted {
    name: ImageName,
    image: ImageReference,
    exposed: Digest,
    /// Is it compiled against, or only there when the modules are loaded?
    compiled_against: bool,
}

impl Controller {
    /// Fetches what the cell needs, as far as the cache lacks it.
    pub(super) async fn needed(&self, cell: &Cell, image: &DriverImage) -> Result<Needed, TargetError> {
        let mut needed = Needed::default();
        if cell.needs.is_empty() {
            return Ok(needed);
        }
        let subject = cell.subject();
        self.reporter.stage(&subject, Stage::Needs);
        self.add_host_trees(cell, image, &mut needed).await?;
        for wanted in self.wanted(cell).await? {
            let tree = self.exposed_tree(&wanted).await?;
            let tables = read_tables(&wanted, &tree).await?;
            if tables.is_empty() {
                let name = &wanted.name;
                self.reporter.note(
                    &subject,
                    &format!("{name} exposes no Module.symvers: nothing can use its symbols"),
                );
            }
            needed.tables.extend(tables);
            if wanted.compiled_against {
                needed.context.push(ContextEntry { dest: format!("needs/{}", wanted.name), from: tree });
            }
            if image.spec.check.boot {
                needed.modules.push(self.modules_of(&wanted, cell).await?);
            }
        }
        Ok(needed)
    }

    /// The images that the cell is compiled against, then those that these need, nearest first.
    async fn wanted(&self, cell: &Cell) -> Result<Vec<Wanted>, TargetError> {
        let mut wanted: Vec<Wanted> = cell
            .needs
            .iter()
            .filter_map(|need| {
                let (name, exposed) = (need.name.clone(), need.exposed.clone());
                Some(Wanted { name, image: need.image.clone()?, exposed, compiled_against: true })
            })
            .collect();
        let mut known: BTreeSet<ImageName> = cell.needs.iter().map(|need| need.name.clone()).collect();
        let mut next = 0;
        while let Some(name) = wanted.get(next).map(|wanted| wanted.name.clone()) {
            next += 1;
            let further = self.definitions.images.get(&name).into_iter().flat_map(|image| &image.spec.needs);
            let further: Vec<&ImageName> = further
                .filter_map(|need| need.image())
                .filter(|name| known.insert((*name).clone()))
                .collect();
            for name in further {
                wanted.push(self.published_need(name, cell).await?);
            }
        }
        Ok(wanted)
    }

    /// An image that a needed image needs. That one was built, so it was published before.
    async fn published_need(&self, name: &ImageName, cell: &Cell) -> Result<Wanted, TargetError> {
        let needed = self.cell(name, &cell.target).await?;
        let found = self.look_up(&needed.reference).await?;
        let found = found.filter(|found| found.input_hash == Some(needed.input_hash));
        let vanished = || TargetError::NeedVanished { reference: needed.reference.to_string() };
        let found = found.ok_or_else(vanished)?;
        let exposed = found.exposed.ok_or_else(|| TargetError::NeedLacks {
            image: needed.reference.to_string(),
            why: "it exposes nothing".to_owned(),
        })?;
        let image = ImageReference {
            repository: needed.reference.repository.clone(),
            version: Version::Digest(found.digest),
        };
        Ok(Wanted { name: name.clone(), image, exposed, compiled_against: false })
    }

    /// The exposed trees of a published image, at their natural paths below one directory.
    async fn exposed_tree(&self, wanted: &Wanted) -> Result<PathBuf, TargetError> {
        let key = wanted.exposed.hex();
        self.cache.get_or_make(EXPOSED, key, |place| self.fetch_exposed(wanted, place)).await
    }

    async fn fetch_exposed(&self, wanted: &Wanted, place: PathBuf) -> Result<(), TargetError> {
        let Wanted { name, image, exposed, compiled_against: _ } = wanted;
        let lacks = |why: String| TargetError::NeedLacks { image: image.to_string(), why };
        let definition = self.definitions.images.get(name);
        let patterns =
            definition.ok_or_else(|| TargetError::Definition(name.to_string()))?.spec.exposes.clone();
        let manifest = self.needed_manifest(image).await?;
        let claimed = ImageFacts::from_annotations(&manifest.annotations).unwrap_or_default().exposed_digest;
        if claimed.as_ref() != Some(exposed) {
            let claimed =
                claimed.map_or_else(|| "exposes nothing".to_owned(), |digest| format!("exposes {digest}"));
            return Err(lacks(format!("{exposed} is wanted, and its annotations say that it {claimed}")));
        }
        let work = self.cache.scratch()?;
        let (blob, tree) = (work.path().join("layer"), work.path().join("tree"));
        self.fetch_payload(image, &manifest, &blob).await?;
        let unpacked = tree.clone();
        let found = blocking(move || {
            make_directory(&unpacked)?;
            let found = payload::unpack_exposed(&blob, &patterns, &unpacked).map_err(|error| chain(&error));
            Ok::<_, TargetError>(
                found.and_then(|()| {
                    payload::read_exposed(&unpacked, &patterns).map_err(|error| chain(&error))
                }),
            )
        })
        .await?;
        let found = found.map_err(lacks)?.digest;
        if found != *exposed {
            return Err(lacks(format!("its annotations say {exposed}, and its content is {found}")));
        }
        fs::rename(&tree, &place).map_err(|source| TargetError::Input { path: place.clone(), source })
    }

    /// The modules of a needed image for the cell's kernel.
    async fn modules_of(&self, wanted: &Wanted, cell: &Cell) -> Result<PathBuf, TargetError> {
        let Version::Digest(digest) = &wanted.image.version else {
            return Err(TargetError::NeedVanished { reference: wanted.image.to_string() });
        };
        let release = cell.target.release.as_str();
        self.cache
            .get_or_make(MODULES, digest.hex(), |place| self.fetch_modules(wanted, release, place))
            .await
    }

    async fn fetch_modules(&self, wanted: &Wanted, release: &str, place: PathBuf) -> Result<(), TargetError> {
        let image = &wanted.image;
        let manifest = self.needed_manifest(image).await?;
        let work = self.cache.scratch()?;
        let blob = work.path().join("layer");
        self.fetch_payload(image, &manifest, &blob).await?;
        let (release, image) = (release.to_owned(), image.to_string());
        blocking(move || {
            payload::unpack_modules(&blob, &release, &place)
                .map_err(|error| TargetError::NeedLacks { image, why: chain(&error) })
        })
        .await
    }

    async fn needed_manifest(&self, image: &ImageReference) -> Result<ImageManifest, TargetError> {
        let stored = self.shelf(&image.repository).manifest(&image.repository, &image.version).await?;
        let stored = stored.ok_or_else(|| TargetError::NeedVanished { reference: image.to_string() })?;
        Ok(ImageManifest::parse(&stored.bytes)?)
    }

    async fn fetch_payload(
        &self,
        image: &ImageReference,
        manifest: &ImageManifest,
        to: &Path,
    ) -> Result<(), TargetError> {
        let layer = manifest.payload_layer().ok_or_else(|| TargetError::NeedLacks {
            image: image.to_string(),
            why: "it has no layers".to_owned(),
        })?;
        Ok(self.shelf(&image.repository).fetch_blob(&image.repository, &layer.digest, to).await?)
    }
}

fn make_directory(path: &Path) -> Result<(), TargetError> {
    fs::create_dir(path).map_err(|source| TargetError::Input { path: path.to_owned(), source })
}

/// The symbol tables of an exposed tree.
async fn read_tables(wanted: &Wanted, tree: &Path) -> Result<Vec<NeededTable>, TargetError> {
    let (name, image, tree) = (wanted.name.to_string(), wanted.image.to_string(), tree.to_owned());
    blocking(move || {
        let texts = payload::read_symbol_tables(&tree).map_err(TargetError::Exposed)?;
        parse_tables(&name, &image, texts)
    })
    .await
}

/// Reads the symbol tables of one need; `from` names where they come from in errors.
pub(super) fn parse_tables(
    need: &str,
    from: &str,
    texts: Vec<(PathBuf, String)>,
) -> Result<Vec<NeededTable>, TargetError> {
    let read = |(path, text): (PathBuf, String)| match SymbolTable::parse(&text) {
        Ok(symbols) => Ok(NeededTable { image: need.to_owned(), symbols }),
        Err(error) => Err(TargetError::NeedLacks {
            image: from.to_owned(),
            why: format!("its /{} is no symbol table: {error}", path.display()),
        }),
    };
    texts.into_iter().map(read).collect()
}
