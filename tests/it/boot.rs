//! Boot checks on a real kernel: modules that load, that find nothing, that are refused, and that take the kernel
//! down in every way.
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::support::{
    packages::{fixture_modules, kernel_image, releases},
    virtual_machine::{boot, children, outcomes, request},
};
use farrier::{
    boot::{BootError, boot_check},
    kernel::KernelRelease,
    kmod::{BootOutcome, Verdict},
};
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
    // The last byte of its name's checksum is four bytes of zeros before the name.
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
    request.tried_alone = true;
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
    // One that needs others, which need a cryptographic algorithm by its name alone.
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

/// One machine for each: none survives.
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
        request.tried_alone = true;
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
    assert_eq!(error.to_string(), "start /nonexistent/qemu: there is no such program");
    assert_eq!(error.hint(), "install qemu-system-x86, or name the emulator");
}

/// A guest that breaks out into QEMU finds system calls closed; a QEMU that was built without that works all the same.
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
            // Nothing tells; this only paces the question.
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
    assert!(error.to_string().starts_with(&format!("boot kernel {release}: ")), "{error}");
}

/// Each test is a process of its own under cargo-nextest, so that its children are this test's.
#[tokio::test]
async fn cancelled_or_dropped_it_leaves_nothing() {
    let release = newest();
    let temporary = tempfile::tempdir().unwrap();
    let mut request = request(&release, &fixture_modules(&release), &["farrier_loop.ko"]);
    request.directory = Some(temporary.path().to_owned());
    for drop_it in [false, true] {
        let cancel = CancellationToken::new();
        let mut check = Box::pin(boot_check(&request, &cancel));
        let started = async {
            while children().is_empty() {
                // Nothing tells; this only paces the question.
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
            assert!(matches!(check.as_mut().await, Err(BootError::Cancelled)));
        }
        drop(check);
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
        // The kernel reaps it a moment after it was killed.
        let ended = async {
            while !children().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), ended).await.expect("QEMU has ended");
    }
}
