//! The program `kmodcheck`, on a header set and modules that the tests make.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use kmod::testing::ModuleFile;
use liblzma::stream::{Check, Stream};

const CONFIG: &str = "CONFIG_MODULES=y\nCONFIG_X86_64=y\nCONFIG_SMP=y\nCONFIG_PREEMPT_BUILD=y\nCONFIG_MODULE_UNLOAD=y\nCONFIG_MODVERSIONS=y\n";
const SYMBOLS: &str =
    "0x0000aaaa\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t\n0x00000001\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";

/// Directory with a header set and modules.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        bench.write(
            "6.1.0-9-amd64/build/include/generated/utsrelease.h",
            b"#define UTS_RELEASE \"6.1.0-9-amd64\"\n",
        );
        bench.write("6.1.0-9-amd64/build/include/config/auto.conf", CONFIG.as_bytes());
        bench.write("6.1.0-9-amd64/build/Module.symvers", SYMBOLS.as_bytes());
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Runs the program in the directory.
    fn run(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kmodcheck")).args(words).current_dir(&self.0).output().unwrap()
    }

    fn check(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.run(&[&["--headers", "6.1.0-9-amd64/build"], words].concat());
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    liblzma::read::XzEncoder::new(bytes, 1).read_to_end(&mut out).unwrap();
    out
}

#[test]
fn the_exit_status_follows_the_verdict() {
    let bench = Bench::new();
    let fits = ModuleFile::named("fits").needs("printk", 1).build();
    bench.write("fits.ko", &fits);
    bench.write("fits.ko.xz", &xz(&fits));
    bench.write("fits.ko.zst", &zstd::encode_all(&fits[..], 1).unwrap());
    bench.write("cut.ko.xz", &xz(&fits)[..80]);
    bench.write("other.ko", &ModuleFile::named("other").needs("printk", 2).build());
    for name in ["fits.ko", "fits.ko.xz", "fits.ko.zst"] {
        let (status, said) = bench.check(&[name]);
        assert_eq!(status, Some(0), "{said}");
        assert_eq!(said, "payload on 6.1.0-9-amd64 (amd64): loads\nMODULE  VERDICT  REASON\nfits    loads\n");
    }
    let (status, said) = bench.check(&["other.ko"]);
    assert_eq!(status, Some(1), "{said}");
    insta::assert_snapshot!(said);
    let (status, said) = bench.check(&["cut.ko.xz"]);
    assert!(status == Some(1) && said.contains("refused[elf]: cannot decompress the module: "), "{said}");
}

#[test]
fn kernels_decompress_only_xz_files_with_crc32() {
    let bench = Bench::new();
    let is_warned_of = |file: &str| {
        let (status, said) = bench.check(&[file]);
        assert_eq!(status, Some(0), "{said}");
        said.contains("warning[kernel]: the kernel cannot decompress the xz file")
    };
    let module = ModuleFile::named("m").build();
    bench.write("crc64.ko.xz", &xz(&module));
    let stream = Stream::new_easy_encoder(1, Check::Crc32).unwrap();
    let mut crc32 = Vec::new();
    liblzma::read::XzEncoder::new_stream(&module[..], stream).read_to_end(&mut crc32).unwrap();
    bench.write("crc32.ko.xz", &crc32);
    assert!(!is_warned_of("crc64.ko.xz"));
    let config = format!("{CONFIG}CONFIG_MODULE_DECOMPRESS=y\nCONFIG_MODULE_COMPRESS_XZ=y\n");
    bench.write("6.1.0-9-amd64/build/include/config/auto.conf", config.as_bytes());
    assert!(is_warned_of("crc64.ko.xz") && !is_warned_of("crc32.ko.xz"));
}

