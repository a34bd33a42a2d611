//! Boot checks on a real kernel, with modules that load, find no device, are refused, or crash the kernel in various ways.
use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use farrier_bootcheck::{BootError, boot_check};
use farrier_core::kernel::KernelRelease;

use crate::support::{
    packages::{fixture_modules, header_tree, kernel_image, releases},
    virtual_machine::{boot, children, entrypoint, outcomes, request},
};
use kmod::{BootOutcome, Verdict};
use tokio_util::sync::CancellationToken;

fn newest() -> KernelRelease {
    releases("6.1.0-", "-amd64").pop().expect("the host's suites have a 6.1 kernel")
}

fn says(outcome: &BootOutcome, words: &str) -> bool {
    outcome.messages().iter().any(|line| line.contains(words))
}

#[tokio::test]
async fn modules_load_find_nothing_or_are_refused() {
    let release = newest();
    let built = fixture_modules(&release);
    let payload = tempfile::tempdir().unwrap();
    for name in ["farrier_good.ko", "farrier_absent.ko", "farrier_invalid.ko", "farrier_forge.ko"] {
        fs::copy(built.join(name), payload.path().join(name)).unwrap();
    }
    let mut bytes = fs::read(built.join("farrier_good.ko")).unwrap();
    let text = b"\0\0\0module_layout\0\0";
    let at = bytes.windows(text.len()).position(|window| window == text).unwrap();
    // Change one byte of the symbol CRC, which precedes the symbol's name and is padded to eight bytes.
    bytes[at - 4] ^= 1;
    fs::write(payload.path().join("farrier_other.ko"), bytes).unwrap();

    let modules = [
        "farrier_good.ko",
        "farrier_absent.ko",
        "farrier_forge.ko",
        "farrier_invalid.ko",
        "farrier_other.ko",
    ];
    let mut request = request(&release, payload.path(), &modules);
    request.unload_each = true;
    let report = boot(&request).await;
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    assert_eq!(report.kernel, release.as_str());
    let paths: Vec<&str> = report.modules.iter().map(|module| module.path.as_str()).collect();
    assert_eq!(paths, modules);
    let [good, absent, forge, invalid, other] = &report.modules[..] else { panic!("{report:#?}") };
    assert_eq!(good.outcome, BootOutcome::Loaded);
    for module in [absent, forge] {
        assert!(
            matches!(&module.outcome, BootOutcome::NotPresent { error, .. } if error == "ENODEV"),
            "{module:?}"
        );
    }
    assert!(says(&forge.outcome, "6c6f61646564"), "{forge:?}");
    assert!(
        matches!(&invalid.outcome, BootOutcome::Failed { error, .. } if error == "EINVAL"),
        "{invalid:?}"
    );
    assert!(matches!(&other.outcome, BootOutcome::Refused { error, .. } if error == "ENOEXEC"), "{other:?}");
    assert!(says(&other.outcome, "disagrees about version of symbol module_layout"), "{other:?}");
    assert_eq!(report.verdict(), Verdict::Refused);
}

#[tokio::test]
async fn parameters_and_the_kernels_own_modules_are_given() {
    let release = newest();
    let image = kernel_image(&release);
    let own = image.modules.clone().unwrap().join("kernel");
    let payload = tempfile::tempdir().unwrap();
    fs::copy(fixture_modules(&release).join("farrier_good.ko"), payload.path().join("farrier_good.ko"))
        .unwrap();
    // A module that needs others, which in turn request a cryptographic algorithm by name.
    fs::copy(own.join("net/netfilter/nf_nat.ko"), payload.path().join("nf_nat.ko")).unwrap();
    let mut request = request(&release, payload.path(), &["nf_nat.ko", "farrier_good.ko"]);
    request.parameters.insert("farrier_good".into(), "answer=42".into());
    let report = boot(&request).await;
    let outcomes = outcomes(&report);
    assert_eq!(*outcomes["nf_nat"], BootOutcome::Loaded);
    assert!(
        matches!(outcomes["farrier_good"], BootOutcome::Failed { error, .. } if error == "ERANGE"),
        "{report:#?}"
    );
}

