//! Module signing with real components: the kernel's `scripts/sign-file`, a security module behind PKCS#11 (SoftHSM), the
//! engine and a registry. `modinfo` and OpenSSL serve as references.
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use farrier_core::site::{self, KeySource, Signed};
use farrier_net::SecretReader;
use farrier_payload as payload;
use farrier_payload::ModuleSigning;
use farrier_signing::{ModuleSigner, Signer, read_public_key};

use crate::support::{
    kernels,
    packages::{run, unpacked},
    site::{Run, Site},
};
use kmod::{SignatureHash, SigningRule, without_signature};

const RSA: &str = "RSA -pkeyopt rsa_keygen_bits:2048";
const HASHES: [SignatureHash; 3] = [SignatureHash::Sha256, SignatureHash::Sha384, SignatureHash::Sha512];

fn openssl(directory: &Path, arguments: &str) {
    run(Command::new("openssl").args(arguments.split_whitespace()).current_dir(directory));
}

/// Writes a key, `NAME.pem`, and its certificate, `NAME.crt`.
fn key(directory: &Path, name: &str, kind: &str) {
    openssl(directory, &format!("genpkey -algorithm {kind} -out {name}.pem"));
    openssl(
        directory,
        &format!("req -new -x509 -key {name}.pem -subj /O=Acme/CN={name} -days 1 -out {name}.crt"),
    );
}

/// Signs the modules of a directory like a build.
fn sign(tree: &Path, directory: &Path, source: KeySource, certificate: &str, hash: SignatureHash) {
    let spec = site::ModuleSigning {
        key: source,
        passphrase: None,
        certificate: certificate.parse().unwrap(),
        signed: Signed::Replace,
    };
    let secrets = SecretReader::new(directory.to_owned(), None);
    let certificate = ModuleSigner::open(&spec, directory, secrets).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let signer = runtime.block_on(certificate.load()).unwrap();
    let rule = SigningRule { replace: true, previous: None };
    let how = ModuleSigning { certificate: &certificate, signer: &signer, hash, rule: &rule };
    payload::sign_modules(tree, &how, &payload::DecompressionBudget::without_build()).unwrap();
}

/// Module contents of several lengths; `sign-file` accepts arbitrary files.
fn modules() -> Vec<Vec<u8>> {
    [1, 4095, 70_000, 3 << 20]
        .map(|length: usize| (0..length).filter_map(|n| u8::try_from(n * 31 % 251).ok()).collect())
        .to_vec()
}

#[test]
fn byte_for_byte_what_the_kernels_own_tool_makes() {
    let sign_file = unpacked("linux-kbuild-6.1").join("usr/lib/linux-kbuild-6.1/scripts/sign-file");
    let work = tempfile::tempdir().unwrap();
    for (name, kind) in [("small", RSA), ("large", "RSA -pkeyopt rsa_keygen_bits:4096")] {
        key(work.path(), name, kind);
        for hash in HASHES {
            for module in modules() {
                let tree = tempfile::tempdir().unwrap();
                let (ours, theirs) = (tree.path().join("m.ko"), work.path().join("theirs"));
                for place in [&ours, &theirs] {
                    fs::write(place, &module).unwrap();
                }
                sign(
                    tree.path(),
                    work.path(),
                    KeySource::File(format!("{name}.pem").parse().unwrap()),
                    &format!("{name}.crt"),
                    hash,
                );
                let at = |end: &str| work.path().join(format!("{name}.{end}"));
                run(Command::new(&sign_file).arg(hash.as_str()).args([at("pem"), at("crt"), theirs.clone()]));
                let (ours, theirs) = (fs::read(ours).unwrap(), fs::read(theirs).unwrap());
                assert!(ours == theirs, "{name} {hash} {}", module.len());
                assert_eq!(without_signature(&theirs).0, module);
            }
        }
    }
}