#[test]
fn the_report_as_json_is_that_of_the_library() {
    let bench = Bench::new();
    bench.write("other.ko", &ModuleFile::named("other").needs("printk", 2).build());
    let (status, said) = bench.check(&["--json", "other.ko"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((status, &report["modules"][0]["findings"][0]["errno"]), (Some(1), &"EINVAL".into()));
}

/// Headers that several kernels share, such as `vermagic.h`, are in a source tree beside the build tree.
#[test]
fn the_source_tree_beside_the_build_tree_is_read() {
    let bench = Bench::new();
    let source = "6.1.0-9-amd64/source";
    bench.write(&format!("{source}/arch/x86/include/asm/vermagic.h"), b"");
    let header = b"#define VERMAGIC_STRING UTS_RELEASE \" vendor \"\n";
    bench.write(&format!("{source}/include/linux/vermagic.h"), header);
    bench.write("m.ko", &ModuleFile::named("m").build());
    let (status, said) = bench.check(&["m.ko"]);
    assert!(status == Some(1) && said.contains("refused[vermagic]: "), "{said}");
    bench.write("m.ko", &ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 vendor ").build());
    assert_eq!(bench.check(&["m.ko"]).0, Some(0));
}

#[test]
fn a_kernel_image_of_another_kernel_is_an_error() {
    let bench = Bench::new();
    bench.write("m.ko", &ModuleFile::named("m").build());
    let image = |banner: &str| {
        let mut bytes = vec![0; 64];
        bytes[56..60].copy_from_slice(b"ARM\x64");
        [bytes, banner.as_bytes().to_vec()].concat()
    };
    bench.write("vmlinuz", &image("Linux version 6.1.0-9-amd64 (x)"));
    assert_eq!(bench.check(&["--kernel-image", "vmlinuz", "m.ko"]).0, Some(0));
    bench.write("vmlinuz", &image("Linux version 6.1.0-8-amd64 (x)"));
    let (status, said) = bench.check(&["--kernel-image", "vmlinuz", "m.ko"]);
    assert_eq!(status, Some(2));
    assert_eq!(said, "error: vmlinuz: this is the image of kernel 6.1.0-8-amd64, not of 6.1.0-9-amd64\n");
}

#[test]
fn a_rule_is_explained() {
    let bench = Bench::new();
    let output = bench.run(&["--explain", "vermagic"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("check_modinfo"), "{output:?}");
    let output = bench.run(&["--explain", "vermagick"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("error: \"vermagick\" is not a rule (elf, "), "{output:?}");
}

#[test]
fn wrong_arguments_are_errors() {
    let bench = Bench::new();
    bench.write("m.ko", &ModuleFile::named("m").build());
    for (words, wanted) in [
        (&["m.ko"][..], "error: give --headers DIR and module files; see --help\n"),
        (&["--headers", "6.1.0-9-amd64/build"], "error: give --headers DIR and module files; see --help\n"),
        (&["--headers"], "error: --headers: the value is missing\n"),
        (&["--quick"], "error: --quick: no such option; see --help\n"),
        (
            &["--headers", ".", "m.ko"],
            "error: .: the header set holds neither include/generated/utsrelease.h nor include/config/kernel.release\n",
        ),
        (
            &["--headers", "6.1.0-9-amd64/build", "none.ko"],
            "error: none.ko: No such file or directory (os error 2)\n",
        ),
    ] {
        let output = bench.run(words);
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), wanted), "{words:?}");
    }
    let output = bench.run(&["--help"]);
    assert!(output.status.success() && text(&output.stdout).contains("usage: kmodcheck"), "{output:?}");
}

/// Paths with a link, as in `/lib/modules/RELEASE/build`.
#[test]
fn a_build_tree_may_be_a_link() {
    let bench = Bench::new();
    let build = bench.path("6.1.0-9-amd64/build");
    fs::rename(&build, bench.path("headers")).unwrap();
    std::os::unix::fs::symlink(Path::new("../headers"), &build).unwrap();
    bench.write("m.ko", &ModuleFile::named("m").build());
    assert_eq!(bench.check(&["m.ko"]).0, Some(0));
}
