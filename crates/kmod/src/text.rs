//! Formats a check report for people.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use super::{BootOutcome, BootReport, CheckReport, Finding, ModuleReport, Rule, Taint, Verdict};

/// Maximum number of names in a line; further names are only counted.
const MAX_NAMES: usize = 12;

/// Formats the report as a table for people. Shows findings of one kind once, with their number, because a module built for
/// another kernel disagrees about hundreds of symbols. Shows a warning that several modules share once, below the table.
impl fmt::Display for CheckReport {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, architecture, verdict, findings, modules, load_order, boot } = self;
        writeln!(text, "payload on {kernel} ({architecture}): {verdict}")?;
        for reason in grouped_findings(findings.iter()) {
            writeln!(text, "{reason}")?;
        }
        if modules.is_empty() {
            writeln!(text, "the payload contains no module")?;
        } else {
            let shared = shared_warnings(modules);
            write_rows(text, modules, &shared)?;
            for ((_, message), (first, modules)) in &shared {
                let (kind, count) = (kind_and_rule(first), modules.len());
                writeln!(text, "{kind}, {count} modules: {}{}", one_line(message), details(first))?;
            }
            if load_order.len() > 1 {
                writeln!(text, "load order: {}", names(load_order.iter().map(String::as_str)))?;
            }
            write_notes(text, modules)?;
        }
        boot.as_ref().map_or(Ok(()), |boot| write_boot_report(text, boot))
    }
}

/// Warnings that several modules share, by rule and message, with the first such finding and the modules' names.
type SharedWarnings<'a> = BTreeMap<(Rule, &'a str), (&'a Finding, Vec<&'a str>)>;

fn shared_warnings(modules: &[ModuleReport]) -> SharedWarnings<'_> {
    let mut shared = SharedWarnings::new();
    for module in modules {
        for finding in module.findings.iter().filter(|finding| finding.verdict == Verdict::Loads) {
            let entry = shared.entry((finding.rule, &finding.message)).or_insert((finding, Vec::new()));
            entry.1.push(&module.name);
        }
    }
    shared.retain(|_, (_, modules)| modules.len() > 1);
    shared
}

fn write_rows(
    text: &mut fmt::Formatter<'_>,
    modules: &[ModuleReport],
    shared: &SharedWarnings<'_>,
) -> fmt::Result {
    let width = modules.iter().map(|module| module.name.chars().count()).max().unwrap_or_default().max(6);
    writeln!(text, "{:<width$}  VERDICT  REASON", "MODULE")?;
    for module in modules {
        let unshared = module.findings.iter().filter(|finding| {
            finding.verdict > Verdict::Loads || !shared.contains_key(&(finding.rule, &finding.message))
        });
        let reasons = grouped_findings(unshared).join("\n");
        let mut lines = reasons.lines();
        let first = lines.next().unwrap_or_default();
        let row = format!("{:<width$}  {:<7}  {first}", one_line(&module.name), module.verdict);
        writeln!(text, "{}", row.trim_end())?;
        for line in lines {
            writeln!(text, "{:<width$}           {line}", "")?;
        }
    }
    Ok(())
}

/// Writes facts beyond the verdicts. Two taints are omitted: every driver is out of tree, and a missing signature is
/// already a warning.
fn write_notes(text: &mut fmt::Formatter<'_>, modules: &[ModuleReport]) -> fmt::Result {
    let mut taints: BTreeMap<Taint, Vec<&str>> = BTreeMap::new();
    let mut signers: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for module in modules {
        for &taint in &module.about.taints {
            taints.entry(taint).or_default().push(&module.name);
        }
        if let Some(signed_by) = &module.about.signed_by {
            let signer = match &signed_by.signer {
                Some(signer) => format!("{signer} ({})", signed_by.key_id),
                None => signed_by.key_id.clone(),
            };
            signers.entry(signer).or_default().push(&module.name);
        }
    }
    for (taint, modules) in taints {
        if !matches!(taint, Taint::OutOfTree | Taint::Unsigned) {
            writeln!(text, "taints the kernel as {taint} ({}): {}", taint.letter(), names(modules))?;
        }
    }
    for (signer, modules) in signers {
        writeln!(text, "signed by {}: {}", one_line(&signer), names(modules))?;
    }
    let shadows = modules.iter().filter(|module| module.about.shadows.is_some());
    let shadows: Vec<&str> = shadows.map(|module| module.name.as_str()).collect();
    if !shadows.is_empty() {
        writeln!(text, "replaces the kernel's own: {}", names(shadows))?;
    }
    for module in modules.iter().filter(|module| !module.about.missing_firmware.is_empty()) {
        let files = module.about.missing_firmware.iter().map(String::as_str);
        writeln!(text, "firmware of {} that the image lacks: {}", one_line(&module.name), names(files))?;
    }
    Ok(())
}

