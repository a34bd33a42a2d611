//! Steps of the loader beyond names and versions: sections, relocations, and kernels that load no such modules.

mod relocations;
mod sections;

use super::*;
use crate::testing::{SH_OFFSET, SH_SIZE, SH_TYPE};

const ALLOC: u64 = 2;
const WRITE: u64 = 1;
const EXEC: u64 = 4;
const PROGBITS: u32 = 1;
const RELA: u32 = 4;
const REL: u32 = 9;

/// Entry of a relocation section.
fn rela(offset: u64, kind: u32, symbol: u32) -> Vec<u8> {
    let info = u64::from(symbol) << 32 | u64::from(kind);
    [offset, info, 0].map(u64::to_le_bytes).concat()
}

/// Module whose loaded section `.text` has these bytes and relocations.
fn relocated(text: &[u8], relocations: &[Vec<u8>]) -> ModuleFile {
    let mut file = ModuleFile::named("m");
    file.more.push((".text", PROGBITS, ALLOC | EXEC, "", text.to_vec()));
    file.more.push((".rela.text", RELA, 0, ".text", relocations.concat()));
    file
}

/// Verdict for the module on a kernel of this release with these options.
fn verdict_on(release: &str, options: &[&str], file: &ModuleFile) -> Verdict {
    let mut facts = kernel(options, PRINTK);
    facts.release = release.parse().unwrap();
    let magic = format!("{} ", facts.expected_vermagic());
    run(&facts, &[], &[file.clone().info("vermagic", &magic).payload()]).verdict
}

fn arm64(mut file: ModuleFile) -> CheckReport {
    let mut facts = kernel(&[], "");
    facts.arch = crate::Architecture::Arm64;
    file.machine = 183;
    run(&facts, &[], &[file.info("vermagic", &facts.expected_vermagic().to_string()).payload()])
}

#[test]
fn two_modules_export_one_name() {
    let modules = ["a", "b"].map(|name| ModuleFile::named(name).exports("shared", 1).payload());
    let report = run(&kernel(&[], ""), &[], &modules);
    assert_eq!(lines(&report).lines().count(), 2, "{}", lines(&report));
    assert!(
        lines(&report)
            .contains("b (refused): refused DuplicateExport: exports symbol shared, which a of this payload")
    );
    // `z` is loaded first, because `a` needs it.
    let needed = ModuleFile::named("z").exports("shared", 1).exports("base", 2);
    let modules = [ModuleFile::named("a").needs("base", 2).exports("shared", 1).payload(), needed.payload()];
    assert!(lines(&run(&kernel(&[], ""), &[], &modules)).contains("a (refused): refused DuplicateExport"));
}

#[test]
fn a_module_exports_a_name_of_a_module_that_it_needs() {
    let table = "0x00000001\tverb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n\
                 0x00000001\tother\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let file = ModuleFile::named("m").exports("verb", 1);
    assert_eq!(findings(&kernel(&[], table), &file.build()), [""; 0], "ib_core need not be loaded");
    assert_eq!(
        findings(&kernel(&[], table), &file.needs("other", 1).build()),
        ["refused DuplicateExport: exports symbol verb, which the kernel's ib_core also exports"]
    );
}

#[test]
fn a_kernel_that_is_locked_down_enforces_signatures() {
    let file = ModuleFile::named("m");
    let forced = ["MODULE_SIG", "LOCK_DOWN_KERNEL_FORCE_INTEGRITY", "SECURITY_LOCKDOWN_LSM"];
    assert_eq!(verdict_on("6.1.1", &forced, &file), Verdict::Refused);
    let mut facts = kernel(&forced, PRINTK);
    assert!(
        lines(&run(&facts, &[], &[file.payload()])).contains("according to CONFIG_LOCK_DOWN_KERNEL_FORCE_*")
    );
    // Without `lockdown` in the list, the option has no effect.
    let text = "CONFIG_MODULES=y\nCONFIG_MODULE_SIG=y\nCONFIG_LOCK_DOWN_KERNEL_FORCE_INTEGRITY=y\nCONFIG_LSM=\"yama,bpf\"\n";
    facts.config = crate::KernelConfig::parse(text).unwrap();
    assert_eq!(facts.enforces_signatures(), None);
}

#[test]
fn kernels_that_load_no_such_module() {
    let livepatch = ModuleFile::named("m").info("livepatch", "Y");
    assert_eq!(verdict_on("6.1.1", &[], &livepatch), Verdict::Refused);
    assert_eq!(verdict_on("6.1.1", &["LIVEPATCH"], &livepatch), Verdict::Loads);
    let pinned = ["SECURITY_LOADPIN", "SECURITY_LOADPIN_ENFORCE"];
    assert_eq!(verdict_on("6.1.1", &pinned, &ModuleFile::named("m")), Verdict::Unknown);
    let mut facts = kernel(&[], "");
    facts.config = crate::KernelConfig::parse("CONFIG_SMP=y\n").unwrap();
    facts.beyond_headers.module_size = Some(known(896));
    let file = ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP ");
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "refused Kernel: the kernel loads no modules: its configuration lacks CONFIG_MODULES",
            "loads SymbolVersion: CONFIG_MODVERSIONS is off, so the kernel also loads modules that were compiled with \
             different structure layouts"
        ]
    );
}

