//! The record of when each kernel was last seen. The record lives in the registry, because farrier keeps state
//! only in the registry and the cluster.

use std::{collections::BTreeMap, str::FromStr};

use jiff::civil::Date;

use crate::{
    facts::{RegistryRecord, annotations, media_type},
    kernel::Architecture,
};

/// Key of a kernel in the record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{release}{}", arch.map(|arch| format!(" {arch}")).unwrap_or_default())]
pub struct KernelKey {
    /// Exact kernel release.
    pub release: String,
    /// Architecture; `None` for a kernel known only from an image.
    pub arch: Option<Architecture>,
}

impl FromStr for KernelKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (release, arch) = match text.split_once(' ') {
            Some((release, arch)) => (release, Some(arch)),
            None => (text, None),
        };
        // Validate the release, so that it is safe to print.
        release.parse::<crate::kernel::KernelRelease>().map_err(|error| error.to_string())?;
        let arch = arch.map(str::parse).transpose().map_err(|_| format!("{text:?} names no architecture"))?;
        Ok(Self { release: release.to_owned(), arch })
    }
}

/// Kernels, each with the latest day (UTC) on which a node ran the kernel, the kernel was announced, or farrier first saw the
/// kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelRecord(BTreeMap<KernelKey, Date>);

impl RegistryRecord for KernelRecord {
    const TAG: &'static str = "last-seen";
    const TITLE: &'static str = "when each kernel was last seen";
    const KIND: &'static str = media_type::KERNEL_RECORD;
    const ANNOTATION: &'static str = annotations::KERNELS_SEEN;

    // An invalid kernel or day is an error. Starting a new record instead would lose the days of the
    // kernels in the old one.
    fn parse(text: &str) -> Result<Self, String> {
        let entries: BTreeMap<String, Date> =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        entries.into_iter().map(|(key, seen)| Ok((key.parse()?, seen))).collect::<Result<_, _>>().map(Self)
    }

    // Format: `{"6.1.0-47-amd64 amd64": "2026-11-21"}`.
    fn to_text(&self) -> String {
        let entries: BTreeMap<String, String> =
            self.0.iter().map(|(key, seen)| (key.to_string(), seen.to_string())).collect();
        // Only strings: the serialization cannot fail.
        serde_json::to_string(&entries).unwrap_or_default()
    }

    // Keeps the later day of each kernel.
    fn merged(&self, other: &Self) -> Self {
        let mut record = self.clone();
        for (kernel, day) in &other.0 {
            record.note(kernel.clone(), *day);
        }
        record
    }
}

impl KernelRecord {
    /// Returns the day on which a kernel was last seen on any architecture.
    pub fn seen(&self, release: &str) -> Option<Date> {
        self.0.iter().filter(|(key, _)| key.release == release).map(|(_, seen)| *seen).max()
    }

    /// Returns the last day on which any kernel was seen.
    pub fn newest(&self) -> Option<Date> {
        self.0.values().copied().max()
    }

    /// Returns the record updated with kernels seen on a day.
    #[must_use]
    pub fn with<'a>(&self, kernels: impl IntoIterator<Item = &'a KernelKey>, day: Date) -> Self {
        let mut record = self.clone();
        for kernel in kernels {
            record.note(kernel.clone(), day);
        }
        record
    }

    /// Returns the record with unknown kernels added, as first seen on a day. Known kernels keep their day.
    #[must_use]
    pub fn noticed<'a>(&self, releases: impl IntoIterator<Item = &'a String>, day: Date) -> Self {
        let mut record = self.clone();
        for release in releases {
            if record.seen(release).is_none() {
                record.note(KernelKey { release: release.clone(), arch: None }, day);
            }
        }
        record
    }

    fn note(&mut self, kernel: KernelKey, day: Date) {
        let seen = self.0.entry(kernel).or_insert(day);
        *seen = day.max(*seen);
    }
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> KernelKey {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let day = date(2026, 11, 21);
        let record = KernelRecord::default()
            .with(&[key("6.1.0-47-amd64 amd64"), key("6.1.192-acme+ arm64")], day)
            .noticed(&["5.10.0-1-amd64".to_owned(), "6.1.0-47-amd64".to_owned()], date(2026, 1, 2));
        let text = record.to_text();
        insta::assert_snapshot!(text, @r#"{"5.10.0-1-amd64":"2026-01-02","6.1.0-47-amd64 amd64":"2026-11-21","6.1.192-acme+ arm64":"2026-11-21"}"#);
        assert_eq!(KernelRecord::parse(&text), Ok(record.clone()));
        assert_eq!(record.seen("6.1.0-47-amd64"), Some(day));
        assert_eq!(record.with(&[key("6.1.0-47-amd64 amd64")], date(2025, 1, 1)), record);
    }

    #[test]
    fn hostile_records_are_refused() {
        for text in
            ["", "[]", r#"{"../etc":"2026-01-02"}"#, r#"{"6.1.0":"soon"}"#, r#"{"6.1.0 vax":"2026-01-02"}"#]
        {
            assert!(KernelRecord::parse(text).is_err(), "{text}");
        }
    }

    fn record() -> impl Strategy<Value = KernelRecord> {
        proptest::collection::btree_map(0_u8..5, 1_i8..28, 0..5).prop_map(|entries| {
            let entry = |(n, day)| (key(&format!("6.1.{n}")), date(2026, 3, day));
            KernelRecord(entries.into_iter().map(entry).collect())
        })
    }

    proptest! {
        #[test]
        fn writers_in_any_order_come_to_the_same(a in record(), b in record(), c in record()) {
            prop_assert_eq!(a.merged(&b).merged(&c), c.merged(&a).merged(&b));
            prop_assert_eq!(a.merged(&a), a.clone());
            prop_assert_eq!(a.merged(&b).merged(&b), a.merged(&b));
        }
    }
}
