//! Adapter: one image for one kernel, asked for by name rather than by a node.

use std::collections::BTreeSet;

use super::{BuildOptions, Built, Controller, Failures, PassError, TargetError};
use crate::{
    image::{Digest, DriverImage, ImageName, OnConflict, UnknownPolicy},
    kernel::KernelTarget,
    kmod::Verdict,
    plan::{self, Cell, CellInputs},
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
    /// The cell of one image for one kernel.
    pub async fn cell(&self, name: &ImageName, target: &KernelTarget) -> Result<Cell, TargetError> {
        let image = self.image(name)?;
        let resolved = self.resolve(&[image], &BTreeSet::from([target.clone()])).await;
        let location = self.image_location();
        let inputs = CellInputs {
            definitions: &self.definitions,
            resolved: &resolved.images,
            toolchains: &resolved.toolchains,
            headers: &resolved.headers,
            published: &std::collections::BTreeMap::new(),
            trees: &resolved.trees,
            location: &location,
        };
        plan::cell_for(&inputs, &mut Templates::default(), image, target)
            .map_err(|reason| TargetError::Skipped { subject: format!("{name} for {target}"), reason })
    }

    /// Builds one image for one kernel and, with `push`, publishes it under its tags.
    ///
    /// With `force` it is compiled although the same inputs are published, failed before, or could take over another kernel's payload.
    pub async fn build_one(
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
