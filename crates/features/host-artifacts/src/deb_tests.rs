//! Packages of images that the pipeline published, as `dpkg-deb` reads them.

use std::{collections::BTreeSet, fs, path::Path, process::Command, sync::Arc};

use farrier_builder::{
    build_one,
    services::BuildError,
    testing::{Bench, K9, module},
};
use farrier_core::{
    facts::media_type,
    image::{Digest, HostOutput},
};
use farrier_signing::testing::{EC_256, OpensslDir};
use oci::Artifact;
use serde_json::json;

use super::*;
use crate::{
    HostArtifacts,
    testing::{bench_that_signs_modules, make, run},
};

async fn package(bench: &Bench, image: &Digest) -> Result<Artifact, BuildError> {
    make(bench, image, HostOutput::Deb).await
}

fn dpkg_deb(option: &str, package: &Path, to: &[&Path]) -> String {
    run(Command::new("dpkg-deb").arg(option).arg(package).args(to))
}

#[tokio::test]
async fn dpkg_reads_the_package() {
    let bench = Bench::new(&json!({}));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let made = package(&bench, &built.digest).await.unwrap();
    let root = tempfile::tempdir().unwrap();
    let (file, tree) = (root.path().join("x.deb"), root.path().join("tree"));
    fs::write(&file, &made.content).unwrap();
    let control = dpkg_deb("--field", &file, &[]);
    let (size, control): (Vec<&str>, Vec<&str>) =
        control.lines().partition(|line| line.starts_with("Installed-Size: "));
    assert_eq!(size, [format!("Installed-Size: {}", module().build().len() / 1024 + 1)]);
    let wanted = format!(
        "Package: x-modules-6.1.0-9-amd64\nVersion: 1.0\nArchitecture: amd64\nMaintainer: farrier\n\
         Depends: kmod, linux-image-6.1.0-9-amd64 | linux-image-unsigned-6.1.0-9-amd64 | \
         linux-image-6.1.0-9-amd64-unsigned\nProvides: x-modules (= 1.0)\nSection: kernel\nPriority: optional\n\
         Description: modules of x for Linux 6.1.0-9-amd64\n The same files as in the driver image {}.",
        built.digest
    );
    assert_eq!(control.join("\n"), wanted);
    dpkg_deb("--extract", &file, &[&tree]);
    let directory = tree.join("lib/modules/6.1.0-9-amd64/updates/farrier-x/extra");
    assert!(fs::read(directory.join("m.ko")).unwrap() == module().build(), "the image's module");
    let overrides = fs::read_to_string(tree.join("lib/depmod.d/farrier-x-6.1.0-9-amd64.conf")).unwrap();
    assert_eq!(overrides, "override m * updates/farrier-x/extra\n");
    // The payload's own modules.dep would replace the kernel's.
    assert!(!tree.join("lib/modules/6.1.0-9-amd64/modules.dep").exists());
    let manifest = String::from_utf8(made.manifest).unwrap();
    assert!(manifest.contains("\"x-modules-6.1.0-9-amd64_1.0_amd64.deb\""), "{manifest}");
}

#[tokio::test]
async fn the_same_image_gives_the_same_package_on_two_machines() {
    let (bench, mut other) = (Bench::new(&json!({})), Bench::new(&json!({})));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    other.services.images.registry = Arc::clone(&bench.services.images.registry);
    let packages = [package(&bench, &built.digest).await, package(&other, &built.digest).await];
    let [here, there] = packages.map(Result::unwrap);
    assert_eq!(here.digest, there.digest);
    assert!(here.content == there.content);
}

#[tokio::test]
async fn the_certificate_of_signed_modules_is_in_the_package() {
    let (mut bench, _keys) = bench_that_signs_modules();
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let made = package(&bench, &built.digest).await.unwrap();
    let root = tempfile::tempdir().unwrap();
    let (file, tree) = (root.path().join("x.deb"), root.path().join("tree"));
    fs::write(&file, &made.content).unwrap();
    dpkg_deb("--extract", &file, &[&tree]);
    let certificate = tree.join("usr/share/farrier/x/6.1.0-9-amd64/module-signing.der");
    let shown = run(Command::new("openssl")
        .args(["x509", "-inform", "DER", "-subject", "-noout", "-in"])
        .arg(certificate));
    assert!(shown.contains("Acme"), "{shown}");

    // Without the certificate, another package would have the same name.
    bench.services.tools.module_signer = None;
    let error = package(&bench, &built.digest).await.unwrap_err().to_string();
    assert!(error.contains("has modules signed with unknown certificate sha256:"), "{error}");
}

async fn listed(bench: &Bench, image: &Digest) -> Vec<Digest> {
    let repository = bench.services.images.location.repository("x").unwrap();
    let kind = Some(HostOutput::Deb.media_type());
    let found = bench.services.images.registry.referrers(&repository, image, kind).await.unwrap();
    found.into_iter().map(|found| found.digest).collect()
}

