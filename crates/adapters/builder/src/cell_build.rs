//! Data that the stages of one build share and pass to each other.

use std::{path::PathBuf, sync::Arc};

use farrier_core::{
    facts::ReusedFrom,
    image::{Digest, DriverImage},
    kernel::{KernelFamily, Toolchain},
    plan::Cell,
    provenance::Confinement,
};
use farrier_engines::ContextEntry;
use farrier_inputs::HeaderSet;
use farrier_local::cache::Scratch;
use farrier_payload::{ArchiveImage, DecompressionBudget};
use kmod::{CheckReport, NeededTable};

use crate::services::{BuildError, BuildServices, ProblemKind, Result, Stage};

/// The build of one image for one kernel.
pub(super) struct CellBuild<'a> {
    pub(super) services: &'a BuildServices,
    pub(super) cell: &'a Cell,
    pub(super) image: &'a DriverImage,
    pub(super) family: &'a KernelFamily,
    /// The family's toolchain, with the packages that the image adds.
    pub(super) toolchain: Toolchain,
}

impl<'a> CellBuild<'a> {
    /// Looks up the cell's definitions.
    pub(super) fn of(services: &'a BuildServices, cell: &'a Cell) -> Result<Self> {
        let image = services.definitions.images.get(&cell.image);
        let family = services.definitions.families.iter().find(|family| family.metadata.name == cell.family);
        let (image, family) =
            image.zip(family).ok_or_else(|| BuildError::definition_gone(&cell.subject()))?;
        let toolchain = image.spec.toolchain(family).map_err(|why| {
            let message = format!("toolchain of family {}: {why}", cell.family);
            BuildError::problem(ProblemKind::Usage, message, None)
        })?;
        Ok(Self { services, cell, image, family, toolchain })
    }

    /// Reports the start of a stage.
    pub(super) fn stage(&self, stage: Stage) {
        self.services.process.reporter.stage(&self.cell.subject(), stage);
    }

    /// Reports a note that does not stop the build.
    pub(super) fn note(&self, text: &str) {
        self.services.process.reporter.note(&self.cell.subject(), text);
    }
}

/// Fails if a fetched input is not the planned one, because the input hash would not describe the published image.
pub(super) fn ensure_planned(is_planned: bool, input: impl Into<String>) -> Result<()> {
    if is_planned { Ok(()) } else { Err(BuildError::Outdated(input.into())) }
}

/// Inputs from other images and host trees: for compiling, for the check, and for loading.
#[derive(Default)]
pub(super) struct NeedInputs {
    /// Entries for the build context.
    pub(super) context: Vec<ContextEntry>,
    /// Symbol tables of the images that the build compiles against, then of the images that these need when loaded.
    pub(super) tables: Vec<NeededTable>,
    /// Directories with the modules that must be loaded first, if the definition asks for a boot check.
    pub(super) modules: Vec<PathBuf>,
}

/// Inputs that a payload is compiled and checked against.
pub(super) struct CompileInputs {
    /// The kernel's header set.
    pub(super) headers: HeaderSet,
    /// Needed images and host trees.
    pub(super) needed: NeedInputs,
}

/// An unchecked payload, from an engine or a published image.
pub(super) struct Payload {
    /// Unpacked `/out`; for an engine-made image, only its modules.
    pub(super) tree: PathBuf,
    /// The engine-made image, for `output: image`.
    pub(super) image: Option<ArchiveImage>,
    /// Identity of each source, for the image's annotations.
    pub(super) sources: Vec<String>,
    /// The toolchain, for the image's annotations.
    pub(super) toolchain: String,
    /// Digest of the exposed headers.
    pub(super) exposed: Option<Digest>,
    /// The image whose payload was reused; `None` if the payload was compiled.
    pub(super) reused_from: Option<ReusedFrom>,
    /// Confinement of the build.
    pub(super) confinement: Confinement,
    /// Budget for decompressing the modules during the check.
    pub(super) decompression: Arc<DecompressionBudget>,
    /// Scratch directory that holds the files above until it is dropped.
    pub(super) work: Scratch,
}

/// A payload that may be published: the check has passed, and the modules are signed if the site signs modules.
pub(super) struct CheckedPayload {
    pub(super) payload: Payload,
    /// Packages or file of the header set, for the image's annotations.
    pub(super) headers: Vec<String>,
    /// Digest of the header set's content, if it was imported or comes from the store; for the provenance.
    pub(super) header_content: Option<Digest>,
    pub(super) report: CheckReport,
}

impl CheckedPayload {
    /// Creates a payload that was checked against these headers.
    pub(super) fn of(payload: Payload, headers: &HeaderSet, report: CheckReport) -> Self {
        let (headers, header_content) = (headers.origin.clone(), headers.content.clone());
        Self { payload, headers, header_content, report }
    }
}
