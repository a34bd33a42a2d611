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
    request.tried_alone = true;
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
    let harmless = ["as it is", "another release", "bytes after it", "nbd as it is", "pcbc as it is"];
    let (older, newer) = (releases().pop().unwrap(), newest_6_12());
    let of_newer = of_a_fixture(&newer).into_iter().chain([of_another_size(&newer)]).collect();
    for (release, variants) in
        [(&older, [of_a_fixture(&older), of_the_kernel(&older)].concat()), (&newer, of_newer)]
    {
        let dir = tempfile::tempdir().unwrap();
        let (differences, refused) = compare(release, &variants, dir.path()).await;
        assert_eq!(differences, "");
        let names = variants.iter().map(|(what, _)| *what);
        assert_eq!(refused, names.filter(|what| !harmless.contains(what)).collect::<Vec<_>>());
    }
}
