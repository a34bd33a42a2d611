use std::fmt::Write as _;

use farrier_core::site::{KeySource, SecretSource};
use farrier_net::SecretReader;

use super::{
    testing::{EC_256, EC_384, OpensslDir, RSA_2048, RSA_4096},
    *,
};

/// Loads a key on a single-threaded runtime, which suffices for files.
fn load(
    source: &KeySource,
    passphrase: Option<&SecretSource>,
    public: Option<&PublicKey>,
    root: &Path,
) -> Result<Signer, SigningError> {
    let secrets = SecretReader::new(root.to_owned(), None);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(Signer::load(source, passphrase, public, &secrets))
}

impl OpensslDir {
    fn load(&self, file: &str, passphrase: Option<&str>) -> Result<Signer, SigningError> {
        let passphrase = passphrase.map(|text| {
            std::fs::write(self.path("passphrase"), text).unwrap();
            SecretSource::File("passphrase".parse().unwrap())
        });
        load(&KeySource::File(file.parse().unwrap()), passphrase.as_ref(), None, self.root())
    }

    /// Checks that OpenSSL accepts a signature.
    fn verify(&self, signer: &Signer, hash: SignatureHash) {
        let content = b"a module, or a manifest";
        let signature = signer.sign(hash, content).unwrap();
        assert!(signer.public_key().verify(hash, content, &signature));
        assert!(!signer.public_key().verify(hash, b"another", &signature));
        std::fs::write(self.path("content"), content).unwrap();
        std::fs::write(self.path("signature"), signature).unwrap();
        self.openssl(&format!("dgst -{hash} -verify p.pem -signature signature content"));
    }
}

const HASHES: [SignatureHash; 3] = [SignatureHash::Sha256, SignatureHash::Sha384, SignatureHash::Sha512];

#[test]
fn openssl_takes_the_signatures_of_every_kind_of_key_and_digest() {
    for kind in [RSA_2048, RSA_4096, EC_256, EC_384] {
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(kind);
        let signer = openssl_dir.load("k.pem", None).unwrap();
        let public = read_public_key(&openssl_dir.path("p.pem")).unwrap();
        assert_eq!(*signer.public_key(), public, "{kind}");
        for hash in HASHES {
            openssl_dir.verify(&signer, hash);
        }
        let twice = [0, 1].map(|_| signer.sign(SignatureHash::Sha256, b"same").unwrap());
        assert_eq!(twice[0], twice[1], "{kind}: signatures are deterministic");
    }
}

#[test]
fn every_form_of_a_private_key() {
    for (kind, old) in [(RSA_2048, "rsa -traditional"), (EC_256, "ec"), (EC_384, "ec")] {
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(kind);
        let public = openssl_dir.load("k.pem", None).unwrap().public_key().clone();
        openssl_dir.openssl(&format!("{old} -in k.pem -out old.pem"));
        openssl_dir.openssl("pkcs8 -topk8 -in k.pem -passout pass:sesame -out aes.pem");
        openssl_dir
            .openssl("pkcs8 -topk8 -scrypt -scrypt_N 1024 -in k.pem -passout pass:sesame -out scrypt.pem");
        // The kernel's build writes both into one file, and OpenSSL's tools add text between the blocks.
        openssl_dir.certificate("/CN=k");
        let [key, certificate] =
            ["k.pem", "c.pem"].map(|name| std::fs::read_to_string(openssl_dir.path(name)).unwrap());
        let combined = format!("Bag Attributes\n    localKeyID: 01\n{certificate}{key}");
        std::fs::write(openssl_dir.path("combined.pem"), combined).unwrap();
        for (file, passphrase) in [
            ("old.pem", None),
            ("aes.pem", Some("sesame\n")),
            ("scrypt.pem", Some("sesame")),
            ("combined.pem", None),
        ] {
            let signer =
                openssl_dir.load(file, passphrase).unwrap_or_else(|error| panic!("{kind} {file}: {error}"));
            assert_eq!(*signer.public_key(), public, "{kind} {file}");
        }
        let certificate = read_certificate(&openssl_dir.path("c.pem")).unwrap();
        assert_eq!(certificate.public_key, public.info());
        assert_eq!(certificate.subject.as_deref(), Some("k"));
    }
}