/// `sign-file` produces a different ECDSA signature each time; everything around the signature is the same.
#[test]
fn with_an_elliptic_curve_all_but_the_signature_is_the_tools() {
    let sign_file = unpacked("linux-kbuild-6.1").join("usr/lib/linux-kbuild-6.1/scripts/sign-file");
    let work = tempfile::tempdir().unwrap();
    for curve in ["P-256", "P-384"] {
        key(work.path(), "ec", &format!("EC -pkeyopt ec_paramgen_curve:{curve}"));
        for hash in HASHES {
            let tree = tempfile::tempdir().unwrap();
            let (ours, theirs) = (tree.path().join("m.ko"), work.path().join("theirs"));
            for place in [&ours, &theirs] {
                fs::write(place, "module").unwrap();
            }
            sign(tree.path(), work.path(), KeySource::File("ec.pem".parse().unwrap()), "ec.crt", hash);
            let at = |end: &str| work.path().join(format!("ec.{end}"));
            run(Command::new(&sign_file).arg(hash.as_str()).args([at("pem"), at("crt"), theirs.clone()]));
            let shapes = [ours, theirs].map(|file| {
                let bytes = fs::read(file).unwrap();
                let message = &bytes["module".len()..bytes.len() - 40];
                fs::write(work.path().join("message"), message).unwrap();
                let listing = run(Command::new("openssl")
                    .args(["asn1parse", "-inform", "DER", "-in", "message"])
                    .current_dir(work.path()));
                // Ignore lengths, because ECDSA signatures vary by a few bytes.
                let shape = |line: &str| {
                    let (_, element) = line.split_at(line.find("prim:").or(line.find("cons:")).unwrap());
                    element.split("[HEX DUMP]").next().unwrap().to_owned()
                };
                listing.lines().map(shape).collect::<Vec<_>>()
            });
            assert_eq!(shapes[0], shapes[1], "{curve} {hash}");
        }
    }
}

/// A SoftHSM token with an RSA and an ECDSA key.
struct Token {
    directory: tempfile::TempDir,
    module: PathBuf,
}

impl Token {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("tokens")).unwrap();
        let tokens = directory.path().join("tokens");
        fs::write(
            directory.path().join("softhsm2.conf"),
            format!("directories.tokendir = {}\nobjectstore.backend = file\n", tokens.display()),
        )
        .unwrap();
        let module = ["/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so"];
        let module = module.into_iter().map(PathBuf::from).find(|path| path.exists());
        let token =
            Self { directory, module: module.expect("SoftHSM is installed (Debian package softhsm2)") };
        token.util("--init-token --free --label farrier --pin 1234 --so-pin 5678");
        for (name, id, kind) in [("rsa", "01", RSA), ("ec", "02", "EC -pkeyopt ec_paramgen_curve:P-256")] {
            key(token.path(), name, kind);
            openssl(token.path(), &format!("x509 -in {name}.crt -pubkey -noout -out {name}.pub"));
            token.util(&format!("--import {name}.pem --token farrier --label {name} --id {id} --pin 1234"));
            // From here on only the token holds the key.
            fs::remove_file(token.path().join(format!("{name}.pem"))).unwrap();
        }
        token
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn util(&self, arguments: &str) {
        run(Command::new("softhsm2-util")
            .args(arguments.split_whitespace())
            .env("SOFTHSM2_CONF", self.path().join("softhsm2.conf"))
            .current_dir(self.path()));
    }

    /// Returns a signing command: a shell script with the token in its environment.
    fn command(&self, script: &str) -> KeySource {
        let script = format!(
            "export SOFTHSM2_CONF={}/softhsm2.conf MODULE={}; {script}",
            self.path().display(),
            self.module.display()
        );
        KeySource::Command(["sh", "-c", &script, "sh", "{{hash}}"].map(str::to_owned).to_vec())
    }
}

/// Signs through OpenSSL's PKCS#11 engine, which creates the DigestInfo.
const WITH_OPENSSL: &str = "exec openssl pkeyutl -engine pkcs11 -keyform engine -sign -pkeyopt digest:$1 \
    -inkey 'pkcs11:token=farrier;object=KEY;type=private;pin-value=1234'";
