//! Finds the images that objects of any kind mention, by the words in their text.

use std::collections::BTreeSet;

use super::RegistryImage;
use crate::{
    image::{ImageReference, Version},
    plan::ClusterSnapshot,
};

/// Shortest tag that names an image without its repository (`newTag:` of a kustomization, `version:` of an operator's
/// resource). Shorter ones such as `latest` and `1.0` have other meanings as well.
const SHORTEST_TAG: usize = 8;

/// Length of the longest word that can name an image: repository, tag and digest.
const MAX_WORD_LENGTH: usize = 255 + 128 + 80;

/// Words that would name one of the images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidates(BTreeSet<String>);

impl Candidates {
    /// Returns the words that name any of these images.
    pub fn of(images: &[RegistryImage]) -> Self {
        Self(images.iter().flat_map(Self::of_image).collect())
    }

    /// Returns the words that name an image: by digest, by the digest alone, by tag, and by a tag alone.
    pub(super) fn of_image(image: &RegistryImage) -> impl Iterator<Item = String> {
        let RegistryImage { repository, digest, tags, .. } = image;
        let by_digest = [format!("{repository}@{digest}"), digest.to_string()];
        let by_tag = tags.iter().map(move |tag| format!("{repository}:{tag}"));
        let alone = tags.iter().map(ToString::to_string).filter(|tag| tag.len() >= SHORTEST_TAG);
        by_digest.into_iter().chain(by_tag).chain(alone)
    }

    /// Adds the words that a snapshot's rollout targets mention: in image fields, in farrier's records of replaced
    /// values, in operators' resources, and in pods.
    pub fn mentioned_in_snapshot(&self, snapshot: &ClusterSnapshot, into: &mut BTreeSet<String>) {
        for daemon_set in &snapshot.daemon_sets {
            for container in &daemon_set.containers {
                self.mentioned_in(&container.image, into);
            }
            let Some(live) = &daemon_set.live else { continue };
            self.mentioned_in(&live.manifest.to_string(), into);
            live.annotations.values().for_each(|text| self.mentioned_in(text, into));
        }
        for image in snapshot.pods.iter().flat_map(|pod| pod.images.values()) {
            self.mentioned_in(image, into);
        }
        for resource in &snapshot.resources {
            self.mentioned_in(&resource.spec.to_string(), into);
            resource.annotations.values().for_each(|text| self.mentioned_in(text, into));
        }
    }

    /// Adds the words that a text mentions.
    pub fn mentioned_in(&self, text: &str, into: &mut BTreeSet<String>) {
        for word in words(text) {
            if let Some(candidate) = self.0.get(word) {
                into.insert(candidate.clone());
            } else if let Ok(reference) = word.parse::<ImageReference>() {
                // In a reference with a tag and a digest, the digest decides. A digest names the image at each name of its registry.
                let by_digest = match &reference.version {
                    Version::Digest(digest) => self.0.get(digest.as_str()),
                    Version::Tag(_) => None,
                };
                into.extend(self.0.get(&reference.to_string()).or(by_digest).cloned());
            }
        }
    }
}

/// Splits a text into words at blanks, quotes and the punctuation of YAML and JSON. URL schemes are stripped.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_separator = |c: char| c.is_whitespace() || c.is_control() || "\"'`,;{}[]()<>=|\\".contains(c);
    text.split(is_separator)
        .map(|word| word.split_once("://").map_or(word, |(_, address)| address))
        .filter(|word| !word.is_empty() && word.len() <= MAX_WORD_LENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Digest;

    #[test]
    fn images_are_found_by_every_form_of_their_name() {
        let digest = Digest::of(b"x");
        let image = RegistryImage::new(
            "r.test/drivers/mft".parse().unwrap(),
            digest.clone(),
            ["1.0-6.1.0-47-amd64", "1"].map(|tag| tag.parse().unwrap()).into(),
            b"",
        );
        let candidates = Candidates::of(&[image]);
        let by_digest = format!("r.test/drivers/mft@{digest}");
        for (text, found) in [
            ("image:  'r.test/drivers/mft:1'   # comment", Some("r.test/drivers/mft:1")),
            (r#"{\"set\":\"r.test/drivers/mft:1\"}"#, Some("r.test/drivers/mft:1")),
            ("image: {x: r.test/drivers/mft:1}", Some("r.test/drivers/mft:1")),
            (&format!("docker-pullable://{by_digest}"), Some(by_digest.as_str())),
            (&format!("image: r.test/drivers/mft:gone@{digest}"), Some(by_digest.as_str())),
            (&format!("digest: {digest}"), Some(digest.as_str())),
            (&format!("image: localhost:5000/drivers/mft@{digest}"), Some(digest.as_str())),
            ("newTag: 1.0-6.1.0-47-amd64\n", Some("1.0-6.1.0-47-amd64")),
            ("replicas: 1", None),
            ("image: r.test/drivers/mft:2", None),
            ("image: other.test/drivers/mft:1", None),
        ] {
            let mut mentioned = BTreeSet::new();
            candidates.mentioned_in(text, &mut mentioned);
            assert_eq!(mentioned.into_iter().collect::<Vec<_>>(), Vec::from_iter(found), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}") {
            Candidates::default().mentioned_in(&text, &mut BTreeSet::new());
        }
    }
}
