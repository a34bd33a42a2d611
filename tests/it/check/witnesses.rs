//! Compares the check's results on whole kernels with the output of other programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self},
    io::Read,
    path::Path,
    process::Command,
};

use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_inputs::read_header_set;
use farrier_payload::{DecompressionBudget, read_modules};
use kmod::{BtfBase, CheckReport, CheckRequest, FactSource, Known, Module, Rule, Signature, Verdict, check};
use object::{Object, ObjectSection};

use super::kernels::{
    arm64_apt, check_one, facts, find, image_package, in_tree, kmod_tool, module_bytes, network, newest_6_12,
    releases, run, unpacked, unpacked_with,
};

/// All in-tree modules of a kernel, checked as one payload, load on that kernel.
#[test]
fn every_in_tree_module_loads_on_its_own_kernel() {
    let release = releases().pop().unwrap();
    let (kernel, modules) = (facts(&release), in_tree(&release));
    assert!(modules.len() > 3000, "{} modules", modules.len());
    let required = ["ib_core", "mlx5_core", "nvme-tcp"].map(str::to_owned);
    let report = check(&CheckRequest {
        kernel: &kernel,
        needs: &[],
        modules: &modules,
        required: &required,
        files: None,
    });
    // In-tree modules of unsigned packages get a warning about Secure Boot.
    let findings = report.modules.iter().flat_map(|module| &module.findings);
    let findings: Vec<_> = findings.filter(|finding| finding.rule != Rule::Signature).collect();
    assert!(findings.is_empty() && report.findings.is_empty(), "{findings:#?} {:#?}", report.findings);
    assert_eq!(report.verdict, Verdict::Loads);
    assert_eq!(report.load_order.len(), modules.len());
    let place = |name: &str| report.load_order.iter().position(|m| m == name).unwrap();
    assert!(place("ib_core") < place("ib_uverbs") && place("ib_uverbs") < place("mlx5_ib"));
}

/// Returns the symbols with different versions and the missing symbols, according to `modprobe` and the symbol table.
fn witness(file: &Path, symvers: &BTreeMap<String, String>) -> (BTreeSet<String>, BTreeSet<String>) {
    let dump = run(kmod_tool("modprobe").arg("--dump-modversions").arg(file));
    let (mut differ, mut gone) = (BTreeSet::new(), BTreeSet::new());
    for line in dump.lines() {
        let (crc, name) = line.split_once('\t').unwrap();
        match symvers.get(name) {
            Some(wanted) if wanted == crc => {}
            Some(_) => drop(differ.insert(name.to_owned())),
            None => drop(gone.insert(name.to_owned())),
        }
    }
    (differ, gone)
}

fn subjects(report: &CheckReport, rule: Rule) -> BTreeSet<String> {
    let findings =
        report.modules[0].findings.iter().filter(|f| f.rule == rule && f.verdict == Verdict::Refused);
    findings.map(|finding| finding.subject.clone()).collect()
}

/// Checks modules of the newest kernel on the previous kernel and on the oldest available one.
#[test]
fn other_kernels_refuse_exactly_what_the_witness_says() {
    let releases = releases();
    let (built_for, others) = releases.split_last().unwrap();
    let root = unpacked(&image_package(built_for)).join("lib/modules").join(built_for.as_str());
    let modules = in_tree(built_for);
    let mut refused = 0;
    for other in BTreeSet::from([others.first().unwrap(), others.last().unwrap()]) {
        let kernel = facts(other);
        let table = unpacked(&format!("linux-headers-{other}"))
            .join(format!("usr/src/linux-headers-{other}/Module.symvers"));
        let awk = run(Command::new("awk").args(["-F\t", "{print $1, $2}"]).arg(table));
        let symvers: BTreeMap<String, String> = awk
            .lines()
            .map(|line| line.split_once(' ').unwrap())
            .map(|(crc, name)| (name.to_owned(), crc.to_owned()))
            .collect();
        for payload in modules.iter().step_by(16) {
            let (differ, gone) = witness(&root.join(&payload.path), &symvers);
            let report = check_one(&kernel, payload.module.clone());
            assert_eq!(subjects(&report, Rule::SymbolVersion), differ, "{} on {other}", payload.path);
            assert_eq!(subjects(&report, Rule::UndefinedSymbol), gone, "{} on {other}", payload.path);
            let expected =
                if differ.is_empty() && gone.is_empty() { Verdict::Loads } else { Verdict::Refused };
            assert_eq!(report.verdict, expected, "{} on {other}: {report:#?}", payload.path);
            refused += usize::from(expected == Verdict::Refused);
        }
    }
    assert!(refused > 0, "the oldest kernel accepts every module of the newest");
}

