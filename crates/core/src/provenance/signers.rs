//! Verifies image signatures: how many of which keys must have signed, and whether the signatures found suffice.

use std::fmt;

use super::{Envelope, PublicKey, SIGNED_PREDICATE, Statement, is_about, signed_digest};
use crate::image::Digest;

/// An unverified signature found beside an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSignature {
    /// In the format of `cosign` 2: a signature over a document that names the image.
    Simple {
        /// The signed document.
        payload: Vec<u8>,
        /// The signature over the document's bytes.
        signature: Vec<u8>,
    },
    /// In the format of `cosign` 3: a signed statement that only says that the image is signed.
    Statement(Envelope),
}

impl ImageSignature {
    /// Whether this key made the signature for this image. Checks the image and the statement's type too, because
    /// anyone who may push can store a valid signature of another image, or another statement, with this image's signatures.
    pub fn is_by(&self, image: &Digest, key: &PublicKey) -> bool {
        // Content that the key did not sign is not parsed, because hostile JSON can take a hundred times its size in memory.
        match self {
            Self::Simple { payload, signature } => {
                key.verify_sha256(payload, signature)
                    && signed_digest(payload).is_some_and(|signed| signed == *image)
            }
            Self::Statement(envelope) => {
                envelope.is_signed_by(key)
                    && Statement::parse(&envelope.payload).is_ok_and(|statement| {
                        statement.predicate_type == SIGNED_PREDICATE && is_about(&statement, image)
                    })
            }
        }
    }
}

/// Signatures found for an image.
#[derive(Clone, Debug, Default)]
pub struct FoundSignatures {
    signers: Vec<PublicKey>,
    /// Whether a signature was found that is not by any of the keys, or not for this image.
    has_unaccepted: bool,
    /// Reason why a signature could not be read.
    unread: Option<String>,
}

impl FoundSignatures {
    /// Verifies a signature with the accepted keys, and adds the result.
    pub fn add<'a>(
        &mut self,
        image: &Digest,
        signature: &ImageSignature,
        keys: impl IntoIterator<Item = &'a PublicKey>,
    ) {
        match keys.into_iter().find(|key| signature.is_by(image, key)) {
            Some(key) => self.add_signer(key),
            None => self.has_unaccepted = true,
        }
    }

    /// Adds a key that is known to have signed the image.
    pub fn add_signer(&mut self, key: &PublicKey) {
        if !self.is_by(key) {
            self.signers.push(key.clone());
        }
    }

    /// Records that a signature could not be read.
    pub fn add_unread(&mut self, why: String) {
        self.unread.get_or_insert(why);
    }

    /// Returns the keys that signed, without duplicates.
    pub fn signers(&self) -> &[PublicKey] {
        &self.signers
    }

    /// Returns why a signature could not be read.
    pub fn unread(&self) -> Option<&str> {
        self.unread.as_deref()
    }

    /// Whether no signature was found.
    pub fn is_empty(&self) -> bool {
        let Self { signers, has_unaccepted, unread } = self;
        signers.is_empty() && !has_unaccepted && unread.is_none()
    }

    fn is_by(&self, key: &PublicKey) -> bool {
        self.signers.iter().any(|signer| signer.is_same_key(key))
    }

    /// Explains why no accepted key is among the signers.
    fn why_no_signer(&self) -> String {
        match (&self.unread, self.has_unaccepted) {
            (Some(why), _) => format!("its signature cannot be read: {why}"),
            (None, true) => "it has signatures, but no accepted key has signed this image".to_owned(),
            (None, false) => "it has no signature".to_owned(),
        }
    }
}

/// An accepted key and its configured names.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{} (sha256:{})", names.join(" = "), key.fingerprint().short())]
pub struct NamedKey {
    names: Vec<String>,
    key: PublicKey,
}

/// Error: fewer different keys are configured than must sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at_least} different keys must sign, but only {different} are named")]
pub struct TooFewKeys {
    /// Number of keys that must sign.
    pub at_least: usize,
    /// Number of different keys.
    pub different: usize,
}

/// Accepted keys, and how many of them must have signed an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredSigners {
    keys: Vec<NamedKey>,
    at_least: usize,
}

