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
    // As in an initramfs with a merged /usr.
    fs::create_dir_all(root.path().join("usr/lib")).unwrap();
    std::os::unix::fs::symlink("usr/lib", root.path().join("lib")).unwrap();
    fs::write(root.path().join("x.gz"), &made.content).unwrap();
    let unpack = "gzip -dc x.gz | cpio --extract --quiet";
    let output =
        Command::new("sh").args(["-c", unpack]).current_dir(&root).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let directory = root.path().join("usr/lib/modules/6.1.0-9-amd64/updates/farrier-x/extra");
    assert!(fs::read(directory.join("m.ko")).unwrap() == module().build(), "the image's module");
    let script = |path| fs::read_to_string(root.path().join(path)).unwrap();
    let [initramfs_tools, dracut] =
        ["conf/conf.d/farrier-x", "lib/dracut/hooks/pre-udev/50-farrier-x.sh"].map(script);
    assert_eq!(initramfs_tools, dracut);
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