/// A module whose dependencies are unavailable gets no verdict from the kernel. A module with a missing symbol is refused.
#[tokio::test]
async fn what_lacks_modules_that_are_not_there_is_not_refused() {
    let release = newest();
    let own = kernel_image(&release).modules.unwrap().join("kernel");
    let payload = tempfile::tempdir().unwrap();
    fs::copy(own.join("net/netfilter/nf_nat.ko"), payload.path().join("nf_nat.ko")).unwrap();
    // Clear the list of dependencies: the boot check then omits no module, and no module exports the symbols.
    let mut bytes = fs::read(own.join("net/netfilter/xt_nat.ko")).unwrap();
    let at = bytes.windows(8).position(|window| window == b"depends=").unwrap();
    let length = bytes[at..].iter().position(|&byte| byte == 0).unwrap();
    bytes[at..at + length].fill(0);
    // Invalidate the signature's marker, so that the module counts as unsigned instead of wrongly signed.
    bytes.push(0);
    fs::write(payload.path().join("xt_nat.ko"), bytes).unwrap();
    let mut request = request(&release, payload.path(), &["nf_nat.ko", "xt_nat.ko"]);
    request.kernel.modules = None;
    let report = boot(&request).await;
    let outcomes = outcomes(&report);
    assert_eq!(*outcomes["nf_nat"], BootOutcome::NotReached, "{report:#?}");
    assert!(
        matches!(outcomes["xt_nat"], BootOutcome::Refused { error, .. } if error == "ENOENT"),
        "{report:#?}"
    );
}

/// A kernel image alone comes without modules, so the boot check loads those from `--needs`.
#[test]
fn modules_of_needed_directories_are_loaded() {
    let release = newest();
    let image = kernel_image(&release);
    let own = image.modules.unwrap().join("kernel");
    let work = tempfile::tempdir().unwrap();
    let place = |name: &str| work.path().join(name).display().to_string();
    fs::copy(image.vmlinuz, place("vmlinuz")).unwrap();
    header_tree(&release, &work.path().join("headers"));
    let build = work.path().join("headers/lib/modules").join(release.as_str()).join("build");
    fs::create_dir_all(build.parent().unwrap()).unwrap();
    symlink(format!("/usr/src/linux-headers-{release}"), build).unwrap();
    for file in [
        "net/netfilter/nf_conntrack.ko",
        "net/ipv4/netfilter/nf_defrag_ipv4.ko",
        "net/ipv6/netfilter/nf_defrag_ipv6.ko",
        "lib/libcrc32c.ko",
        "crypto/crc32c_generic.ko",
    ] {
        let to = work.path().join("needed").join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(own.join(file), to).unwrap();
    }
    let table = "0x00000001\tother_f\textra/other\tEXPORT_SYMBOL\t\n";
    fs::write(place("needed/Module.symvers"), table).unwrap();
    let outcome = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_farrier"))
            .args([
                "check",
                "--boot",
                "-o",
                "json",
                "--os",
                "debian",
                "--os-version",
                "12",
                "--arch",
                "amd64",
            ])
            .args(["--kernel", release.as_str(), "--headers", &place("headers")])
            .args(["--kernel-image", &place("vmlinuz"), "--cache-dir", &place("cache")])
            .arg("--entrypoint")
            .arg(entrypoint())
            .args(more)
            .arg(own.join("net/netfilter/nf_nat.ko"))
            .output()
            .unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(report["boot"]["modules"][0]["name"], "nf_nat", "{report:#}");
        report["boot"]["modules"][0]["outcome"].as_str().unwrap().to_owned()
    };
    assert_eq!(outcome(&[]), "notReached");
    assert_eq!(outcome(&["--needs", &place("needed")]), "loaded");
}

/// Each module runs in a separate virtual machine, and none of them survives.
#[tokio::test]
async fn what_takes_the_kernel_down_is_said_to() {
    let release = newest();
    let payload = fixture_modules(&release);
    for (module, words) in [
        ("farrier_bug", "kernel BUG at"),
        ("farrier_null", "NULL pointer dereference"),
        ("farrier_panic", "Kernel panic - not syncing: farrier_panic: on purpose"),
        ("farrier_last", "kernel BUG at"),
    ] {
        let file = format!("{module}.ko");
        let mut request = request(&release, &payload, &["farrier_good.ko", &file, "farrier_absent.ko"]);
        request.unload_each = true;
        let report = boot(&request).await;
        let outcomes = outcomes(&report);
        assert_eq!(*outcomes["farrier_good"], BootOutcome::Loaded, "{report:#?}");
        assert!(matches!(outcomes[module], BootOutcome::Crashed { .. }), "{report:#?}");
        assert!(says(outcomes[module], words), "{report:#?}");
        assert_eq!(*outcomes["farrier_absent"], BootOutcome::NotReached, "{report:#?}");
        assert_eq!(report.verdict(), Verdict::Refused);
    }
}

