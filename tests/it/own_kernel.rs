//! A user-compiled kernel with enforced signatures: the static check's verdicts on modules, and the kernel's own behavior.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_bootcheck::{BootRequest, boot_check};
use farrier_core::site::{KeySource, ModuleSigning, Signed};
use farrier_net::SecretReader;
use farrier_payload as payload;
use farrier_signing::ModuleSigner;

use crate::support::{
    own_kernel::{OwnKernel, own_kernel},
    packages::run,
    site::Site,
    virtual_machine::{boot, entrypoint, outcomes},
};
use kmod::{BootOutcome, SignatureHash, SigningRule, Verdict};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

const HELLO: &str = "farrier_hello.ko";

/// Compiles the small module without farrier and without a signature.
fn unsigned(kernel: &OwnKernel, work: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/definitions/sources/hello");
    kernel.compile(&sources, work).join(HELLO)
}

/// Copies a module and signs the copy with a PEM file's key and certificate, using the kernel's own tool.
fn signed(kernel: &OwnKernel, module: &Path, key: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    let copy = to.join(module.file_name().unwrap());
    fs::copy(module, &copy).unwrap();
    kernel.sign_file(key, &copy);
    copy
}

/// Creates a key and a certificate that the kernel does not trust.
fn stranger(work: &Path) -> PathBuf {
    let pem = work.join("stranger.pem");
    run(Command::new("openssl")
        .args([
            "req",
            "-new",
            "-nodes",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-subj",
            "/CN=stranger",
            "-outform",
            "PEM",
        ])
        .arg("-out")
        .arg(&pem)
        .arg("-keyout")
        .arg(&pem));
    // OpenSSL writes both into one file only when `-out` precedes `-keyout`.
    let text = fs::read_to_string(&pem).unwrap();
    assert!(text.contains("PRIVATE KEY") && text.contains("BEGIN CERTIFICATE"), "{text}");
    pem
}

/// Runs `farrier check` on one module against the headers of the kernel's package, without definitions.
fn check(site: &Site, kernel: &OwnKernel, module: &Path, args: &[&str]) -> crate::support::site::Run {
    let headers = site.path("headers");
    if !headers.exists() {
        kernel.install_headers(&headers);
    }
    let (module, headers) = (module.display().to_string(), headers.display().to_string());
    let common = ["check", &module, "--headers", &headers, "--kernel", kernel.release.as_str(), "-o", "json"];
    site.farrier(&[&common, args].concat())
}

