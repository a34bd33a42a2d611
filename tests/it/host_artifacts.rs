//! Packages for hosts: published beside images, signed, carried, fetched, and installed by a real `dpkg`.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use farrier_core::image::Digest;
use serde_json::Value;

use crate::{
    signatures::{P256, SIGNING, key, pinned, site_yaml},
    support::{
        as_root,
        cosign::{Cosign, THREE, TWO},
        kept, kernels,
        packages::{apt_cache, image_package, run, unpacked},
        site::{self, Run, Site},
    },
};

const DEB: &str = "application/vnd.farrier.deb.v1";
/// Documents of an output, as `cosign` names their types.
const DOCUMENT_TYPES: [&str; 3] = ["cyclonedx", "spdxjson", "slsaprovenance1"];
const MODULES: &str = "  modules: [farrier_hello]\n";

fn ask_for(site: &Site, outputs: &str) {
    site.edit("images/hello.yaml", MODULES, &format!("{MODULES}  outputs: {outputs}\n"));
}

/// Returns the types and digests of the referrers of an image or output.
fn beside(site: &Site, digest: &str) -> BTreeSet<(String, String)> {
    let listed = site.inspect_raw(&format!("hello:{}", digest.replace(':', "-")));
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let referrers = listed["manifests"].as_array().unwrap().iter();
    referrers.map(|one| (text(one, "artifactType"), text(one, "digest"))).collect()
}

/// Returns the packages of an image: their manifests' digests.
fn published(site: &Site, image: &str) -> Vec<String> {
    let listed = beside(site, image.split_once('@').unwrap().1);
    listed.into_iter().filter(|(kind, _)| kind == DEB).map(|(_, digest)| digest).collect()
}

/// Runs `farrier pull` for the kernel, with the file `x.deb` of the site as its target.
fn pull(site: &Site, kernel: &str, args: &[&str]) -> (Run, PathBuf) {
    pull_output(site, "deb", kernel, args)
}

fn pull_output(site: &Site, output: &str, kernel: &str, args: &[&str]) -> (Run, PathBuf) {
    let file = site.path("x.deb");
    let words = ["pull", output, "hello", "--kernel", kernel, "--arch", "amd64", "-o", "json"];
    let run = site.farrier(&[&words[..], &["--to", file.to_str().unwrap()], args].concat());
    (run, file)
}

