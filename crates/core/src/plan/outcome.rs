//! Pure: the cells of a plan: each driver image that is called for on a kernel target, with exactly one outcome.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use serde::Serialize;

use super::{AnnouncedBy, BuildReason, Cell, Published, SkipReason, skip_reason::explained};
use crate::{
    image::{ImageName, ImageReference, InputHash},
    kernel::KernelTarget,
};

/// One driver image that is called for on one kernel target.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedCell {
    /// The image.
    pub image: ImageName,
    /// The kernel target.
    pub target: KernelTarget,
    /// What becomes of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How many nodes call for it.
    pub nodes: usize,
    /// Who announces the kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

/// What becomes of a cell.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum Outcome {
    /// It is built, checked and published.
    Build {
        /// The cell.
        cell: Arc<Cell>,
        /// Why it is built.
        #[serde(serialize_with = "explained")]
        why: BuildReason,
        /// Is an image of the same recipe for another kernel published for this one instead, if the check allows?
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        may_reuse: bool,
    },
    /// It is published with these very inputs.
    UpToDate {
        /// The cell.
        cell: Arc<Cell>,
        /// The image.
        #[serde(flatten)]
        published: Published,
        /// Does the definition not accept its verdict any more? Then the image is not rolled out.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        denied: bool,
        /// Further names that do not lead to it yet.
        #[serde(skip)]
        missing_tags: Vec<ImageReference>,
    },
    /// A tag holds something else than these inputs give (guarantee 3).
    Conflict {
        /// The cell.
        cell: Arc<Cell>,
        /// The tag.
        reference: ImageReference,
        /// Input hash of the image under the tag; absent for an image that farrier did not make.
        theirs: Option<InputHash>,
        /// What to do.
        remedy: &'static str,
    },
    /// It failed before with the same inputs.
    HeldBack {
        /// The cell.
        cell: Arc<Cell>,
        /// When it failed.
        at: jiff::Timestamp,
        /// How.
        message: String,
    },
    /// The registry gave no answer.
    Unknown {
        /// The cell.
        cell: Arc<Cell>,
        /// The reference that was looked up.
        reference: ImageReference,
        /// What happened instead.
        message: String,
    },
    /// It is compiled against images that are not published yet.
    Waiting {
        /// Those images, themselves to be built or waiting.
        needs: Vec<ImageName>,
    },
    /// It cannot be built.
    Skipped {
        /// Why not.
        #[serde(serialize_with = "explained")]
        why: SkipReason,
    },
}

/// Where one image for one kernel stands.
#[derive(Serialize, strum::IntoStaticStr, strum::VariantArray)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// In the registry, with these inputs.
    Published,
    /// Being built at this moment.
    Building,
    /// To be built as soon as a builder is free.
    Queued,
    /// Failed for a reason that passes; tried again later.
    Retrying,
    /// To be built by the next pass.
    Missing,
    /// To be built when what it is compiled against is published.
    Waiting,
    /// Failed with these inputs; not tried again until one changes.
    Failed,
    /// The tag holds an image of other inputs.
    Conflict,
    /// The registry did not say.
    Unknown,
    /// Nothing can be built, for the reason given.
    Skipped,
    /// Nothing is built: the nodes have their own driver.
    OwnDriver,
}

impl Phase {
    /// The phase in lower case.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl Outcome {
    /// Where the cell stands, as far as registry and cluster tell.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Build { .. } => Phase::Missing,
            Self::UpToDate { .. } => Phase::Published,
            Self::Conflict { .. } => Phase::Conflict,
            Self::HeldBack { .. } => Phase::Failed,
            Self::Unknown { .. } => Phase::Unknown,
            Self::Waiting { .. } => Phase::Waiting,
            Self::Skipped { .. } => Phase::Skipped,
        }
    }

    /// The cell; `None` where it is not known what would be built.
    pub fn cell(&self) -> Option<&Arc<Cell>> {
        match self {
            Self::Build { cell, .. }
            | Self::UpToDate { cell, .. }
            | Self::Conflict { cell, .. }
            | Self::HeldBack { cell, .. }
            | Self::Unknown { cell, .. } => Some(cell),
            Self::Waiting { .. } | Self::Skipped { .. } => None,
        }
    }

    /// Why there will be no image; empty where there will be one.
    pub fn why_not(&self) -> String {
        match self {
            Self::Build { .. } | Self::UpToDate { .. } => String::new(),
            Self::Conflict { reference, .. } => format!("{reference} holds an image of other inputs"),
            Self::HeldBack { message, .. } => format!("failed before with the same inputs: {message}"),
            Self::Unknown { message, .. } => message.clone(),
            Self::Waiting { needs } => waits_for(needs),
            Self::Skipped { why } => why.to_string(),
        }
    }
}

