//! Pure: which published images are to be signed, and which are not rolled out because they are not signed.

use serde::Serialize;

use super::{HoldReason, Observed, PlanInputs};
use crate::{
    image::{Digest, ImageName, ImageReference, Version},
    site::SiteSpec,
};

/// What is known of an image's signatures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignatureState {
    /// Is it signed by the site's own key (`imageSigning`), or has the site none?
    pub ours: bool,
    /// Why the policy (`policy.requireSigned`) does not accept it; `None` where it does, or asks for nothing.
    pub refused: Option<String>,
}

/// A published image to sign.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedSignature {
    /// The driver image.
    pub image: ImageName,
    /// The image by digest.
    pub reference: ImageReference,
}

/// Does anybody ask for the signatures of images that are published?
pub fn asks_for_signatures(site: &SiteSpec) -> bool {
    signs_existing(site) || !site.policy.is_empty()
}

fn signs_existing(site: &SiteSpec) -> bool {
    site.image_signing.as_ref().is_some_and(|signing| signing.existing.signs())
}

/// Guarantee 1, where the site asks for signatures: an image of which it is not known that an accepted key signed it
/// is not rolled out.
pub(super) fn accepts(inputs: &PlanInputs<'_>, image: &ImageReference) -> Result<(), HoldReason> {
    if inputs.definitions.site.policy.is_empty() {
        return Ok(());
    }
    let why = match state(inputs.observed, image) {
        Some(SignatureState { refused: None, .. }) => return Ok(()),
        Some(SignatureState { refused: Some(why), .. }) => why.clone(),
        None => "its signature was not looked up".to_owned(),
    };
    Err(HoldReason::NotSigned { image: image.clone(), why })
}

/// The images among those in use that are to be signed.
pub(super) fn unsigned(
    inputs: &PlanInputs<'_>,
    images: impl IntoIterator<Item = PlannedSignature>,
) -> Vec<PlannedSignature> {
    if !signs_existing(&inputs.definitions.site) {
        return Vec::new();
    }
    let lacks =
        |image: &PlannedSignature| state(inputs.observed, &image.reference).is_some_and(|state| !state.ours);
    let mut all: Vec<PlannedSignature> = images.into_iter().filter(lacks).collect();
    all.sort();
    all.dedup();
    all
}

fn state<'a>(observed: &'a Observed, image: &ImageReference) -> Option<&'a SignatureState> {
    let Version::Digest(digest) = &image.version else { return None };
    let digest: &Digest = digest;
    observed.signatures.get(digest)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{
        kmod::Verdict,
        plan::{
            Plan, RolloutDecision,
            fixtures::{K47, World},
        },
        site::{Existing, ImageSigning, KeySource},
    };

    /// One published image, and what is known of its signature.
    fn world(state: Option<SignatureState>) -> World {
        let mut world = World::new(&[K47]);
        world.publish(Verdict::Loads);
        world.definitions.site.policy.require_signed = vec![PathBuf::from("pub.pem")];
        if let Some(state) = state {
            let digests: Vec<Digest> =
                world.observed.published.values().map(|published| published.digest.clone()).collect();
            world.observed.signatures = digests.into_iter().map(|digest| (digest, state.clone())).collect();
        }
        world
    }

    fn signing(existing: Existing) -> ImageSigning {
        let key = KeySource::File(PathBuf::from("key.pem"));
        ImageSigning { key, passphrase: None, public_key: None, existing }
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
        assert!(held(&world(None).plan()).unwrap().ends_with("its signature was not looked up"));
        assert!(held(&world(Some(SignatureState::default())).plan()).is_none());
        assert!(world(None).plan().has_failures());
    }

    #[test]
    fn without_a_policy_nothing_is_asked() {
        let mut world = world(None);
        world.definitions.site.policy.require_signed.clear();
        assert!(!asks_for_signatures(&world.definitions.site));
        assert!(held(&world.plan()).is_none());
        assert!(world.plan().signatures.is_empty());
    }

    #[test]
    fn with_a_key_what_is_there_is_signed() {
        let mut world = world(Some(SignatureState { ours: false, refused: None }));
        assert!(world.plan().signatures.is_empty(), "no key");
        world.definitions.site.image_signing = Some(signing(Existing::Leave));
        assert!(world.plan().signatures.is_empty(), "left as it is");
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
