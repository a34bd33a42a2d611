//! The cells of a plan: each driver image that is called for on a kernel target, with exactly one outcome.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use serde::Serialize;

use super::{
    AnnouncedBy, BuildProducts, BuildReason, Cell, Published, SkipReason, skip_reason::serialize_reason,
};
use crate::{
    image::{ImageName, ImageReference, InputHash},
    kernel::KernelTarget,
};

/// Returns the remedies for a conflict. A published tag never changes, so a changed driver needs another tag.
/// `products` are build products in the image's sources.
pub fn conflict_remedy(cell: &Cell, changed: &[String], products: &BuildProducts) -> String {
    let Cell { image, target: KernelTarget { release, .. }, .. } = cell;
    let is_changed =
        |source: &str| changed.iter().any(|change| change.starts_with(&format!("source {source} changed")));
    let clean = match products.iter().find(|(source, _)| is_changed(source)) {
        Some((source, file)) => {
            format!("source {source} contains products of a build, such as {file}: run `make clean` there; ")
        }
        None => String::new(),
    };
    let signer = if changed.iter().any(|change| change.contains("certificate changed ")) {
        "put `{{signer}}` into `tags`, so that each signing certificate has its own tags; or "
    } else {
        ""
    };
    format!(
        "{clean}a published tag never changes: {signer}raise `version` in the definition of {image} (such as `git describe` prints), or set \
         `onConflict: overwrite` there while you develop; `farrier build {image} --kernel {release}` tries the change without publishing"
    )
}

/// Describes a tag that points to an image with other inputs.
pub fn conflict(reference: &ImageReference, changed: &[String]) -> String {
    let changed = if changed.is_empty() { String::new() } else { format!(": {}", changed.join("; ")) };
    format!("{reference} holds an image built from other inputs{changed}")
}

/// One driver image that is called for on one kernel target.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedCell {
    /// The image.
    pub image: ImageName,
    /// The kernel target.
    pub target: KernelTarget,
    /// Outcome of the cell.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Number of nodes that call for the image.
    pub nodes: usize,
    /// Origins of the kernel's announcement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

/// Outcome of a cell.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum Outcome {
    /// The image is built, checked and published.
    Build {
        /// The cell.
        cell: Arc<Cell>,
        /// Reason for the build.
        #[serde(serialize_with = "serialize_reason")]
        why: BuildReason,
        /// Whether an image of the same recipe for another kernel may be reused instead, if the check allows it.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        may_reuse: bool,
    },
    /// The image is published with exactly these inputs.
    UpToDate {
        /// The cell.
        cell: Arc<Cell>,
        /// The published image.
        #[serde(flatten)]
        published: Published,
        /// Whether the definition no longer accepts the image's verdict. The image is then not rolled out.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        denied: bool,
        /// Additional names that do not point to the image yet.
        #[serde(skip)]
        missing_tags: Vec<ImageReference>,
    },
    /// A tag points to an image with other inputs (guarantee 3).
    Conflict {
        /// The cell.
        cell: Arc<Cell>,
        /// The conflicting tag.
        reference: ImageReference,
        /// Input hash of the image under the tag; absent for an image that farrier did not build.
        theirs: Option<InputHash>,
        /// Inputs that differ, as far as the image names its inputs.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        changed: Vec<String>,
        /// Remedy for the conflict.
        remedy: String,
    },
    /// An earlier build with the same inputs failed.
    Failed {
        /// The cell.
        cell: Arc<Cell>,
        /// Time of the failure.
        at: jiff::Timestamp,
        /// Error of the failed build.
        message: String,
    },
    /// The registry lookup failed.
    Unknown {
        /// The cell.
        cell: Arc<Cell>,
        /// Reference that was looked up.
        reference: ImageReference,
        /// Error of the lookup.
        message: String,
    },
    /// The image is compiled against images that are not published yet.
    Waiting {
        /// Unpublished needs, which are still to be built or waiting themselves.
        needs: Vec<ImageName>,
    },
    /// The image cannot be built.
    Skipped {
        /// Reason why the image is skipped.
        #[serde(serialize_with = "serialize_reason")]
        why: SkipReason,
    },
}

/// Phase of one image for one kernel.
#[derive(Serialize, strum::IntoStaticStr, strum::VariantArray)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// In the registry, with these inputs.
    Published,
    /// Being built now.
    Building,
    /// Waiting for a free builder.
    Queued,
    /// Failed with a transient error; retried later.
    Retrying,
    /// To be built by the next reconcile.
    Missing,
    /// To be built when its needs are published.
    Waiting,
    /// Failed with these inputs; not retried until one of them changes.
    Failed,
    /// The tag points to an image with other inputs.
    Conflict,
    /// The registry lookup failed.
    Unknown,
    /// Cannot be built, for the given reason.
    Skipped,
    /// Not built: the nodes bring their own driver.
    OwnDriver,
}