#[test]
fn a_package_is_published_signed_carried_and_fetched() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["site", "other"] {
        key(&site, name, P256);
    }
    site_yaml(&site, SIGNING);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    // An older image has no package: farrier makes it from the image.
    let (run, file) = pull(&site, &kernel, &[]);
    let made = run.exits(0).json();
    assert_eq!((&made["published"], &made["verified"]), (&false.into(), &true.into()), "{made}");
    let content = fs::read(&file).unwrap();
    assert_eq!(made["digest"], Digest::of(&content).as_str());

    ask_for(&site, "[deb]");
    let built = site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    assert_eq!(built["outcome"], "up-to-date", "outputs change no input hash");
    let packages = published(&site, &image);
    assert_eq!(packages, [made["artifact"].as_str().unwrap()]);
    fs::remove_file(&file).unwrap();
    let pem = |name: &str| site.definitions().join(format!("{name}.pem")).display().to_string();
    let (run, _) = pull(&site, &kernel, &["--key", &pem("site")]);
    let fetched = run.exits(0).json();
    assert_eq!((&fetched["published"], &fetched["digest"]), (&true.into(), &made["digest"]), "{fetched}");
    assert!(fs::read(&file).unwrap() == content);

    // The modules are the image's.
    let (tree, layers) = (tempfile::tempdir().unwrap(), site::unpacked(&image));
    run_dpkg_deb(&file, tree.path());
    let modules = format!("lib/modules/{kernel}");
    let of_image = layers.path().join("tree").join(&modules).join("extra/farrier_hello.ko");
    let of_package = tree.path().join(&modules).join("updates/farrier-hello/extra/farrier_hello.ko");
    assert!(fs::read(of_image).unwrap() == fs::read(of_package).unwrap());

    // cosign accepts the package's signature and documents; farrier refuses another key, and a package that anyone pushed.
    let home = site.path("home");
    fs::create_dir_all(&home).unwrap();
    let package = format!("{}/hello@{}", site.location, packages[0]);
    for version in [&TWO, &THREE] {
        let cosign = Cosign::of(version, &home);
        cosign.accepts(&["verify", "--key", &pem("site"), &package]);
        for kind in DOCUMENT_TYPES {
            cosign.accepts(&["verify-attestation", "--key", &pem("site"), "--type", kind, &package]);
        }
    }
    let listed = beside(&site, &packages[0]);
    for kind in ["application/vnd.cyclonedx+json", "application/spdx+json", "application/vnd.in-toto+json"] {
        assert_eq!(listed.iter().filter(|(found, _)| found == kind).count(), 1, "{kind}: {listed:?}");
    }
    let (run, _) = pull(&site, &kernel, &["--key", &pem("other")]);
    run.exits(1).line("has no deb with an accepted signature");
    let (run, _) = pull(&site, &kernel, &["--insecure-no-signature"]);
    assert_eq!(run.exits(0).json()["verified"], false);

    // A bundle carries the package with its signature and documents.
    let to = Site::new();
    let bundle = site.path("site.bundle").display().to_string();
    let reference = format!("hello:1.0-{kernel}-debian12-amd64");
    site.farrier(&["bundle", "export", "--reference", &reference, "--to", &bundle]).exits(0);
    to.farrier(&["bundle", "import", "--key", &pem("site"), &bundle]).exits(0);
    let (run, file) = pull(&to, &kernel, &["--key", &pem("site")]);
    assert_eq!(run.exits(0).json()["published"], true);
    assert!(fs::read(file).unwrap() == content);
    assert_eq!(beside(&to, &packages[0]), listed);

    // A second publication adds nothing, and garbage collection takes nothing.
    site.build("hello", &kernel, &["--push"]).exits(0);
    assert_eq!(beside(&site, &packages[0]), listed);
    let collected = site.farrier(&["gc", "--delete", "-o", "json"]).exits(0).json();
    assert_eq!(collected["leftovers"], serde_json::json!([]), "{collected}");
    assert_eq!(beside(&site, &packages[0]), listed);

    // After a rotation, the new key signs the package and its documents, too.
    key(&site, "new", P256);
    site_yaml(
        &site,
        "  imageSigning: {key: {file: new.key}}\n  policy: {requireSigned: {atLeast: 1, keys: [site.pem, new.pem]}}\n",
    );
    site.farrier(&["rotate"]).exits(0);
    let (run, _) = pull(&site, &kernel, &["--key", &pem("new")]);
    assert_eq!(run.exits(0).json()["published"], true);
    for kind in DOCUMENT_TYPES {
        let words = ["verify-attestation", "--key", &pem("new"), "--type", kind, &package];
        Cosign::of(&THREE, &home).accepts(&words);
    }
}

/// A host keeps an extension with its signatures, and verifies both at each boot.
#[test]
fn a_stored_extension_is_verified_without_the_registry() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    for name in ["site", "other"] {
        key(&site, name, P256);
    }
    site_yaml(&site, SIGNING);
    let store = site.path("store").display().to_string();
    let from_store = format!("oci:{store}");
    let file = site.path("x.raw");
    let pull = |key: &str, options: &[&str]| {
        let (key, file) = (site.definitions().join(format!("{key}.pem")), file.to_str().unwrap().to_owned());
        let words =
            ["pull", "sysext", "hello", "--kernel", &kernel, "--arch", "amd64", "-o", "json", "--to", &file];
        site.farrier(&[&words[..], &["--key", key.to_str().unwrap()], options].concat())
    };
    site.build("hello", &kernel, &["--push"]).exits(0);
    let refused = pull("site", &["--store", &store]).exits(1);
    refused.line("has none in the registry to store");
    refused.line("hint: publish it");
    ask_for(&site, "[sysext]");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let published = pull("site", &["--store", &store]).exits(0).json();
    let content = fs::read(&file).unwrap();

    let stored = pull("site", &["--registry", &from_store, "--offline"]).exits(0).json();
    assert_eq!((&stored["digest"], &stored["verified"]), (&published["digest"], &true.into()));
    assert!(fs::read(&file).unwrap() == content);
    pull("other", &["--registry", &from_store]).exits(1).line("has no sysext with an accepted signature");

    let digest = published["digest"].as_str().unwrap().trim_start_matches("sha256:");
    let blob = site.path("store").join("blobs/sha256").join(digest);
    // A host links the extension: the link is verified in place, and never written through.
    fs::remove_file(&file).unwrap();
    fs::hard_link(&blob, &file).unwrap();
    pull("site", &["--registry", &from_store]).exits(0);
    let mut altered = content;
    altered[1 << 20] ^= 1;
    fs::write(&blob, altered).unwrap();
    let altered = pull("site", &["--registry", &from_store]);
    assert_ne!(altered.code, Some(0), "an altered extension: {altered}");
}

