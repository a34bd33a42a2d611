//! Pure: decides which published images to sign, and which signatures to look up.

use serde::Serialize;

use super::{PendingLookups, PlanInputs};
use crate::{
    image::{ImageName, ImageReference},
    site::{Existing, SiteSpec},
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
pub fn asks_for_signatures(site: &SiteSpec) -> bool {
    signs_existing(site) || !site.policy.is_empty()
}

fn signs_existing(site: &SiteSpec) -> bool {
    site.image_signing.as_ref().is_some_and(|signing| signing.existing == Existing::Sign)
}

/// Returns the published images that are to be signed. Adds unknown signatures to the lookups.
pub(super) fn unsigned(
    inputs: &PlanInputs<'_>,
    published: impl IntoIterator<Item = PlannedSignature>,
    lookups: &mut PendingLookups,
) -> Vec<PlannedSignature> {
    let site = &inputs.definitions().site;
    if !asks_for_signatures(site) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for image in published {
        match inputs.observed.signature(&image.reference) {
            Some(state) if !state.ours && signs_existing(site) => all.push(image),
            Some(_) => {}
            None => drop(lookups.signatures.insert(image.reference)),
        }
    }
    all.sort();
    all.dedup();
    all
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
        site::{Existing, ImageSigning, KeySource, RequireSigned},
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

    fn signing(existing: Existing) -> ImageSigning {
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
        assert!(why.ends_with("is not signed as policy.requireSigned asks: it has no signature"), "{why}");
        assert_eq!(world(None).ask().unwrap_err().signatures.len(), 1, "the signature is looked up first");
        assert!(held(&world(Some(SignatureState::default())).plan()).is_none());
        assert!(world(Some(refused("it has no signature"))).plan().has_failures());
    }

    #[test]
    fn without_a_policy_nothing_is_asked() {
        let mut world = world(None);
        world.definitions.site.policy.require_signed = RequireSigned::default();
        assert!(!asks_for_signatures(&world.definitions.site));
        assert!(held(&world.plan()).is_none());
        assert!(world.plan().signatures.is_empty());
    }

    #[test]
    fn a_key_signs_what_is_there_only_where_that_is_said() {
        let mut world = world(Some(SignatureState { ours: false, refused: None }));
        assert!(world.plan().signatures.is_empty(), "no key");
        world.definitions.site.image_signing = Some(signing(Existing::default()));
        assert!(world.plan().signatures.is_empty(), "existing images are left unsigned");
        world.definitions.site.image_signing = Some(signing(Existing::Sign));
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