impl Outcome {
    /// Can nothing be built, though a definition is meant for the kernel?
    pub fn is_unbuildable(&self) -> bool {
        matches!(self, Self::Skipped { why } if !why.is_finding())
    }
}

impl From<SkipReason> for Outcome {
    fn from(why: SkipReason) -> Self {
        Self::Skipped { why }
    }
}

impl PlannedCell {
    /// For messages: `<image> for <kernel release>`.
    pub fn subject(&self) -> String {
        format!("{} for {}", self.image, self.target.release)
    }

    pub(super) fn key(&self) -> Key<'_> {
        (&self.image, &self.target)
    }
}

/// Which image for which kernel target.
pub(super) type Key<'a> = (&'a ImageName, &'a KernelTarget);

/// Where a cell stands; what rollouts and nodes ask for.
pub(super) enum State<'a> {
    /// Published.
    Published(&'a Cell, &'a Published),
    /// Will be built.
    Building(&'a Cell),
    /// Will not be there.
    Absent(Absence<'a>),
}

/// Why there will be no image.
pub(super) struct Absence<'a> {
    /// What would be built, where that is known.
    pub(super) cell: Option<&'a Cell>,
    pub(super) why: String,
    /// Is it only that the registry gave no answer?
    pub(super) unknown: bool,
}

/// The cells of a plan, as a rollout or a node sees them.
#[derive(Clone, Copy)]
pub(super) struct Cells<'a> {
    pub(super) all: &'a [PlannedCell],
    pub(super) places: &'a HashMap<Key<'a>, usize>,
    /// Published images that do not count as there, with the reason.
    pub(super) withheld: Option<&'a HashMap<Key<'a>, String>>,
    /// Cells that are unknown because the registry gave no answer about others.
    pub(super) unknown: &'a HashSet<Key<'a>>,
    /// An image that counts as published for no kernel.
    pub(super) without: Option<&'a ImageName>,
}

impl<'a> Cells<'a> {
    /// The cell of an image for a kernel, where it is called for.
    pub(super) fn get(&self, image: &ImageName, kernel: &KernelTarget) -> Option<&'a PlannedCell> {
        self.places.get(&(image, kernel)).and_then(|place| self.all.get(*place))
    }

    /// The cells of one image, by target.
    pub(super) fn of(&self, image: &ImageName) -> impl Iterator<Item = &'a PlannedCell> {
        self.all.iter().filter(move |cell| cell.image == *image)
    }

    /// Where an image stands for a kernel.
    pub(super) fn state(&self, image: &ImageName, kernel: &KernelTarget) -> State<'a> {
        let found = self.get(image, kernel);
        let absent = |why| {
            let is_unknown = matches!(found.map(|found| &found.outcome), Some(Outcome::Unknown { .. }));
            let unknown = is_unknown || self.unknown.contains(&(image, kernel));
            let cell = found.and_then(|found| found.outcome.cell()).map(AsRef::as_ref);
            State::Absent(Absence { cell, why, unknown })
        };
        let Some(found) = found else {
            return absent(format!("no node of this kernel matches the nodes of image {image}"));
        };
        if let Some(why) = self.withheld.and_then(|withheld| withheld.get(&found.key())) {
            return absent(why.clone());
        }
        match &found.outcome {
            Outcome::UpToDate { .. } if self.without == Some(image) => {
                absent("its chain is on hold".to_owned())
            }
            Outcome::UpToDate { cell, published, .. } => State::Published(cell, published),
            Outcome::Build { cell, .. } => State::Building(cell),
            Outcome::Waiting { needs } => absent(format!("it {}", waits_for(needs))),
            other => absent(other.why_not()),
        }
    }
}

/// `waits for mofed, nvidia-gpu`.
pub(super) fn waits_for(needs: &[ImageName]) -> String {
    let needs: Vec<&str> = needs.iter().map(ImageName::as_str).collect();
    format!("waits for {}", needs.join(", "))
}
