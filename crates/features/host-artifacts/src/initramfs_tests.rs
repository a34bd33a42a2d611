//! Archives of images that the pipeline published, as `cpio` reads them.

use std::{
    fs,
    process::{Command, Stdio},
};

use farrier_builder::testing::{Bench, K9, module};
use farrier_core::image::HostOutput;
use kmod::testing::ModuleFile;
use serde_json::json;

use crate::testing::make;

#[tokio::test]
async fn cpio_unpacks_what_loads_the_modules() {
    let bench = Bench::new(&json!({"modules": ["m", "a"]}));
    let user = ModuleFile::named("a").info("depends", "m,usbcore").needs("printk", 1);
    let built = bench.publish(K9, &[&module(), &user]).await.unwrap();
    let made = make(&bench, &built.digest, HostOutput::Initramfs).await.unwrap();
    let again = make(&bench, &built.digest, HostOutput::Initramfs).await.unwrap();
    assert_eq!(made, again);
    let manifest = String::from_utf8(made.manifest).unwrap();
    assert!(manifest.contains("\"x-modules-6.1.0-9-amd64_1.0_amd64.cpio.gz\""), "{manifest}");

    let root = tempfile::tempdir().unwrap();
    // As in an initramfs of dracut 106 with a merged /usr.
    for directory in ["usr/lib/dracut", "var/lib/dracut/hooks/pre-udev"] {
        fs::create_dir_all(root.path().join(directory)).unwrap();
    }
    for (target, link) in [("usr/lib", "lib"), ("../../../var/lib/dracut/hooks", "lib/dracut/hooks")] {
        std::os::unix::fs::symlink(target, root.path().join(link)).unwrap();
    }
    fs::write(root.path().join("x.gz"), &made.content).unwrap();
    let cpio = |options: &str| {
        let command = format!("gzip -dc x.gz | cpio --quiet {options}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &command]).current_dir(&root).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    // Unlike cpio, the kernel replaces a link by a directory.
    let listed = cpio("--list");
    assert!(listed.lines().all(|path| !["lib", "lib/dracut/hooks"].contains(&path)), "{listed}");
    cpio("--extract --unconditional");
    let directory = root.path().join("usr/lib/modules/6.1.0-9-amd64/updates/farrier-x/extra");
    assert!(fs::read(directory.join("m.ko")).unwrap() == module().build(), "the image's module");
    let script = |path| fs::read_to_string(root.path().join(path)).unwrap();
    let [initramfs_tools, dracut] =
        ["conf/conf.d/farrier-x", "var/lib/dracut/hooks/pre-udev/50-farrier-x.sh"].map(script);
    assert_eq!(initramfs_tools, dracut);
    assert!(
        listed.lines().any(|path| path == "lib/dracut/hooks/pre-udev/50-farrier-x.sh"),
        "before dracut 103"
    );
    assert_eq!(
        dracut,
        "read -r farrier_release < /proc/sys/kernel/osrelease\n\
         if [ \"$farrier_release\" = 6.1.0-9-amd64 ]; then\n    \
             command -v insmod >/dev/null || insmod() { kmod insmod \"$1\"; }\n    \
             modprobe -q usbcore\n    \
             insmod /lib/modules/6.1.0-9-amd64/updates/farrier-x/extra/m.ko\n    \
             insmod /lib/modules/6.1.0-9-amd64/updates/farrier-x/extra/a.ko\n\
         fi\n"
    );
}
