use std::io::{self, Read as _};

use farrier_core::image::{Memory, Period};
use farrier_payload::DecompressionBudget;
use kmod::{BootOutcome, ModuleBoot, testing::ModuleFile};
use serde_json::json;

use super::{super::cell_build::NeedInputs, *};
use crate::{
    build_one,
    failures::record_outcome,
    known_failures,
    testing::{Bench, K9, SYMBOLS, module},
};

/// A function that returns the result of a scripted boot.
type Answer = fn() -> Result<BootReport, BuildError>;

fn boot_report(outcome: BootOutcome) -> BootReport {
    BootReport {
        kernel: K9.to_owned(),
        accelerator: "tcg".to_owned(),
        milliseconds: 3000,
        modules: vec![ModuleBoot { path: "m.ko".to_owned(), name: "m".to_owned(), outcome }],
    }
}

/// Returns a report with the verdict unknown, made by the real check of a header set without `Module.symvers`.
async fn unknown(bench: &Bench) -> Result<CheckReport, BuildError> {
    let cell = bench.cell(K9).await;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let mut headers = crate::headers::fetch(&build).await.unwrap();
    headers.facts.symbols = None;
    let compile_inputs = CompileInputs { headers, needed: NeedInputs::default() };
    let payload = bench.payload(K9, &[&module()]);
    Ok(check(&build, &compile_inputs, payload, None).await?.report)
}

#[tokio::test]
async fn firmware_that_the_payload_lacks_is_reported() {
    let bench = Bench::new(&json!({}));
    let cell = bench.cell(K9).await;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let headers = crate::headers::fetch(&build).await.unwrap();
    let compile_inputs = CompileInputs { headers, needed: NeedInputs::default() };
    let payload = bench.payload(K9, &[&module().info("firmware", "acme/*.fw")]);
    let lacking = static_check(&build, &compile_inputs, None, &payload).await.unwrap();
    assert_eq!(lacking.verdict, Verdict::Loads, "firmware is a fact about the image, not a verdict");
    assert_eq!(lacking.modules[0].about.missing_firmware, ["acme/*.fw"]);
    assert!(lacking.to_string().contains("firmware of m that the image lacks: acme/*.fw\n"), "{lacking}");
    let place = payload.tree.join("lib/firmware/acme");
    fs_err::create_dir_all(&place).unwrap();
    fs_err::write(place.join("a.fw.xz"), "").unwrap();
    let complete = static_check(&build, &compile_inputs, None, &payload).await.unwrap();
    assert!(complete.modules[0].about.missing_firmware.is_empty(), "{complete}");
}

/// A mistyped name in `modules` leads to the hint that names the built module, not to one about the kernel.
#[tokio::test]
async fn a_mistyped_required_module_is_named_with_the_built_one() {
    let hint = async |required: &str| {
        let bench = Bench::new(&json!({"modules": [required]}));
        let error =
            bench.publish(K9, &[&ModuleFile::named("acme_ticker").needs("printk", 1)]).await.unwrap_err();
        assert!(error.to_string().ends_with("does not contain it: found acme_ticker"), "{error}");
        error.hint().unwrap()
    };
    assert_eq!(
        hint("acme_tickr").await,
        "`modules` of driver image x has acme_tickr, which was not built: did you mean acme_ticker?"
    );
    assert_eq!(
        hint("other").await,
        "`modules` of driver image x has other, which was not built: correct it, or let the template install the module under /out"
    );
}

