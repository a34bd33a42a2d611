//! Pure: did the first pods with a new image get ready in time?

use jiff::Timestamp;

use crate::{image::Period, plan::PodFacts};

/// How a new image does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// No pod with it is ready yet, and the deadline is ahead; or there is no such pod.
    Waiting,
    /// At least one pod with it is ready, and none is late.
    Good,
    /// A pod with it has not got ready in time.
    Failed {
        /// The pod's node.
        node: String,
        /// What its containers say, for people.
        messages: Vec<String>,
    },
}

/// Looks at the pods in which `container` runs `image`, which was set at `since`. A pod that was made later has its
/// own time; one that is bound to no node has none, because the cluster and not the image is what it waits for.
pub(super) fn progress<'a>(
    pods: impl IntoIterator<Item = &'a PodFacts>,
    container: &str,
    image: &str,
    since: Timestamp,
    deadline: Period,
    now: Timestamp,
) -> Progress {
    let mut progress = Progress::Waiting;
    for pod in pods {
        let runs = pod.images.get(container).is_some_and(|found| found == image);
        if !runs || pod.deleting || !pod.bound {
            continue;
        }
        if pod.ready {
            progress = Progress::Good;
            continue;
        }
        let from = pod.created.map_or(since, |created| created.max(since));
        // A clock that jumped back makes the pod young, not late.
        if now.duration_since(from) > jiff::SignedDuration::try_from(deadline.duration()).unwrap_or_default()
        {
            return Progress::Failed { node: pod.node.clone(), messages: pod.messages.clone() };
        }
    }
    progress
}
