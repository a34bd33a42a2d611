//! Pure: guarantee 1: the one decision whether an image field may be pointed at a published image.

use super::{HoldReason, PlanInputs, Published, SignatureState};
use crate::{
    image::{ImageName, ImageReference, InputHash, UnknownPolicy},
    kernel::KernelTarget,
    kmod::Verdict,
};

/// What a published image must have been made for.
#[derive(Clone, Copy)]
pub(super) enum MadeFor<'a> {
    /// The kernel of every node that it reaches: its exact release, which the tag's label does not tell.
    Kernel(&'a KernelTarget),
    /// Several kernels: the members that these inputs name, each of which passed by itself.
    Members(InputHash),
}

/// The image of a definition by digest, where its check passed, an accepted key signed it, and it was made for the nodes
/// that it is to reach. `name` is the tag that it was found under.
pub(super) fn passing(
    inputs: &PlanInputs<'_>,
    definition: &ImageName,
    published: &Published,
    name: &ImageReference,
    made_for: MadeFor<'_>,
) -> Result<ImageReference, HoldReason> {
    let Published { input_hash, verdict, kernel_release, .. } = published;
    let image = published.pinned(name);
    match made_for {
        MadeFor::Kernel(kernel) if kernel_release.as_deref() != Some(kernel.release.as_str()) => {
            return Err(HoldReason::OtherKernel { image, found: kernel_release.clone() });
        }
        MadeFor::Members(inputs) if *input_hash != Some(inputs) => {
            return Err(HoldReason::NoUnion { detail: format!("{name} holds an image of other inputs") });
        }
        MadeFor::Kernel(_) | MadeFor::Members(_) => {}
    }
    if !inputs.definitions().site.policy.is_empty() {
        let why = match inputs.observed.signature(&image) {
            Some(SignatureState { refused, .. }) => refused.clone(),
            None => Some("its signature was not looked up".to_owned()),
        };
        if let Some(why) = why {
            return Err(HoldReason::NotSigned { image, why });
        }
    }
    let spec = inputs.definitions().images.get(definition).map(|image| &image.spec);
    match (verdict, spec.map(|spec| spec.check.unknown).unwrap_or_default()) {
        (Some(Verdict::Loads), _) | (Some(Verdict::Unknown), UnknownPolicy::Allow) => Ok(image),
        (Some(Verdict::Unknown), UnknownPolicy::Deny) => Err(HoldReason::UnknownDenied { image }),
        (Some(Verdict::Refused) | None, _) => Err(HoldReason::NotPassed { image, verdict: *verdict }),
    }
}