impl RequiredSigners {
    /// Requires signatures by `at_least` of these named keys. A key that is listed twice counts once, whatever its names.
    pub fn new(
        named_keys: impl IntoIterator<Item = (String, PublicKey)>,
        at_least: usize,
    ) -> Result<Self, TooFewKeys> {
        let mut keys: Vec<NamedKey> = Vec::new();
        for (name, key) in named_keys {
            match keys.iter_mut().find(|known| known.key.is_same_key(&key)) {
                Some(known) => known.names.push(name),
                None => keys.push(NamedKey { names: vec![name], key }),
            }
        }
        let at_least = at_least.max(1);
        let different = keys.len();
        if different < at_least {
            Err(TooFewKeys { at_least, different })
        } else {
            Ok(Self { keys, at_least })
        }
    }

    /// Requires a signature by this key.
    pub fn one(name: &str, key: PublicKey) -> Self {
        Self { keys: vec![NamedKey { names: vec![name.to_owned()], key }], at_least: 1 }
    }

    /// Returns the different keys.
    pub fn keys(&self) -> impl Iterator<Item = &PublicKey> {
        self.keys.iter().map(|key| &key.key)
    }

    /// Compares the signatures found with the requirement.
    pub fn check<'a>(&'a self, signatures: &'a FoundSignatures) -> SignerCheck<'a> {
        let (signed, missing) = self.keys.iter().partition(|key| signatures.is_by(&key.key));
        SignerCheck { signed, missing, at_least: self.at_least, signatures }
    }
}

/// Result of the comparison: the accepted keys that signed an image, and the accepted keys that did not.
#[derive(Clone, Debug)]
pub struct SignerCheck<'a> {
    /// Accepted keys that signed the image.
    pub signed: Vec<&'a NamedKey>,
    /// Accepted keys that did not sign the image.
    pub missing: Vec<&'a NamedKey>,
    at_least: usize,
    signatures: &'a FoundSignatures,
}

impl SignerCheck<'_> {
    /// Whether enough accepted keys signed.
    pub fn is_enough(&self) -> bool {
        self.signed.len() >= self.at_least
    }

    /// Fails with an explanation if too few accepted keys signed.
    pub fn accept(&self) -> Result<(), String> {
        if self.is_enough() { Ok(()) } else { Err(self.to_string()) }
    }
}

impl fmt::Display for SignerCheck<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { signed, missing, at_least, signatures } = self;
        let list = |keys: &[&NamedKey]| keys.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if !self.is_enough() && *at_least == 1 {
            return f.write_str(&signatures.why_no_signer());
        }
        if self.is_enough() {
            write!(f, "by {}", list(signed))?;
        } else {
            write!(f, "{} of {at_least} required keys have signed", signed.len())?;
            let detail = if signed.is_empty() { signatures.why_no_signer() } else { list(signed) };
            write!(f, ": {detail}")?;
        }
        if missing.is_empty() { Ok(()) } else { write!(f, "; missing: {}", list(missing)) }
    }
}

/// Trusted keys of a site. They decide whether a published image may be an input of another image.
#[derive(Clone, Copy, Debug)]
pub struct Trust<'a> {
    /// The site's own key (`imageSigning`). Images signed with it were made by this site's farrier.
    pub own: Option<&'a RequiredSigners>,
    /// The keys that the policy requires (`policy.requireSigned`).
    pub required: Option<&'a RequiredSigners>,
    /// Whether the site signs modules. Every image then needs a valid signature before use. Otherwise anyone who may write to the
    /// registry could have arbitrary modules signed.
    pub signs_modules: bool,
}

