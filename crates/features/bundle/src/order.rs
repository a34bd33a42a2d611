//! The order of one exporter's bundles. A registry records the order of its newest export, and the order of the newest
//! import from each exporter. An import of an older bundle, which would move tags back, is therefore noticed.
//!
//! Each order is one manifest in [`RECORDS`] with a separate tag: the counter, and a part of the contents' digest. No tag
//! moves, so concurrent writers need no lock: exports that take the same counter see each other's tags.

use std::fmt;

use farrier_builder::images::RECORDS;
use farrier_core::{
    facts::annotations,
    image::{Digest, Tag, Version},
    text::is_deceptive,
};
use farrier_store::registry::{RegistryError, read_annotation, retry_delay, write_annotations};
use jiff::Timestamp;
use oci::ImageManifest;
use serde::{Deserialize, Serialize};

use super::{
    BundleError, Collection, Listed, PreviousBundle, Result, Target, Verified,
    import::{ImportOutcome, ListedReferrers},
};

/// Media type of a record.
const KIND: &str = "application/vnd.farrier.bundle-order.v1";
/// Annotation with a [`RecordedOrder`] in JSON.
const ANNOTATION: &str = "farrier.dev/bundle-order";
/// Largest counter: it fits into an `i64`, and a successor always exists.
const MAX_COUNTER: u64 = i64::MAX as u64;
/// Longest description of a content in a message.
const MAX_DESCRIPTION: usize = 80;

/// Position of a bundle among the bundles of one exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    /// The exporter: the registry that the bundles are exported from, or the name given with `--origin`.
    pub origin: String,
    /// Increases with each export of other contents, even if the clock was set back.
    pub counter: u64,
    /// Time of the export, for messages.
    pub time: Timestamp,
}

/// Side of the air gap on which an order is recorded.
#[derive(Clone, Copy, Debug, strum::Display)]
#[strum(serialize_all = "kebab-case")]
enum Role {
    /// Exported from this registry.
    Exported,
    /// Imported into this registry.
    Accepted,
}

#[derive(Serialize, Deserialize)]
struct RecordedOrder {
    order: Order,
    /// Digest of the index without its order; for imports, the bundle's ID.
    content: Digest,
}

impl Order {
    /// Returns the problem with an order from a bundle, if any.
    pub(super) fn problem(&self) -> Option<&'static str> {
        let Self { origin, counter, time: _ } = self;
        if origin.is_empty() || origin.len() > 512 || origin.contains(is_deceptive) {
            return Some("the origin in its order is not a name");
        }
        (*counter > MAX_COUNTER).then_some("the counter in its order is too large")
    }
}

impl fmt::Display for Order {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "number {} of {}, exported {}", self.counter, self.origin, self.time)
    }
}

/// Reason to refuse a bundle: the site accepted a newer one of the same exporter, or another one with the same counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Older {
    /// Order of the bundle; `None` for a bundle of a farrier that wrote no order.
    pub order: Option<Order>,
    /// Newest order that the site accepted.
    pub newest: Order,
    /// Each tag that would move back, with its present content and the bundle's.
    pub changes: Vec<String>,
}

impl fmt::Display for Older {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.order {
            Some(order) => write!(to, "the bundle ({order})")?,
            None => write!(to, "the bundle has no order, because an older farrier made it, and")?,
        }
        let is_equal = self.order.as_ref().is_some_and(|order| order.counter == self.newest.counter);
        let relation = if is_equal { "has the number of another bundle" } else { "is older than the newest" };
        write!(to, " {relation} that this site accepted ({}); ", self.newest)?;
        match &self.changes[..] {
            [] => write!(to, "no tag moves back"),
            changes => write!(to, "these tags move back: {}", changes.join(", ")),
        }
    }
}

