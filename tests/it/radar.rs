//! `farrier radar` with a real compiler and the headers of a real kernel.
use crate::support::{kernels, site::Site};

/// A driver for kernels before 6.1.0-53, whose function has an argument less.
const DRIVER: &str = r#"#include <linux/module.h>
#include <linux/pci.h>
int farrier_resize(struct pci_dev *dev);
int farrier_resize(struct pci_dev *dev)
{
	return pci_resize_resource(dev, 0, 0);
}
MODULE_LICENSE("GPL");
"#;
const OLD: &str = "int __must_check pci_resize_resource(struct pci_dev *dev, int i, int size)";
const NEW: &str =
    "int __must_check pci_resize_resource(struct pci_dev *dev, int i, int size, int exclude_bars)";

#[test]
fn the_header_change_behind_a_failed_build_is_named() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.stand_in_kernels();
    site.define("headers/6.1.0-901-amd64/include/linux/pci.h", &format!("{OLD};\n"));
    site.define("sources/hello/farrier_hello.c", DRIVER);
    let target = ["--kernel", "6.1.0-901-amd64", "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let radar = |more: &[&str]| {
        site.farrier(&[&["radar", "hello", "--engine", "sandbox"], &target[..], more].concat())
    };
    let run = radar(&["--next", &kernel, "-o", "json"]).exits(1);
    let build = &run.json()["builds"][0];
    assert_eq!((&build["kernel"], &build["builds"]), (&kernel.as_str().into(), &false.into()), "{run}");
    let change = serde_json::json!([
        {"function": "pci_resize_resource", "file": "include/linux/pci.h", "old": OLD, "new": NEW}
    ]);
    assert_eq!(build["changes"], change, "{run}");
    assert_eq!(build["patches"][0]["when"]["header"], "include/linux/pci.h", "{run}");
    let run = radar(&["--next", &kernel]).exits(1);
    for words in [
        "include/linux/pci.h changed pci_resize_resource:",
        OLD,
        NEW,
        "patches/hello-pci_resize_resource.patch",
    ] {
        assert!(run.stdout.contains(words), "{words}: {run}");
    }
    // No family knows the suites of a kernel whose headers are a directory.
    radar(&[])
        .exits(2)
        .line("the kernel family of 6.1.0-901-amd64 names no suites: give the kernels with --next");
    let hint =
        ["radar", "nonesuch", "--kernel", &kernel, "--os", "debian", "--os-version", "12", "--next", &kernel];
    site.farrier(&hint).exits(2).line("no driver image is named nonesuch");
}