impl Trust<'_> {
    /// Returns the trusted keys.
    pub fn keys(&self) -> impl Iterator<Item = &PublicKey> {
        self.own.into_iter().chain(self.required).flat_map(RequiredSigners::keys)
    }

    /// Whether an image with these signatures may be used as an input. Without a signature, the image's content and annotations are
    /// untrusted: anyone who may write to the registry can replace them. The policy's requirement for a rollout also applies here.
    pub fn check(&self, signatures: &FoundSignatures) -> Result<(), String> {
        let Self { own, required, signs_modules } = self;
        match (own, required) {
            (None, None) if *signs_modules => Err("the site has no keys for images".to_owned()),
            (None, None) => Ok(()),
            (Some(own), _) if own.check(signatures).is_enough() => Ok(()),
            (_, Some(required)) => required.check(signatures).accept(),
            (Some(own), None) => own.check(signatures).accept(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::testing::{COSIGN_3_KEY, P256_COMPRESSED_KEY, P256_KEY, RSA_KEY};

    fn key(pem: &str) -> PublicKey {
        PublicKey::image_key_from_pem(pem).unwrap()
    }

    fn required(at_least: usize, pems: &[&str]) -> Result<RequiredSigners, TooFewKeys> {
        let named = pems.iter().enumerate().map(|(at, pem)| (format!("{at}.pem"), key(pem)));
        RequiredSigners::new(named, at_least)
    }

    fn found(pems: &[&str]) -> FoundSignatures {
        let mut found = FoundSignatures::default();
        for pem in pems {
            found.add_signer(&key(pem));
        }
        found
    }

    #[test]
    fn enough_different_keys_must_sign() {
        let (site, release, third) = (P256_KEY, RSA_KEY, COSIGN_3_KEY);
        let two_of_three = required(2, &[site, release, third]).unwrap();
        for (signed, enough) in [
            (&[][..], false),
            (&[site], false),
            (&[site, site], false),
            (&[site, release], true),
            (&[third, release], true),
            (&[site, release, third], true),
        ] {
            assert_eq!(two_of_three.check(&found(signed)).is_enough(), enough, "{signed:?}");
        }
        assert!(!required(1, &[site]).unwrap().check(&found(&[release])).is_enough());
    }

    #[test]
    fn a_key_under_two_names_is_one() {
        let twice = [P256_KEY, P256_KEY, RSA_KEY];
        assert_eq!(required(3, &twice), Err(TooFewKeys { at_least: 3, different: 2 }));
        let two = required(2, &twice).unwrap();
        assert!(!two.check(&found(&[P256_KEY])).is_enough());
        let said = two.check(&found(&[P256_KEY])).to_string();
        assert!(said.starts_with("1 of 2 required keys have signed: 0.pem = 1.pem (sha256:"), "{said}");
        assert!(said.contains("; missing: 2.pem (sha256:"), "{said}");
        // A different encoding of the point does not make another key.
        assert_ne!(key(P256_KEY), key(P256_COMPRESSED_KEY));
        assert!(required(2, &[P256_KEY, P256_COMPRESSED_KEY]).is_err());
        let other_form = found(&[P256_COMPRESSED_KEY, P256_KEY]);
        assert_eq!(other_form.signers().len(), 1);
        assert!(two.check(&found(&[P256_COMPRESSED_KEY, RSA_KEY])).is_enough());
    }

    #[test]
    fn messages_explain_the_result() {
        let one = required(1, &[P256_KEY, RSA_KEY]).unwrap();
        let said = |found: &FoundSignatures| one.check(found).to_string();
        assert_eq!(said(&found(&[])), "it has no signature");
        let mut strange = found(&[]);
        let simple = ImageSignature::Simple { payload: Vec::new(), signature: Vec::new() };
        strange.add(&Digest::of(b""), &simple, one.keys());
        assert_eq!(said(&strange), "it has signatures, but no accepted key has signed this image");
        strange.add_unread("gone".to_owned());
        assert_eq!(said(&strange), "its signature cannot be read: gone");
        assert!(said(&found(&[RSA_KEY])).starts_with("by 1.pem (sha256:"));
        assert!(said(&found(&[RSA_KEY])).contains("; missing: 0.pem (sha256:"));
    }

    #[test]
    fn inputs_need_signatures_by_trusted_keys() {
        let own = RequiredSigners::one("imageSigning", key(P256_KEY));
        let two = required(2, &[P256_KEY, RSA_KEY, COSIGN_3_KEY]).unwrap();
        let judge = |own, required, signs_modules, signed: &[&str]| {
            Trust { own, required, signs_modules }.check(&found(signed)).is_ok()
        };
        // Without keys, every image is accepted, unless the site signs modules.
        assert!(judge(None, None, false, &[]));
        assert!(!judge(None, None, true, &[P256_KEY]));
        // An image made by this site is accepted. An image signed by others is accepted if enough of them signed.
        for signs_modules in [false, true] {
            assert!(judge(Some(&own), None, signs_modules, &[P256_KEY]));
            assert!(!judge(Some(&own), None, signs_modules, &[RSA_KEY]));
            assert!(judge(Some(&own), Some(&two), signs_modules, &[P256_KEY]));
            assert!(!judge(Some(&own), Some(&two), signs_modules, &[RSA_KEY]));
            assert!(judge(Some(&own), Some(&two), signs_modules, &[RSA_KEY, COSIGN_3_KEY]));
            assert!(!judge(None, Some(&two), signs_modules, &[P256_KEY]));
            assert!(!judge(None, Some(&two), signs_modules, &[]));
        }
    }
}
