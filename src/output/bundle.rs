//! Output of `farrier bundle`.

use std::collections::BTreeMap;

use farrier_bundle::{
    Bundle, BundleIndex, Content, ContentKind, ImportOutcome, ImportSummary, Imported, License, Listed,
};
use farrier_core::{image::Digest, text::is_deceptive};
use indicatif::HumanBytes;
use serde::Serialize;

use super::indented_table;

/// JSON form of a bundle, which `--since` reads.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listing<'a> {
    #[serde(skip)]
    bundle: &'a Bundle,
    id: &'a str,
    file: String,
    /// Size of the file, in bytes.
    length: u64,
    /// Digest of each file, if they were read, as `sha256sum` prints them.
    #[serde(skip_serializing_if = "String::is_empty")]
    sha256: String,
    /// Fingerprint of the key whose signature was verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    signed_by: Option<Digest>,
    /// Size of the file's blobs in bytes, each counted once.
    carried: u64,
    /// Size in bytes of the blobs that only the base bundle holds.
    in_base: u64,
    #[serde(flatten)]
    index: &'a BundleIndex,
}

impl<'a> Listing<'a> {
    pub fn of(bundle: &'a Bundle, signed_by: Option<Digest>, sha256: String) -> Self {
        let (carried, in_base) = bundle.index().bytes();
        Self {
            bundle,
            sha256,
            signed_by,
            id: bundle.id().as_str(),
            file: bundle.path().display().to_string(),
            length: bundle.length(),
            carried,
            in_base,
            index: bundle.index(),
        }
    }

    /// Formats the contents of the bundle.
    pub fn table(&self) -> String {
        let rows = self.index.contents.iter().map(|Listed { content, kernel, size, artifact_type: _ }| {
            let kernel = kernel.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
            [content.kind.to_string(), name(content), kernel, HumanBytes(*size).to_string()]
        });
        let contents = indented_table(["KIND", "NAME", "KERNEL", "SIZE"], rows);
        format!("{contents}\n{}{}", self.licenses(), self.summary())
    }

    fn licenses(&self) -> String {
        if self.index.licenses.is_empty() {
            return String::new();
        }
        let rows = self.index.licenses.iter().map(|License { image, source, license, redistribute }| {
            let source = line(source.as_deref().unwrap_or("-"));
            let license = line(license.as_deref().unwrap_or("-"));
            [line(image), source, license, redistribute.map_or("-", <&str>::from).to_owned()]
        });
        indented_table(["IMAGE", "SOURCE", "LICENSE", "REDISTRIBUTE"], rows) + "\n"
    }

    /// Formats the number of contents of each kind, and the sizes.
    pub fn summary(&self) -> String {
        let Self { bundle, index, carried, in_base, .. } = self;
        let mut kinds: BTreeMap<ContentKind, usize> = BTreeMap::new();
        for listed in &index.contents {
            *kinds.entry(listed.content.kind).or_default() += 1;
        }
        let kinds: Vec<String> = kinds.into_iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let mut lines = vec![
            format!("bundle   {}", bundle.id()),
            format!("file     {}, {}", bundle.path().display(), HumanBytes(bundle.length())),
        ];
        lines.extend(self.sha256.lines().map(|line| format!("sha256   {line}")));
        lines.push(format!("made     by {} from {}", line(&index.made_by), line(&index.from)));
        lines.extend(index.order.as_ref().map(|order| format!("order    {order}")));
        lines.extend(self.signed_by.as_ref().map(|key| format!("signed   by {key}")));
        lines.push(format!("holds    {}", kinds.join(", ")));
        lines.push(format!("blobs    {}, {}, each once", index.carried().count(), HumanBytes(*carried)));
        if let Some(base) = &index.base {
            lines.push(format!("adds to  bundle {}, made from {}", base.id, line(&base.from)));
            lines.push(format!("         which has {} more of its contents", HumanBytes(*in_base)));
        }
        lines.join("\n")
    }
}

/// Result of an import, for `-o json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImportReport<'a> {
    pub id: &'a Digest,
    pub registry: String,
    #[serde(flatten)]
    pub imported: &'a ImportSummary,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub definitions_written: Option<usize>,
}

/// Formats the outcome for each imported content.
pub fn imported(imported: &ImportSummary) -> String {
    let rows = imported.contents.iter().map(|Imported { content, outcome }| {
        let outcome = match outcome {
            ImportOutcome::Pushed => "pushed".to_owned(),
            ImportOutcome::Present => "already present".to_owned(),
            ImportOutcome::Moved { previous } => format!("pushed; the tag held {previous} before"),
            ImportOutcome::Conflict { holds } => format!("conflict: the tag holds {holds}"),
        };
        [content.kind.to_string(), name(content), outcome]
    });
    let table = indented_table(["KIND", "NAME", "OUTCOME"], rows);
    let ImportSummary { sent_blobs, sent_bytes, .. } = imported;
    format!("{table}\nsent     {sent_blobs} blobs, {}", HumanBytes(*sent_bytes))
}

/// Text of a bundle without line breaks, which could imitate other lines such as `signed by`.
fn line(text: &str) -> String {
    text.replace(is_deceptive, "")
}

fn name(content: &Content) -> String {
    let Content { kind: _, repository, tag, digest } = content;
    match tag {
        Some(tag) => format!("{repository}:{tag}"),
        None => format!("{repository}@{}", &digest.as_str()[..digest.as_str().len().min(19)]),
    }
}
