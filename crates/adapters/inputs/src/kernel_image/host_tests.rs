use std::io::Write as _;

use fs_err as fs;
use kmod::testing::ModuleFile;

use super::*;

struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        root.write("proc/sys/kernel/osrelease", "6.1.0-1-amd64\n");
        root
    }

    fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn read(&self) -> Result<KernelFacts, FetchError> {
        read_host(self.0.path(), Architecture::Amd64)
    }
}

fn btf() -> Vec<u8> {
    let mut bytes = vec![0x9f, 0xeb, 1, 0];
    for field in [24_u32, 0, 12, 12, 8, 1, 4 << 24, 896] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(b"\0module\0");
    bytes
}

#[test]
fn a_machine_without_headers_tells_what_it_runs() {
    let root = Root::new();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(b"CONFIG_SMP=y\nCONFIG_X86_64=y\n").unwrap();
    root.write("proc/config.gz", gzip.finish().unwrap());
    root.write("sys/kernel/btf/vmlinux", btf());
    root.write("proc/kallsyms", "0000000000000000 r __ksymtab_module_layout\n0 r __ksymtab_x\t[m]\n");
    root.write("lib/modules/6.1.0-1-amd64/kernel/a.ko", ModuleFile::named("a").build());
    root.write("sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
    let facts = root.read().unwrap();
    assert_eq!(facts.release.as_str(), "6.1.0-1-amd64");
    assert!(facts.config.is_set("SMP") && facts.symbols.is_none());
    let beyond = facts.beyond_headers;
    assert_eq!(beyond.module_size, Some(Known { value: 896, source: FactSource::Host }));
    assert_eq!(beyond.btf_base.unwrap().value, kmod::BtfBase { types: 2, strings: 8 });
    assert_eq!(beyond.exports.unwrap().value.into_iter().collect::<Vec<_>>(), ["module_layout"]);
    assert!(!beyond.enforces_signatures.unwrap().value);
    assert!(beyond.in_tree.unwrap().value.modules.contains_key("a"));
    assert!(beyond.vermagic.is_some());
}

#[test]
fn either_switch_enforces_signatures() {
    for (parameter, lockdown, enforced) in [
        (None, None, None),
        (Some("N\n"), None, None),
        (Some("N\n"), Some("[none] integrity confidentiality\n"), Some(false)),
        (Some("Y\n"), None, Some(true)),
        (Some("Y\n"), Some("[none] integrity confidentiality\n"), Some(true)),
        (Some("N\n"), Some("none [integrity] confidentiality\n"), Some(true)),
        (None, Some("none integrity [confidentiality]\n"), Some(true)),
        (None, Some("[none] integrity confidentiality\n"), Some(false)),
    ] {
        let root = Root::new();
        root.write("boot/config-6.1.0-1-amd64", "CONFIG_X86_64=y\n");
        if let Some(value) = parameter {
            root.write("sys/module/module/parameters/sig_enforce", value);
        }
        if let Some(value) = lockdown {
            root.write("sys/kernel/security/lockdown", value);
        }
        let found = root.read().unwrap().beyond_headers.enforces_signatures.map(|known| known.value);
        assert_eq!(found, enforced, "{parameter:?} {lockdown:?}");
    }
}

#[test]
fn what_is_missing_or_damaged_is_named() {
    let root = Root::new();
    let error = root.read().unwrap_err();
    insta::assert_snapshot!(error, @"cannot find the configuration of the running kernel 6.1.0-1-amd64: there is none of /lib/modules/6.1.0-1-amd64/build, /proc/config.gz, /boot/config-6.1.0-1-amd64, /lib/modules/6.1.0-1-amd64/config, /usr/lib/modules/6.1.0-1-amd64/config");
    root.write("boot/config-6.1.0-1-amd64", "CONFIG_X86_64=y\n");
    root.write("sys/kernel/btf/vmlinux", "no types");
    let error = root.read().unwrap_err().to_string();
    assert!(error.starts_with("cannot read the type information (BTF) in "), "{error}");
    root.write("proc/sys/kernel/osrelease", "\n");
    let error = root.read().unwrap_err().to_string();
    assert!(error.starts_with("cannot read the release in "), "{error}");
}
