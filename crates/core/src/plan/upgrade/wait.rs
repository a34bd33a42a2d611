//! Pure: why a node waits, for people and for programs.

use jiff::Timestamp;
use serde::Serialize;

/// What a node waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum UpgradeWait {
    /// Under way: pods that must leave first.
    #[error("pods that must leave first: {count}")]
    Users { count: usize },
    /// Under way: the forecast that its driver would go. What holds it, as far as that is known.
    #[error("waits until its driver would go{}", .holders.as_ref().map(|held| format!(": {held}")).unwrap_or_default())]
    Forecast {
        #[serde(skip_serializing_if = "Option::is_none")]
        holders: Option<String>,
    },
    /// Under way: the new pod of the driver.
    #[error("waits for its new driver to be ready")]
    Driver,
    /// Under way: the Job of `waitFor`.
    #[error("waits for its check")]
    Job,
    /// Under way: the annotation of `waitFor`.
    #[error("waits for annotation farrier.dev/upgrade-checked with the new image as its value")]
    Annotation,
    /// Its kernel is not known, or what the image has for it.
    #[error("its kernel, or what the new image has for it, is not known")]
    KernelUnknown,
    /// The new image has no modules for its kernel.
    #[error("the new image has no modules for its kernel {kernel}")]
    NoModules { kernel: String },
    /// Someone else has cordoned it.
    #[error("someone else has cordoned it")]
    Cordoned,
    /// It is away.
    #[error("it is not Ready")]
    NotReady,
    /// An operator upgrades it.
    #[error("left to the operator's upgrade controller: {label}={state}")]
    Operator { label: &'static str, state: String },
    /// farrier upgrades another driver on it.
    #[error("the driver of {rollout} comes first")]
    Other { rollout: String },
    /// Pods did not leave it, and it was given back.
    #[error("tried again at {until:.0}: {why}")]
    Again { until: Timestamp, why: String },
    /// The new driver does not work on a node.
    #[error("stopped, because node {node} failed")]
    Stopped { node: String },
    /// Someone has paused the upgrade.
    #[error("the upgrade is paused (`farrier upgrade resume` goes on)")]
    Paused,
    /// The window is closed. It opens at this time, or not within four years.
    #[error("the window opens {}", .opens.map_or("never".to_owned(), |opens| format!("at {opens:.0}")))]
    Window { opens: Option<Timestamp> },
    /// The time between two nodes.
    #[error("the next node is begun at {until:.0}")]
    Between { until: Timestamp },
    /// The nodes that go first.
    #[error("waits for the nodes that go first")]
    Canary,
    /// There are none.
    #[error("no node has the labels of those that go first (canary)")]
    NoCanary,
    /// The DaemonSet does not have the new image yet.
    #[error("waits until the DaemonSet has the new image")]
    Image,
    /// As many nodes as may be are without a driver.
    #[error("nodes without a working driver, or not Ready: {down}; maxParallel: {most}")]
    Room { down: usize, most: usize },
}

impl UpgradeWait {
    /// Does it end by itself at a time?
    pub(super) fn is_about_time(&self) -> bool {
        matches!(self, Self::Window { .. } | Self::Between { .. })
    }

    /// Does the node have to change for farrier to begin it?
    pub(super) fn leaves_alone(&self) -> bool {
        matches!(
            self,
            Self::KernelUnknown
                | Self::NoModules { .. }
                | Self::Cordoned
                | Self::NotReady
                | Self::Operator { .. }
        )
    }
}