#[tokio::test]
async fn a_module_that_never_comes_back_hangs() {
    let release = newest();
    let mut request = request(
        &release,
        &fixture_modules(&release),
        &["farrier_good.ko", "farrier_loop.ko", "farrier_absent.ko"],
    );
    request.limits.module_time = Duration::from_secs(5);
    let report = boot(&request).await;
    let outcomes = outcomes(&report);
    assert_eq!(*outcomes["farrier_good"], BootOutcome::Loaded);
    assert!(matches!(outcomes["farrier_loop"], BootOutcome::Hung { .. }), "{report:#?}");
    assert_eq!(*outcomes["farrier_absent"], BootOutcome::NotReached);
    assert_eq!(children(), [""; 0]);
}

#[tokio::test]
async fn without_qemu_it_says_what_to_install() {
    let release = newest();
    let mut request = request(&release, &fixture_modules(&release), &["farrier_good.ko"]);
    request.emulator = Some(PathBuf::from("/nonexistent/qemu"));
    let error = boot_check(&request, &CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot start /nonexistent/qemu: not found");
    assert_eq!(error.hint(), "install the package qemu-system-x86");
}

/// QEMU's seccomp filter restricts a guest that escapes into QEMU. A QEMU built without the filter also works.
#[tokio::test]
async fn qemu_runs_in_its_sandbox_where_it_has_one() {
    let release = newest();
    let modules = fixture_modules(&release);
    let endless = request(&release, &modules, &["farrier_loop.ko"]);
    let filtered = async {
        let is_filtered = |stat: String| {
            let id = stat.split(' ').next().unwrap();
            let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
            status.contains("qemu-system") && status.contains("\nSeccomp:\t2\n")
        };
        while !children().into_iter().any(is_filtered) {
            // No notification exists; the sleep only limits the polling rate.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let cancel = CancellationToken::new();
    tokio::select! {
        report = boot_check(&endless, &cancel) => panic!("{report:?}"),
        filtered = tokio::time::timeout(Duration::from_secs(30), filtered) => filtered.expect("QEMU is filtered"),
    }

    let directory = tempfile::tempdir().unwrap();
    let emulator = directory.path().join("qemu");
    let text = "#!/bin/sh\ncase \"$*\" in *-sandbox*) exit 1 ;; esac\nexec qemu-system-x86_64 \"$@\"\n";
    fs::write(&emulator, text).unwrap();
    fs::set_permissions(&emulator, fs::Permissions::from_mode(0o755)).unwrap();
    let mut request = request(&release, &modules, &["farrier_good.ko"]);
    request.emulator = Some(emulator);
    assert_eq!(*outcomes(&boot(&request).await)["farrier_good"], BootOutcome::Loaded);
}

#[tokio::test]
async fn what_is_no_kernel_does_not_start() {
    let release = newest();
    let mut request = request(&release, &fixture_modules(&release), &["farrier_good.ko"]);
    request.kernel.vmlinuz = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let error = boot_check(&request, &CancellationToken::new()).await.unwrap_err();
    assert!(matches!(&error, BootError::NotStarted(_, last) if !last.is_empty()), "{error:?}");
    assert!(error.to_string().starts_with(&format!("cannot boot kernel {release}: ")), "{error}");
}

/// cargo-nextest runs each test in its own process, so all child processes belong to this test.
#[tokio::test]
async fn cancelled_or_dropped_it_leaves_nothing() {
    let release = newest();
    let temporary = tempfile::tempdir().unwrap();
    let mut request = request(&release, &fixture_modules(&release), &["farrier_loop.ko"]);
    request.scratch_dir = Some(temporary.path().to_owned());
    for drop_it in [false, true] {
        let cancel = CancellationToken::new();
        let mut check = Box::pin(boot_check(&request, &cancel));
        let started = async {
            while children().is_empty() {
                // No notification exists; the sleep only limits the polling rate.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            report = &mut check => panic!("{report:?}"),
            () = started => {}
        }
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
        if !drop_it {
            cancel.cancel();
            assert!(matches!(check.as_mut().await, Err(BootError::Canceled)));
        }
        drop(check);
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
        // The kernel reaps the process shortly after the kill.
        let ended = async {
            while !children().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), ended).await.expect("QEMU has ended");
    }
}
