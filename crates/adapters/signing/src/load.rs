//! Loads private keys in the forms that OpenSSL and the kernel's build write.

use farrier_core::{
    provenance::{KeyError, PublicKey},
    site::{KeySource, SecretKey, SecretSource},
};
use farrier_net::SecretReader;
use pkcs8::{DecodePrivateKey as _, EncodePublicKey as _, EncryptedPrivateKeyInfoRef, spki};
use ring::signature::{KeyPair as _, RsaKeyPair};

use super::{Key, Result, Signer, SigningCommand, SigningError, pem, public_key::check_usable};

/// Reason to refuse an encrypted key: PBES1, 3DES, or a key derived with SHA-1.
const UNSUPPORTED_ENCRYPTION: &str = "its encryption is not PBES2 with AES and SHA-2 or scrypt";

impl Signer {
    /// Loads a key. `passphrase` decrypts an encrypted key. `public` is the public key, which is required if a program signs.
    pub async fn load(
        source: &KeySource,
        passphrase: Option<&SecretSource>,
        public: Option<&PublicKey>,
        secrets: &SecretReader,
    ) -> Result<Self> {
        let read =
            |what, source| move |error| SigningError::Secret { what, from: describe(source), source: error };
        let source = match source {
            KeySource::File(path) => SecretSource::File(path.clone()),
            KeySource::Secret(key) => SecretSource::Secret(key.clone()),
            KeySource::Command(command) => {
                let no_key = || {
                    let command = command.join(" ");
                    let message = format!("the key of `{command}` is unknown: no public key is named for it");
                    SigningError::key(message, "name the public half with `publicKey`")
                };
                let command = SigningCommand::new(command).ok_or_else(no_key)?;
                let (public, from) = (public.cloned().ok_or_else(no_key)?, command.program().to_owned());
                return Ok(Self { key: Key::Command(command), public, from });
            }
        };
        let text = secrets.read(&source).await.map_err(read("the signing key", &source))?;
        let passphrase = match passphrase {
            None => None,
            Some(source) => Some(secrets.read(source).await.map_err(read("the passphrase", source))?),
        };
        let passphrase = passphrase.as_ref().map(|text| without_newline(text.as_bytes()));
        Self::from_pem(text.as_bytes(), passphrase, &describe(&source))
    }

    /// Parses a private key in PEM form. `from` is its source, for messages.
    pub fn from_pem(text: &[u8], passphrase: Option<&[u8]>, from: &str) -> Result<Self> {
        let missing_private_key = || {
            let hint = "name the file with the private key, not only a certificate; convert DER to PEM with \
                `openssl pkey -inform DER`";
            SigningError::key(format!("{from} contains no private key in PEM form"), hint)
        };
        let text = std::str::from_utf8(text).map_err(|_| missing_private_key())?;
        let block = pem::blocks(text).into_iter().find(|block| block.label.ends_with("PRIVATE KEY"));
        let block = block.ok_or_else(missing_private_key)?;
        let unsupported = |why| SigningError::unsupported_format(from, why);
        if block.old_encryption {
            return Err(unsupported("it is encrypted in OpenSSL's legacy format (Proc-Type: 4,ENCRYPTED)"));
        }
        let bytes = block.bytes.ok_or_else(|| unsupported("its base64 is damaged"))?;
        match block.label.as_str() {
            "PRIVATE KEY" => pkcs8(&bytes, from),
            "ENCRYPTED PRIVATE KEY" => {
                let encrypted = EncryptedPrivateKeyInfoRef::try_from(bytes.as_slice())
                    .map_err(|_| unsupported(UNSUPPORTED_ENCRYPTION))?;
                let passphrase = passphrase.filter(|passphrase| !passphrase.is_empty()).ok_or_else(|| {
                    let message =
                        format!("the private key in {from} is encrypted, and no passphrase is named");
                    SigningError::key(message, "name it with `passphrase: {file: PATH}`")
                })?;
                let wrong = || {
                    let message = format!("the passphrase does not decrypt the private key in {from}");
                    let hint = "check that `passphrase` names the right file or secret; one trailing \
                        newline is ignored";
                    SigningError::key(message, hint)
                };
                let decrypted = encrypted.decrypt(passphrase).map_err(|error| match error {
                    // The default of OpenSSL before 1.1.0.
                    pkcs8::Error::EncryptedPrivateKey(pkcs8::pkcs5::Error::UnsupportedAlgorithm {
                        ..
                    }) => unsupported(UNSUPPORTED_ENCRYPTION),
                    _ => wrong(),
                });
                pkcs8(decrypted?.as_bytes(), from)
            }
            "RSA PRIVATE KEY" => rsa(RsaKeyPair::from_der(&bytes), from),
            "EC PRIVATE KEY" => {
                if let Ok(key) = p256::SecretKey::from_sec1_der(&bytes) {
                    return p256_signer(&key.into(), from);
                }
                let key = p384::SecretKey::from_sec1_der(&bytes);
                p384_signer(&key.map_err(|_| another_curve(from))?.into(), from)
            }
            _ => Err(unsupported("it is neither PKCS#8, PKCS#1 nor SEC 1")),
        }
    }
}