impl Collection {
    /// Assigns the bundle an order, and records the order in the exporter's registry. The same contents as in the newest export
    /// get the same order, so an interrupted export resumes. Returns the error of a registry that refuses the record;
    /// the counter then comes from the clock.
    pub async fn assign_order(
        &mut self,
        exporter: &Target,
        origin: &str,
        since: Option<&PreviousBundle>,
    ) -> Result<Option<RegistryError>> {
        let content = Digest::of(&self.index.to_bytes()?);
        // The file of the base is not verified: a counter near the largest one would leave none for later exports.
        let is_usable = |order: &Order| order.origin == origin && order.counter <= MAX_COUNTER / 2;
        let base = since.and_then(|since| since.index.order.clone()).filter(is_usable);
        let mut attempt = 0;
        loop {
            let newest = exporter.newest(Role::Exported, origin).await?;
            if let Some(newest) = newest.as_ref().filter(|newest| newest.content == content)
                && !exporter.has_rival(newest).await?
            {
                self.index.order = Some(newest.order.clone());
                return Ok(None);
            }
            let now = Timestamp::now().as_second();
            let known = newest.map(|newest| newest.order).into_iter().chain(base.clone());
            let next = known.map(|order| order.counter + 1).chain(u64::try_from(now));
            let counter = next.max().unwrap_or_default();
            let time = Timestamp::from_second(now).unwrap_or_default();
            let order = Order { origin: origin.to_owned(), counter, time };
            if let Some(problem) = order.problem() {
                return Err(BundleError::Nothing(problem.to_owned()));
            }
            self.index.order = Some(order.clone());
            let recorded = RecordedOrder { order, content: content.clone() };
            match exporter.record(Role::Exported, &recorded).await {
                Err(BundleError::Registry(
                    error @ (RegistryError::Denied { .. } | RegistryError::Protocol { .. }),
                )) => return Ok(Some(error)),
                outcome => outcome?,
            }
            if !exporter.has_rival(&recorded).await? {
                return Ok(None);
            }
            // The rival may be done, or try again, too. The delay has jitter, so that the two do not meet again.
            let Some(delay) = retry_delay(attempt) else {
                let (action, reason) = ("record the bundle's order", "other exports take the same number");
                return Err(RegistryError::protocol(exporter.registry.describe(), action, reason).into());
            };
            tokio::time::sleep(delay).await;
            attempt += 1;
        }
    }
}

impl Target {
    /// Returns the newest accepted order, and the tags that would move back, unless the bundle is newer or is that bundle.
    pub async fn older(&self, verified: &Verified) -> Result<Option<Older>> {
        let index = verified.bundle.index();
        let order = index.order.clone();
        let origin = order.as_ref().map_or(&index.from, |order| &order.origin);
        let counter = order.as_ref().map_or(0, |order| order.counter);
        let is_refusal = |newest: &RecordedOrder| {
            (newest.order.counter, newest.content != *verified.bundle.id()) > (counter, false)
        };
        let newest = self.newest(Role::Accepted, origin).await?.filter(is_refusal);
        let Some(RecordedOrder { order: newest, .. }) = newest else { return Ok(None) };
        let (mut changes, mut listed) = (Vec::new(), ListedReferrers::default());
        for Listed { content, .. } in &index.contents {
            let tag = content.tag.as_ref().filter(|_| content.has_moving_tag());
            let (Some(tag), Some(new)) = (tag, verified.manifests.get(&content.digest)) else { continue };
            let ImportOutcome::Moved { previous } = self.outcome(verified, content, &mut listed).await?
            else {
                continue;
            };
            let name = &content.repository;
            let version = Version::Digest(previous.clone());
            let old = self.registry.manifest(&self.repository(name)?, &version).await?;
            let old = describe(&previous, old.as_ref().map(|old| &old.bytes[..]));
            let new = describe(&content.digest, Some(&new.bytes));
            changes.push(format!("{name}:{tag} from {old} to {new}"));
        }
        Ok(Some(Older { order, newest, changes }))
    }

