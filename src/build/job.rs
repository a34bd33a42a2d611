//! Adapter: what the stages of one build share, and what they hand to each other.

use std::{path::PathBuf, sync::Arc};

use crate::{
    cache::Scratch,
    engine::ContextEntry,
    image::{Digest, DriverImage},
    inputs::HeaderSet,
    kernel::{KernelFamily, Toolchain},
    kmod::{CheckReport, NeededTable},
    oci::ReusedFrom,
    parts::{FindingKind, Parts, Result, Stage, TargetError},
    payload::{ArchiveImage, DecompressionBudget},
    plan::Cell,
    provenance::Confinement,
};

/// One image for one kernel, which is being built.
pub(super) struct Job<'a> {
    pub(super) parts: &'a Parts,
    pub(super) cell: &'a Cell,
    pub(super) image: &'a DriverImage,
    pub(super) family: &'a KernelFamily,
    /// The family's, with the packages that the image adds.
    pub(super) toolchain: Toolchain,
}

impl<'a> Job<'a> {
    /// Finds the cell's definitions.
    pub(super) fn of(parts: &'a Parts, cell: &'a Cell) -> Result<Self> {
        let image = parts.definitions.images.get(&cell.image);
        let family = parts.definitions.families.iter().find(|family| family.metadata.name == cell.family);
        let (image, family) =
            image.zip(family).ok_or_else(|| TargetError::definition_gone(&cell.subject()))?;
        let toolchain = image.spec.toolchain(family).map_err(|why| {
            let message = format!("toolchain of family {}: {why}", cell.family);
            TargetError::finding(FindingKind::Usage, message, None)
        })?;
        Ok(Self { parts, cell, image, family, toolchain })
    }

    /// A stage begins.
    pub(super) fn stage(&self, stage: Stage) {
        self.parts.reporter.stage(&self.cell.subject(), stage);
    }

    /// Something to know that stops nothing.
    pub(super) fn note(&self, text: &str) {
        self.parts.reporter.note(&self.cell.subject(), text);
    }
}

/// What is published is what its input hash says: an input that was fetched must be the one that was planned.
pub(super) fn ensure_planned(is_same: bool, what: impl Into<String>) -> Result<()> {
    if is_same { Ok(()) } else { Err(TargetError::Outdated(what.into())) }
}

/// What a cell is compiled against, checked against and loaded after.
#[derive(Default)]
pub(super) struct Needed {
    /// Its part of the build context.
    pub(super) context: Vec<ContextEntry>,
    /// Symbol tables: of the images that it is compiled against, then of those that these need when they are loaded.
    pub(super) tables: Vec<NeededTable>,
    /// Directories with the modules that must be loaded before, where the definition asks for a boot check.
    pub(super) modules: Vec<PathBuf>,
}

/// What a payload is compiled and checked against.
pub(super) struct Against {
    /// The kernel's.
    pub(super) headers: HeaderSet,
    /// The needed images'.
    pub(super) needed: Needed,
}

/// What an engine or another image left, not checked yet.
pub(super) struct Payload {
    /// `/out`, unpacked; for an engine-made image only its modules.
    pub(super) tree: PathBuf,
    /// The engine-made image, for `output: image`.
    pub(super) image: Option<ArchiveImage>,
    /// Each source's identity, for the image's annotations.
    pub(super) sources: Vec<String>,
    /// The toolchain, for the image's annotations.
    pub(super) toolchain: String,
    /// Digest over what it exposes.
    pub(super) exposed: Option<Digest>,
    /// The image whose payload it is; `None` where it was compiled.
    pub(super) reused_from: Option<ReusedFrom>,
    /// What confined the build.
    pub(super) confinement: Confinement,
    /// What its check may spend on the decompression of its modules.
    pub(super) decompression: Arc<DecompressionBudget>,
    /// Keeps the files above until it is dropped.
    pub(super) work: Scratch,
}

/// A payload that may be published: its check has passed, its modules are signed where the site has them signed.
pub(super) struct CheckedPayload {
    pub(super) payload: Payload,
    /// The header set's packages or file, for the image's annotations.
    pub(super) headers: Vec<String>,
    /// Digest of the header set's content, where it was imported or comes from the store; for the provenance.
    pub(super) header_content: Option<Digest>,
    /// The report of the check.
    pub(super) report: CheckReport,
}

impl CheckedPayload {
    /// A payload that was checked against these headers.
    pub(super) fn of(payload: Payload, headers: &HeaderSet, report: CheckReport) -> Self {
        let (headers, header_content) = (headers.origin.clone(), headers.content.clone());
        Self { payload, headers, header_content, report }
    }
}