/// A tag and the annotations of an image's manifest are not signed: a signed output of another kernel stays one of that kernel.
#[test]
fn a_signed_output_for_another_kernel_is_refused() {
    let kernels::Kernels { older, newer } = kernels::newest();
    let site = Site::new();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    ask_for(&site, "[sysext]");
    site.build("hello", &older, &["--push"]).exits(0);
    let image = pinned(&site, &older);
    let image = site.inspect_raw(image.rsplit_once('/').unwrap().1);
    let pem = site.definitions().join("site.pem").display().to_string();
    let (run, file) = pull_output(&site, "sysext", &older, &["--key", &pem]);
    let fetched = run.exits(0).json();
    let title = format!("farrier-hello-{older}.raw");
    fs::remove_file(&file).unwrap();
    // An attacker who may push gives the image's manifest the annotation of the newer kernel, and makes it name the image.
    let mut relabeled = image.clone();
    relabeled["artifactType"] = "application/vnd.farrier.sysext.v1".into();
    relabeled["annotations"]["farrier.dev/kernel-release"] = newer.clone().into();
    let digest = fetched["image"].as_str().unwrap().split_once('@').unwrap().1;
    let length = image.to_string().len();
    relabeled["subject"] =
        serde_json::json!({"mediaType": image["mediaType"], "digest": digest, "size": length});
    let (host, path) = site.location.split_once('/').unwrap();
    let body = site.path("relabeled.json");
    fs::write(&body, relabeled.to_string()).unwrap();
    let kind = format!("content-type: {}", image["mediaType"].as_str().unwrap());
    let url = format!("http://{host}/v2/{path}/hello/manifests/relabeled");
    let body = format!("@{}", body.display());
    run_curl(&["--request", "PUT", "--header", &kind, "--data-binary", &body, &url]);

    let (run, file) = pull_output(&site, "sysext", &newer, &["--key", &pem]);
    run.exits(1).line(&format!("it is {title}"));
    assert!(!file.exists());
}

fn run_curl(words: &[&str]) {
    run(Command::new("curl").args(["--fail", "--silent", "--show-error"]).args(words));
}

/// A file that has the output's bytes stays as it is, so that a host verifies a link to its store and needs no space for a copy.
#[test]
fn of_two_versions_the_newest_is_pulled_and_a_current_file_stays() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.build("hello", &kernel, &["--push"]).exits(0);
    site.edit("images/hello.yaml", "version: \"1.0\"", "version: \"1.10\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    site.edit("images/hello.yaml", "version: \"1.10\"", "version: \"1.9\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let pull = || pull(&site, &kernel, &["--insecure-no-signature"]);
    let (run, file) = pull();
    let newest = format!("/hello:1.10-{kernel}-debian12-amd64");
    let digest = run.exits(0).json()["image"].as_str().unwrap().split_once('@').unwrap().1.to_owned();
    assert_eq!(site.inspect(newest.trim_start_matches('/'))["Digest"], digest.as_str());
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&file).unwrap());
    let before = inode();
    ask_for(&site, "[deb]");
    site.edit("images/hello.yaml", "version: \"1.9\"", "version: \"1.10\"");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let (run, _) = pull();
    assert_eq!(run.exits(0).json()["published"], true);
    assert_eq!(inode(), before, "the published output has the same bytes");
    fs::write(&file, "other").unwrap();
    pull().0.exits(0);
    assert_ne!(fs::read(&file).unwrap(), b"other");
}

fn run_dpkg_deb(package: &Path, tree: &Path) {
    run(Command::new("dpkg-deb").arg("--extract").args([package, tree]));
}