impl Phase {
    /// Returns the phase in kebab case.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl Outcome {
    /// Returns the cell's phase, without regard to running builds.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Build { .. } => Phase::Missing,
            Self::UpToDate { .. } => Phase::Published,
            Self::Conflict { .. } => Phase::Conflict,
            Self::Failed { .. } => Phase::Failed,
            Self::Unknown { .. } => Phase::Unknown,
            Self::Waiting { .. } => Phase::Waiting,
            Self::Skipped { .. } => Phase::Skipped,
        }
    }

    /// Returns the cell; `None` where the inputs of the build are unknown.
    pub fn cell(&self) -> Option<&Arc<Cell>> {
        match self {
            Self::Build { cell, .. }
            | Self::UpToDate { cell, .. }
            | Self::Conflict { cell, .. }
            | Self::Failed { cell, .. }
            | Self::Unknown { cell, .. } => Some(cell),
            Self::Waiting { .. } | Self::Skipped { .. } => None,
        }
    }

    /// Returns the reason why there will be no image; empty where there will be one.
    pub fn absence_reason(&self) -> String {
        match self {
            Self::Build { .. } | Self::UpToDate { .. } => String::new(),
            Self::Conflict { reference, changed, .. } => conflict(reference, changed),
            Self::Failed { message, .. } => format!("failed before with the same inputs: {message}"),
            Self::Unknown { message, .. } => message.clone(),
            Self::Waiting { needs } => waits_for(needs),
            Self::Skipped { why } => why.to_string(),
        }
    }

    /// Whether the image cannot be built although a definition is meant for the kernel.
    pub fn is_unbuildable(&self) -> bool {
        matches!(self, Self::Skipped { why } if !why.is_not_applicable())
    }
}

impl From<SkipReason> for Outcome {
    fn from(why: SkipReason) -> Self {
        Self::Skipped { why }
    }
}

impl PlannedCell {
    /// Returns the cell's name for messages: `<image> for <kernel release>`.
    pub fn subject(&self) -> String {
        format!("{} for {}", self.image, self.target.release)
    }

    pub(super) fn key(&self) -> Key<'_> {
        (&self.image, &self.target)
    }
}

/// Image and kernel target.
pub(super) type Key<'a> = (&'a ImageName, &'a KernelTarget);

/// State of a cell, as rollouts and nodes see it.
pub(super) enum CellState<'a> {
    /// The image is published.
    Published(&'a Cell, &'a Published),
    /// The image will be built.
    ToBuild(&'a Cell),
    /// There will be no image.
    Absent(AbsentImage<'a>),
}

/// Reason why there will be no image.
pub(super) struct AbsentImage<'a> {
    /// Cell that would be built, where known.
    pub(super) cell: Option<&'a Cell>,
    pub(super) why: String,
    /// Whether the only reason is that the registry did not answer.
    pub(super) unknown: bool,
}

/// Cells of a plan, as a rollout or a node sees them.
#[derive(Clone, Copy)]
pub(super) struct CellLookup<'a> {
    pub(super) all: &'a [PlannedCell],
    pub(super) index: &'a HashMap<Key<'a>, usize>,
    /// Published images that do not count as available, with the reason.
    pub(super) unavailable: Option<&'a HashMap<Key<'a>, String>>,
    /// Cells that are unknown because the registry did not answer for other cells.
    pub(super) unknown: &'a HashSet<Key<'a>>,
    /// Image whose chain is on hold. The image counts as unpublished for every kernel.
    pub(super) held_image: Option<&'a ImageName>,
}

impl<'a> CellLookup<'a> {
    /// Returns the cell of an image for a kernel, if it is called for.
    pub(super) fn get(&self, image: &ImageName, kernel: &KernelTarget) -> Option<&'a PlannedCell> {
        self.index.get(&(image, kernel)).and_then(|position| self.all.get(*position))
    }

    /// Returns the cells of one image, by target.
    pub(super) fn of(&self, image: &ImageName) -> impl Iterator<Item = &'a PlannedCell> {
        self.all.iter().filter(move |cell| cell.image == *image)
    }

    /// Returns the state of an image for a kernel.
    pub(super) fn state(&self, image: &ImageName, kernel: &KernelTarget) -> CellState<'a> {
        let planned = self.get(image, kernel);
        let absent = |why| {
            let is_unknown = matches!(planned.map(|planned| &planned.outcome), Some(Outcome::Unknown { .. }));
            let unknown = is_unknown || self.unknown.contains(&(image, kernel));
            let cell = planned.and_then(|planned| planned.outcome.cell()).map(AsRef::as_ref);
            CellState::Absent(AbsentImage { cell, why, unknown })
        };
        let Some(planned) = planned else {
            return absent(format!("no node with this kernel matches the `nodes` of image {image}"));
        };
        if let Some(why) = self.unavailable.and_then(|unavailable| unavailable.get(&planned.key())) {
            return absent(why.clone());
        }
        match &planned.outcome {
            Outcome::UpToDate { .. } if self.held_image == Some(image) => {
                absent("its chain is on hold".to_owned())
            }
            Outcome::UpToDate { cell, published, .. } => CellState::Published(cell, published),
            Outcome::Build { cell, .. } => CellState::ToBuild(cell),
            Outcome::Waiting { needs } => absent(format!("it {}", waits_for(needs))),
            other => absent(other.absence_reason()),
        }
    }
}

/// Formats the needs as `waits for mofed, nvidia-gpu`.
pub(super) fn waits_for(needs: &[ImageName]) -> String {
    let needs: Vec<&str> = needs.iter().map(ImageName::as_str).collect();
    format!("waits for {}", needs.join(", "))
}
