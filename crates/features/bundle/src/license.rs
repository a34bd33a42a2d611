//! Licenses of a bundle's images and sources, and the site's policy for exports.

use std::collections::BTreeSet;

use farrier_builder::{
    images::{BILL_OF_MATERIALS, StoredImage},
    services::{BuildServices, Result},
};
use farrier_core::{
    image::{DriverImage, Redistribute, SourceSpec},
    provenance::restricted_components,
    site::Policy,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{BundleError, Content};

/// License of a driver image, or of one of its sources.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct License {
    /// Name of the driver image.
    pub image: String,
    /// Name of the source, or of a component in the bill of materials; `None` for the image itself.
    pub source: Option<String>,
    /// License as an SPDX expression.
    pub license: Option<String>,
    /// Whether the license allows redistribution.
    pub redistribute: Option<Redistribute>,
}

impl License {
    fn of_image(image: &DriverImage) -> Self {
        let license = image.spec.license.as_ref().map(ToString::to_string);
        let (source, redistribute) = (None, image.spec.redistribute);
        Self { image: image.metadata.name.to_string(), source, license, redistribute }
    }

    pub(super) fn of_source(image: &DriverImage, source: &SourceSpec) -> Self {
        let license = source.license.as_ref().map(ToString::to_string);
        let (name, redistribute) = (Some(source.name.to_string()), source.redistribute);
        Self { image: image.metadata.name.to_string(), source: name, license, redistribute }
    }
}

/// Returns the licenses of the images among the contents. Licenses come from the definitions, and restrictions also from the
/// images' bills of materials, so that a changed definition does not lift a restriction.
pub async fn licenses(services: &BuildServices, contents: &[Content]) -> Result<BTreeSet<License>> {
    let mut licenses = BTreeSet::new();
    for Content { repository: name, digest, .. } in contents.iter().filter(|content| content.is_image()) {
        if let Some(image) = services.definitions.images.get(name.as_str()) {
            licenses.insert(License::of_image(image));
            licenses.extend(image.spec.sources.iter().map(|source| License::of_source(image, source)));
        }
        let repository = services.images.location.repository(name)?;
        let image = StoredImage { services, repository: &repository, digest };
        let bill = image.find_document(&BILL_OF_MATERIALS).await?;
        let bill: Value = bill.and_then(|bill| serde_json::from_slice(&bill).ok()).unwrap_or_default();
        for (component, redistribute) in restricted_components(&bill) {
            let (source, redistribute) = ((component != *name).then_some(component), Some(redistribute));
            let is_listed = |known: &License| {
                (&known.image, &known.source, known.redistribute) == (name, &source, redistribute)
            };
            if !licenses.iter().any(is_listed) {
                licenses.insert(License { image: name.clone(), source, license: None, redistribute });
            }
        }
    }
    Ok(licenses)
}

/// Fails if the site's policy does not let one of these images or sources leave the site.
pub fn ensure_exportable<'a>(
    licenses: impl IntoIterator<Item = &'a License>,
    policy: &Policy,
) -> Result<(), BundleError> {
    let mut refused = BTreeSet::new();
    for License { image, source, license: _, redistribute } in licenses {
        let Some(redistribute) = redistribute.filter(|r| !policy.may_export(image, *r)) else { continue };
        let of_source = source.as_ref().map(|source| format!(", source {source}")).unwrap_or_default();
        refused.insert(format!("image {image}{of_source} (redistribute: {})", <&str>::from(redistribute)));
    }
    if refused.is_empty() { Ok(()) } else { Err(BundleError::Restricted(refused)) }
}
