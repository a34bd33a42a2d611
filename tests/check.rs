//! The check on real kernels: the distribution's headers and in-tree modules, fetched through the host's apt, with
//! `modinfo`, `modprobe --dump-modversions` and `depmod` (package kmod) and `nm` (binutils) as independent witnesses.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use farrier::{
    headers::read_header_set,
    kernel::{Architecture, KernelRelease},
    kmod::{
        BtfBase, CheckReport, CheckRequest, FactSource, KernelConfig, KernelFacts, Known, Module,
        ModuleError, PayloadModule, Rule, Signature, Verdict, check,
    },
    payload::read_modules,
};
use object::{Object, ObjectSection, read::ReadCache};

fn run(command: &mut Command) -> String {
    let output = command
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|error| panic!("{command:?} does not start, install its package: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// kmod's tools lie in `sbin`, which a user's PATH may lack.
fn kmod_tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap()));
    command
}

/// The 6.1 kernels whose headers the host's suites have, oldest first.
fn releases() -> Vec<KernelRelease> {
    let packages = run(Command::new("apt-cache").args(["pkgnames", "linux-headers-6.1.0-"]));
    let number = |package: &str| -> Option<u32> {
        package.strip_prefix("linux-headers-6.1.0-")?.strip_suffix("-amd64")?.parse().ok()
    };
    let numbers: BTreeSet<u32> = packages.lines().filter_map(number).collect();
    assert!(numbers.len() >= 2, "the host's suites have fewer than two 6.1 kernels: {packages}");
    numbers.iter().map(|number| format!("6.1.0-{number}-amd64").parse().unwrap()).collect()
}

/// An unpacked package, made once for all tests and runs.
fn unpacked(package: &str) -> PathBuf {
    unpacked_with(&[], package)
}

/// The same, from an apt with these options beside the host's.
fn unpacked_with(options: &[String], package: &str) -> PathBuf {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    fs::create_dir_all(&cache).unwrap();
    let lock = File::create(cache.join(format!("{package}.lock"))).unwrap();
    lock.lock().unwrap();
    let show = ["show", "--no-all-versions", package];
    let version = run(Command::new("apt-cache").args(options).args(show));
    let version =
        version.lines().find_map(|line| line.strip_prefix("Version: ")).unwrap().replace([':', '/'], "_");
    let root = cache.join(format!("{package}_{version}"));
    if !root.exists() {
        let work = tempfile::tempdir_in(&cache).unwrap();
        let download = ["-o", "APT::Sandbox::User=root", "-q", "download", package];
        run(Command::new("apt-get").args(options).args(download).current_dir(work.path()));
        let deb =
            fs::read_dir(work.path()).unwrap().next().expect("apt-get leaves the package").unwrap().path();
        let tree = work.path().join("tree");
        run(Command::new("dpkg-deb").arg("-x").args([&deb, &tree]));
        fs::rename(&tree, &root).unwrap();
    }
    root
}

/// Options for an apt of its own, of another architecture than the host's: the same suites, its own lists.
fn arm64_apt() -> Vec<String> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("apt-arm64");
    fs::create_dir_all(&root).unwrap();
    let place = root.display();
    let options: Vec<String> = [
        "APT::Architecture=arm64".to_owned(),
        "APT::Architectures=arm64".to_owned(),
        "APT::Sandbox::User=root".to_owned(),
        "Dir::State::status=/dev/null".to_owned(),
        format!("Dir::State={place}/state"),
        format!("Dir::Cache={place}/cache"),
    ]
    .into_iter()
    .flat_map(|option| ["-o".to_owned(), option])
    .collect();
    let lock = File::create(root.join("lock")).unwrap();
    lock.lock().unwrap();
    // Lists of another day name packages that the mirror no longer has.
    let fresh = |path: PathBuf| {
        let modified = fs::metadata(path).and_then(|data| data.modified());
        modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age.as_secs() < 12 * 3600))
    };
    if !fresh(root.join("updated")) {
        for part in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(part)).unwrap();
        }
        run(Command::new("apt-get").args(&options).args(["-q", "update"]));
        File::create(root.join("updated")).unwrap();
    }
    options
}

