//! Decides which published images to sign, and which signatures to look up.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{Observed, PlanInputs};
use crate::{
    image::{ImageName, ImageReference},
    site::{ExistingImages, SiteSpec},
};

/// Published image to sign.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedSignature {
    /// Driver image.
    pub image: ImageName,
    /// Published image by digest.
    pub reference: ImageReference,
}

/// Whether the site's settings need the signatures of published images.
pub fn needs_signatures(site: &SiteSpec) -> bool {
    signs_existing(site) || !site.policy.require_signed.is_empty()
}

fn signs_existing(site: &SiteSpec) -> bool {
    site.image_signing.as_ref().is_some_and(|signing| signing.existing == ExistingImages::Sign)
}

/// Returns the published images, by digest, whose signatures the site's settings need.
pub(super) fn signatures_to_look_up(
    inputs: &PlanInputs<'_>,
    published: impl IntoIterator<Item = PlannedSignature>,
) -> BTreeSet<ImageReference> {
    if !needs_signatures(&inputs.definitions().site) {
        return BTreeSet::new();
    }
    published.into_iter().map(|image| image.reference).collect()
}

/// Returns the published images that are to be signed.
pub(super) fn images_to_sign(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    published: impl IntoIterator<Item = PlannedSignature>,
) -> Vec<PlannedSignature> {
    if !signs_existing(&inputs.definitions().site) {
        return Vec::new();
    }
    let is_unsigned =
        |image: &PlannedSignature| observed.signature(&image.reference).is_some_and(|state| !state.ours);
    let all: BTreeSet<PlannedSignature> = published.into_iter().filter(is_unsigned).collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::{
        image::Digest,
        kmod::Verdict,
        plan::{
            HoldReason, Plan, RolloutDecision, SignatureState,
            fixtures::{K47, World},
        },
        site::{ExistingImages, ImageSigning, KeySource, RequireSigned},
    };

    /// Returns a world with one published image in this signature state.
    fn world(state: Option<SignatureState>) -> World {
        let mut world = World::new(&[K47]);
        world.publish(Verdict::Loads);
        world.definitions.site.policy.require_signed = RequireSigned::OneOf(vec!["pub.pem".parse().unwrap()]);
        if let Some(state) = state {
            let digests: Vec<Digest> =
                world.observed.published.values().map(|published| published.digest.clone()).collect();
            world.observed.signatures = digests.into_iter().map(|digest| (digest, state.clone())).collect();
        }
        world
    }

    fn signing(existing: ExistingImages) -> ImageSigning {
        let key = KeySource::File("key.pem".parse().unwrap());
        ImageSigning { key, passphrase: None, public_key: None, existing, trust_registry_writers: false }
    }

    fn held(plan: &Plan) -> Option<String> {
        match &plan.rollouts[0].decision {
            RolloutDecision::Hold(why @ HoldReason::NotSigned { .. }) => {
                assert!(why.is_failure());
                Some(why.to_string())
            }
            RolloutDecision::Rewrite { .. } => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_not_signed_is_held_with_the_reason() {
        let refused = |why: &str| SignatureState { ours: true, refused: Some(why.to_owned()) };
        let why = held(&world(Some(refused("it has no signature"))).plan()).unwrap();
        assert!(why.ends_with("does not satisfy policy.requireSigned: it has no signature"), "{why}");
        assert_eq!(world(None).rounds().1.signatures.len(), 1, "the signature is looked up first");
        assert!(held(&world(Some(SignatureState::default())).plan()).is_none());
        assert!(world(Some(refused("it has no signature"))).plan().has_failures());
    }

    #[test]
    fn without_a_policy_nothing_is_asked() {
        let mut world = world(None);
        world.definitions.site.policy.require_signed = RequireSigned::default();
        assert!(!needs_signatures(&world.definitions.site));
        assert!(held(&world.plan()).is_none());
        assert!(world.plan().signatures.is_empty());
    }

    #[test]
    fn a_key_signs_what_is_there_only_where_that_is_said() {
        let mut world = world(Some(SignatureState { ours: false, refused: None }));
        assert!(world.plan().signatures.is_empty(), "no key");
        world.definitions.site.image_signing = Some(signing(ExistingImages::default()));
        assert!(world.plan().signatures.is_empty(), "existing images are left unsigned");
        world.definitions.site.image_signing = Some(signing(ExistingImages::Sign));
        let plan = world.plan();
        assert_eq!(plan.signatures.len(), 1);
        assert!(!plan.is_idle());
        assert!(plan.signatures[0].reference.to_string().contains("/mft@sha256:"));
        for state in world.observed.signatures.values_mut() {
            state.ours = true;
        }
        assert!(world.plan().signatures.is_empty());
    }
}
