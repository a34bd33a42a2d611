//! The generated pages of docs/reference match the schemas, types and metrics.

mod schema_pages;
mod source_tables;

use std::{collections::BTreeSet, fmt::Write as _, fs, time::Duration};

use farrier_cluster::kube::KubeStats;
use farrier_controller::runtime::Metrics;
use farrier_core::plan::RolloutWait;
use jiff::Timestamp;
use regex::Regex;
use schema_pages::Page;
use serde_json::Value;
use source_tables::{cell, constants, table, variants};

use crate::{schema::is_current_file, support::pages::page as source};

const GENERATED: &str = "<!-- Generated: UPDATE_SCHEMA=1 cargo nextest run --test it reference:: -->\n";

/// Compares a page with its current text.
fn is_current(name: &str, title: &str, text: &str) {
    is_current_file(&format!("docs/reference/{name}.md"), &format!("# {title}\n\n{GENERATED}\n{text}"));
}

/// Returns the examples of a kind, and loads them as definitions, so that they are correct.
fn examples(name: &str, place: &str) -> Vec<Value> {
    let text = source(&format!("docs/reference/examples/{name}.yaml"));
    let documents: Vec<&str> = text.split("\n---\n").collect();
    let loads = |text: &str| {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(place);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::create_dir_all(directory.path().join("patches")).unwrap();
        fs::write(directory.path().join("patches/timer.patch"), "").unwrap();
        fs::write(file, text).unwrap();
        if let Err(errors) = farrier_definitions::load(Some(directory.path())) {
            panic!("{name}: {errors}");
        }
    };
    // A site has one document.
    let files = if place == "site.yaml" { documents.clone() } else { vec![text.as_str()] };
    for file in files {
        loads(file);
    }
    documents.iter().map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

/// Every field of a kind has a row with an example.
fn kind_is_current(name: &str, kind: &str, place: &str) {
    let file = format!("schema/{}.json", name.replace('-', ""));
    let schema: Value = serde_json::from_str(&source(&file)).unwrap();
    let mut page = Page::new(&schema, kind, &examples(name, place));
    let tables = page.text();
    assert_eq!(page.missing, [""; 0], "fields without a value in docs/reference/examples/{name}.yaml");
    let all = source(&format!("docs/reference/examples/{name}.yaml"));
    let first = all.split("\n---\n").next().unwrap();
    let more = if first == all { "" } else { "[More examples]" };
    let link = if more.is_empty() { String::new() } else { format!("{more}(examples/{name}.yaml).\n") };
    let text = format!(
        "A file in the definitions directory, not an object in the cluster: `{place}`.\n\n\
         ```yaml\n{}\n```\n\n{link}{tables}",
        first.trim_end()
    );
    is_current(name, kind, &text);
}

#[test]
fn driver_images() {
    kind_is_current("driver-image", "DriverImage", "images/NAME.yaml");
}

#[test]
fn kernel_families() {
    kind_is_current("kernel-family", "KernelFamily", "kernels/NAME.yaml");
}

#[test]
fn announced_kernels() {
    kind_is_current("announced-kernels", "AnnouncedKernels", "announced/NAME.yaml");
}

#[test]
fn sites() {
    kind_is_current("site", "Site", "site.yaml");
}

/// Enums whose words users see: heading, sentence, source, enum.
const STATES: [(&str, &str, &str, &str); 19] = [
    (
        "Phases of an image for a kernel",
        "`status`, the page, DriverBuild, `farrier_images`.",
        "crates/core/src/plan/outcome.rs",
        "Phase",
    ),
    (
        "Reasons to build",
        "`reason` of a build in the plan.",
        "crates/core/src/plan/reasons.rs",
        "BuildReason",
    ),
    (
        "Reasons to skip an image for a kernel",
        "`reason` of a skipped image in the plan.",
        "crates/core/src/plan/skip_reason.rs",
        "SkipReason",
    ),
    ("Reasons against a need", "`reason` below `need`.", "crates/core/src/plan/skip_reason.rs", "NeedReason"),
    (
        "Images that are for no node",
        "`reason` in the plan's `unusedImages`.",
        "crates/core/src/plan/unused_image.rs",
        "NoNodeReason",
    ),
    (
        "Decisions about a rollout",
        "`decision` in the plan.",
        "crates/core/src/plan/rollout/context.rs",
        "RolloutDecision",
    ),
    (
        "Reasons to hold a rollout",
        "`reason` of a held rollout.",
        "crates/core/src/plan/reasons.rs",
        "HoldReason",
    ),
    (
        "Reasons to skip a node",
        "`reason` in the plan's `skippedNodes`.",
        "crates/core/src/plan/node.rs",
        "NodeReason",
    ),
    (
        "Reasons not to use an announcement",
        "`reason` of an announced kernel.",
        "crates/core/src/plan/announced.rs",
        "AnnouncementReason",
    ),
    (
        "Readiness of a node for a kernel",
        "`preflight`.",
        "crates/core/src/plan/readiness.rs",
        "BootReadiness",
    ),
    (
        "Stages of a node in an upgrade",
        "`upgrade plan`, `farrier_upgrade_nodes`.",
        "crates/core/src/plan/upgrade.rs",
        "UpgradeStage",
    ),
    (
        "States of a node's upgrade",
        "The node's label `farrier.dev/upgrade`.",
        "crates/core/src/plan/upgrade/note.rs",
        "UpgradeState",
    ),
    (
        "Reasons why a node waits for its upgrade",
        "`reason` of a node in `upgrade plan`.",
        "crates/core/src/plan/upgrade/wait.rs",
        "UpgradeWait",
    ),
    (
        "Outcomes of a rollback",
        "`outcome` of `rollback`.",
        "crates/core/src/plan/rollout/rollback.rs",
        "RollbackOutcome",
    ),
    ("Reasons to keep an image", "`why` of `gc`.", "crates/core/src/plan/gc.rs", "KeepReason"),
    (
        "Verdicts of the check",
        "`check`, reports, `farrier.dev/check-verdict`.",
        "crates/kmod/src/report.rs",
        "Verdict",
    ),
    (
        "Rules of the check",
        "`rule` of a finding; `farrier check --explain RULE` explains one.",
        "crates/kmod/src/report.rs",
        "Rule",
    ),
    (
        "Outcomes of a build",
        "`farrier_builds_total`.",
        "crates/adapters/controller/src/runtime/metrics.rs",
        "BuildOutcomeLabel",
    ),
    (
        "Reasons of Events",
        "`kubectl get events`.",
        "crates/adapters/controller/src/status/events.rs",
        "EventReason",
    ),
];

#[test]
fn states_and_reasons() {
    let mut text = "Each word is the same in tables, JSON, the page and metrics. [Commands](commands.md) lists the exit codes.\n".to_owned();
    for (heading, place, file, name) in STATES {
        let rows = variants(&source(file), name);
        let rows = rows.into_iter().map(|(word, meaning)| {
            assert!(!meaning.is_empty(), "{file}: {name}::{word} has no documentation");
            let word = if name == "EventReason" { word } else { source_tables::kebab(&word) };
            (word, meaning)
        });
        write!(text, "\n## {heading}\n\n{place}\n\n{}", table("word", rows)).unwrap();
    }
    is_current("states", "States and reasons", &text);
}

/// Labels of metrics that have no samples at the start.
const LABELS: [(&str, &str); 7] = [
    ("farrier_images", "image, phase"),
    ("farrier_upgrade_nodes", "rollout, stage"),
    ("farrier_kernel_unresolved_seconds", "kernel"),
    ("farrier_rollout_unresolved_seconds", "image, rollout, state"),
    ("farrier_certificate_expiry_timestamp_seconds", "certificate"),
    ("farrier_api_requests", "verb, kind, outcome"),
    ("farrier_build", "version"),
];

#[test]
fn metrics() {
    let made =
        Regex::new(r#"(\w+): registrar\.(add|seconds)\(\s*"(\w+)",\s*"((?:[^"\\]|\\.|\\\n)*)""#).unwrap();
    let field = |name: &str, code: &str| {
        let kind = Regex::new(&format!(r"\n    {name}: (?:Family<.*, )?(?:Decimal)?(\w+)>?,")).unwrap();
        kind.captures(code).unwrap_or_else(|| panic!("metric {name}"))[1].to_lowercase()
    };
    let code = source("crates/adapters/controller/src/runtime/metrics.rs");
    let mut rows = BTreeSet::from([
        (
            "farrier_api_requests".to_owned(),
            "counter".to_owned(),
            "Requests to the Kubernetes API server, by answer".to_owned(),
        ),
        ("farrier_build".to_owned(), "info".to_owned(), "The running farrier".to_owned()),
    ]);
    let continued = Regex::new(r"\\\n\s*").unwrap();
    for metric in made.captures_iter(&code) {
        let name = format!("farrier_{}{}", &metric[3], if &metric[2] == "seconds" { "_seconds" } else { "" });
        let help = continued.replace_all(&metric[4], "").into_owned();
        rows.insert((name, field(&metric[1], &code), help));
    }

    // What farrier serves at its start, with a sample of each family whose samples come later.
    let metrics = Metrics::default();
    metrics.kernels(vec![("debian 12 6.1.0-1 amd64".to_owned(), Duration::from_secs(1))]);
    metrics.rollouts([("mofed", "tags", RolloutWait::Held, Duration::from_secs(1))].into_iter());
    metrics.certificates([("moduleSigning".to_owned(), Timestamp::UNIX_EPOCH)]);
    let stats = KubeStats::default();
    stats.requests.get_or_create(&[("verb", "list"), ("kind", "nodes"), ("outcome", "success")]).inc();
    metrics.add_api(&stats);
    let served = metrics.text().unwrap();
    for line in served.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        assert!(rows.iter().any(|row| row.0 == name && row.1 == kind), "{line} is not in\n{rows:?}");
    }

    let mut text = String::from(
        "`farrier run` serves them at `/metrics` of `--listen`, in the OpenMetrics format. [Alerts](../alerts.md) use them.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    let label = Regex::new(r#"(\w+)=""#).unwrap();
    for (name, kind, help) in rows {
        let labels = Regex::new(&format!(r"(?m)^{name}(?:_total|_info)?\{{(.*)\}} ")).unwrap();
        let sample = labels.captures(&served).map(|sample| {
            label.captures_iter(&sample[1]).map(|label| label[1].to_owned()).collect::<Vec<_>>().join(", ")
        });
        let known = LABELS.iter().find(|(metric, _)| *metric == name).map(|(_, labels)| (*labels).to_owned());
        assert!(sample.is_none() || known.is_none() || sample == known, "{name}: {sample:?} {known:?}");
        let labels = sample.or(known).unwrap_or_default();
        let suffix = match kind.as_str() {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        writeln!(text, "| `{name}{suffix}` | {kind} | {labels} | {help} |").unwrap();
    }
    is_current("metrics", "Metrics", &text);
}

#[test]
fn labels_and_annotations() {
    let mut text = String::new();
    for (heading, files) in [
        (
            "In the cluster",
            &["labels", "rollout/copy", "rollout/union"]
                .map(|file| format!("crates/core/src/plan/{file}.rs"))[..],
        ),
        ("On published images and stored inputs", &["crates/core/src/facts/annotations.rs".to_owned()]),
    ] {
        let rows = files.iter().flat_map(|file| constants(&source(file)));
        let mut rows: Vec<_> = rows.filter(|(value, _)| value.starts_with("farrier.dev/")).collect();
        rows.sort();
        for (value, meaning) in &rows {
            assert!(!meaning.is_empty(), "{value} has no documentation");
        }
        write!(text, "\n## {heading}\n\n{}", table("name", rows)).unwrap();
    }
    is_current("annotations", "Labels and annotations", text.trim_start());
}

#[test]
fn environment() {
    let code = source("src/env_vars.rs");
    let options = constants(&code);
    let mut text = format!(
        "No other variable is read. An option on the command line precedes its variable.\n\n## Options\n\n{}",
        table("variable", options)
    );
    // The other variables stand in the documentation of the functions that read them.
    let function = Regex::new(r"((?:/// .*\n)+)(?:#\[.*\n)*pub fn ").unwrap();
    let variable = Regex::new(r"\$([A-Za-z_]{4,})").unwrap();
    let rows = function.captures_iter(&code).filter_map(|found| {
        let meaning =
            found[1].lines().map(|line| line.trim_start_matches("/// ")).collect::<Vec<_>>().join(" ");
        let mut names: Vec<_> = variable.captures_iter(&meaning).map(|name| name[1].to_owned()).collect();
        names.dedup();
        (!names.is_empty()).then(|| (names.join("`, `"), cell(&meaning)))
    });
    write!(text, "\n## Other variables\n\n{}", table("variable", rows)).unwrap();
    let read = Regex::new(r#"(?:var|var_os|absolute|proxy|value|set)\("([A-Za-z_]+)"\)"#).unwrap();
    for name in read.captures_iter(&code) {
        assert!(
            text.contains(&name[1]),
            "{} is not in the page: name it in the documentation of its function",
            &name[1]
        );
    }
    is_current("environment", "Environment", &text);
}