fn rules(report: &Value, verdict: &str) -> Vec<String> {
    let findings = report["modules"][0]["findings"].as_array().unwrap().iter();
    let of_verdict = findings.filter(|finding| finding["verdict"] == verdict);
    of_verdict.map(|finding| finding["rule"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_release_keeps_its_plus_and_its_upper_case() {
    let kernel = own_kernel();
    assert!(kernel.release.as_str().ends_with("-Acme+"), "{}", kernel.release);
    let work = tempfile::tempdir().unwrap();
    let module = unsigned(&kernel, work.path());
    let vermagic = run(Command::new("modinfo").args(["-F", "vermagic"]).arg(module));
    assert!(vermagic.starts_with(&format!("{} ", kernel.release)), "{vermagic}");
    assert!(vermagic.contains("modversions"), "{vermagic}");
}

/// The headers suffice to refuse an unsigned module. Only the kernel knows which signatures are valid.
#[test]
fn the_static_check_refuses_what_is_not_signed() {
    let (kernel, site) = (own_kernel(), Site::new());
    let module = unsigned(&kernel, &site.path("work"));
    let report = check(&site, &kernel, &module, &[]).exits(1).json();
    assert_eq!(report["verdict"], "refused");
    assert_eq!(rules(&report, "refused"), ["signature"], "{report:#}");

    let module = signed(&kernel, &module, &kernel.signing_key(), &site.path("signed"));
    let report = check(&site, &kernel, &module, &[]).exits(0).json();
    assert_eq!(rules(&report, "refused"), [""; 0], "{report:#}");
    assert_eq!(rules(&report, "unknown"), ["signature"], "{report:#}");
}

/// `sign-file` produces the same bytes, and `extract-module-sig` finds both parts.
#[tokio::test]
async fn the_kernels_tools_take_farriers_signature_for_their_own() {
    let kernel = own_kernel();
    let work = tempfile::tempdir().unwrap();
    let module = unsigned(&kernel, &work.path().join("work"));
    let ours = work.path().join("ours").join(HELLO);
    fs::create_dir(work.path().join("ours")).unwrap();
    fs::copy(&module, &ours).unwrap();
    let spec = ModuleSigning {
        key: KeySource::File(kernel.signing_key().to_str().unwrap().parse().unwrap()),
        passphrase: None,
        certificate: kernel.certificate().to_str().unwrap().parse().unwrap(),
        signed: Signed::Replace,
    };
    let secrets = SecretReader::new(work.path().to_owned(), None);
    let certificate = ModuleSigner::open(&spec, work.path(), secrets).unwrap();
    let signer = certificate.load().await.unwrap();
    let (hash, rule) = (SignatureHash::Sha256, SigningRule { replace: true, previous: None });
    let how = payload::ModuleSigning { certificate: &certificate, signer: &signer, hash, rule: &rule };
    payload::sign_modules(ours.parent().unwrap(), &how, &payload::DecompressionBudget::without_build())
        .unwrap();

    let theirs = signed(&kernel, &module, &kernel.signing_key(), &work.path().join("theirs"));
    assert!(fs::read(&ours).unwrap() == fs::read(theirs).unwrap(), "sign-file produces other bytes");
    assert!(
        kernel.extract_module_sig("-0", &ours) == fs::read(&module).unwrap(),
        "the module without its signature"
    );
    let message = work.path().join("message.der");
    fs::write(&message, kernel.extract_module_sig("-s", &ours)).unwrap();
    run(Command::new("openssl")
        .args(["cms", "-verify", "-binary", "-inform", "DER", "-noverify", "-nointern", "-out", "/dev/null"])
        .arg("-in")
        .arg(message)
        .arg("-content")
        .arg(module)
        .arg("-certfile")
        .arg(kernel.signing_key()));
}

#[test]
fn the_boot_check_agrees() {
    let (kernel, site) = (own_kernel(), Site::new());
    let module = unsigned(&kernel, &site.path("work"));
    let (vmlinuz, entrypoint) = (kernel.vmlinuz().display().to_string(), entrypoint().display().to_string());
    let boot = ["--boot", "--kernel-image", &vmlinuz, "--entrypoint", &entrypoint];
    let report = check(&site, &kernel, &module, &boot).exits(1).json();
    let shown = &report["boot"]["modules"][0];
    assert_eq!(report["boot"]["kernel"], kernel.release.as_str());
    assert_eq!(shown["outcome"], "refused", "{report:#}");
    assert_eq!(shown["error"], "EKEYREJECTED", "{report:#}");

    let module = signed(&kernel, &module, &kernel.signing_key(), &site.path("signed"));
    let report = check(&site, &kernel, &module, &boot).exits(0).json();
    assert_eq!(report["boot"]["modules"][0]["outcome"], "loaded", "{report:#}");
}

/// Loads four modules in one boot: unsigned, signed by an untrusted key, signed by the kernel's key, and an in-tree module.
#[tokio::test]
async fn the_kernel_takes_its_own_key_alone() {
    let kernel = own_kernel();
    let work = tempfile::tempdir().unwrap();
    let payload = work.path().join("payload");
    let none = unsigned(&kernel, &work.path().join("work"));
    let stranger = stranger(work.path());
    fs::create_dir_all(payload.join("unsigned")).unwrap();
    fs::copy(&none, payload.join("unsigned").join(HELLO)).unwrap();
    signed(&kernel, &none, &stranger, &payload.join("stranger"));
    signed(&kernel, &none, &kernel.signing_key(), &payload.join("own"));
    fs::copy(kernel.own_module(), payload.join("crc7.ko")).unwrap();

    let modules = ["unsigned", "stranger", "own"].map(|directory| format!("{directory}/{HELLO}"));
    let mut request = BootRequest::new(kernel.image(), payload.clone(), modules.to_vec(), entrypoint());
    request.unload_each = true;
    let report = boot(&request).await;
    let [unsigned, stranger, own] = &report.modules[..] else { panic!("{report:#?}") };
    for (module, words) in [(unsigned, "Loading of unsigned module is rejected"), (stranger, "rejected")] {
        let BootOutcome::Refused { error, .. } = &module.outcome else { panic!("{report:#?}") };
        assert_eq!(error, "EKEYREJECTED", "{report:#?}");
        assert!(module.outcome.messages().iter().any(|line| line.contains(words)), "{report:#?}");
    }
    assert_eq!(own.outcome, BootOutcome::Loaded, "{report:#?}");
    assert_eq!(report.verdict(), Verdict::Refused);

    let request = BootRequest::new(kernel.image(), payload, vec!["crc7.ko".to_owned()], entrypoint());
    let report = boot_check(&request, &CancellationToken::new()).await.unwrap();
    assert_eq!(*outcomes(&report)["crc7"], BootOutcome::Loaded, "{report:#?}");
}
