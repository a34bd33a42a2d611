//! The truth table: modules built for one Debian kernel are checked against the others and then loaded on each of them. The
//! kernel's loader must agree with the check in every case.
use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_inputs::read_header_set;
use farrier_payload::{DecompressionBudget, is_module_file, open_module, read_module};

use crate::support::{
    packages::{fixture_modules, headers, kernel_image, releases},
    virtual_machine::{boot, request},
};
use futures::{StreamExt, stream};
use kmod::{BootOutcome, CheckRequest, KernelFacts, Module, Verdict, check, module_name};

/// Directories of in-tree modules with candidates: several subsystems, without buses to probe.
const DIRECTORIES: [&str; 8] =
    ["crypto", "drivers/block", "drivers/md", "drivers/net", "fs/nls", "lib", "net/core", "net/sched"];
/// Maximum size of a candidate in bytes, because one initramfs contains the candidates of all kernels.
const SMALL: usize = 256 << 10;

/// Returns the 6.1 kernel of the stable suite, the two newest ones, the newest other flavors, and the newest 6.12 kernel.
fn kernels() -> Vec<KernelRelease> {
    let plain = releases("6.1.0-", "-amd64");
    assert!(plain.len() >= 3, "the host's suites have fewer than three 6.1 kernels: {plain:?}");
    let mut kernels = vec![plain[0].clone()];
    kernels.extend_from_slice(&plain[plain.len() - 2..]);
    for (prefix, suffix) in [("6.1.0-", "-cloud-amd64"), ("6.1.0-", "-rt-amd64"), ("6.12.", "+deb12-amd64")] {
        kernels.push(releases(prefix, suffix).pop().unwrap_or_else(|| panic!("no kernel {prefix}*{suffix}")));
    }
    kernels
}

/// Returns a kernel's own modules in a directory, by module name.
fn files(modules: &Path, directory: &str) -> BTreeMap<String, PathBuf> {
    let Ok(listing) = fs::read_dir(modules.join("kernel").join(directory)) else { return BTreeMap::new() };
    let paths = listing.map(|entry| entry.unwrap().path());
    let modules = paths.filter(|path| is_module_file(path.to_str().unwrap()));
    modules.map(|path| (module_name(path.to_str().unwrap()), path)).collect()
}

/// Returns whether a module is small, has no dependencies, and has init and exit functions. An unloadable module frees its name
/// for the next kernel's module.
fn is_suitable(path: &Path) -> bool {
    let mut bytes = Vec::new();
    open_module(path, &DecompressionBudget::without_build())
        .unwrap()
        .unwrap()
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    if bytes.len() > SMALL {
        return false;
    }
    // The string table may store a short name as the suffix of a longer one.
    let text = String::from_utf8_lossy(&bytes);
    let module = Module::parse(&bytes[..]).unwrap();
    let needs_nothing =
        module.fields("depends").all(str::is_empty) && module.fields("softdep").next().is_none();
    needs_nothing && text.contains("init_module\0") && text.contains("cleanup_module\0")
}

/// Returns each kernel's files of the same modules: in each directory, the first module that is suitable for every kernel.
fn candidates(kernels: &[KernelRelease]) -> Vec<Vec<PathBuf>> {
    let mut chosen = vec![Vec::new(); kernels.len()];
    // Look up each kernel once, because apt is slow.
    let roots: Vec<_> = kernels.iter().map(|kernel| kernel_image(kernel).modules.unwrap()).collect();
    for directory in DIRECTORIES {
        let files: Vec<_> = roots.iter().map(|root| files(root, directory)).collect();
        let of_all = |name: &String| files.iter().map(|files| files.get(name)).collect::<Option<Vec<_>>>();
        let mut suitable = files[0].keys().filter_map(of_all);
        if let Some(paths) = suitable.find(|paths| paths.iter().all(|path| is_suitable(path))) {
            for (chosen, path) in chosen.iter_mut().zip(paths) {
                chosen.push(path.clone());
            }
        }
    }
    assert!(chosen[0].len() > 4, "too few modules are suitable: {:?}", chosen[0]);
    chosen
}

/// Copies the modules of all kernels to one directory, with a subdirectory per kernel.
fn payload(kernels: &[KernelRelease], directory: &Path) -> Vec<String> {
    let mut paths = Vec::new();
    for (release, modules) in kernels.iter().zip(candidates(kernels)) {
        fs::create_dir(directory.join(release.as_str())).unwrap();
        let out_of_tree = fixture_modules(release).join("farrier_good.ko");
        for source in modules.into_iter().chain([out_of_tree]) {
            let path = format!("{release}/{}", source.file_name().unwrap().to_str().unwrap());
            fs::copy(source, directory.join(&path)).unwrap();
            paths.push(path);
        }
    }
    paths
}