#[test]
fn what_cannot_be_pulled() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let (run, _) = pull(&site, &kernel, &["--insecure-no-signature"]);
    run.exits(1).line("has no image for kernel");
    let words = ["pull", "deb", "hello", "--insecure-no-signature"];
    site.farrier(&words).exits(2).line("hint: give NAME:TAG");
    let (run, _) = pull(&site, &kernel, &[]);
    run.exits(2).line("no key to verify the image with");
}

/// A Debian package that makes a kernel's initramfs.
#[derive(Clone, Copy, strum::Display)]
#[strum(serialize_all = "kebab-case")]
enum Generator {
    InitramfsTools,
    Dracut,
}

impl Generator {
    fn packages(self) -> &'static str {
        match self {
            Self::InitramfsTools => "initramfs-tools",
            // dracut puts systemd into an initramfs if the host has it.
            Self::Dracut => "dracut,systemd",
        }
    }

    /// Returns the command that makes the initramfs of a kernel.
    fn command(self, kernel: &str) -> String {
        match self {
            Self::InitramfsTools => format!("update-initramfs -c -k {kernel}"),
            Self::Dracut => format!("dracut --quiet --force /boot/initrd.img-{kernel} {kernel}"),
        }
    }

    /// Returns the command that adds a module to each new initramfs.
    fn add_module(self) -> &'static str {
        match self {
            Self::InitramfsTools => "echo farrier_hello >> /etc/initramfs-tools/modules",
            Self::Dracut => "echo 'force_drivers+=\" farrier_hello \"' > /etc/dracut.conf.d/hello.conf",
        }
    }

    /// Returns the program that lists an initramfs.
    fn list(self) -> &'static str {
        match self {
            Self::InitramfsTools => "lsinitramfs",
            Self::Dracut => "lsinitrd",
        }
    }

    /// Returns the path of a script that the initramfs runs after the one of the output.
    fn hook(self) -> &'static str {
        match self {
            Self::InitramfsTools => "conf/conf.d/report",
            Self::Dracut => "lib/dracut/hooks/pre-udev/99-report.sh",
        }
    }
}

/// A root file system of Debian 12 with a kernel's package, removed on drop.
struct Root {
    directory: tempfile::TempDir,
    generator: Generator,
}

impl Root {
    /// Copies a root file system that all tests share, and installs a package with the kernel's indexes and some of its modules.
    fn new(kernel: &str, generator: Generator) -> Self {
        let base = kept("host-root");
        let lock = fs::File::create(base.join("lock")).unwrap();
        lock.lock().unwrap();
        let shared = base.join(format!("bookworm-{generator}"));
        if !shared.exists() {
            let made = base.join("new");
            run(as_root("rm").arg("-rf").arg(&made));
            let packages = format!("--include=kmod,{}", generator.packages());
            run(as_root("mmdebstrap").args(["--variant=apt", &packages, "bookworm"]).arg(&made));
            run(as_root("mv").args([&made, &shared]));
        }
        drop(lock);
        let root = Self { directory: tempfile::tempdir().unwrap(), generator };
        run(as_root("cp").arg("-a").arg(&shared).arg(root.path("")));
        root.install_kernel(kernel);
        root
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("root").join(name)
    }

    fn run(&self, words: &[&str]) -> String {
        run(as_root("chroot").arg(self.path("")).args(words).env("DEBIAN_FRONTEND", "noninteractive"))
    }

    /// Writes a package without content into the root's repository.
    fn package(&self, name: &str, fields: &str, tree: &Path) {
        let control = tree.join("DEBIAN/control");
        fs::create_dir_all(control.parent().unwrap()).unwrap();
        let text = format!("Package: {name}\nArchitecture: amd64\nMaintainer: x\nDescription: x\n{fields}\n");
        fs::write(control, text).unwrap();
        run(as_root("mkdir").arg("-p").arg(self.path("repo")));
        run(as_root("dpkg-deb")
            .args(["-Zgzip", "--build"])
            .arg(tree)
            .arg(self.path(&format!("repo/{name}.deb"))));
    }

