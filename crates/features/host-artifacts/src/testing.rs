//! Helpers of several outputs' tests.

use std::{
    process::{Command, Stdio},
    sync::Arc,
};

use farrier_builder::{
    services::{BuildError, OutputMaker as _},
    testing::{Bench, K9, SYMBOLS},
};
use farrier_core::{
    image::{Digest, HostOutput},
    site::{KeySource, ModuleSigning, Signed},
};
use farrier_net::SecretReader;
use farrier_signing::{
    ModuleSigner,
    testing::{OpensslDir, RSA_2048},
};
use oci::Artifact;
use serde_json::json;

use crate::HostArtifacts;

pub(crate) async fn make(bench: &Bench, image: &Digest, output: HostOutput) -> Result<Artifact, BuildError> {
    let repository = bench.services.images.location.repository("x").unwrap();
    Ok(HostArtifacts.make(&bench.services, &repository, image, output).await?.artifact)
}

/// Runs a program, and returns what it printed.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a site that signs modules, with the directory of its key `k.pem` and certificate `c.pem`.
pub(crate) fn bench_that_signs_modules() -> (Bench, OpensslDir) {
    let keys = OpensslDir::new();
    keys.key(RSA_2048);
    keys.certificate("/CN=Acme");
    let mut bench = Bench::new(&json!({}));
    let config = "CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_FORCE=y\nCONFIG_MODULE_SIG_HASH=\"sha512\"\n";
    bench.headers_with(K9, SYMBOLS, config);
    bench.sign_images_with(&keys);
    let spec = ModuleSigning {
        key: KeySource::File("k.pem".parse().unwrap()),
        passphrase: None,
        certificate: "c.pem".parse().unwrap(),
        signed: Signed::Keep,
    };
    let secrets = SecretReader::new(keys.root().to_owned(), None);
    bench.services.tools.module_signer =
        Some(Arc::new(ModuleSigner::open(&spec, keys.root(), secrets).unwrap()));
    (bench, keys)
}
