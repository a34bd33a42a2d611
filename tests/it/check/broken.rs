//! Checks of real modules that are broken on purpose.

use std::fs::{self, File};

use kmod::{CachedFile, FactSource, KernelConfig, KernelFacts, Known, Module, Rule, Verdict};
use object::{Object, ObjectSection};

use super::kernels::{check_one, facts, find, in_tree, module_bytes, releases};

#[test]
fn a_module_broken_on_purpose_is_refused_for_the_right_reason() {
    let release = releases().pop().unwrap();
    let kernel = facts(&release);
    let good = module_bytes(&release, "ib_core");
    let refusal = |bytes: &[u8]| {
        let report = check_one(&kernel, Module::parse(bytes));
        assert_eq!(report.verdict, Verdict::Refused);
        let decisive: Vec<_> =
            report.modules[0].findings.iter().filter(|f| f.verdict > Verdict::Loads).collect();
        let [finding] = decisive[..] else { panic!("{report:#?}") };
        (finding.rule, finding.subject.clone())
    };
    assert_eq!(check_one(&kernel, Module::parse(&good[..])).verdict, Verdict::Loads);

    // A different release alone is fine, because the module carries symbol versions.
    let mut bytes = good.clone();
    let vermagic = find(&bytes, b"vermagic=") + b"vermagic=".len();
    bytes[vermagic] = b'5';
    assert_eq!(check_one(&kernel, Module::parse(&bytes[..])).verdict, Verdict::Loads);

    let mut bytes = good.clone();
    let flag = vermagic + find(&bytes[vermagic..], b"preempt");
    bytes[flag] = b'b';
    assert_eq!(refusal(&bytes), (Rule::Vermagic, "vermagic".to_owned()));

    // Without symbol versions the release must match, nothing proves that the module fits, and the size is unconfirmed.
    let mut bytes = good.clone();
    let name = bytes.windows(12).rposition(|window| window == b"\0__versions\0").unwrap();
    bytes[name + 1] = b'x';
    bytes[vermagic] = b'5';
    let report = check_one(&kernel, Module::parse(&bytes[..]));
    let findings = report.modules[0].findings.iter().filter(|finding| finding.rule != Rule::Signature);
    let rules: Vec<(Rule, bool)> = findings.map(|finding| (finding.rule, finding.unproven)).collect();
    assert_eq!(
        (report.verdict, rules),
        (
            Verdict::Refused,
            vec![(Rule::ModuleSize, false), (Rule::Vermagic, false), (Rule::SymbolVersion, true)]
        )
    );

    for symbol in ["module_layout", "__fentry__"] {
        let mut bytes = good.clone();
        let entry = find(&bytes, format!("\0\0\0\0{symbol}\0\0\0\0").as_bytes()) - 4;
        bytes[entry] ^= 1;
        assert_eq!(refusal(&bytes), (Rule::SymbolVersion, symbol.to_owned()));
    }

    let mut bytes = good.clone();
    bytes[18] = 183;
    assert_eq!(refusal(&bytes), (Rule::Elf, "machine".to_owned()));
}

#[test]
fn a_damaged_module_is_refused_and_never_read_beyond_its_end() {
    let release = releases().pop().unwrap();
    let good = module_bytes(&release, "ib_core");
    let headers = usize::try_from(u64::from_le_bytes(good[40..48].try_into().unwrap())).unwrap();
    let sections = usize::from(u16::from_le_bytes(good[60..62].try_into().unwrap()));
    // A signature follows the section headers and is not part of the object.
    let end = headers + sections * 64;
    for length in (0..end).step_by(end / 97) {
        assert!(Module::parse(&good[..length]).is_err(), "{length} of {end}");
    }
    let dir = tempfile::tempdir().unwrap();
    for section in 1..sections {
        let kind = u32::from_le_bytes(good[headers + section * 64 + 4..][..4].try_into().unwrap());
        if kind == object::elf::SHT_NOBITS.0 {
            continue;
        }
        for (field, value) in [(32, 4_u64 << 30), (32, u64::MAX), (24, good.len() as u64 + 1), (24, u64::MAX)]
        {
            let mut bytes = good.clone();
            bytes[headers + section * 64 + field..][..8].copy_from_slice(&value.to_le_bytes());
            let path = dir.path().join("m.ko");
            fs::write(&path, &bytes).unwrap();
            let error = Module::parse(&CachedFile::new(File::open(&path).unwrap())).unwrap_err();
            assert!(error.to_string().contains(" lies outside the file: "), "section {section}: {error}");
            assert_eq!(error.verdict(), Verdict::Refused);
        }
    }
}

