//! Pure: what is rewritten when an image is there.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checked::{self, DnsLabel, DnsName, LocalPath, Rule};

/// One thing whose image field is rewritten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "strategy", try_from = "RolloutForm")]
// The schema is that of the enum; the form below exists for the messages.
#[schemars(!try_from, deny_unknown_fields)]
pub enum RolloutSpec {
    /// A DaemonSet of the cluster whose nodes share one kernel.
    Image {
        /// The DaemonSet's namespace.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        namespace: String,
        /// The DaemonSet's name.
        #[serde(rename = "daemonSet")]
        #[schemars(regex(pattern = DnsName::PATTERN))]
        daemon_set: String,
        /// The container or init container whose image is set.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        container: String,
    },
    /// A DaemonSet in a directory of manifests beside the cluster (GitOps).
    File {
        /// The file or directory, relative to the definitions directory.
        #[serde(deserialize_with = "checked::path::<LocalPath, _>")]
        path: PathBuf,
        /// The DaemonSet's namespace.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        namespace: String,
        /// The DaemonSet's name.
        #[serde(rename = "daemonSet")]
        #[schemars(regex(pattern = DnsName::PATTERN))]
        daemon_set: String,
        /// The container or init container whose image is set.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        container: String,
    },
}

/// [`RolloutSpec`] as written: serde's internally tagged enums lose the place of an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RolloutForm {
    strategy: Strategy,
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    namespace: String,
    #[serde(deserialize_with = "checked::one::<DnsName, _>")]
    daemon_set: String,
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    container: String,
    #[serde(default, deserialize_with = "checked::optional_path::<LocalPath, _>")]
    path: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Strategy {
    Image,
    File,
}

impl TryFrom<RolloutForm> for RolloutSpec {
    type Error = &'static str;

    fn try_from(form: RolloutForm) -> Result<Self, Self::Error> {
        let RolloutForm { strategy, namespace, daemon_set, container, path } = form;
        match (strategy, path) {
            (Strategy::Image, None) => Ok(Self::Image { namespace, daemon_set, container }),
            (Strategy::Image, Some(_)) => Err("strategy `image` has no `path`; strategy `file` has"),
            (Strategy::File, Some(path)) => Ok(Self::File { path, namespace, daemon_set, container }),
            (Strategy::File, None) => Err("strategy `file` needs a `path`: the file or directory to edit"),
        }
    }
}
