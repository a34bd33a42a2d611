//! Packages for hosts, installed by real `apt` and `dpkg`, and archives that a kernel boots.
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::support::{
    as_root, kept, kernels,
    packages::{apt_cache, image_package, run, unpacked},
    site::Site,
};

mod pull;

use pull::{ask_for, pull, pull_output, run_dpkg_deb};

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