/// Breaks one real module in each way that the loader detects. Each defect has a distinct message.
#[test]
fn each_way_to_break_a_module_has_its_own_message() {
    let release = releases().pop().unwrap();
    let mut kernel = facts(&release);
    let good = module_bytes(&release, "ib_core");
    let module = Module::parse(&good[..]).unwrap();
    let size = module.this_module_size;
    kernel.beyond_headers.module_size =
        Some(Known { value: size, source: FactSource::InTreeModule("ext4".to_owned()) });
    let mut enforcing = kernel.clone();
    enforcing.config = KernelConfig::parse(
        "CONFIG_MODULES=y\nCONFIG_SMP=y\nCONFIG_PREEMPT_BUILD=y\nCONFIG_MODULE_UNLOAD=y\nCONFIG_MODVERSIONS=y\nCONFIG_MODULE_SIG=y\n\
         CONFIG_MODULE_SIG_FORCE=y\n",
    )
    .unwrap();
    // Linux 6.4 and later compare the size; nothing else changes.
    let mut comparing = kernel.clone();
    comparing.release = "6.12.0-1-amd64".parse().unwrap();

    let end = object_end(&good);
    let said = |kernel: &KernelFacts, bytes: &[u8]| -> Vec<String> {
        let report = check_one(kernel, Module::parse(bytes));
        let findings = report.modules[0].findings.iter();
        let decisive = findings.filter(|finding| finding.verdict > Verdict::Loads);
        decisive.map(|finding| format!("{} {finding}", finding.verdict)).collect()
    };
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let value_of = |field: &str| find(&good, field.as_bytes()) + field.len();
    let header = |name: &str| section_header(&good, name);
    let symbol = |name: &str| {
        let wanted = format!("\0{name}\0");
        good.windows(wanted.len()).rposition(|window| window == wanted.as_bytes()).unwrap() + 1
    };

    assert_eq!(said(&kernel, &good), [""; 0]);
    let expect = |kernel: &KernelFacts, bytes: &[u8], starts: &[&str]| {
        let said = said(kernel, bytes);
        assert_eq!(said.len(), starts.len(), "{said:#?}");
        for (line, start) in said.iter().zip(starts) {
            assert!(line.starts_with(start), "{line}\n{start}");
        }
    };

    // A different release matters when the symbol versions are missing.
    let mut bytes = changed(value_of("vermagic="), b"5");
    let versions = good.windows(12).rposition(|window| window == b"\0__versions\0").unwrap();
    bytes[versions + 1] = b'x';
    expect(&kernel, &bytes, &["refused the vermagic has `5."]);
    expect(
        &kernel,
        &changed(value_of("vermagic=") + find(&good[value_of("vermagic=")..], b"SMP"), b"UMP"),
        &["refused the vermagic has `UMP` where the kernel has `SMP`"],
    );
    let crc = find(&good, b"\0\0\0\0__fentry__\0") - 4;
    expect(
        &kernel,
        &changed(crc, &[!good[crc]]),
        &["refused disagrees about version of symbol __fentry__, exported by the kernel: found 0x"],
    );
    expect(&kernel, &changed(header(".symtab") + 4, &[1]), &["refused the module has no symbols"]);
    expect(
        &kernel,
        &changed(symbol("class_unregister"), b"K"),
        &["refused unknown symbol Klass_unregister: neither 6.1.0-"],
    );
    let licence = said(&kernel, &changed(value_of("\0license="), b"X"));
    assert!(!licence.is_empty());
    assert!(
        licence
            .iter()
            .all(|line| line.contains(", is for GPL modules only, but the module's license is not")),
        "{licence:#?}"
    );
    let mut bytes = good.clone();
    let at = header(".gnu.linkonce.this_module") + 32;
    bytes[at..at + 8].copy_from_slice(&(size + 64).to_le_bytes());
    expect(
        &comparing,
        &bytes,
        &[
            // The section now covers bytes of the next one.
            "unknown struct module contains more than the module's name",
            "refused struct module differs in size from the kernel's, according to the kernel's own ext4: found ",
        ],
    );
    expect(
        &kernel,
        &good[..end - 1],
        &["refused the ELF header is damaged: its section headers lie outside the file: it is truncated"],
    );
    let outside = good.len() as u64;
    for (field, value) in [(24, outside), (32, 4 << 30)] {
        expect(
            &kernel,
            &changed(header(".modinfo") + field, &value.to_le_bytes()),
            &["refused section .modinfo lies outside the file: "],
        );
    }
    expect(&enforcing, &good[..end], &["refused the module is not signed: the kernel rejects it"]);
    let mut buried = sign(&good[..end]);
    expect(&enforcing, &buried, &["unknown the signature is well-formed"]);
    buried.extend(b"\n\n\n");
    expect(
        &enforcing,
        &buried,
        &["refused 3 bytes follow the signature, so the kernel treats the module as unsigned"],
    );
    let mut wrong = sign(&good[..end]);
    wrong[end] ^= 0xff;
    expect(
        &kernel,
        &wrong,
        &["refused the signature is not a PKCS#7 message that the kernel accepts: the kernel refuses it"],
    );
    let namespaced = in_tree(&release)
        .into_iter()
        .filter_map(|payload| payload.module.ok())
        .find(|module| module.field("import_ns").is_some())
        .unwrap();
    let mut bytes = module_bytes(&release, &namespaced.name);
    let at = find(&bytes, b"\0import_ns=") + 1;
    bytes[at] = b'x';
    let missing = said(&kernel, &bytes);
    assert!(!missing.is_empty());
    assert!(
        missing.iter().all(|line| line
            .contains("is in a namespace that the module does not import: found no imports, wanted ")),
        "{missing:#?}"
    );
}

/// Appends a signature in the format of `scripts/sign-file`, by a key that no kernel has. The signature comes from an in-tree
/// module, so its PKCS #7 message is real.
fn sign(object: &[u8]) -> Vec<u8> {
    let release = releases().pop().unwrap();
    let signed = module_bytes(&release, "ib_uverbs");
    let end = object_end(&signed);
    assert!(signed.len() > end + 40, "the distribution's modules are signed");
    [object, &signed[end..]].concat()
}

/// Returns the end of an object: the end of the section headers, which `ld` and `objcopy` write last.
pub fn object_end(bytes: &[u8]) -> usize {
    let headers = usize::try_from(u64::from_le_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    headers + usize::from(u16::from_le_bytes(bytes[60..62].try_into().unwrap())) * 64
}

/// Returns the offset of a section's header.
pub fn section_header(bytes: &[u8], name: &str) -> usize {
    let elf = object::read::elf::ElfFile64::<object::Endianness>::parse(bytes).unwrap();
    let headers = usize::try_from(u64::from_le_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    headers + elf.section_by_name(name).unwrap().index().0 * 64
}