#[test]
fn a_module_without_control_flow_integrity_panics_a_kernel_that_has_it() {
    let mut file = ModuleFile::named("m");
    file.defined.push("init_module");
    assert_eq!(verdict_on("6.1.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG"], &file), Verdict::Refused);
    assert_eq!(verdict_on("6.18.1", &["CFI"], &file), Verdict::Refused);
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG", "CFI_PERMISSIVE"], &file), Verdict::Loads);
    // On arm64 the hashes have no symbols. The older scheme has the symbol `__cfi_check`.
    let mut facts = kernel(&["CFI_CLANG"], "");
    facts.arch = crate::Architecture::Arm64;
    let mut arm_file = file.clone();
    arm_file.machine = 183;
    for (release, verdict) in [("5.14.0", Verdict::Refused), ("6.1.1", Verdict::Loads)] {
        facts.release = release.parse().unwrap();
        let arm_file = arm_file.clone().info("vermagic", &facts.expected_vermagic().to_string());
        assert_eq!(run(&facts, &[], &[arm_file.payload()]).verdict, verdict, "{release}");
    }
    file.defined.push("__cfi_start");
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG"], &file), Verdict::Loads);
}

#[test]
fn suse_supports_some_modules() {
    let facts = kernel(&["SUSE_KERNEL_SUPPORTED"], "");
    let file = ModuleFile::named("m");
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "loads Kernel: the module has no field supported=external: the kernel loads it, but SUSE's modprobe refuses it on hosts"
        ]
    );
    assert_eq!(findings(&facts, &file.info("supported", "external").build()), [""; 0]);
}

#[test]
fn namespaces_of_modules_are_not_imported() {
    let file = ModuleFile::named("m").info("import_ns", "module:kvm");
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
}

#[test]
fn extended_versions_count_since_linux_6_14() {
    let mut file = ModuleFile::named("m").needs("printk", 1);
    file.extended = Some((vec![0xaaaa, 2], b"module_layout\0printk\0".to_vec()));
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads, "the basic table is right");
    assert_eq!(verdict_on("6.14.1", &[], &file), Verdict::Refused, "the extended one is not");
    file.extended = Some((vec![0xaaaa, 1], b"module_layout\0printk\0".to_vec()));
    file.versions = None;
    assert_eq!(verdict_on("6.14.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Refused);
    file.extended = Some((vec![0xaaaa, 1], b"module_layout\0".to_vec()));
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
}

#[test]
fn exports_without_versions_are_refused() {
    let mut file = ModuleFile::named("m").exports("mine", 1);
    assert_eq!(findings(&kernel(&[], ""), &file.build()), [""; 0]);
    file.no_crcs = true;
    assert_eq!(
        findings(&kernel(&[], ""), &file.build()),
        ["refused SymbolVersion: no versions for exported symbols: the kernel refuses it"]
    );
    assert_eq!(
        findings(&kernel(&["MODULE_FORCE_LOAD"], ""), &file.build()),
        [
            "loads SymbolVersion: no versions for exported symbols: the kernel skips the check and taints itself \
             (CONFIG_MODULE_FORCE_LOAD)"
        ]
    );
}

#[test]
fn headers_of_another_build_prove_nothing() {
    let mut facts = kernel(&[], PRINTK);
    let own = |layout: u32| {
        let value = [("module_layout".to_owned(), layout)].into();
        Some(Known { value, source: FactSource::InTreeModule("ext4".to_owned()) })
    };
    let file = ModuleFile::named("m").needs("printk", 1).build();
    facts.beyond_headers.symbol_versions = own(0xaaaa);
    assert_eq!(findings(&facts, &file), [""; 0]);
    facts.beyond_headers.symbol_versions = own(0xbbbb);
    assert_eq!(
        findings(&facts, &file),
        [
            "refused SymbolVersion: disagrees about version of symbol module_layout, the kernel's structure of modules: \
             found 0x0000aaaa, wanted 0x0000bbbb",
            "unknown SymbolVersion: the header set belongs to another build of the kernel: its version of module_layout \
             differs from that in the kernel's own ext4: found 0x0000aaaa, wanted 0x0000bbbb"
        ]
    );
}

#[test]
fn exports_have_flags_since_linux_7_2() {
    let mut file = ModuleFile::named("m").exports("mine", 1);
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
    file.flags = Some("__kflagstab");
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Loads);
}

/// Number of the first section of a type.
fn section_of_type(file: &[u8], kind: u8) -> usize {
    (1..32).find(|&index| file[section_header(file, index) + SH_TYPE] == kind).unwrap()
}

fn field(file: &[u8], section: usize, offset: usize) -> usize {
    usize::try_from(u64::from_le_bytes(
        file[section_header(file, section) + offset..][..8].try_into().unwrap(),
    ))
    .unwrap()
}
