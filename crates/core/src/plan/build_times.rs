//! Durations of the last builds of each image and architecture, and their usual duration.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    facts::{RegistryRecord, annotations, media_type},
    image::ImageName,
    kernel::Architecture,
};

/// Number of builds kept for each image and architecture: the most recent ones.
const KEPT_BUILDS: usize = 5;

/// Durations of the last builds that compiled, from start to published image, by image and architecture. The JSON form
/// is `{"mofed amd64": [[1764107999, 74], ...]}`: the end in seconds since the epoch, and the duration in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BuildTimes(BTreeMap<String, BTreeSet<(i64, u64)>>);

impl BuildTimes {
    /// Returns the record of one build.
    pub fn of(image: &ImageName, arch: Architecture, ended: Timestamp, duration: Duration) -> Self {
        let build = (ended.as_second(), duration.as_secs());
        Self([(key(image, arch), [build].into())].into())
    }

    /// Returns how long a build usually takes: the median of the kept builds.
    pub fn usual_duration(&self, image: &ImageName, arch: Architecture) -> Option<Duration> {
        let mut seconds: Vec<u64> = self.0.get(&key(image, arch))?.iter().map(|(_, took)| *took).collect();
        seconds.sort_unstable();
        seconds.get(seconds.len() / 2).copied().map(Duration::from_secs)
    }
}

impl RegistryRecord for BuildTimes {
    const TAG: &'static str = "build-times";
    const TITLE: &'static str = "how long the last builds took";
    const KIND: &'static str = media_type::BUILD_TIMES;
    const ANNOTATION: &'static str = annotations::BUILD_TIMES;

    // Nothing depends on this record, so start a new one when it cannot be parsed.
    fn parse(text: &str) -> Result<Self, String> {
        Ok(serde_json::from_str(text).unwrap_or_default())
    }

    fn to_text(&self) -> String {
        // Only strings and numbers: the serialization cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    fn merged(&self, other: &Self) -> Self {
        let mut times = self.0.clone();
        for (key, builds) in &other.0 {
            times.entry(key.clone()).or_default().extend(builds);
        }
        for builds in times.values_mut() {
            while builds.len() > KEPT_BUILDS {
                builds.pop_first();
            }
        }
        Self(times)
    }
}

fn key(image: &ImageName, arch: Architecture) -> String {
    format!("{image} {arch}")
}

/// Elapsed and usual time of a build.
#[serde_with::skip_serializing_none]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildTime {
    /// Seconds since the running build started; `None` when no build runs.
    pub elapsed_seconds: Option<u64>,
    /// Seconds that builds of this image usually take, where known.
    pub usual_seconds: Option<u64>,
}

impl fmt::Display for BuildTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.elapsed_seconds.map(format_seconds), self.usual_seconds.map(format_seconds)) {
            (Some(elapsed), Some(usual)) => write!(f, "{elapsed} of usually {usual}"),
            (Some(elapsed), None) => f.write_str(&elapsed),
            (None, Some(usual)) => write!(f, "usually {usual}"),
            (None, None) => Ok(()),
        }
    }
}

/// Formats seconds as `74 s`, `4 min` or `3 h`.
fn format_seconds(seconds: u64) -> String {
    match seconds {
        seconds if seconds < 120 => format!("{seconds} s"),
        seconds if seconds < 2 * 3600 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(image: &str, ended: i64, took: u64) -> BuildTimes {
        let ended = Timestamp::from_second(ended).unwrap();
        BuildTimes::of(&image.parse().unwrap(), Architecture::Amd64, ended, Duration::from_secs(took))
    }

    fn all(builds: &[(i64, u64)]) -> BuildTimes {
        builds
            .iter()
            .fold(BuildTimes::default(), |all, (ended, took)| all.merged(&of("mofed", *ended, *took)))
    }

    #[test]
    fn the_last_five_count_and_one_odd_one_out_does_not() {
        let usual = |times: &BuildTimes, arch| {
            times.usual_duration(&"mofed".parse().unwrap(), arch).map(|usual| usual.as_secs())
        };
        let times = all(&[(1, 9000), (2, 9000), (3, 70), (4, 80), (5, 75), (6, 9000), (7, 74)]);
        assert_eq!(usual(&times, Architecture::Amd64), Some(75));
        assert_eq!(usual(&times, Architecture::Arm64), None);
        let text = times.to_text();
        assert_eq!(text, r#"{"mofed amd64":[[3,70],[4,80],[5,75],[6,9000],[7,74]]}"#);
        assert_eq!(BuildTimes::parse(&text).unwrap(), times);
        assert_eq!(BuildTimes::parse("hostile"), Ok(BuildTimes::default()));
    }

    #[test]
    fn times_for_people() {
        let said = |elapsed_seconds, usual_seconds| BuildTime { elapsed_seconds, usual_seconds }.to_string();
        assert_eq!(
            [said(Some(61), Some(240)), said(Some(7200), None), said(None, Some(119)), said(None, None)],
            ["61 s of usually 4 min", "2 h", "usually 119 s", ""]
        );
    }

    proptest! {
        #[test]
        fn the_order_of_writers_does_not_matter(builds in proptest::collection::vec((0i64..9, 0u64..9), 0..9)) {
            let (forth, back) = (all(&builds), all(&builds.iter().rev().copied().collect::<Vec<_>>()));
            prop_assert_eq!(&forth, &back);
            prop_assert_eq!(forth.merged(&back), forth);
        }
    }
}