/// Returns the check's verdict on each module alone.
fn verdicts(kernel: &KernelRelease, directory: &Path, modules: &[String]) -> Vec<(Verdict, String)> {
    let (facts, _): (KernelFacts, _) =
        read_header_set(&headers(kernel), kernel, Architecture::Amd64).unwrap();
    modules
        .iter()
        .map(|path| {
            let modules =
                [read_module(&directory.join(path), &DecompressionBudget::without_build()).unwrap().unwrap()];
            let request =
                CheckRequest { kernel: &facts, needs: &[], modules: &modules, required: &[], files: None };
            let report = check(&request);
            let reasons: Vec<String> =
                report.modules[0].findings.iter().take(2).map(|finding| finding.message.clone()).collect();
            (report.verdict, reasons.join("; "))
        })
        .collect()
}

/// Returns the loader's verdict. A module whose init function ran was loaded, whatever the function returned.
fn loader(outcome: &BootOutcome) -> Verdict {
    match outcome {
        BootOutcome::Loaded | BootOutcome::NotPresent { .. } | BootOutcome::Failed { .. } => Verdict::Loads,
        BootOutcome::Refused { .. } => Verdict::Refused,
        BootOutcome::Crashed { .. } | BootOutcome::Hung { .. } | BootOutcome::NotReached => Verdict::Unknown,
    }
}

fn word(outcome: &BootOutcome) -> String {
    match outcome {
        BootOutcome::Loaded => "loaded".to_owned(),
        BootOutcome::NotPresent { error, .. } => format!("absent {error}"),
        BootOutcome::Failed { error, .. } => format!("failed {error}"),
        BootOutcome::Refused { error, .. } => format!("refused {error}"),
        BootOutcome::Crashed { .. } => "crashed".to_owned(),
        BootOutcome::Hung { .. } => "hung".to_owned(),
        BootOutcome::NotReached => "not reached".to_owned(),
    }
}

fn matrix(kernels: &[KernelRelease], modules: &[String], cells: &[Vec<String>]) -> String {
    let header = kernels.iter().map(KernelRelease::as_str).collect();
    let rows = modules.iter().enumerate().map(|(index, module)| {
        (module.as_str(), cells.iter().map(|column| column[index].as_str()).collect())
    });
    let lines = [("module, by the kernel it was built for", header)].into_iter().chain(rows);
    lines.fold(String::new(), |mut text, (first, cells): (&str, Vec<&str>)| {
        write!(text, "{first:48}").unwrap();
        for cell in cells {
            write!(text, " {cell:23}").unwrap();
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        text
    })
}

#[tokio::test]
async fn the_check_and_the_kernels_loader_agree() {
    let kernels = kernels();
    let directory = tempfile::tempdir().unwrap();
    let modules = payload(&kernels, directory.path());
    let names: Vec<&str> = modules.iter().map(String::as_str).collect();
    // Boot two machines at a time, because each one uses one processor.
    let boots: Vec<_> = kernels
        .iter()
        .map(|kernel| {
            let mut request = request(kernel, directory.path(), &names);
            request.unload_each = true;
            async move { boot(&request).await }
        })
        .collect();
    let reports: Vec<_> = stream::iter(boots).buffered(2).collect().await;

    let (mut cells, mut disagreements, mut counts) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (kernel, report) in kernels.iter().zip(&reports) {
        let said = verdicts(kernel, directory.path(), &modules);
        assert_eq!(report.modules.len(), modules.len());
        let mut column = Vec::new();
        for ((verdict, reasons), tried) in said.iter().zip(&report.modules) {
            let really = loader(&tried.outcome);
            *counts.entry(really).or_insert(0) += 1;
            let agree = *verdict == really;
            column.push(format!("{}{}", word(&tried.outcome), if agree { "" } else { " !" }));
            if !agree {
                let messages = tried.outcome.messages().join(" | ");
                disagreements.push(format!(
                    "{} on {kernel}: the check says {verdict:?} ({reasons}), the kernel {}: {messages}",
                    tried.path,
                    word(&tried.outcome)
                ));
            }
            if tried.path.starts_with(&format!("{kernel}/")) {
                assert_eq!(
                    really,
                    Verdict::Loads,
                    "{kernel} refuses its own {}: {tried:?}",
                    module_name(&tried.path)
                );
            }
        }
        println!(
            "{kernel}: {} modules in {} ms with {}",
            modules.len(),
            report.milliseconds,
            report.accelerator
        );
        cells.push(column);
    }
    println!("{}{counts:?}", matrix(&kernels, &modules, &cells));
    assert!(disagreements.is_empty(), "{} disagreements:\n{}", disagreements.len(), disagreements.join("\n"));
    assert!(counts[&Verdict::Loads] > modules.len() && counts[&Verdict::Refused] > 0, "{counts:?}");
}
