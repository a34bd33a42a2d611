//! Finds published images whose payload may be reused for another kernel, or signed again.

use std::cmp::Ordering;

use super::Cell;
use crate::{
    image::{Tag, Version},
    kernel::{
        KernelLabel,
        runs::{leading_digits, number_key},
    },
    kmod::Verdict,
    oci::{ImageFacts, is_referrers_tag},
    provenance::is_cosign_tag,
    site::Signed,
};

/// Returns the tags to look up, most promising first: tags with the driver's version before others, higher numbers
/// before lower ones. Excludes the cell's own tags, lists of referrers, and signatures.
pub fn reuse_candidate_tags(cell: &Cell, tags: Vec<Tag>, at_most: usize) -> Vec<Tag> {
    let mut tags: Vec<Tag> =
        tags.into_iter().filter(|tag| !has_tag(cell, tag) && !is_referrer_or_signature(tag)).collect();
    let has_version = |tag: &Tag| tag.as_str().contains(&cell.version);
    tags.sort_by(|a, b| has_version(b).cmp(&has_version(a)).then_with(|| by_numbers(b.as_str(), a.as_str())));
    tags.truncate(at_most);
    tags
}

/// Whether the tag holds a list of referrers or a signature.
fn is_referrer_or_signature(tag: &Tag) -> bool {
    is_referrers_tag(tag) || is_cosign_tag(tag)
}

fn has_tag(cell: &Cell, tag: &Tag) -> bool {
    cell.references().any(|reference| matches!(&reference.version, Version::Tag(own) if own == tag))
}

/// Whether an image with these facts may be reused for the cell, if the check agrees. The image must have the same
/// recipe, be for another kernel, and have modules that are known to load there.
pub fn is_reusable(cell: &Cell, facts: &ImageFacts) -> bool {
    facts.recipe == Some(cell.recipe)
        && can_sign_as_required(cell, facts)
        && facts.verdict == Some(Verdict::Loads)
        && facts.kernel_release.as_ref().is_some_and(|release| *release != cell.target.release)
}

/// Returns the tags to look up for a payload for the same kernel with another signature. The cell's own tags come
/// first, then tags that name the kernel, then others.
pub fn re_sign_candidate_tags(cell: &Cell, tags: Vec<Tag>, at_most: usize) -> Vec<Tag> {
    let release = cell.target.release.as_str();
    let label = KernelLabel::of(&cell.target.release);
    let names_kernel = |tag: &Tag| {
        tag.as_str().contains(release)
            || label.as_ref().is_some_and(|label| tag.as_str().contains(label.as_str()))
    };
    let rank = |tag: &Tag| (!has_tag(cell, tag), !names_kernel(tag), !tag.as_str().contains(&cell.version));
    let mut tags: Vec<Tag> = tags.into_iter().filter(|tag| !is_referrer_or_signature(tag)).collect();
    tags.sort_by_key(rank);
    tags.truncate(at_most);
    tags
}

/// Whether an image with these facts has the cell's payload except for the signatures. The image may be signed with
/// another key, or predate module signing.
pub fn can_re_sign(cell: &Cell, facts: &ImageFacts) -> bool {
    let unsigned = facts.unsigned_hash.or(facts.input_hash);
    cell.unsigned_hash.is_some()
        && unsigned == cell.unsigned_hash
        && facts.kernel_release.as_ref() == Some(&cell.target.release)
        && can_sign_as_required(cell, facts)
}

/// Whether the payload can get the signatures that the cell requires. Replaced signatures cannot be restored, and
/// signatures cannot be removed.
fn can_sign_as_required(cell: &Cell, facts: &ImageFacts) -> bool {
    match (&cell.signed_with, &facts.module_signer) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(ours), Some(theirs)) => ours.signed == Signed::Replace || theirs.signed == Signed::Keep,
    }
}

/// Compares texts like version numbers: runs of digits by their value, other characters one by one.
pub fn by_numbers(mut a: &str, mut b: &str) -> Ordering {
    loop {
        let ((run_a, rest_a), (run_b, rest_b)) = (leading_digits(a), leading_digits(b));
        let order = if run_a.is_empty() || run_b.is_empty() {
            let (mut chars_a, mut chars_b) = (a.chars(), b.chars());
            let (first_a, first_b) = (chars_a.next(), chars_b.next());
            if first_a.is_none() || first_b.is_none() {
                return first_a.is_some().cmp(&first_b.is_some());
            }
            (a, b) = (chars_a.as_str(), chars_b.as_str());
            first_a.cmp(&first_b)
        } else {
            (a, b) = (rest_a, rest_b);
            number_key(run_a).cmp(&number_key(run_b))
        };
        if order.is_ne() {
            return order;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        image::Digest,
        plan::fixtures::{K47, K48, World},
    };

    fn cell() -> Cell {
        Cell::clone(&World::new(&[K48]).cells()[0])
    }

    #[test]
    fn newer_kernels_come_first() {
        let tags = [
            "4.33.0-6.1.0-9-amd64-debian12-amd64".to_owned(),
            "4.32.0-6.1.0-99-amd64-debian12-amd64".to_owned(),
            "4.33.0-6.1.0-48-amd64-debian12-amd64".to_owned(),
            "4.33.0-6.1.0-47-amd64-debian12-amd64".to_owned(),
            format!("sha256-{}", Digest::of(b"x").hex()),
            "4.33.0-6.1.0-100-amd64-debian12-amd64".to_owned(),
        ];
        let tags = tags.map(|tag| tag.parse().unwrap()).to_vec();
        let ranked: Vec<String> =
            reuse_candidate_tags(&cell(), tags, 4).iter().map(ToString::to_string).collect();
        assert_eq!(
            ranked,
            [
                "4.33.0-6.1.0-100-amd64-debian12-amd64",
                "4.33.0-6.1.0-47-amd64-debian12-amd64",
                "4.33.0-6.1.0-9-amd64-debian12-amd64",
                "4.32.0-6.1.0-99-amd64-debian12-amd64",
            ]
        );
    }

    #[test]
    fn only_the_same_recipe_that_loads_on_another_kernel_lends() {
        let cell = cell();
        let good = ImageFacts {
            recipe: Some(cell.recipe),
            verdict: Some(Verdict::Loads),
            kernel_release: Some(K47.parse().unwrap()),
            ..ImageFacts::default()
        };
        assert!(is_reusable(&cell, &good));
        for bad in [
            ImageFacts { recipe: None, ..good.clone() },
            ImageFacts { recipe: Some(cell.input_hash), ..good.clone() },
            ImageFacts { verdict: Some(Verdict::Unknown), ..good.clone() },
            ImageFacts { verdict: None, ..good.clone() },
            ImageFacts { kernel_release: Some(K48.parse().unwrap()), ..good.clone() },
            ImageFacts { kernel_release: None, ..good.clone() },
        ] {
            assert!(!is_reusable(&cell, &bad), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn the_order_is_one(a in "[01a.-]{0,6}", b in "[01a.-]{0,6}", c in "[01a.-]{0,6}") {
            prop_assert_eq!(by_numbers(&a, &b), by_numbers(&b, &a).reverse());
            if by_numbers(&a, &b) != Ordering::Greater && by_numbers(&b, &c) != Ordering::Greater {
                prop_assert_ne!(by_numbers(&a, &c), Ordering::Greater);
            }
        }

        #[test]
        fn numbers_are_compared_as_numbers(a in 0_u64..u64::MAX, b in 0_u64..u64::MAX) {
            prop_assert_eq!(by_numbers(&format!("k-{a}-x"), &format!("k-{b}-x")), a.cmp(&b));
        }
    }
}