#[test]
fn fields_are_those_that_modinfo_prints() {
    let release = releases().pop().unwrap();
    let root = unpacked(&image_package(&release)).join("lib/modules").join(release.as_str());
    for payload in in_tree(&release).iter().step_by(200) {
        let module = payload.module.as_ref().unwrap();
        for key in
            ["name", "license", "vermagic", "depends", "srcversion", "intree", "retpoline", "import_ns"]
        {
            let printed = run(kmod_tool("modinfo").args(["-F", key]).arg(root.join(&payload.path)));
            let ours: Vec<&str> = module.fields(key).collect();
            let theirs: Vec<&str> = printed.lines().filter(|line| !line.is_empty()).collect();
            let ours: Vec<&str> = ours.into_iter().filter(|value| !value.is_empty()).collect();
            assert_eq!(ours, theirs, "{key} of {}", payload.path);
        }
    }
}

/// Extracts the kernel's BTF from its image without farrier's code.
fn kernel_btf(release: &KernelRelease) -> Vec<u8> {
    let image = fs::read(unpacked(&image_package(release)).join(format!("boot/vmlinuz-{release}"))).unwrap();
    let start = find(&image, b"\xfd7zXZ\0");
    let mut kernel = Vec::new();
    liblzma::read::XzDecoder::new(&image[start..]).read_to_end(&mut kernel).unwrap();
    let elf = object::read::elf::ElfFile64::<object::Endianness>::parse(&kernel[..]).unwrap();
    elf.section_by_name(".BTF").unwrap().data().unwrap().to_vec()
}

/// Every module's BTF fits its own kernel, and hardly any module's BTF fits another kernel.
#[test]
fn type_information_fits_its_own_kernel_only() {
    let releases = releases();
    let (other, own) = (releases.first().unwrap(), releases.last().unwrap());
    let modules = in_tree(own);
    let with = |release: &KernelRelease| {
        let mut kernel = facts(own);
        let value = BtfBase::of(&kernel_btf(release)).unwrap();
        assert!(value.types > 50_000 && value.strings > 500_000, "{value:?}");
        kernel.beyond_headers.btf_base = Some(Known { value, source: FactSource::Btf });
        check(&CheckRequest { kernel: &kernel, needs: &[], modules: &modules, required: &[], files: None })
    };
    let findings = |report: &CheckReport| {
        report.modules.iter().flat_map(|m| &m.findings).filter(|f| f.rule == Rule::Btf).count()
    };
    let bearing = modules.iter().filter(|m| m.module.as_ref().is_ok_and(|m| m.btf.is_some())).count();
    assert!(bearing > 3000, "{bearing} modules with type information");
    assert_eq!(findings(&with(own)), 0);
    let told = findings(&with(other));
    assert!(told * 100 > bearing * 95, "{told} of {bearing}");
}

#[test]
fn signatures_are_those_that_modinfo_prints() {
    let release = releases().pop().unwrap();
    let root = unpacked(&image_package(&release)).join("lib/modules").join(release.as_str());
    let mut read = 0;
    for payload in in_tree(&release).iter().step_by(200) {
        let file = root.join(&payload.path);
        let print = |key| run(kmod_tool("modinfo").args(["-F", key]).arg(&file)).trim().to_owned();
        match &payload.module.as_ref().unwrap().signature {
            Signature::By(signer) => {
                read += 1;
                assert_eq!(signer.name.as_deref(), Some(print("signer").as_str()), "{}", payload.path);
                assert_eq!(signer.key_id, print("sig_key"), "{}", payload.path);
                assert_eq!(signer.hash, Some(print("sig_hashalgo").as_str()), "{}", payload.path);
            }
            other => {
                assert_eq!((other, print("signer")), (&Signature::None, String::new()), "{}", payload.path);
            }
        }
    }
    assert!(read > 0 || image_package(&release).ends_with("-unsigned"), "no module is signed");
}

#[test]
fn symbols_are_those_that_nm_prints() {
    let release = releases().pop().unwrap();
    let root = unpacked(&image_package(&release)).join("lib/modules").join(release.as_str());
    let mut exporting = 0;
    for payload in in_tree(&release).iter().step_by(100) {
        let module = payload.module.as_ref().unwrap();
        let printed = run(Command::new("nm").arg(root.join(&payload.path)));
        let (mut undefined, mut exports) = (BTreeSet::new(), BTreeSet::new());
        for line in printed.lines() {
            let (kind, name) = line.get(17..).unwrap().split_once(' ').unwrap();
            match (kind, name.strip_prefix("__ksymtab_")) {
                ("U" | "w" | "v", _) if name != "_GLOBAL_OFFSET_TABLE_" => drop(undefined.insert(name)),
                (_, Some(export)) => drop(exports.insert(export)),
                _ => {}
            }
        }
        assert_eq!(module.undefined.iter().map(|u| u.name.as_str()).collect::<BTreeSet<_>>(), undefined);
        assert_eq!(module.exports.iter().map(|e| e.name.as_str()).collect::<BTreeSet<_>>(), exports);
        exporting += usize::from(!exports.is_empty());
    }
    assert!(exporting > 0, "no module of the sample exports anything");
}