    /// Makes the packages in the root's repository the only ones that apt knows.
    fn update_lists(&self) {
        let list = "for package in /repo/*.deb; do dpkg-deb --field $package; echo Filename: ${package#/repo/}; \
                    stat --format 'Size: %s' $package; echo SHA256: $(sha256sum < $package | cut -d' ' -f1); echo; done";
        let update = format!(
            "({list}) > /repo/Packages && rm -f /etc/apt/sources.list.d/* && \
             echo 'deb [trusted=yes] file:/repo ./' > /etc/apt/sources.list && apt-get update"
        );
        self.run(&["sh", "-c", &update]);
    }

    fn simulate(&self, upgrade: &[&str]) -> String {
        self.run(&[&["apt-get", "--simulate"], upgrade].concat())
    }

    fn install_kernel(&self, kernel: &str) {
        let (real, tree) = (unpacked(&image_package(&kernel.parse().unwrap())), tempfile::tempdir().unwrap());
        let modules = format!("lib/modules/{kernel}");
        let indexes =
            ["modules.builtin", "modules.builtin.modinfo", "modules.order", "kernel/drivers/net/dummy.ko"];
        let files = indexes.iter().map(|name| format!("{modules}/{name}"));
        for file in files.chain([format!("boot/config-{kernel}")]) {
            let place = tree.path().join(&file);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::copy(real.join(&file), place).unwrap();
        }
        self.package(&format!("linux-image-{kernel}"), "Version: 1", tree.path());
        self.run(&["dpkg", "--install", &format!("/repo/linux-image-{kernel}.deb")]);
        self.run(&["depmod", kernel]);
        self.run(&["sh", "-c", &self.generator.command(kernel)]);
    }

    /// Returns the file that modprobe loads as `farrier_hello`.
    fn module(&self, kernel: &str) -> String {
        let said = self.run(&["modprobe", "--show-depends", "--set-version", kernel, "farrier_hello"]);
        said.trim().strip_prefix("insmod ").unwrap().to_owned()
    }

    /// Returns the modules named `farrier_hello` in the initramfs.
    fn in_initramfs(&self, kernel: &str) -> Vec<String> {
        let listed = self.run(&[self.generator.list(), &format!("/boot/initrd.img-{kernel}")]);
        let paths = listed.lines().filter_map(|line| line.split_whitespace().last());
        paths.filter(|path| path.ends_with("farrier_hello.ko")).map(str::to_owned).collect()
    }

    /// Returns all files with their checksums, except for logs and what dpkg, apt and an initramfs's creation leave.
    fn files(&self) -> String {
        let script = "cd / && find . -xdev \\( -path ./var -o -path ./proc -o -path ./sys -o -name 'initrd.img-*' \
                      -o -name 'x.deb' \\) -prune -o \\( -type f -exec sha256sum {} + -o -print \\) | sort";
        self.run(&["sh", "-c", script])
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        run(as_root("rm").arg("-rf").arg(self.path("")));
    }
}

#[test]
fn apt_installs_and_removes_the_package_without_a_trace() {
    install_and_remove(Generator::InitramfsTools);
}

#[test]
fn apt_installs_and_removes_the_package_on_a_host_with_dracut() {
    install_and_remove(Generator::Dracut);
}

