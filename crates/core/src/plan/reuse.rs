//! Pure: which published images may lend their payload to another kernel.

use std::cmp::Ordering;

use super::Cell;
use crate::{
    image::{Tag, Version},
    kernel::{
        KernelLabel,
        debian_version::{leading_digits, number},
    },
    kmod::Verdict,
    oci::{ImageFacts, is_referrers_tag},
    provenance::is_cosign_tag,
    site::Signed,
};

/// The tags to look up, the likeliest and newest first: those that name the driver's version before others, higher
/// numbers before lower ones. The cell's own tags and lists of referrers are left out.
pub fn tags_to_try(cell: &Cell, tags: Vec<Tag>, at_most: usize) -> Vec<Tag> {
    let mut tags: Vec<Tag> =
        tags.into_iter().filter(|tag| !has_tag(cell, tag) && !is_about_another(tag)).collect();
    let of_version = |tag: &Tag| tag.as_str().contains(&cell.version);
    tags.sort_by(|a, b| of_version(b).cmp(&of_version(a)).then_with(|| by_numbers(b.as_str(), a.as_str())));
    tags.truncate(at_most);
    tags
}

/// Does it stand for lists of referrers or signatures?
fn is_about_another(tag: &Tag) -> bool {
    is_referrers_tag(tag) || is_cosign_tag(tag)
}

fn has_tag(cell: &Cell, tag: &Tag) -> bool {
    cell.references().any(|reference| matches!(&reference.version, Version::Tag(own) if own == tag))
}

/// May an image that says this about itself lend its payload to the cell, if the check agrees? Only one of the
/// same recipe, for another kernel, of whose own modules it is known that they load.
pub fn may_lend(cell: &Cell, facts: &ImageFacts) -> bool {
    facts.recipe == Some(cell.recipe)
        && can_sign_over(cell, facts)
        && facts.verdict == Some(Verdict::Loads)
        && facts.kernel_release.as_ref().is_some_and(|release| *release != cell.target.release)
}

/// The tags under which a payload for the same kernel may stand that is signed otherwise: the cell's own first, then those that
/// name the kernel, then others.
pub fn tags_to_resign(cell: &Cell, tags: Vec<Tag>, at_most: usize) -> Vec<Tag> {
    let release = cell.target.release.as_str();
    let label = KernelLabel::of(&cell.target.release);
    let names_kernel = |tag: &Tag| {
        tag.as_str().contains(release)
            || label.as_ref().is_some_and(|label| tag.as_str().contains(label.as_str()))
    };
    let rank = |tag: &Tag| (!has_tag(cell, tag), !names_kernel(tag), !tag.as_str().contains(&cell.version));
    let mut tags: Vec<Tag> = tags.into_iter().filter(|tag| !is_about_another(tag)).collect();
    tags.sort_by_key(rank);
    tags.truncate(at_most);
    tags
}

/// Has an image that says this about itself the cell's payload but for the signatures? It may be signed with another key, or
/// from the time before modules were signed.
pub fn may_resign(cell: &Cell, facts: &ImageFacts) -> bool {
    let unsigned = facts.unsigned_hash.or(facts.input_hash);
    cell.unsigned_hash.is_some()
        && unsigned == cell.unsigned_hash
        && facts.kernel_release.as_ref() == Some(&cell.target.release)
        && can_sign_over(cell, facts)
}

/// Can the payload get the signatures that the cell asks for? Signatures that were replaced cannot be had again, and nothing
/// takes signatures off.
fn can_sign_over(cell: &Cell, facts: &ImageFacts) -> bool {
    match (&cell.signed_with, &facts.module_signer) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(ours), Some(theirs)) => ours.signed == Signed::Replace || theirs.signed == Signed::Keep,
    }
}

/// Orders texts as people order versions: runs of digits by their value, the rest by its characters.
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
            number(run_a).cmp(&number(run_b))
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
        let ranked: Vec<String> = tags_to_try(&cell(), tags, 4).iter().map(ToString::to_string).collect();
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
        assert!(may_lend(&cell, &good));
        for bad in [
            ImageFacts { recipe: None, ..good.clone() },
            ImageFacts { recipe: Some(cell.input_hash), ..good.clone() },
            ImageFacts { verdict: Some(Verdict::Unknown), ..good.clone() },
            ImageFacts { verdict: None, ..good.clone() },
            ImageFacts { kernel_release: Some(K48.parse().unwrap()), ..good.clone() },
            ImageFacts { kernel_release: None, ..good.clone() },
        ] {
            assert!(!may_lend(&cell, &bad), "{bad:?}");
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