fn write_boot_report(text: &mut fmt::Formatter<'_>, boot: &BootReport) -> fmt::Result {
    let BootReport { kernel, accelerator, milliseconds, modules } = boot;
    let (seconds, tenths) = (milliseconds / 1000, milliseconds % 1000 / 100);
    writeln!(
        text,
        "boot of {} ({}, {seconds}.{tenths} s): {}",
        one_line(kernel),
        one_line(accelerator),
        boot.verdict()
    )?;
    for module in modules {
        writeln!(text, "  {}: {}", one_line(&module.name), describe_outcome(&module.outcome))?;
    }
    Ok(())
}

fn describe_outcome(outcome: &BootOutcome) -> String {
    let last =
        outcome.messages().last().map(|message| format!(": {}", one_line(message))).unwrap_or_default();
    match outcome {
        BootOutcome::Loaded => "loaded".to_owned(),
        BootOutcome::NotPresent { error, .. } => {
            format!("no hardware for it ({}), its symbols were resolved", one_line(error))
        }
        BootOutcome::Refused { error, .. } => format!("refused with {}{last}", one_line(error)),
        BootOutcome::Failed { error, .. } => {
            format!("its symbols were resolved, then it failed with {}{last}", one_line(error))
        }
        BootOutcome::Crashed { .. } => format!("crashed the kernel{last}"),
        BootOutcome::Hung { .. } => format!("the virtual machine timed out{last}"),
        BootOutcome::NotReached => {
            "not tried: the boot ended first, or a dependency found no hardware or was missing".to_owned()
        }
    }
}

/// Lists the first names without duplicates, and the number of further ones.
pub(crate) fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let (mut seen, mut list) = (BTreeSet::new(), Vec::new());
    for name in names {
        if seen.insert(name) {
            list.push(one_line(name));
        }
    }
    let more = list.len().saturating_sub(MAX_NAMES);
    list.truncate(MAX_NAMES);
    match more {
        0 => list.join(", "),
        more => format!("{} and {more} more", list.join(", ")),
    }
}

/// Formats one entry for each kind of finding, worst kinds first. The first finding of a kind represents all.
fn grouped_findings<'a>(findings: impl Iterator<Item = &'a Finding>) -> Vec<String> {
    let mut kinds: Vec<(&Finding, usize)> = Vec::new();
    let mut indices = HashMap::new();
    for finding in findings {
        let kind = (finding.rule, finding.verdict, &finding.remedy);
        let index = *indices.entry(kind).or_insert(kinds.len());
        match kinds.get_mut(index) {
            Some((_, count)) => *count += 1,
            None => kinds.push((finding, 1)),
        }
    }
    kinds.sort_by_key(|(finding, _)| std::cmp::Reverse(finding.verdict));
    kinds
        .into_iter()
        .map(|(finding, count)| {
            let more = if count > 1 { format!(" (and {} more like it)", count - 1) } else { String::new() };
            format!(
                "{}: {}{more}{}",
                kind_and_rule(finding),
                one_line(&finding.to_string()),
                details(finding)
            )
        })
        .collect()
}

/// Names the kind of a finding and its rule, as compilers do: `refused[vermagic]`.
fn kind_and_rule(finding: &Finding) -> String {
    let kind = match finding.verdict {
        Verdict::Loads if finding.unproven => "unproven",
        Verdict::Loads => "warning",
        other => other.as_str(),
    };
    format!("{kind}[{}]", finding.rule)
}

/// Formats the location, the kernel's own message, and the remedy, each on a line. Omits a location that the finding's message
/// contains, and subjects such as `signature`, which are no location.
fn details(finding: &Finding) -> String {
    let Finding { subject, message, kernel_message, errno, remedy, .. } = finding;
    let is_location = subject.contains(['.', '_']) && !message.contains(subject.as_str());
    let location = is_location.then(|| ("at", subject.clone()));
    let kernel_line = kernel_message.as_ref().map(|message| match errno {
        Some(errno) => ("kernel", format!("{message} ({errno})")),
        None => ("kernel", message.clone()),
    });
    let lines = location.into_iter().chain(kernel_line).chain([("help", remedy.clone())]);
    lines.fold(String::new(), |text, (label, line)| format!("{text}\n  {label}: {}", one_line(&line)))
}

