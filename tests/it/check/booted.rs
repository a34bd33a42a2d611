//! Compares the check with the kernel: both must give the same verdict for each broken module.

use std::{fmt::Write as _, fs, path::Path};

use farrier_core::kernel::KernelRelease;
use kmod::{BootOutcome, KernelFacts, Module, Verdict};

use super::{
    broken::{object_end, section_header},
    kernels::{check_one, facts, find, module_bytes, newest_6_12, releases},
};
use crate::support::{
    packages::fixture_modules,
    virtual_machine::{boot, request},
};

/// A variant's description and the module's bytes.
type Variant = (&'static str, Vec<u8>);

/// Returns modules of the fixtures, each broken in one way that every loader detects.
fn of_a_fixture(release: &KernelRelease) -> Vec<Variant> {
    let good = fs::read(fixture_modules(release).join("farrier_good.ko")).unwrap();
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let vermagic = find(&good, b"vermagic=") + b"vermagic=".len();
    let flag = vermagic + find(&good[vermagic..], b"SMP");
    let layout = find(&good, b"\0\0\0\0module_layout\0") - 4;
    let kfree = good.windows(7).rposition(|window| window == b"\0kfree\0").unwrap() + 1;
    let info = section_header(&good, ".modinfo");
    let garbage =
        [&good[..], &[7; 64], &[0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 64], b"~Module signature appended~\n"];
    vec![
        ("as it is", good.clone()),
        ("another release", changed(vermagic, b"5")),
        ("other flags", changed(flag, b"UMP")),
        ("a version flipped", changed(layout, &[!good[layout]])),
        ("no symbol table", changed(section_header(&good, ".symtab") + 4, &[1])),
        ("an undefined symbol", changed(kfree, b"K")),
        ("truncated", good[..object_end(&good) - 1].to_vec()),
        ("a section outside the file", changed(info + 24, &(good.len() as u64).to_le_bytes())),
        ("a section of 4 GiB", changed(info + 32, &(4_u64 << 30).to_le_bytes())),
        ("a signature that is none", garbage.concat()),
        ("bytes after it", [&good[..], b"\n\n\n"].concat()),
    ]
}

/// Appends a section, with new tables of section names and section headers.
fn with_section(bytes: &[u8], name: &str, flags: u64, content: &[u8]) -> Vec<u8> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let (headers, count, names) = (usize::try_from(word(40)).unwrap(), half(60), half(62));
    let mut file = bytes[..object_end(bytes)].to_vec();
    let append = |file: &mut Vec<u8>, content: &[u8]| {
        file.resize(file.len().next_multiple_of(64), 0);
        file.extend(content);
        (file.len() - content.len()) as u64
    };
    let table = headers + names * 64;
    let (start, size) =
        (usize::try_from(word(table + 24)).unwrap(), usize::try_from(word(table + 32)).unwrap());
    let all_names = [&bytes[start..start + size], name.as_bytes(), b"\0"].concat();
    let names_at = append(&mut file, &all_names);
    let content_at = append(&mut file, content);
    let mut all_headers = bytes[headers..headers + count * 64].to_vec();
    all_headers[names * 64 + 24..][..8].copy_from_slice(&names_at.to_le_bytes());
    all_headers[names * 64 + 32..][..8].copy_from_slice(&(all_names.len() as u64).to_le_bytes());
    all_headers.extend([u32::try_from(size).unwrap().to_le_bytes(), 1_u32.to_le_bytes()].concat());
    for value in [flags, 0, content_at, content.len() as u64, 0, 64, 0] {
        all_headers.extend(value.to_le_bytes());
    }
    let headers_at = append(&mut file, &all_headers);
    file[40..48].copy_from_slice(&headers_at.to_le_bytes());
    file[60..62].copy_from_slice(&u16::try_from(count + 1).unwrap().to_le_bytes());
    file
}

/// Returns modules with sections, relocations and symbols that the loader does not accept, and some at the limit.
fn of_sections(release: &KernelRelease) -> Vec<Variant> {
    const WRITE: u64 = 1;
    const ALLOC: u64 = 2;
    const EXEC: u64 = 4;
    let good = fs::read(fixture_modules(release).join("farrier_good.ko")).unwrap();
    let good = &good[..object_end(&good)];
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = good.to_vec();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let start = |name: &str| {
        let header = section_header(good, name);
        usize::try_from(u64::from_le_bytes(good[header + 24..][..8].try_into().unwrap())).unwrap()
    };
    // The first relocation of the code, and the bytes that it changes.
    let entry = start(".rela.init.text");
    let target = start(".init.text")
        + usize::try_from(u64::from_le_bytes(good[entry..][..8].try_into().unwrap())).unwrap();
    // A symbol of a section is defined in it.
    let symbols = start(".symtab");
    let entries = (symbols..).step_by(24).skip(1);
    let local = entries
        .into_iter()
        .find(|&at| matches!(u16::from_le_bytes([good[at + 6], good[at + 7]]), 1..0xff00))
        .unwrap();
    vec![
        ("a relocation of an unknown type", changed(entry + 8, &[42])),
        ("a relocation of 32 unsigned bits", changed(entry + 8, &[10])),
        ("a target that is not zero", changed(target, &[1])),
        ("a symbol of a section that does not exist", changed(local + 6, &999_u16.to_le_bytes())),
        ("writable code", with_section(good, ".both", WRITE | ALLOC | EXEC, &[0; 16])),
        ("one more section", with_section(good, ".more", WRITE | ALLOC, &[0; 16])),
        ("8192 bytes per processor", with_section(good, ".data..percpu", WRITE | ALLOC, &[0; 8192])),
        ("8193 bytes per processor", with_section(good, ".data..percpu", WRITE | ALLOC, &[0; 8193])),
        ("half of the extended versions", with_section(good, "__version_ext_crcs", ALLOC, &[0; 4])),
    ]
}