#[tokio::test]
async fn a_build_publishes_what_its_definition_asks_for() {
    let mut bench = Bench::new(&json!({"outputs": ["deb"]}));
    let error = bench.build(K9).await.unwrap_err().to_string();
    assert_eq!(error, "image x: this farrier cannot make outputs", "before anything is compiled");
    bench.services.tools.output_maker = Some(Arc::new(HostArtifacts));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let output = package(&bench, &built.digest).await.unwrap().digest;
    assert_eq!(listed(&bench, &built.digest).await, std::slice::from_ref(&output));
    let repository = bench.services.images.location.repository("x").unwrap();
    let registry = &bench.services.images.registry;
    let documents = registry.referrers(&repository, &output, None).await.unwrap();
    let kinds: BTreeSet<_> = documents.into_iter().filter_map(|document| document.artifact_type).collect();
    let wanted = [media_type::CYCLONEDX, media_type::SPDX, media_type::IN_TOTO].map(str::to_owned);
    assert_eq!(kinds, wanted.into());
}

/// A registry's writer may have published the image.
#[tokio::test]
async fn the_sites_key_signs_nothing_that_is_made_from_an_unsigned_image() {
    let keys = OpensslDir::new();
    keys.key(EC_256);
    let mut bench = Bench::new(&json!({}));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    bench.sign_images_with(&keys);
    bench.image().spec.outputs = [HostOutput::Deb].into();
    bench.services.tools.output_maker = Some(Arc::new(HostArtifacts));
    let (name, target) = ("x".parse().unwrap(), Bench::target(K9));
    let error = build_one(&bench.services, &name, &target, true, false).await.unwrap_err().to_string();
    assert!(error.contains("is not signed with a key of this site"), "{error}");
    assert_eq!(listed(&bench, &built.digest).await, []);
}

/// Writes a program that appends its name and arguments to the file `calls`.
fn recorder(directory: &Path, name: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let program = directory.join(name);
    fs::write(&program, format!("#!/bin/sh\necho {name} \"$@\" >> {}/calls\n", directory.display())).unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

/// dracut does not copy the initramfs to the boot partition.
#[test]
fn systemd_boot_gets_the_initramfs_of_dracut() {
    let root = tempfile::tempdir().unwrap();
    let place = root.path().display().to_string();
    fs::create_dir_all(root.path().join("lib/modules/6.1")).unwrap();
    fs::create_dir_all(root.path().join("boot")).unwrap();
    for file in ["lib/modules/6.1/modules.builtin", "boot/initrd.img-6.1"] {
        fs::write(root.path().join(file), "").unwrap();
    }
    let text = script("6.1", "configure").replace(" /boot", &format!(" {place}/boot"));
    let text = text.replace(" /lib", &format!(" {place}/lib"));
    let initramfs = format!("{place}/boot/initrd.img-6.1");
    let made = format!("depmod 6.1\ndracut --quiet --force {initramfs} 6.1\n");
    let copied = format!(
        "{made}bootctl is-installed --quiet\nkernel-install add 6.1 {place}/boot/vmlinuz-6.1 {initramfs}\n"
    );
    for (programs, expected) in
        [(&["depmod", "dracut"][..], &made), (&["depmod", "dracut", "bootctl", "kernel-install"], &copied)]
    {
        for name in programs {
            recorder(root.path(), name);
        }
        let mut shell = Command::new("/bin/sh");
        run(shell.args(["-c", &text, "sh", "configure"]).env("PATH", root.path()));
        assert_eq!(fs::read_to_string(root.path().join("calls")).unwrap(), *expected);
        fs::remove_file(root.path().join("calls")).unwrap();
    }
}

#[test]
fn the_flavor_of_a_release() {
    for (release, numbers, flavor) in [
        ("6.1.0-56-amd64", "6.1.0.56", "amd64"),
        ("6.1.0-56-cloud-amd64", "6.1.0.56", "cloud-amd64"),
        ("6.12.48+deb13-amd64", "6.12.48+deb13", "amd64"),
        ("6.1.0-0.deb11.5-amd64", "6.1.0.0.deb11.5", "amd64"),
    ] {
        assert_eq!(numbers_and_flavor(release), Some((numbers.to_owned(), flavor.to_owned())));
    }
    assert_eq!(numbers_and_flavor("6.1.192"), None);
}

/// The headers of these images are no Debian package.
#[tokio::test]
async fn a_meta_package_needs_the_version_of_the_kernel() {
    let bench = Bench::new(&json!({}));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let error = make(&bench, &built.digest, HostOutput::DebMeta).await.unwrap_err().to_string();
    assert!(error.contains("is for a kernel whose package or meta package is unknown"), "{error}");
}

#[test]
fn versions_are_debian_versions() {
    for (driver, package) in [
        ("25.10-1.2.8.0", "25.10-1.2.8.0"),
        ("580.95.05", "580.95.05"),
        ("4.33.0_1", "4.33.0.1"),
        ("v1.2", "0.v1.2"),
        ("main-", "0.main"),
        ("1:2", "1.2"),
    ] {
        assert_eq!(version(driver), package);
        let status = Command::new("dpkg").args(["--validate-version", package]).status().unwrap();
        assert!(status.success(), "{package}");
    }
}