/// `pkcs11-tool` expects the input of the RSA padding, so the script prepends SHA-256's DigestInfo header to the digest.
const WITH_PKCS11_TOOL: &str = r#"{ printf '\060\061\060\015\006\011\140\206\110\001\145\003\004\002\001\005\000\004\040'; cat; } |
    pkcs11-tool --module "$MODULE" --login --pin 1234 --id 01 --sign --mechanism RSA-PKCS"#;
/// `pkcs11-tool` returns an ECDSA signature as two concatenated integers.
const WITH_PKCS11_TOOL_EC: &str =
    r#"pkcs11-tool --module "$MODULE" --login --pin 1234 --id 02 --sign --mechanism ECDSA"#;

#[test]
fn a_key_in_a_security_module_signs_modules() {
    let token = Token::new();
    let sha256 = SignatureHash::Sha256;
    for (script, certificate, hash) in [
        (WITH_OPENSSL.replace("KEY", "rsa"), "rsa", SignatureHash::Sha512),
        (WITH_OPENSSL.replace("KEY", "rsa"), "rsa", sha256),
        (WITH_PKCS11_TOOL.to_owned(), "rsa", sha256),
        (WITH_PKCS11_TOOL_EC.to_owned(), "ec", sha256),
    ] {
        let tree = tempfile::tempdir().unwrap();
        fs::write(tree.path().join("m.ko"), "a module").unwrap();
        sign(tree.path(), token.path(), token.command(&script), &format!("{certificate}.crt"), hash);
        verify(&tree.path().join("m.ko"), &token.path().join(format!("{certificate}.crt")));
    }
    // A locked token, and a token that signs with another key.
    let public = read_public_key(&token.path().join("ec.pub")).unwrap();
    let secrets = SecretReader::new(token.path().to_owned(), None);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let fails = |script: &str| {
        let command = token.command(script);
        runtime
            .block_on(Signer::load(&command, None, Some(&public), &secrets))
            .unwrap()
            .sign(sha256, b"m")
            .unwrap_err()
            .to_string()
    };
    let locked = fails(&WITH_PKCS11_TOOL_EC.replace("1234", "9999"));
    assert!(locked.contains("CKR_PIN_INCORRECT"), "{locked}");
    let other = fails(&WITH_OPENSSL.replace("KEY", "rsa"));
    assert!(other.contains("not a signature (sha256) by the ECDSA P-256 key"), "{other}");
}

/// Asserts that OpenSSL accepts the signature with the certificate over the unsigned module.
fn verify(module: &Path, certificate: &Path) {
    let work = tempfile::tempdir().unwrap();
    let bytes = fs::read(module).unwrap();
    let (bare, _) = without_signature(&bytes);
    assert!(bare.len() < bytes.len(), "{} is not signed", module.display());
    fs::write(work.path().join("bare"), bare).unwrap();
    fs::write(work.path().join("message"), &bytes[bare.len()..bytes.len() - 40]).unwrap();
    run(Command::new("openssl")
        .args([
            "cms",
            "-verify",
            "-binary",
            "-inform",
            "DER",
            "-in",
            "message",
            "-content",
            "bare",
            "-noverify",
        ])
        .args(["-nointern", "-out", "/dev/null", "-certfile"])
        .arg(certificate)
        .current_dir(work.path()));
}

/// Unpacks the module of the published image from its last layer.
fn published(site: &Site, tag: &str, to: &Path) -> PathBuf {
    let manifest = site.inspect_raw(&format!("hello:{tag}"));
    let layer = manifest["layers"].as_array().unwrap().last().unwrap()["digest"].as_str().unwrap().to_owned();
    let url = format!("http://{}/v2/drivers/hello/blobs/{layer}", site.registry.host);
    fs::create_dir(to).unwrap();
    run(Command::new("curl").args(["-sSfL", "-o"]).arg(to.with_extension("tar.gz")).arg(url));
    run(Command::new("tar").arg("-xzf").arg(to.with_extension("tar.gz")).arg("-C").arg(to));
    let files = walkdir::WalkDir::new(to).into_iter().map(Result::unwrap);
    let module = files.into_iter().find(|entry| entry.file_name() == "farrier_hello.ko");
    module.expect("the image contains its module").into_path()
}

