//! Origin of an image: its bill of materials, its provenance, and the signatures over both and over the image, in the formats of
//! other tools. The module writes these documents from facts, and verifies documents read from the registry.

mod bill;
mod bundle;
mod components;
mod cosign;
mod dsse;
mod key;
mod materials;
mod purl;
mod signers;
mod slsa;
mod spdx;
mod statement;
#[cfg(test)]
mod testing;

pub use bill::{CYCLONEDX_PREDICATE, bill, restricted_components};
pub use bundle::{SIGNED_PREDICATE, SIGSTORE_BUNDLE, bundle, bundle_layer, may_be_bundle};
pub use cosign::{
    CosignManifest, SIMPLE_SIGNING, add_layers, attestation_layer, attestation_tag, is_cosign_tag,
    layer_predicate_type, layer_signature, signature_layer, signature_tag, signed_digest, simple_signing,
};
pub use dsse::{DSSE, Envelope, EnvelopeError, pre_authentication};
pub use key::{KeyAlgorithm, KeyError, PublicKey};
pub use materials::{
    Confinement, Material, ModuleFile, Package, PackageList, Provenance, Role, Subject, Terms,
};
pub use purl::Distribution;
pub use signers::{
    FoundSignatures, ImageSignature, NamedKey, RequiredSigners, SignerCheck, TooFewKeys, Trust,
};
pub use slsa::{SLSA_PREDICATE, named_inputs, slsa};
pub use spdx::{SPDX_IMAGE, SPDX_PREDICATE, spdx};
pub use statement::{CHECK_REPORT_PREDICATE, Statement, StatementError, is_about, statement};
