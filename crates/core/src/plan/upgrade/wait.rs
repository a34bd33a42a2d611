//! The reasons why a node waits, each with a human-readable text and a stable identifier.

use jiff::Timestamp;
use serde::Serialize;

/// Condition that a node waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum UpgradeWait {
    /// Under way: pods must leave first.
    #[error("pods that must leave first: {count}")]
    Users { count: usize },
    /// Under way: the forecast that the node's driver can be unloaded. Names the driver's current holders, if known.
    #[error("waits until its driver can be unloaded{}", .holders.as_ref().map(|holders| format!(": {holders}")).unwrap_or_default())]
    Forecast {
        #[serde(skip_serializing_if = "Option::is_none")]
        holders: Option<String>,
    },
    /// Under way: the new driver pod.
    #[error("waits for its new driver to be ready")]
    Driver,
    /// Under way: the registry, which does not deliver the new driver's image to the node.
    #[error("waits for the registry, which does not deliver its new driver's image: {why}")]
    Registry { why: String },
    /// Under way: the `waitFor` Job.
    #[error("waits for its check")]
    Job,
    /// Under way: the `waitFor` annotation.
    #[error("waits for annotation farrier.dev/upgrade-checked with the new image as its value")]
    Annotation,
    /// The node's kernel, or the image's content for it, is unknown.
    #[error("its kernel, or whether the new image has modules for it, is unknown")]
    KernelUnknown,
    /// The new image has no modules for the node's kernel.
    #[error("the new image has no modules for its kernel {kernel}")]
    NoModules { kernel: String },
    /// Another actor cordoned the node.
    #[error("another actor cordoned the node")]
    Cordoned,
    /// The node is not Ready.
    #[error("it is not Ready")]
    NotReady,
    /// The driver pod does not tolerate a taint of the node, so the node would get no new pod.
    #[error("its driver pod does not tolerate its taint {taint}")]
    Tainted { taint: String },
    /// An operator is upgrading the node.
    #[error("left to the operator's upgrade controller: {label}={state}")]
    Operator { label: &'static str, state: String },
    /// farrier is upgrading another driver on the node.
    #[error("the driver of {rollout} is upgraded first")]
    Other { rollout: String },
    /// Pods did not leave the node, and farrier uncordoned it; it is retried later.
    #[error("retried at {until:.0}: {why}")]
    Again { until: Timestamp, why: String },
    /// The new driver failed on a node.
    #[error("stopped, because node {node} failed")]
    Stopped { node: String },
    /// A person paused the upgrade.
    #[error("the upgrade is paused (resume it with `farrier upgrade resume`)")]
    Paused,
    /// The window is closed. `opens` is the time of its next opening; absent if there is none within four years.
    #[error("the window opens {}", .opens.map_or("never".to_owned(), |opens| format!("at {opens:.0}")))]
    Window { opens: Option<Timestamp> },
    /// The pause between two nodes has not passed.
    #[error("the next node starts at {until:.0}")]
    Between { until: Timestamp },
    /// The canary nodes come first.
    #[error("waits for the canary nodes")]
    Canary,
    /// No node has the canary labels.
    #[error("no node has the labels of `canary`")]
    NoCanary,
    /// The DaemonSet does not have the new image yet.
    #[error("waits until the DaemonSet has the new image")]
    Image,
    /// As many nodes as allowed are without a working driver.
    #[error("nodes without a working driver, or not Ready: {down}; maxParallel: {most}")]
    Room { down: usize, most: usize },
}

impl UpgradeWait {
    /// Whether the wait ends at a certain time.
    pub(super) fn is_timed(&self) -> bool {
        matches!(self, Self::Window { .. } | Self::Between { .. })
    }

    /// Whether the node itself has to change before its upgrade can start.
    pub(super) fn is_skip(&self) -> bool {
        matches!(
            self,
            Self::KernelUnknown
                | Self::NoModules { .. }
                | Self::Cordoned
                | Self::NotReady
                | Self::Tainted { .. }
                | Self::Operator { .. }
        )
    }
}