/// Returns a module whose `struct module` is shorter than the kernel's. Kernels before 6.4 do not compare the size and write
/// beyond the structure.
fn of_another_size(release: &KernelRelease) -> Variant {
    let mut bytes = fs::read(fixture_modules(release).join("farrier_good.ko")).unwrap();
    let size = section_header(&bytes, ".gnu.linkonce.this_module") + 32;
    let shorter = u64::from_le_bytes(bytes[size..size + 8].try_into().unwrap()) - 64;
    bytes[size..size + 8].copy_from_slice(&shorter.to_le_bytes());
    ("this_module of another size", bytes)
}

/// Returns variants of the kernel's own modules, which use features that the fixtures do not. Their signatures are removed,
/// because the kernel knows the key and would detect the change.
fn of_the_kernel(release: &KernelRelease) -> Vec<Variant> {
    let unsigned = |name: &str| {
        let bytes = module_bytes(release, name);
        bytes[..object_end(&bytes)].to_vec()
    };
    let (mut proprietary, mut namespace) = (unsigned("nbd"), unsigned("pcbc"));
    let variants = vec![("nbd as it is", proprietary.clone()), ("pcbc as it is", namespace.clone())];
    let licence = find(&proprietary, b"license=GPL\0") + b"license=".len();
    proprietary[licence] = b'X';
    let import = find(&namespace, b"\0import_ns=") + 1;
    namespace[import] = b'x';
    let broken =
        [("GPL-only symbols, another licence", proprietary), ("a namespace not imported", namespace)];
    variants.into_iter().chain(broken).collect()
}

fn loader(outcome: &BootOutcome) -> Verdict {
    match outcome {
        BootOutcome::Loaded | BootOutcome::NotPresent { .. } | BootOutcome::Failed { .. } => Verdict::Loads,
        BootOutcome::Refused { .. } => Verdict::Refused,
        other => panic!("{other:?}"),
    }
}

/// Checks and boots all variants, and returns the differences and the refused variants.
async fn compare(release: &KernelRelease, variants: &[Variant], dir: &Path) -> (String, Vec<&'static str>) {
    let mut paths = Vec::new();
    for (number, (_, bytes)) in variants.iter().enumerate() {
        // The name of a damaged module is known only from its file name.
        let name = Module::parse(&bytes[..]).map_or_else(|_| "farrier_good".to_owned(), |module| module.name);
        let path = format!("{number}/{name}.ko");
        fs::create_dir(dir.join(number.to_string())).unwrap();
        fs::write(dir.join(&path), bytes).unwrap();
        paths.push(path);
    }
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let mut request = request(release, dir, &paths);
    request.unload_each = true;
    let kernel = KernelFacts { beyond_headers: request.kernel.facts().unwrap(), ..facts(release) };
    let report = boot(&request).await;

    let (mut differences, mut refused) = (String::new(), Vec::new());
    for ((what, bytes), tried) in variants.iter().zip(&report.modules) {
        let said = check_one(&kernel, Module::parse(&bytes[..]));
        let really = loader(&tried.outcome);
        println!("{release}: {what}: the kernel {really}, the check {}", said.summary());
        if said.verdict != really {
            writeln!(differences, "{release}: {what}: {} but {:?}", said.summary(), tried.outcome).unwrap();
        }
        if really == Verdict::Refused {
            refused.push(*what);
        }
    }
    (differences, refused)
}

#[tokio::test]
async fn the_kernel_refuses_what_is_broken_on_purpose_as_the_check_says() {
    let harmless = [
        "as it is",
        "another release",
        "bytes after it",
        "nbd as it is",
        "pcbc as it is",
        "one more section",
        "8192 bytes per processor",
        // Both kernels are older than Linux 6.14.
        "half of the extended versions",
    ];
    let (older, newer) = (releases().pop().unwrap(), newest_6_12());
    let of_older = [of_a_fixture(&older), of_the_kernel(&older), of_sections(&older)].concat();
    let of_newer = [of_a_fixture(&newer), vec![of_another_size(&newer)], of_sections(&newer)].concat();
    for (release, variants) in [(&older, of_older), (&newer, of_newer)] {
        let dir = tempfile::tempdir().unwrap();
        let (differences, refused) = compare(release, &variants, dir.path()).await;
        assert_eq!(differences, "");
        let names = variants.iter().map(|(what, _)| *what);
        assert_eq!(refused, names.filter(|what| !harmless.contains(what)).collect::<Vec<_>>());
    }
}