/// `depmod -e -E` names each module and symbol that does not fit a kernel's table, for all modules at once.
#[test]
fn depmod_names_the_same_symbols() {
    let releases = releases();
    let (other, own) = (releases.first().unwrap(), releases.last().unwrap());
    let base = unpacked(&image_package(own));
    let table = unpacked(&format!("linux-headers-{other}"))
        .join(format!("usr/src/linux-headers-{other}/Module.symvers"));
    let output = kmod_tool("depmod")
        .args(["--dry-run", "--errsyms", "--symvers"])
        .args([&table, Path::new("--basedir"), &base])
        .arg(own.as_str())
        .output()
        .unwrap();
    let mut theirs = BTreeSet::new();
    for line in String::from_utf8(output.stderr).unwrap().lines() {
        let Some(rest) = line.strip_prefix("depmod: WARNING: ") else { continue };
        for what in [" disagrees about version of symbol ", " needs unknown symbol "] {
            if let Some((file, symbol)) = rest.split_once(what) {
                theirs.insert((file.rsplit('/').next().unwrap().to_owned(), symbol.to_owned()));
            }
        }
    }
    let (kernel, modules) = (facts(other), in_tree(own));
    let report =
        check(&CheckRequest { kernel: &kernel, needs: &[], modules: &modules, required: &[], files: None });
    let mut ours = BTreeSet::new();
    for module in &report.modules {
        let file = module.path.rsplit('/').next().unwrap();
        for finding in module.findings.iter().filter(|f| f.verdict == Verdict::Refused) {
            if matches!(finding.rule, Rule::SymbolVersion | Rule::UndefinedSymbol) {
                ours.insert((file.to_owned(), finding.subject.clone()));
            }
        }
    }
    assert!(theirs.len() > 1000, "{} lines of depmod", theirs.len());
    let differ: Vec<_> = ours.symmetric_difference(&theirs).take(20).collect();
    assert!(differ.is_empty(), "{} and {} differ: {differ:#?}", ours.len(), theirs.len());
}

/// All modules of one kernel have the same size of `struct module`. Kernels that compare the size refuse other sizes.
#[test]
fn one_size_of_struct_module_for_each_kernel() {
    let (old, new) = (releases().pop().unwrap(), newest_6_12());
    let sizes = |release: &KernelRelease| -> BTreeSet<u64> {
        network(release).iter().map(|payload| payload.module.as_ref().unwrap().this_module_size).collect()
    };
    let (of_old, of_new) = (sizes(&old), sizes(&new));
    assert_eq!((of_old.len(), of_new.len()), (1, 1), "{of_old:?} {of_new:?}");
    let mut kernel = facts(&new);
    let size = *of_new.first().unwrap();
    kernel.beyond_headers.module_size =
        Some(Known { value: size, source: FactSource::InTreeModule("ext4".to_owned()) });
    let modules = network(&new);
    let report =
        check(&CheckRequest { kernel: &kernel, needs: &[], modules: &modules, required: &[], files: None });
    let findings = report.modules.iter().flat_map(|m| &m.findings).filter(|f| f.rule == Rule::ModuleSize);
    assert_eq!((report.verdict, findings.count()), (Verdict::Loads, 0), "{}", report.summary());
    let foreign = Module::parse(&module_bytes(&old, "ib_core")[..]).unwrap();
    let expected = foreign.this_module_size != size;
    let report = check_one(&kernel, Ok(foreign));
    assert_eq!(report.modules[0].findings.iter().any(|f| f.rule == Rule::ModuleSize), expected);
    assert_eq!(report.verdict, Verdict::Refused);
}

/// arm64 modules load on their own kernel, and not on an amd64 kernel.
#[test]
fn arm64_modules_load_on_their_own_kernel() {
    let apt = arm64_apt();
    // Both architectures' lists are read at different times, and one of them can have a kernel before the other.
    let names = run(Command::new("apt-cache").args(&apt).args(["pkgnames", "linux-headers-6.1.0-"]));
    let of_arm64 = |amd64: KernelRelease| {
        let release = amd64.as_str().replace("amd64", "arm64");
        let package = format!("linux-headers-{release}");
        names.lines().any(|name| name == package).then(|| (amd64, release.parse::<KernelRelease>().unwrap()))
    };
    let (amd64, release) = releases().into_iter().rev().find_map(of_arm64).unwrap();
    let root = unpacked_with(&apt, &format!("linux-headers-{release}"));
    let (kernel, _) = read_header_set(&root, &release, Architecture::Arm64).unwrap();
    let image = unpacked_with(&apt, &format!("linux-image-{release}-unsigned"));
    let modules = read_modules(
        &image.join(format!("lib/modules/{release}/kernel/drivers/net")),
        &DecompressionBudget::without_build(),
    )
    .unwrap();
    assert!(modules.len() > 300, "{} modules", modules.len());
    let report =
        check(&CheckRequest { kernel: &kernel, needs: &[], modules: &modules, required: &[], files: None });
    let bad: Vec<_> = report.modules.iter().filter(|module| module.verdict > Verdict::Loads).collect();
    assert!(bad.is_empty() && report.verdict == Verdict::Loads, "{bad:#?} {:#?}", report.findings);
    let foreign = check_one(&facts(&amd64), modules[0].module.clone());
    assert!(foreign.modules[0].findings.iter().any(|f| f.subject == "machine"), "{foreign:#?}");
}