fn install_and_remove(generator: Generator) {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    ask_for(&site, "[deb]");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let (pulled, file) = pull(&site, &kernel, &["--insecure-no-signature"]);
    pulled.exits(0);
    let root = Root::new(&kernel, generator);
    let (directory, package) = (format!("/lib/modules/{kernel}/updates"), format!("hello-modules-{kernel}"));
    let own = format!("{directory}/farrier-hello/extra/farrier_hello.ko");
    // The module is wanted in the initramfs. DKMS left one of the same name.
    let dkms = format!("{directory}/dkms/farrier_hello.ko");
    let (tree, dkms_place) = (tempfile::tempdir().unwrap(), root.path(dkms.trim_start_matches('/')));
    run_dpkg_deb(&file, tree.path());
    run(as_root("install").arg("-D").arg(tree.path().join(own.trim_start_matches('/'))).arg(dkms_place));
    root.run(&["sh", "-c", generator.add_module()]);
    root.run(&["depmod", &kernel]);
    root.run(&["sh", "-c", &generator.command(&kernel)]);
    let before = root.files();
    assert_eq!(root.module(&kernel), dkms);

    run(as_root("cp").arg(&file).arg(root.path("x.deb")));
    root.run(&["apt-get", "install", "--yes", "/x.deb"]);
    assert_eq!(root.module(&kernel), own);
    assert_eq!(root.in_initramfs(&kernel), [format!("usr{own}")]);
    assert_eq!(root.run(&["dpkg", "--verify", &package]), "");
    assert_ne!(root.files(), before);

    // apt protects the modules of a kernel that it protects.
    root.run(&["apt-mark", "auto", &package]);
    let removed = root.run(&["apt-get", "--simulate", "autoremove"]);
    assert!(!removed.contains(&package), "{removed}");

    root.run(&["apt-get", "purge", "--yes", &package]);
    assert_eq!(root.module(&kernel), dkms);
    assert_eq!(root.in_initramfs(&kernel), [format!("usr{dkms}")]);
    assert_eq!(root.files(), before);

    // Together with the kernel, nothing of it stays.
    root.run(&["apt-get", "install", "--yes", "/x.deb"]);
    root.run(&["apt-get", "purge", "--yes", &format!("linux-image-{kernel}")]);
    let left = root.files();
    assert!(!left.contains("farrier-hello"), "{left}");
}

/// A kernel's meta package brings the next kernel, for which there is no package with modules yet.
#[test]
fn a_new_kernel_comes_without_its_modules_unless_it_is_held() {
    let kernel = kernels::newest().older;
    let site = Site::new();
    ask_for(&site, "[deb]");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let (pulled, file) = pull(&site, &kernel, &["--insecure-no-signature"]);
    pulled.exits(0);
    let root = Root::new(&kernel, Generator::InitramfsTools);
    let tree = tempfile::tempdir().unwrap();
    let meta = |version: &str, needs: &str| {
        let fields = format!("Version: {version}\nDepends: linux-image-{needs}");
        root.package("linux-image-amd64", &fields, tree.path());
    };
    meta("1", &kernel);
    root.run(&["dpkg", "--install", "/repo/linux-image-amd64.deb"]);
    run(as_root("cp").arg(&file).arg(root.path("x.deb")));
    root.run(&["apt-get", "install", "--yes", "/x.deb"]);
    root.package("linux-image-6.1.0-999-amd64", "Version: 1", tree.path());
    meta("2", "6.1.0-999-amd64");
    root.update_lists();
    for upgrade in UPGRADES {
        let said = root.simulate(upgrade);
        assert!(said.contains("Inst linux-image-6.1.0-999-amd64"), "{said}");
        assert!(!said.contains("Remv"), "{said}");
    }
    root.run(&["apt-mark", "hold", "linux-image-amd64"]);
    for upgrade in UPGRADES {
        let said = root.simulate(upgrade);
        assert!(!said.contains("Inst "), "{said}");
    }
}

/// `apt upgrade` and `apt full-upgrade`.
const UPGRADES: [&[&str]; 2] = [&["upgrade", "--with-new-pkgs"], &["dist-upgrade"]];