fn pkcs8(der: &[u8], from: &str) -> Result<Signer> {
    let info = pkcs8::PrivateKeyInfoRef::try_from(der);
    let info = info.map_err(|_| SigningError::unsupported_format(from, "it is not PKCS#8"))?;
    match info.algorithm.oid.to_string().as_str() {
        "1.2.840.113549.1.1.1" => rsa(RsaKeyPair::from_pkcs8(der), from),
        "1.2.840.10045.2.1" => {
            if let Ok(key) = p256::ecdsa::SigningKey::from_pkcs8_der(der) {
                return p256_signer(&key, from);
            }
            let key = p384::ecdsa::SigningKey::from_pkcs8_der(der);
            p384_signer(&key.map_err(|_| another_curve(from))?, from)
        }
        _ => Err(SigningError::unusable(from, "it is neither an RSA nor an ECDSA key")),
    }
}

fn another_curve(from: &str) -> SigningError {
    let why = "it is an elliptic curve key that is damaged, or on a curve other than P-256 and P-384";
    SigningError::unusable(from, why)
}

fn rsa(key: Result<RsaKeyPair, ring::error::KeyRejected>, from: &str) -> Result<Signer> {
    let key =
        key.map_err(|error| SigningError::unusable(from, format!("the RSA key is refused ({error})")))?;
    let public = check_usable(PublicKey::of_rsa(key.public_key().as_ref()), from)?;
    Ok(Signer { key: Key::Rsa(Box::new(key)), public, from: from.to_owned() })
}

fn p256_signer(key: &p256::ecdsa::SigningKey, from: &str) -> Result<Signer> {
    let public = public_key_of(key.verifying_key().to_public_key_der(), from)?;
    Ok(Signer { key: Key::P256(Box::new(key.clone())), public, from: from.to_owned() })
}

fn p384_signer(key: &p384::ecdsa::SigningKey, from: &str) -> Result<Signer> {
    let public = public_key_of(key.verifying_key().to_public_key_der(), from)?;
    Ok(Signer { key: Key::P384(Box::new(key.clone())), public, from: from.to_owned() })
}

fn public_key_of(info: spki::Result<pkcs8::Document>, from: &str) -> Result<PublicKey> {
    let key = info.map_err(|_| KeyError::Damaged).and_then(|info| PublicKey::any_from_info(info.as_bytes()));
    check_usable(key, from)
}

/// Removes the line end that editors and `echo` add.
fn without_newline(text: &[u8]) -> &[u8] {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    text.strip_suffix(b"\r").unwrap_or(text)
}

/// Location of a secret, for messages.
fn describe(source: &SecretSource) -> String {
    match source {
        SecretSource::File(path) => path.display().to_string(),
        SecretSource::Secret(SecretKey { namespace, name, key }) => {
            format!("Secret {namespace}/{name} ({key})")
        }
    }
}