/// Asserts that bill of materials and provenance contain the certificate's fingerprint as OpenSSL prints it.
fn names_certificate(site: &Site, tag: &str, name: &str) {
    let certificate = site.definitions().join(format!("{name}.crt"));
    let shown = run(Command::new("openssl")
        .args(["x509", "-noout", "-fingerprint", "-sha256", "-in"])
        .arg(certificate));
    let fingerprint = shown.trim().rsplit('=').next().unwrap().replace(':', "").to_lowercase();
    let digest = site.inspect(&format!("hello:{tag}"))["Digest"].as_str().unwrap().replace(':', "-");
    for kind in ["application/vnd.cyclonedx+json", "application/vnd.in-toto+json"] {
        let beside = site.inspect_raw(&format!("hello:{digest}"));
        let mut entries = beside["manifests"].as_array().unwrap().iter();
        let entry = entries.find(|entry| entry["artifactType"] == kind).unwrap();
        let manifest = site.inspect_raw(&format!("hello@{}", entry["digest"].as_str().unwrap()));
        let layer = manifest["layers"][0]["digest"].as_str().unwrap().to_owned();
        let url = format!("http://{}/v2/drivers/hello/blobs/{layer}", site.registry.host);
        let document = run(Command::new("curl").args(["-sSfL", &url]));
        assert!(document.contains(&fingerprint), "{kind} of {name}: {document}");
    }
}

fn modinfo(module: &Path, field: &str) -> String {
    run(Command::new("modinfo").args(["-F", field]).arg(module)).trim().to_owned()
}

/// Runs `farrier build hello --push` without an available engine.
fn without_engine(site: &Site, kernel: &str) -> Run {
    let target = ["--kernel", kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let mut command = site.command(&[&["build", "hello", "--push", "-o", "json"][..], &target].concat());
    command
        .env("FARRIER_ENGINE", "docker")
        .env("DOCKER_HOST", format!("unix://{}", site.path("no-engine.sock").display()));
    site.finish(command.stdout(Stdio::piped()).spawn().unwrap())
}

#[test]
fn a_rotated_key_signs_what_was_compiled_once() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["first", "second"] {
        key(&site.definitions(), name, RSA);
    }
    site.edit(
        "images/hello.yaml",
        "  modules: [farrier_hello]\n",
        "  modules: [farrier_hello]\n  tags: [\"{{version}}-{{kernel_label}}-{{signer}}\"]\n",
    );
    let configure = |key: &str| {
        site.define(
            "site.yaml",
            &format!(
                "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: acme}}\nspec:\n  moduleSigning:\n    \
                 key: {{file: {key}.pem}}\n    certificate: {key}.crt\n  imageSigning: {{key: {{file: first.pem}}}}\n"
            ),
        );
    };
    let mut modules = Vec::new();
    for name in ["first", "second"] {
        configure(name);
        let built = if name == "first" {
            site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json()
        } else {
            without_engine(&site, &kernel).exits(0).json()
        };
        let known: Vec<PathBuf> = modules.iter().map(|(_, tag)| site.path(tag)).collect();
        let tag = site.tags("hello").into_iter().find(|tag| !known.contains(&site.path(tag)));
        let tag = tag.unwrap_or_else(|| panic!("no new tag: {built}"));
        let module = published(&site, &tag, &site.path(&tag));
        assert_eq!(
            (modinfo(&module, "signer"), modinfo(&module, "sig_hashalgo")),
            (name.to_owned(), "sha256".to_owned())
        );
        verify(&module, &site.definitions().join(format!("{name}.crt")));
        names_certificate(&site, &tag, name);
        modules.push((fs::read(&module).unwrap(), tag));
    }
    let bare: Vec<&[u8]> = modules.iter().map(|(bytes, _)| without_signature(bytes).0).collect();
    assert!(bare[0] == bare[1] && modules[0].0 != modules[1].0);

    // The private keys appear in no log, layer or cache.
    let pem = fs::read_to_string(site.definitions().join("first.pem")).unwrap();
    let secret = pem.lines().nth(10).unwrap().as_bytes();
    let places = [site.cache(), site.path("home"), site.path("docker")];
    for place in places.iter().filter(|place| place.exists()) {
        for entry in walkdir::WalkDir::new(place).into_iter().map(Result::unwrap) {
            if entry.file_type().is_file() {
                let bytes = fs::read(entry.path()).unwrap();
                let found = bytes.windows(secret.len()).any(|window| window == secret);
                assert!(!found, "{} holds the key", entry.path().display());
            }
        }
    }
}