    /// Fails if the site accepted a newer bundle, unless older bundles are allowed.
    pub(super) async fn check_order(&self, verified: &Verified, allow_older: bool) -> Result<()> {
        if allow_older {
            return Ok(());
        }
        self.older(verified).await?.map_or(Ok(()), |older| Err(BundleError::Older(Box::new(older))))
    }

    /// Records that the site accepted the bundle.
    pub(super) async fn accept(&self, verified: &Verified) -> Result<()> {
        let Some(order) = verified.bundle.index().order.clone() else { return Ok(()) };
        let newest = self.newest(Role::Accepted, &order.origin).await?;
        if newest.is_some_and(|newest| newest.order.counter >= order.counter) {
            return Ok(());
        }
        self.record(Role::Accepted, &RecordedOrder { order, content: verified.bundle.id().clone() }).await
    }

    /// Newest recorded order of an exporter.
    async fn newest(&self, role: Role, origin: &str) -> Result<Option<RecordedOrder>> {
        // The counters in the tags have a fixed width.
        let Some(tag) = self.order_tags(&tag_prefix(role, origin)).await?.into_iter().max() else {
            return Ok(None);
        };
        let repository = self.repository(RECORDS)?;
        let tag_location = (&repository, &Version::Tag(tag));
        let parse = |text: &str| serde_json::from_str(text);
        Ok(read_annotation(self.registry.as_ref(), tag_location, ANNOTATION, parse).await?)
    }

    /// Whether an export of other contents recorded the same counter.
    async fn has_rival(&self, RecordedOrder { order, content }: &RecordedOrder) -> Result<bool> {
        let prefix = counter_prefix(Role::Exported, order);
        let own = format!("{prefix}-{}", content.short());
        Ok(self.order_tags(&prefix).await?.iter().any(|tag| tag.as_str() != own))
    }

    /// Tags of recorded orders with this prefix.
    async fn order_tags(&self, prefix: &str) -> Result<Vec<Tag>> {
        let mut tags = self.registry.tags(&self.repository(RECORDS)?).await?;
        tags.retain(|tag| tag.as_str().starts_with(prefix));
        Ok(tags)
    }

    async fn record(&self, role: Role, recorded: &RecordedOrder) -> Result<()> {
        let repository = self.repository(RECORDS)?;
        let RecordedOrder { order, content } = recorded;
        let unusable =
            |reason: String| RegistryError::Options("record the bundle's order".to_owned(), reason);
        let tag = format!("{}-{}", counter_prefix(role, order), content.short()).parse::<Tag>();
        let tag = tag.map_err(|error| unusable(error.to_string()))?;
        let text = serde_json::to_string(recorded).map_err(|error| unusable(error.to_string()))?;
        let tag_location = (&repository, &Version::Tag(tag));
        Ok(write_annotations(self.registry.as_ref(), tag_location, KIND, [(ANNOTATION, text)]).await?)
    }
}

/// First part of the tags with one exporter's orders.
fn tag_prefix(role: Role, origin: &str) -> String {
    format!("{role}-{}-", Digest::of(origin.as_bytes()).short())
}

/// First part of the tags with one order, of which there are several after concurrent exports.
fn counter_prefix(role: Role, Order { origin, counter, time: _ }: &Order) -> String {
    format!("{}{counter:019}", tag_prefix(role, origin))
}

/// Formats the digest of a stored input, after the identity in its manifest, if there is one.
fn describe(digest: &Digest, manifest: Option<&[u8]>) -> String {
    let manifest = manifest.and_then(|bytes| ImageManifest::parse(bytes).ok());
    let identity = manifest.and_then(|mut manifest| manifest.annotations.remove(annotations::IDENTITY));
    let digest = format!("sha256:{}", digest.short());
    let Some(identity) = identity else { return digest };
    let text: String = identity.chars().filter(|c| !is_deceptive(*c)).take(MAX_DESCRIPTION).collect();
    format!("{text} ({digest})")
}
