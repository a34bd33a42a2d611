//! Measures signing 40 modules of the size of OFED's, with a key of the size that a kernel build generates. Prints the
//! milliseconds of each run, one per line; `ci/bench` turns them into table rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::{fs, path::Path, process::Command, time::Instant};

use farrier_core::site::{self, KeySource, Signed};
use farrier_net::SecretReader;
use farrier_payload as payload;
use farrier_payload::ModuleSigning;
use farrier_signing::ModuleSigner;
use kmod::{SignatureHash, SigningRule};

const MODULES: usize = 40;
const BYTES: usize = 1 << 20;
const RUNS: usize = 11;

fn main() {
    let work = tempfile::tempdir().unwrap();
    openssl(work.path(), "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:4096 -out k.pem");
    openssl(work.path(), "req -new -x509 -key k.pem -subj /CN=bench -days 1 -out c.pem");
    let spec = site::ModuleSigning {
        key: KeySource::File("k.pem".parse().unwrap()),
        passphrase: None,
        certificate: "c.pem".parse().unwrap(),
        signed: Signed::Replace,
    };
    let modules = work.path().join("modules");
    fs::create_dir(&modules).unwrap();
    for n in 0..MODULES {
        let content: Vec<u8> =
            (0..BYTES).filter_map(|byte| u8::try_from((byte * 31 + n) % 251).ok()).collect();
        fs::write(modules.join(format!("m{n}.ko")), content).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for _ in 0..RUNS {
        let start = Instant::now();
        // A build reads the key and the certificate each time.
        let secrets = SecretReader::new(work.path().to_owned(), None);
        let certificate = ModuleSigner::open(&spec, work.path(), secrets).unwrap();
        let signer = runtime.block_on(certificate.load()).unwrap();
        let rule = SigningRule { replace: true, previous: None };
        let hash = SignatureHash::Sha512;
        let how = ModuleSigning { certificate: &certificate, signer: &signer, hash, rule: &rule };
        let budget = payload::DecompressionBudget::without_build();
        assert_eq!(payload::sign_modules(&modules, &how, &budget).unwrap(), MODULES);
        println!("{:.3}", start.elapsed().as_secs_f64() * 1000.0);
    }
}

fn openssl(directory: &Path, arguments: &str) {
    let status = Command::new("openssl").args(arguments.split_whitespace()).current_dir(directory).output();
    assert!(status.unwrap().status.success(), "openssl {arguments}");
}
