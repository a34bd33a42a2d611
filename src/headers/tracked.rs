//! Adapter: which kernels a distribution's suites have headers for.

use super::{FetchError, Fetcher, apt::AptArchive};
use crate::kernel::{AptSuites, Architecture, HeaderSource, KernelRelease, TrackedSuites};

/// What header packages are called before the release.
const PREFIX: &str = "linux-headers-";

impl Fetcher {
    /// The releases that packages `linux-headers-<release>` of the suites are for, in no order. Archive, components and
    /// keyring are those that `headers` names, where it names some.
    pub async fn kernel_releases(
        &self,
        headers: &HeaderSource,
        tracked: &TrackedSuites,
        arch: Architecture,
    ) -> Result<Vec<KernelRelease>, FetchError> {
        let known = match headers {
            HeaderSource::Apt(apt) => apt.from.clone(),
            HeaderSource::Tarball(_) => AptSuites::default(),
        };
        let wanted = AptSuites { suites: tracked.suites.clone(), ..known };

        let archive = AptArchive::open(
            &self.cache,
            &self.net,
            &self.options.apt_dir,
            &wanted,
            arch,
            self.options.refresh,
        )
        .await?;
        let names = archive.names(PREFIX).await?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(PREFIX)?.parse().ok()).collect())
    }
}