#[test]
fn what_is_wrong_with_a_key_is_said_before_anything_is_published() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["ours", "other"] {
        key(&site.definitions(), name, RSA);
    }
    openssl(&site.definitions(), "pkcs8 -topk8 -in ours.pem -passout pass:sesame -out locked.pem");
    fs::write(site.definitions().join("passphrase"), "open\n").unwrap();
    for (signing, message) in [
        ("{key: {file: ours.pem}, certificate: absent.crt}", "absent.crt"),
        ("{key: {file: ours.pem}, certificate: other.crt}", "does not belong to"),
        ("{key: {file: locked.pem}, certificate: ours.crt}", "no passphrase is named"),
        (
            "{key: {file: locked.pem}, passphrase: {file: passphrase}, certificate: ours.crt}",
            "the passphrase does not decrypt",
        ),
    ] {
        site.define(
            "site.yaml",
            &format!("apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: acme}}\nspec: {{moduleSigning: {signing}, imageSigning: {{key: {{file: ours.pem}}}}}}\n"),
        );
        let run = site.build("hello", &kernel, &["--push"]).exits(2);
        run.line(message);
        run.line("hint: ");
        assert_eq!(site.tags("hello"), [""; 0]);
    }
}

/// farrier does not sign modules in an image that the engine builds completely, and the run says so. Although the keys are in
/// the definitions directory, no key reaches the engine: the user's Dockerfile searches its whole context for one.
#[test]
fn an_image_that_the_engine_makes_whole() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    key(&site.definitions(), "ours", RSA);
    let pem = fs::read_to_string(site.definitions().join("ours.pem")).unwrap();
    let line = pem.lines().nth(10).unwrap();
    // A pattern that does not match its own text.
    let pattern = format!("[{}]{}", &line[..1], &line[1..]).replace('+', "[+]");
    site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: acme}\nspec:\n  \
         moduleSigning: {key: {file: ours.pem}, certificate: ours.crt}\n  imageSigning: {key: {file: ours.pem}}\n",
    );
    site.edit("images/hello.yaml", "template: kbuild", "template: own\n  output: image");
    site.define(
        "templates/own.Dockerfile.hbs",
        &format!(
            "FROM {{{{toolchain}}}} AS build\n\
             COPY . /context/\n\
             RUN test -e /context/sources/hello/Kbuild && ! grep -rE '{pattern}' /context\n\
             RUN make -C /lib/modules/{{{{kernel.release}}}}/build M=/context/sources/hello modules\n\
             FROM scratch\n\
             COPY --from=build /context/sources/hello/farrier_hello.ko \
             /opt/lib/modules/{{{{kernel.release}}}}/farrier_hello.ko\n\
             ENTRYPOINT [\"/own\"]\n"
        ),
    );
    let run = site.build("hello", &kernel, &["--push"]).exits(0);
    run.line("its modules are not signed: the engine makes the whole image (output: image)");
    let tag = site.tags("hello").remove(0);
    let image = site.inspect_raw(&format!("hello:{tag}"));
    assert!(image["annotations"]["farrier.dev/module-signer"].is_null(), "{image}");
}