/// The package that holds a kernel's modules: signed, or not yet signed.
fn image_package(release: &KernelRelease) -> String {
    let signed = format!("linux-image-{release}");
    let exists = Command::new("apt-cache").args(["show", &signed]).output().unwrap();
    if exists.status.success() && !exists.stdout.is_empty() { signed } else { format!("{signed}-unsigned") }
}

fn facts(release: &KernelRelease) -> KernelFacts {
    let root = unpacked(&format!("linux-headers-{release}"));
    let (facts, compiler) = read_header_set(&root, release, Architecture::Amd64).unwrap();
    assert_eq!(compiler.map(|compiler| compiler.to_string()).as_deref(), Some("gcc 12"));
    facts
}

fn in_tree(release: &KernelRelease) -> Vec<PayloadModule> {
    read_modules(&unpacked(&image_package(release)).join("lib/modules").join(release.as_str())).unwrap()
}

/// The file of one in-tree module, decompressed.
fn module_bytes(release: &KernelRelease, name: &str) -> Vec<u8> {
    let root = unpacked(&image_package(release)).join("lib/modules").join(release.as_str());
    let is_it = |entry: &walkdir::DirEntry| {
        let file = entry.file_name().to_string_lossy();
        file.ends_with(".ko") && farrier::kmod::module_name(&file) == name
    };
    let mut files = walkdir::WalkDir::new(root).into_iter().filter_map(Result::ok);
    fs::read(files.find(is_it).unwrap().path()).unwrap()
}

fn check_one(kernel: &KernelFacts, module: Result<Module, ModuleError>) -> CheckReport {
    let modules = [PayloadModule { path: "m.ko".into(), module }];
    check(&CheckRequest { kernel, needs: &[], modules: &modules, required: &[], files: None })
}

/// All of a kernel's own modules, taken together as a payload, load on it.
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
    let findings: Vec<_> = report.modules.iter().filter(|m| !m.findings.is_empty()).collect();
    assert!(findings.is_empty() && report.findings.is_empty(), "{findings:#?} {:#?}", report.findings);
    assert_eq!(report.verdict, Verdict::Loads);
    assert_eq!(report.load_order.len(), modules.len());
    let place = |name: &str| report.load_order.iter().position(|m| m == name).unwrap();
    assert!(place("ib_core") < place("ib_uverbs") && place("ib_uverbs") < place("mlx5_ib"));
}

/// Which versions differ and which symbols are gone, told from text that other programs printed.
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

/// Modules of the newest kernel on the one before it and on the oldest that there is.
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
    assert!(refused > 0, "the oldest kernel takes every module of the newest");
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

fn find(bytes: &[u8], text: &[u8]) -> usize {
    bytes.windows(text.len()).position(|window| window == text).unwrap()
}