#[test]
fn what_is_wrong_with_a_key_is_said() {
    let openssl_dir = OpensslDir::new();
    openssl_dir.key(RSA_2048);
    openssl_dir.openssl("pkcs8 -topk8 -in k.pem -passout pass:sesame -out aes.pem");
    openssl_dir.openssl("rsa -traditional -aes128 -passout pass:sesame -in k.pem -out old.pem");
    openssl_dir.openssl("pkcs8 -topk8 -v1 PBE-SHA1-3DES -in k.pem -passout pass:sesame -out pbes1.pem");
    openssl_dir
        .openssl("pkcs8 -topk8 -v2 aes256 -v2prf hmacWithSHA1 -in k.pem -passout pass:sesame -out sha1.pem");
    openssl_dir.openssl("genpkey -algorithm ED25519 -out ed.pem");
    openssl_dir.openssl("genpkey -algorithm EC -pkeyopt ec_paramgen_curve:secp521r1 -out p521.pem");
    openssl_dir.openssl("genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024 -out weak.pem");
    std::fs::write(openssl_dir.path("empty.pem"), "nothing").unwrap();
    std::fs::write(
        openssl_dir.path("damaged.pem"),
        "-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    let mut said = String::new();
    for (file, passphrase) in [
        ("absent.pem", None),
        ("empty.pem", None),
        ("damaged.pem", None),
        ("p.pem", None),
        ("aes.pem", None),
        ("aes.pem", Some("open")),
        ("aes.pem", Some("")),
        ("old.pem", Some("sesame")),
        ("pbes1.pem", Some("sesame")),
        ("sha1.pem", Some("sesame")),
        ("ed.pem", None),
        ("p521.pem", None),
        ("weak.pem", None),
    ] {
        let error = openssl_dir.load(file, passphrase).unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        said.push_str(&format!("{error}\n").replace(&format!("{}/", openssl_dir.root().display()), ""));
    }
    insta::assert_snapshot!(said);
}

#[test]
fn a_key_that_is_no_pair_with_a_certificate_is_refused() {
    let (ours, other) = (OpensslDir::new(), OpensslDir::new());
    ours.key(EC_256);
    other.key(EC_256);
    let signer = ours.load("k.pem", None).unwrap();
    let path = other.path("p.pem");
    let public = read_public_key(&path).unwrap();
    assert!(signer.ensure_matches(signer.public_key(), &path).is_ok());
    let error = signer.ensure_matches(&public, &path).unwrap_err();
    assert!(error.to_string().ends_with(&format!("does not belong to {}", path.display())), "{error}");
}

/// Signer that runs a shell script with OpenSSL's key, as it would run a security module's tool.
fn behind(openssl_dir: &OpensslDir, command: &str) -> Signer {
    let public = read_public_key(&openssl_dir.path("p.pem")).unwrap();
    let command =
        ["sh", "-c", &command.replace("DIR", &openssl_dir.root().display().to_string()), "sh", "{{hash}}"];
    let source = KeySource::Command(command.map(str::to_owned).to_vec());
    load(&source, None, Some(&public), openssl_dir.root()).unwrap()
}

#[test]
fn a_command_gets_the_digest_and_gives_the_signature() {
    for kind in [RSA_2048, EC_256, EC_384] {
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(kind);
        let signer = behind(&openssl_dir, "openssl pkeyutl -sign -inkey DIR/k.pem -pkeyopt digest:$1");
        for hash in HASHES {
            openssl_dir.verify(&signer, hash);
        }
    }
}

#[test]
fn a_command_that_does_not_sign_is_said_to() {
    let openssl_dir = OpensslDir::new();
    openssl_dir.key(RSA_2048);
    openssl_dir.openssl("genpkey -algorithm RSA -out other.pem");
    let mut said = String::new();
    for command in [
        "exit 3",
        "echo 'no token in slot 0' >&2; exit 1",
        "kill -9 $$",
        "true",
        "openssl pkeyutl -sign -inkey DIR/other.pem -pkeyopt digest:$1",
        "openssl pkeyutl -sign -inkey DIR/k.pem -pkeyopt digest:sha512; true",
    ] {
        let error = behind(&openssl_dir, command).sign(SignatureHash::Sha256, b"content").unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        writeln!(said, "{error}").unwrap();
    }
    let absent = KeySource::Command(vec!["no-such-program".to_owned()]);
    let public = read_public_key(&openssl_dir.path("p.pem")).unwrap();
    let signer = load(&absent, None, Some(&public), openssl_dir.root()).unwrap();
    writeln!(said, "{}", signer.sign(SignatureHash::Sha256, b"content").unwrap_err()).unwrap();
    writeln!(said, "{}", load(&absent, None, None, openssl_dir.root()).unwrap_err()).unwrap();
    insta::assert_snapshot!(said);
}

#[test]
fn no_message_shows_a_key() {
    let openssl_dir = OpensslDir::new();
    openssl_dir.key(EC_256);
    let signer = openssl_dir.load("k.pem", None).unwrap();
    let key = std::fs::read_to_string(openssl_dir.path("k.pem")).unwrap();
    let shown = format!("{signer:?}");
    assert!(key.lines().filter(|line| !line.starts_with('-')).all(|line| !shown.contains(line)), "{shown}");
}