/// The meta package of the older kernel's modules is installed, and the kernel's meta package would bring the newer kernel.
#[test]
fn a_meta_package_keeps_a_new_kernel_back_until_it_has_modules() {
    let kernels = kernels::newest();
    let site = Site::new();
    ask_for(&site, "[deb, deb-meta]");
    let root = Root::new(&kernels.older, Generator::InitramfsTools);
    let publish = |kernel: &str| {
        site.build("hello", kernel, &["--push"]).exits(0);
        for (output, name) in
            [("deb", format!("hello-modules-{kernel}")), ("deb-meta", format!("meta-{kernel}"))]
        {
            let (pulled, file) = pull_output(&site, output, kernel, &["--insecure-no-signature"]);
            assert_eq!(pulled.exits(0).json()["published"], true);
            run(as_root("mkdir").arg("-p").arg(root.path("repo")));
            run(as_root("cp").arg(file).arg(root.path(&format!("repo/{name}.deb"))));
        }
    };
    let tree = tempfile::tempdir().unwrap();
    // As Debian publishes them: the meta package has the version of the kernel.
    let kernel_meta = |kernel: &str| {
        let shown = apt_cache(&["show", "--no-all-versions", &image_package(&kernel.parse().unwrap())]);
        let version = shown.lines().find(|line| line.starts_with("Version: ")).unwrap();
        let fields = format!("{version}\nDepends: linux-image-{kernel}");
        root.package("linux-image-amd64", &fields, tree.path());
    };
    publish(&kernels.older);
    kernel_meta(&kernels.older);
    root.update_lists();
    let before = root.files();
    root.run(&["apt-get", "install", "--yes", "hello-modules-amd64"]);
    assert!(root.module(&kernels.older).contains("/updates/farrier-hello/"));
    root.run(&["apt-get", "purge", "--yes", "--autoremove", "hello-modules-amd64", "linux-image-amd64"]);
    root.run(&["apt-get", "purge", "--yes", &format!("hello-modules-{}", kernels.older)]);
    assert_eq!(root.files(), before);
    root.run(&["apt-get", "install", "--yes", "hello-modules-amd64"]);

    root.package(&format!("linux-image-{}", kernels.newer), "Version: 1", tree.path());
    kernel_meta(&kernels.newer);
    root.update_lists();
    let [upgrade, full_upgrade] = UPGRADES;
    let said = root.simulate(upgrade);
    assert!(said.contains("kept back") && !said.contains("Inst "), "{said}");
    let said = root.simulate(full_upgrade);
    assert!(said.contains("Remv hello-modules-amd64"), "{said}");

    publish(&kernels.newer);
    root.update_lists();
    for upgrade in UPGRADES {
        let said = root.simulate(upgrade);
        for package in [format!("linux-image-{}", kernels.newer), format!("hello-modules-{}", kernels.newer)]
        {
            assert!(said.contains(&format!("Inst {package} ")), "{said}");
        }
        assert!(!said.contains("Remv"), "{said}");
    }
}

#[test]
fn a_kernel_loads_the_modules_of_an_archive_after_an_initramfs_of_initramfs_tools() {
    boot_with_archive(Generator::InitramfsTools);
}

#[test]
fn a_kernel_loads_the_modules_of_an_archive_after_an_initramfs_of_dracut() {
    boot_with_archive(Generator::Dracut);
}

fn boot_with_archive(generator: Generator) {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    ask_for(&site, "[deb, initramfs]");
    site.build("hello", &kernel, &["--push"]).exits(0);
    let archive = site.path("hello.cpio.gz");
    let words = ["pull", "initramfs", "hello", "--kernel", &kernel, "--arch", "amd64"];
    let to = ["--insecure-no-signature", "--to", archive.to_str().unwrap()];
    site.farrier(&[&words[..], &to].concat()).exits(0).line("published with");

    let root = Root::new(&kernel, generator);
    let report = generator.hook();
    fs::create_dir_all(site.path(report).parent().unwrap()).unwrap();
    // An initramfs of dracut has neither cat nor poweroff, and its hooks write to the journal.
    let script = "{ echo BEGIN; while read -r line; do echo \"$line\"; done < /proc/modules; echo END; } > /dev/console; \
                  echo o > /proc/sysrq-trigger; sleep 60\n";
    fs::write(site.path(report), script).unwrap();
    let join = format!(
        "(cat '{}' '{}'; echo {report} | cpio --create --quiet --format newc | gzip) > initrd",
        root.path(&format!("boot/initrd.img-{kernel}")).display(),
        archive.display(),
    );
    run(Command::new("sh").args(["-c", &join]).current_dir(site.path("")));
    let vmlinuz = unpacked(&image_package(&kernel.parse().unwrap())).join(format!("boot/vmlinuz-{kernel}"));
    let machine =
        ["-accel", "tcg", "-m", "512", "-nographic", "-no-reboot", "-append", "console=ttyS0 quiet"];
    let said = run(Command::new("qemu-system-x86_64")
        .args(machine)
        .arg("-kernel")
        .arg(vmlinuz)
        .arg("-initrd")
        .arg(site.path("initrd"))
        .stdin(Stdio::null()));
    let loaded = said.split_once("BEGIN").and_then(|(_, after)| after.split_once("END"));
    let (loaded, _) = loaded.unwrap_or_else(|| panic!("{said}"));
    assert!(loaded.lines().any(|line| line.starts_with("farrier_hello ")), "{said}");
}