#[test]
fn a_module_broken_on_purpose_is_refused_for_the_right_reason() {
    let release = releases().pop().unwrap();
    let kernel = facts(&release);
    let good = module_bytes(&release, "ib_core");
    let refusal = |bytes: &[u8]| {
        let report = check_one(&kernel, Module::parse(bytes));
        assert_eq!(report.verdict, Verdict::Refused);
        assert_eq!(report.modules[0].findings.len(), 1, "{report:#?}");
        let finding = &report.modules[0].findings[0];
        (finding.rule, finding.subject.clone())
    };
    assert_eq!(check_one(&kernel, Module::parse(&good[..])).verdict, Verdict::Loads);

    // Another release alone is fine, because the module carries symbol versions.
    let mut bytes = good.clone();
    let vermagic = find(&bytes, b"vermagic=") + b"vermagic=".len();
    bytes[vermagic] = b'5';
    assert_eq!(check_one(&kernel, Module::parse(&bytes[..])).verdict, Verdict::Loads);

    let mut bytes = good.clone();
    let flag = vermagic + find(&bytes[vermagic..], b"preempt");
    bytes[flag] = b'b';
    assert_eq!(refusal(&bytes), (Rule::Vermagic, "vermagic".to_owned()));

    // Without the table of versions the release counts, the versions are missed, and nothing speaks for the size.
    let mut bytes = good.clone();
    let name = bytes.windows(12).rposition(|window| window == b"\0__versions\0").unwrap();
    bytes[name + 1] = b'x';
    bytes[vermagic] = b'5';
    let report = check_one(&kernel, Module::parse(&bytes[..]));
    let rules: Vec<Rule> = report.modules[0].findings.iter().map(|finding| finding.rule).collect();
    assert_eq!(
        (report.verdict, rules),
        (Verdict::Refused, vec![Rule::ModuleSize, Rule::Vermagic, Rule::SymbolVersion])
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
    // A signature follows the section headers, and is no part of the object.
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
            let error = Module::parse(&ReadCache::new(File::open(&path).unwrap())).unwrap_err();
            assert!(matches!(error, ModuleError::Outside { .. }), "section {section}: {error}");
            assert_eq!(error.verdict(), Verdict::Refused);
        }
    }
}

/// The kernel's type information, unpacked from its image with nothing of farrier.
fn kernel_btf(release: &KernelRelease) -> Vec<u8> {
    let image = fs::read(unpacked(&image_package(release)).join(format!("boot/vmlinuz-{release}"))).unwrap();
    let start = find(&image, b"\xfd7zXZ\0");
    let mut kernel = Vec::new();
    liblzma::read::XzDecoder::new(&image[start..]).read_to_end(&mut kernel).unwrap();
    let elf = object::read::elf::ElfFile64::<object::Endianness>::parse(&kernel[..]).unwrap();
    elf.section_by_name(".BTF").unwrap().data().unwrap().to_vec()
}

/// Every module of a kernel fits its own kernel's type information, and hardly any that of another.
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

/// `depmod -e -E` names each module and symbol that does not fit a kernel's table, for the whole set at once.
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

/// One real module, broken in each way that the loader knows: each has its own message.
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
        "CONFIG_SMP=y\nCONFIG_PREEMPT_BUILD=y\nCONFIG_MODULE_UNLOAD=y\nCONFIG_MODVERSIONS=y\nCONFIG_MODULE_SIG=y\n\
         CONFIG_MODULE_SIG_FORCE=y\n",
    )
    .unwrap();
    // As Linux 6.4 and later do, it compares the size; all else is the same.
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

    // Another release counts where the versions are missing.
    let mut bytes = changed(value_of("vermagic="), b"5");
    let versions = good.windows(12).rposition(|window| window == b"\0__versions\0").unwrap();
    bytes[versions + 1] = b'x';
    expect(
        &kernel,
        &bytes,
        &["refused the vermagic has `5.", "unknown the module carries no symbol versions"],
    );
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
            .all(|line| line.contains(", is for GPL modules only, but the module's licence is not")),
        "{licence:#?}"
    );
    let mut bytes = good.clone();
    let at = header(".gnu.linkonce.this_module") + 32;
    bytes[at..at + 8].copy_from_slice(&(size + 64).to_le_bytes());
    expect(
        &comparing,
        &bytes,
        &["refused struct module has another size than the kernel's, says the kernel's own ext4: found "],
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
        &["refused 3 bytes follow the signature, so to the kernel the module is not"],
    );
    let mut wrong = sign(&good[..end]);
    wrong[end] ^= 0xff;
    expect(&kernel, &wrong, &["refused the signature is no PKCS#7 message: the kernel answers EBADMSG"]);
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
        missing
            .iter()
            .all(|line| line.contains("is in a namespace that the module does not import: wanted ")),
        "{missing:#?}"
    );
}