#[tokio::test]
async fn unknown_is_accepted_unless_the_definition_denies_it() {
    let mut bench = Bench::new(&json!({}));
    let unknown_report = unknown(&bench).await.unwrap();
    assert_eq!(unknown_report.verdict, Verdict::Unknown);
    assert_eq!(unknown_report.short_summary(), "1 module: unknown");

    bench.image().spec.check.unknown = UnknownPolicy::Deny;
    let error = unknown(&bench).await.unwrap_err();
    let BuildError::Problem(BuildProblem { kind: ProblemKind::Unknown, .. }) = &error else {
        panic!("{error}")
    };
    let settle = unknown_report.remedies(Verdict::Unknown);
    assert!(!settle.is_empty());
    assert!(error.is_permanent() && error.is_caused_by_policy());
    let hint = error.hint().unwrap();
    assert!(hint.starts_with("to settle it: ") && hint.contains(settle[0].as_str()), "{hint}");
    assert!(error.detail().iter().any(|line| line.contains("unknown")), "{:?}", error.detail());

    // The failure is recorded with the policy that caused it.
    let cell = bench.cell(K9).await;
    record_outcome(&bench.services, &cell, &Err(error)).unwrap();
    let failures = known_failures(&bench.services.cache, [cell.input_hash]).unwrap();
    let failure = failures[&cell.input_hash].as_ref().unwrap();
    assert!(failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
    bench.image().spec.check.unknown = UnknownPolicy::Allow;
    assert!(!failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
}

#[tokio::test]
async fn what_was_published_as_unknown_is_not_accepted_after_a_change_of_mind() {
    let mut bench = Bench::new(&json!({}));
    // Without `Module.symvers` nothing is known about symbols.
    std::fs::remove_file(bench.services.definitions.root.join(format!("headers-{K9}/Module.symvers")))
        .unwrap();
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    assert_eq!(built.report.verdict, Verdict::Unknown);
    let (name, target) = ("x".parse().unwrap(), Bench::target(K9));
    let outcome = build_one(&bench.services, &name, &target, true, false).await.unwrap();
    assert!(outcome.built.is_none());

    bench.image().spec.check.unknown = UnknownPolicy::Deny;
    let error = build_one(&bench.services, &name, &target, true, false).await.unwrap_err();
    assert!(error.to_string().ends_with("with the verdict unknown, and check.unknown is deny"), "{error}");
    assert!(error.hint().is_some());
}

/// Compressed modules that decompress to a far larger size end the build permanently.
#[tokio::test]
async fn modules_that_do_not_decompress_within_the_budget_end_the_build() {
    let mut bench = Bench::new(&json!({}));
    let bomb = zstd::encode_all(io::repeat(0).take(1 << 20), 1).unwrap();
    let (cell, deadline) = (bench.cell(K9).await, bench.image().spec.build.deadline);
    let checked = async |budget: DecompressionBudget| {
        let build = CellBuild::of(&bench.services, &cell).unwrap();
        let compile_inputs = CompileInputs {
            headers: crate::headers::fetch(&build).await.unwrap(),
            needed: NeedInputs::default(),
        };
        let mut payload = bench.payload(K9, &[&module()]);
        for number in 0..10 {
            fs_err::write(payload.tree.join(format!("{number}.ko.zst")), &bomb).unwrap();
        }
        payload.decompression = Arc::new(budget);
        check(&build, &compile_inputs, payload, None).await.map(|checked| checked.report).unwrap_err()
    };
    let refused = checked(DecompressionBudget::without_build()).await;
    assert!(
        matches!(refused, BuildError::Problem(BuildProblem { kind: ProblemKind::Refused, .. })),
        "{refused}"
    );

    let many = checked(DecompressionBudget::of_bytes(9 << 20)).await;
    assert!(many.to_string().starts_with("cannot decompress module "), "{many}");
    assert!(many.to_string().ends_with("the limit for all modules of one check is 9437184 bytes"), "{many}");
    assert!(many.is_permanent() && !many.is_caused_by_deadline() && many.hint().is_some());

    let late = checked(DecompressionBudget::of_build(deadline, deadline.duration())).await;
    assert!(late.to_string().ends_with(": the deadline of 2h has passed"), "{late}");
    assert!(late.is_permanent() && late.is_caused_by_deadline() && late.hint().is_some());
    record_outcome(&bench.services, &cell, &Err(late)).unwrap();
    let failures = known_failures(&bench.services.cache, [cell.input_hash]).unwrap();
    let failure = failures[&cell.input_hash].as_ref().unwrap();
    assert!(failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
    bench.image().spec.build.deadline = Period::seconds(3 * 60 * 60);
    assert!(!failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
}

#[tokio::test]
async fn a_build_over_its_limit_is_retried_with_more_memory() {
    let mut bench = Bench::new(&json!({}));
    let cell = bench.cell(K9).await;
    let error = BuildError::problem(ProblemKind::OverLimit, "it needs more memory".to_owned(), None);
    record_outcome(&bench.services, &cell, &Err(error)).unwrap();
    let failures = known_failures(&bench.services.cache, [cell.input_hash]).unwrap();
    let failure = failures[&cell.input_hash].as_ref().unwrap();
    assert!(failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
    bench.image().spec.build.memory = Memory::from_bytes(2 << 30);
    assert!(!failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site));
}

#[tokio::test]
async fn a_refused_module_is_not_booted() {
    let (bench, scripted) =
        Bench::new(&json!({"check": {"boot": true}})).with_boot(|| Ok(boot_report(BootOutcome::Loaded)));
    let error = bench.publish(K9, &[&ModuleFile::named("m").needs("printk", 2)]).await.unwrap_err();
    assert!(matches!(error, BuildError::Problem(BuildProblem { kind: ProblemKind::Refused, .. })), "{error}");
    assert!(scripted.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_boot_that_loads_everything_is_in_the_report() {
    let (bench, scripted) =
        Bench::new(&json!({"check": {"boot": true}})).with_boot(|| Ok(boot_report(BootOutcome::Loaded)));
    // `a` needs a symbol of `m`, and is loaded after it.
    let (first, second) = (module().exports("f", 5), ModuleFile::named("a").needs("f", 5));
    let built = bench.publish(K9, &[&first, &second]).await.unwrap();
    assert_eq!(built.report.boot, Some(boot_report(BootOutcome::Loaded)));
    let paths = ["m", "a"].map(|name| format!("lib/modules/{K9}/extra/{name}.ko"));
    assert_eq!(*scripted.asked.lock().unwrap(), [paths.to_vec()]);
    assert_eq!(
        bench.annotations(K9).await["farrier.dev/check-summary"],
        "2 modules: loads, also when booted"
    );
    let heard = bench.heard();
    assert!(heard.contains(&"booting the kernel to load the modules".to_owned()), "{heard:?}");
}

#[tokio::test]
async fn a_boot_that_does_not_load_stops_the_target() {
    let cases: [(Answer, &str); 3] = [
        (
            || {
                let messages = vec!["m: disagrees about version of symbol printk".to_owned()];
                Ok(boot_report(BootOutcome::Refused { error: "EINVAL".to_owned(), messages }))
            },
            "m was refused with EINVAL: m: disagrees about version of symbol printk",
        ),
        (
            || Ok(boot_report(BootOutcome::Crashed { messages: vec!["Kernel panic".to_owned()] })),
            "m crashed the kernel: Kernel panic",
        ),
        (|| Ok(boot_report(BootOutcome::Hung { messages: Vec::new() })), "m hung the kernel"),
    ];
    for (answer, said) in cases {
        let (bench, _) = Bench::new(&json!({"check": {"boot": true}})).with_boot(answer);
        let error = bench.publish(K9, &[&module()]).await.unwrap_err();
        assert_eq!(error.to_string(), format!("the boot check failed: {said}"));
        assert!(error.is_permanent() && error.is_caused_by_policy() && error.hint().is_some());
        let reference = bench.cell(K9).await.reference;
        assert!(bench.services.look_up(&reference).await.unwrap().is_none(), "nothing is published");
    }
}

/// The build fails before the compiler runs, which may take an hour.
#[tokio::test]
async fn a_boot_check_that_nobody_can_make_is_an_error_at_once() {
    let bench = Bench::new(&json!({"check": {"boot": true}}));
    let error = bench.build(K9).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "image x asks for a boot check (check.boot: true), but this farrier cannot boot kernels"
    );
    assert!(!error.is_permanent());
    assert!(bench.heard().is_empty(), "no stage was started");
}

#[tokio::test]
async fn faults_of_the_virtual_machine_pass_through() {
    let (bench, _) = Bench::new(&json!({"check": {"boot": true}})).with_boot(|| Err(BuildError::Canceled));
    let error = bench.publish(K9, &[&module()]).await.unwrap_err();
    assert!(matches!(error, BuildError::Canceled) && !error.is_permanent(), "{error}");
}

/// A kernel with `CONFIG_MODULE_FORCE_LOAD` loads a module without vermagic, and nothing proves that the module fits.
#[tokio::test]
async fn what_is_unproven_is_published_unless_the_site_denies_it() {
    let mut bench = Bench::new(&json!({}));
    bench.headers_with(K9, SYMBOLS, "CONFIG_MODULE_FORCE_LOAD=y\n");
    let mut file = module();
    file.info.retain(|(key, _)| *key != "vermagic");

    bench.services.definitions.site.check.unproven = UnprovenPolicy::Deny;
    let error = bench.publish(K9, &[&file]).await.unwrap_err();
    let BuildError::Problem(BuildProblem { kind: ProblemKind::Unknown, .. }) = &error else {
        panic!("{error}")
    };
    let message = error.to_string();
    assert!(
        message
            .starts_with("nothing proves that the modules fit, and check.unproven of site.yaml is deny: m: "),
        "{message}"
    );
    let cell = bench.cell(K9).await;
    record_outcome(&bench.services, &cell, &Err(error)).unwrap();
    let failures = known_failures(&bench.services.cache, [cell.input_hash]).unwrap();
    let failure = failures[&cell.input_hash].as_ref().unwrap();
    let applies =
        |bench: &Bench| failure.applies_to(&bench.definition().0.spec, &bench.services.definitions.site);
    assert!(applies(&bench));

    bench.services.definitions.site.check.unproven = UnprovenPolicy::Allow;
    assert!(!applies(&bench));
    let built = bench.publish(K9, &[&file]).await.unwrap();
    assert_eq!(built.report.short_summary(), "1 module: loads, unproven");
}
