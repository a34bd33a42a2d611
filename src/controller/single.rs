//! Adapter: one image for one kernel, asked for by name rather than by a node.

use std::collections::BTreeSet;

use super::{
    BuildOptions, Built, Controller, Failures, PassError, TargetError,
    observe::{Lookups, Resolved},
};
use crate::{
    image::{Chains, Digest, DriverImage, ImageName, OnConflict, UnknownPolicy},
    kernel::KernelTarget,
    kmod::Verdict,
    plan::{self, Cell},
    template::Templates,
};

/// What [`Controller::build_one`] came to.
#[derive(Debug)]
pub struct BuildOutcome {
    /// The image and kernel, with names and input hash.
    pub cell: Cell,
    /// The image's digest.
    pub digest: Digest,
    /// The build; `None` where the same inputs are published already.
    pub built: Option<Built>,
}

impl Controller {
    /// The cell of one image for one kernel. What it is compiled against must be published.
    pub async fn cell(&self, name: &ImageName, target: &KernelTarget) -> Result<Cell, TargetError> {
        let image = self.image(name)?;
        let (needs, resolved) = self.resolve_with_needs(image, target).await;
        let location =
            self.needs_from.as_ref().map_or(&self.location, |from| &from.location).image_location();
        let mut lookups = Lookups::default();
        let mut templates = Templates::default();
        for image in needs.into_iter().chain([image]) {
            let inputs = resolved.cell_inputs(&self.definitions, &lookups, &location);
            match plan::cell_for(&inputs, &mut templates, image, target) {
                Ok(cell) if image.metadata.name == *name => return Ok(cell),
                Ok(needed) => {
                    if let Some(published) = self.look_up(&needed.reference).await? {
                        lookups.published.insert(needed.reference, published);
                    }
                }
                Err(reason) if image.metadata.name == *name => {
                    return Err(TargetError::Skipped { subject: format!("{name} for {target}"), reason });
                }
                // What is compiled against it says so.
                Err(_) => {}
            }
        }
        Err(TargetError::Definition(format!("{name} for {target}")))
    }

    /// The Dockerfile of one image for one kernel; nothing need be published for that.
    pub async fn dockerfile(&self, name: &ImageName, target: &KernelTarget) -> Result<String, TargetError> {
        let image = self.image(name)?;
        let resolved = self.resolve(&[image], &BTreeSet::from([target.clone()])).await;
        let location = self.image_location();
        let lookups = Lookups::default();
        let inputs = resolved.cell_inputs(&self.definitions, &lookups, &location);
        plan::dockerfile_for(&inputs, image, target)
            .map_err(|reason| TargetError::Skipped { subject: format!("{name} for {target}"), reason })
    }

    /// The images that one needs, in the order in which they are built, and what they and it amount to.
    async fn resolve_with_needs<'a>(
        &'a self,
        image: &'a DriverImage,
        target: &KernelTarget,
    ) -> (Vec<&'a DriverImage>, Resolved) {
        let mut images = vec![image];
        self.add_needs(&mut images);
        let resolved = self.resolve(&images, &BTreeSet::from([target.clone()])).await;
        let chains = Chains::of(&self.definitions.images);
        let place =
            |image: &&DriverImage| chains.order().iter().position(|name| *name == image.metadata.name);
        images.sort_by_key(place);
        images.retain(|needed| needed.metadata.name != image.metadata.name);
        (images, resolved)
    }

    /// Builds one image for one kernel and, with `push`, publishes it under its tags; what it is compiled against is
    /// then built and published before, where it is not yet. Without `push` that must be published already.
    ///
    /// With `force` it is compiled although the same inputs are published, failed before, or could take over another kernel's payload.
    pub async fn build_one(
        &self,
        name: &ImageName,
        target: &KernelTarget,
        push: bool,
        force: bool,
    ) -> Result<BuildOutcome, TargetError> {
        if push {
            let image = self.image(name)?;
            let mut needs = vec![image];
            self.add_needs(&mut needs);
            for need in Chains::of(&self.definitions.images).order() {
                if need != name && needs.iter().any(|image| image.metadata.name == *need) {
                    self.build_alone(need, target, push, false).await.map_err(|error| TargetError::Need {
                        image: name.to_string(),
                        need: need.to_string(),
                        error: Box::new(error),
                    })?;
                }
            }
        }
        self.build_alone(name, target, push, force).await
    }

    /// The same for the image alone.
    async fn build_alone(
        &self,
        name: &ImageName,
        target: &KernelTarget,
        push: bool,
        force: bool,
    ) -> Result<BuildOutcome, TargetError> {
        let cell = self.cell(name, target).await?;
        let spec = &self.image(name)?.spec;
        let overwrite = spec.on_conflict == OnConflict::Overwrite;
        // A conflict is found before the compiler runs, forced or not.
        if push
            && let Some(digest) = self.published_already(&cell, spec.check.unknown, overwrite).await?
            && !force
        {
            self.ensure_signed(name.as_str(), &cell.reference.repository, &digest).await?;
            return Ok(BuildOutcome { cell, digest, built: None });
        }
        if !force
            && let Some(failure) =
                Failures::new(&self.cache).look_up([cell.input_hash])?.remove(&cell.input_hash)
            && failure.still_holds(spec.check)
        {
            return Err(TargetError::FailedBefore { at: failure.at, message: failure.message });
        }
        let outcome = self.build(&cell, BuildOptions { push, overwrite, compile: force }).await;
        self.record(&cell, &outcome).map_err(|error| match error {
            PassError::Cache(error) => TargetError::from(error),
            PassError::Cluster(_) => TargetError::Cancelled,
        })?;
        let subject = cell.subject();
        match outcome {
            Ok(built) => {
                self.reporter.finished(&subject, if push { "published" } else { "built" });
                Ok(BuildOutcome { cell, digest: built.digest.clone(), built: Some(built) })
            }
            Err(error) => {
                self.reporter.finished(&subject, "failed");
                Err(error)
            }
        }
    }

    /// The digest under the cell's first tag when it has the cell's inputs; other inputs are a conflict.
    /// So is a verdict that the definition does not accept.
    async fn published_already(
        &self,
        cell: &Cell,
        unknown: UnknownPolicy,
        overwrite: bool,
    ) -> Result<Option<Digest>, TargetError> {
        let mut digest = None;
        for reference in cell.references() {
            let Some(found) = self.look_up(reference).await? else { return Ok(None) };
            if found.input_hash != Some(cell.input_hash) {
                return if overwrite {
                    Ok(None)
                } else {
                    Err(TargetError::Conflict { reference: reference.to_string() })
                };
            }
            if found.verdict == Some(Verdict::Unknown) && unknown == UnknownPolicy::Deny {
                return Err(TargetError::PublishedUnknown { reference: reference.to_string() });
            }
            digest.get_or_insert(found.digest);
        }
        Ok(digest)
    }

    fn image(&self, name: &ImageName) -> Result<&DriverImage, TargetError> {
        self.definitions.images.get(name).ok_or_else(|| TargetError::NoImage {
            name: name.to_string(),
            known: self.definitions.images.keys().map(ToString::to_string).collect(),
        })
    }
}