/// A signature in the form of `scripts/sign-file`, by a key that no kernel has: taken from an in-tree module, so that
/// its message is a real one.
fn sign(object: &[u8]) -> Vec<u8> {
    let release = releases().pop().unwrap();
    let signed = module_bytes(&release, "ib_uverbs");
    let end = object_end(&signed);
    assert!(signed.len() > end + 40, "the distribution's modules are signed");
    [object, &signed[end..]].concat()
}

/// Where an object ends: with its section headers, where `ld` and `objcopy` put them.
fn object_end(bytes: &[u8]) -> usize {
    let headers = usize::try_from(u64::from_le_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    headers + usize::from(u16::from_le_bytes(bytes[60..62].try_into().unwrap())) * 64
}

/// Where the header of a section starts.
fn section_header(bytes: &[u8], name: &str) -> usize {
    let elf = object::read::elf::ElfFile64::<object::Endianness>::parse(bytes).unwrap();
    let headers = usize::try_from(u64::from_le_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    headers + elf.section_by_name(name).unwrap().index().0 * 64
}

/// The newest 6.12 kernel of the host's suites.
fn newest_6_12() -> KernelRelease {
    let packages = run(Command::new("apt-cache").args(["pkgnames", "linux-headers-6.12."]));
    let newest = packages.lines().filter_map(|package| {
        let release = package.strip_prefix("linux-headers-")?;
        let (number, rest) = release.strip_prefix("6.12.")?.split_once('+')?;
        rest.ends_with("-amd64").then_some(())?;
        (rest.split('-').count() == 2).then_some((number.parse::<u32>().ok()?, release))
    });
    newest.max().expect("the host's suites have a 6.12 kernel").1.parse().unwrap()
}

/// All modules of one kernel have one size of `struct module`, and a kernel that compares refuses others.
#[test]
fn one_size_of_struct_module_for_each_kernel() {
    let (old, new) = (releases().pop().unwrap(), newest_6_12());
    let sizes = |release: &KernelRelease| -> BTreeSet<u64> {
        in_tree(release).iter().map(|payload| payload.module.as_ref().unwrap().this_module_size).collect()
    };
    let (of_old, of_new) = (sizes(&old), sizes(&new));
    assert_eq!((of_old.len(), of_new.len()), (1, 1), "{of_old:?} {of_new:?}");
    let mut kernel = facts(&new);
    let size = *of_new.first().unwrap();
    kernel.beyond_headers.module_size =
        Some(Known { value: size, source: FactSource::InTreeModule("ext4".to_owned()) });
    let modules = in_tree(&new);
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

/// The other architecture: its modules load on their own kernel, and not on this one.
#[test]
fn arm64_modules_load_on_their_own_kernel() {
    let apt = arm64_apt();
    let amd64 = releases().pop().unwrap();
    let release: KernelRelease = amd64.as_str().replace("amd64", "arm64").parse().unwrap();
    let root = unpacked_with(&apt, &format!("linux-headers-{release}"));
    let (kernel, _) = read_header_set(&root, &release, Architecture::Arm64).unwrap();
    let image = unpacked_with(&apt, &format!("linux-image-{release}-unsigned"));
    let modules = read_modules(&image.join("lib/modules").join(release.as_str())).unwrap();
    assert!(modules.len() > 2500, "{} modules", modules.len());
    let report =
        check(&CheckRequest { kernel: &kernel, needs: &[], modules: &modules, required: &[], files: None });
    let bad: Vec<_> = report.modules.iter().filter(|module| module.verdict > Verdict::Loads).collect();
    assert!(bad.is_empty() && report.verdict == Verdict::Loads, "{bad:#?} {:#?}", report.findings);
    // Nobody has signed them, and the kernel is configured to say so.
    let rules: BTreeSet<Rule> = report.modules.iter().flat_map(|m| &m.findings).map(|f| f.rule).collect();
    assert_eq!(rules, BTreeSet::from([Rule::Signature]));
    let foreign = check_one(&facts(&amd64), modules[0].module.clone());
    assert!(foreign.modules[0].findings.iter().any(|f| f.subject == "machine"), "{foreign:#?}");
}