/// Replaces control characters: names come from untrusted files, and must not move a terminal's cursor or start a line.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, ModuleAbout, ModuleBoot, SignedBy};

    fn finding(rule: Rule, verdict: Verdict, symbol: &str) -> Finding {
        Finding {
            found: Some("0x00000004".to_owned()),
            wanted: Some("0x00000005".to_owned()),
            ..Finding::new(
                rule,
                verdict,
                symbol,
                format!("disagrees about version of symbol {symbol}, exported by ib_core of mofed"),
                "rebuild it against the exposed headers of mofed for 6.1.0-9-amd64",
            )
        }
    }

    fn module(name: &str, findings: Vec<Finding>) -> ModuleReport {
        let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or_default();
        ModuleReport {
            path: format!("lib/{name}.ko"),
            name: name.to_owned(),
            verdict,
            findings,
            about: ModuleAbout::default(),
        }
    }

    fn report(findings: Vec<Finding>, modules: Vec<ModuleReport>) -> CheckReport {
        CheckReport {
            kernel: "6.1.0-9-amd64".to_owned(),
            architecture: Architecture::Amd64,
            verdict: modules.iter().map(|module| module.verdict).max().unwrap_or_default(),
            findings,
            modules,
            load_order: vec![],
            boot: None,
        }
    }

    #[test]
    fn findings_of_one_kind_are_grouped_and_sorted_by_verdict() {
        let refused = |symbol| finding(Rule::SymbolVersion, Verdict::Refused, symbol);
        let modules = vec![
            module("nvidia", vec![]),
            module(
                "nvidia_peermem",
                vec![
                    finding(Rule::SymbolVersion, Verdict::Loads, "ib_free"),
                    refused("ib_register_peer_memory_client"),
                    refused("ib_unregister_peer_memory_client"),
                ],
            ),
        ];
        insta::assert_snapshot!(report(vec![], modules).to_string());
    }

    #[test]
    fn control_characters_in_names_are_replaced() {
        let hostile = finding(Rule::UndefinedSymbol, Verdict::Refused, "x\u{1b}[2J\nroot: loads");
        let text = report(vec![], vec![module("m\u{7}", vec![hostile])]).to_string();
        assert!(!text.contains(['\u{1b}', '\u{7}']) && !text.contains("\nroot"), "{text:?}");
    }

    #[test]
    fn an_empty_payload_is_reported() {
        let missing = Finding::new(
            Rule::RequiredModule,
            Verdict::Refused,
            "m",
            "module m is required, and the payload does not contain it",
            "look in the build log",
        );
        let mut report = report(vec![missing], vec![]);
        report.verdict = Verdict::Refused;
        insta::assert_snapshot!(report.to_string());
    }

    fn report_with_all_parts() -> CheckReport {
        let mut modules: Vec<ModuleReport> = ["nvidia", "nvidia_uvm", "plain"]
            .map(|name| {
                let unsigned = Finding {
                    rule: Rule::Signature,
                    message: "the module is not signed".to_owned(),
                    found: None,
                    wanted: None,
                    ..finding(Rule::Signature, Verdict::Loads, name)
                };
                module(name, vec![unsigned])
            })
            .into();
        modules[0].about.taints = vec![Taint::Proprietary, Taint::OutOfTree];
        modules[0].about.missing_firmware = vec!["nvidia/550.1/gsp_ga10x.bin".to_owned()];
        let refused = finding(Rule::SymbolVersion, Verdict::Refused, "ib_free");
        let words = "disagrees about version of symbol ib_free";
        modules[0].findings.push(
            Finding { subject: ".text+0x4".to_owned(), ..refused }.with_kernel_message("EINVAL", words),
        );
        modules[1].findings.push(finding(Rule::SymbolVersion, Verdict::Loads, "free").unproven());
        modules[0].verdict = Verdict::Refused;
        modules[1].about.shadows = Some("kernel/drivers/nvidia-uvm.ko".to_owned());
        modules[2].about.signed_by =
            Some(SignedBy { signer: Some("Build key".to_owned()), key_id: "6A:01".to_owned(), hash: None });
        let mut report = report(vec![], modules);
        report.load_order = ["nvidia", "nvidia_uvm", "plain"].map(str::to_owned).into();
        let boot = |name: &str, outcome| ModuleBoot {
            path: format!("lib/{name}.ko"),
            name: name.to_owned(),
            outcome,
        };
        let messages = vec!["first".to_owned(), "disagrees about version of symbol ib_free".to_owned()];
        report.boot = Some(BootReport {
            kernel: "6.1.0-9-amd64".to_owned(),
            accelerator: "tcg".to_owned(),
            milliseconds: 6480,
            modules: vec![
                boot("nvidia", BootOutcome::Refused { error: "EINVAL".to_owned(), messages }),
                boot("nvidia_uvm", BootOutcome::NotPresent { error: "ENODEV".to_owned(), messages: vec![] }),
                boot("plain", BootOutcome::Loaded),
            ],
        });
        report
    }

    #[test]
    fn all_parts_of_a_report_are_formatted() {
        insta::assert_snapshot!(report_with_all_parts().to_string());
    }
}
