//! Guarantee 1: the single decision whether an image field may point to a published image.

use super::{HoldReason, Observed, PlanInputs, Published, SignatureState};
use crate::{
    image::{ImageName, ImageReference, InputHash, UnknownPolicy},
    kernel::KernelTarget,
    kmod::Verdict,
};

/// Kernel or kernels that a published image must have been made for.
#[derive(Clone, Copy)]
pub(super) enum RequiredKernels<'a> {
    /// The kernel of every node that the change reaches: the exact release, because a tag's kernel label is lossy.
    Kernel(&'a KernelTarget),
    /// Several kernels: the members that this input hash covers. Each member passed its own check.
    Members(InputHash),
}

/// Returns an image by digest, if rollouts may use the image: the check passed, an accepted key signed the image, and the
/// image is for the nodes of the rollout. `name` is the tag under which the image was found.
pub(super) fn admissible_image(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    definition: &ImageName,
    published: &Published,
    name: &ImageReference,
    made_for: RequiredKernels<'_>,
) -> Result<ImageReference, HoldReason> {
    let Published { input_hash, verdict, kernel_release, .. } = published;
    let image = published.pinned(name);
    match made_for {
        RequiredKernels::Kernel(kernel) if kernel_release.as_deref() != Some(kernel.release.as_str()) => {
            return Err(HoldReason::OtherKernel { image, found: kernel_release.clone() });
        }
        RequiredKernels::Members(expected) if *input_hash != Some(expected) => {
            return Err(HoldReason::NoUnion {
                detail: format!("{name} holds an image built from other inputs"),
            });
        }
        RequiredKernels::Kernel(_) | RequiredKernels::Members(_) => {}
    }
    if !inputs.definitions().site.policy.require_signed.is_empty() {
        let why = match observed.signature(&image) {
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
