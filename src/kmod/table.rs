//! Pure: a check report as people read it.

use std::fmt::Write;

use comfy_table::{Table, presets::NOTHING};

use super::{CheckReport, Finding, Verdict};

/// A check report as a table for people. Findings of one kind are shown once, with their number: a module built for
/// another kernel disagrees about hundreds of symbols.
pub fn table(report: &CheckReport) -> String {
    let CheckReport { kernel, architecture, verdict, findings, modules, load_order: _, boot: _ } = report;
    let mut text = format!("payload on {kernel} ({architecture}): {verdict}\n");
    for reason in reasons(findings) {
        let _ = writeln!(text, "{reason}");
    }
    if modules.is_empty() {
        text.push_str("the payload holds no module\n");
        return text;
    }
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["MODULE", "VERDICT", "REASON"]);
    for module in modules {
        table.add_row([
            one_line(&module.name),
            module.verdict.as_str().to_owned(),
            reasons(&module.findings).join("\n"),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    text.push_str(&table.trim_fmt());
    text.push('\n');
    text
}

/// One entry for each kind of finding, the first standing for all, the worst kinds first.
fn reasons(findings: &[Finding]) -> Vec<String> {
    let mut kinds: Vec<(&Finding, usize)> = Vec::new();
    for finding in findings {
        let same = |kind: &&mut (&Finding, usize)| {
            let (first, _) = kind;
            (first.rule, first.verdict, &first.remedy) == (finding.rule, finding.verdict, &finding.remedy)
        };
        match kinds.iter_mut().find(same) {
            Some((_, count)) => *count += 1,
            None => kinds.push((finding, 1)),
        }
    }
    kinds.sort_by_key(|(finding, _)| std::cmp::Reverse(finding.verdict));
    kinds
        .into_iter()
        .map(|(finding, count)| {
            let more = if count > 1 { format!(" (and {} more like it)", count - 1) } else { String::new() };
            let kind = match finding.verdict {
                Verdict::Loads => "warning",
                other => other.as_str(),
            };
            format!("{kind}: {}{more}\n  help: {}", one_line(&finding.to_string()), one_line(&finding.remedy))
        })
        .collect()
}

/// Names come from untrusted files: nothing in them moves a terminal's cursor or makes a line.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::Architecture,
        kmod::{ModuleReport, Rule},
    };

    fn finding(rule: Rule, verdict: Verdict, symbol: &str) -> Finding {
        Finding {
            rule,
            verdict,
            subject: symbol.to_owned(),
            message: format!("disagrees about version of symbol {symbol}, exported by ib_core of mofed"),
            found: Some("0x00000004".to_owned()),
            wanted: Some("0x00000005".to_owned()),
            remedy: "rebuild it against the exposed headers of mofed for 6.1.0-9-amd64".to_owned(),
        }
    }

    fn module(name: &str, findings: Vec<Finding>) -> ModuleReport {
        let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or_default();
        ModuleReport { path: format!("lib/{name}.ko"), name: name.to_owned(), verdict, findings }
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
    fn findings_of_one_kind_are_shown_once_and_the_worst_first() {
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
        insta::assert_snapshot!(table(&report(vec![], modules)));
    }

    #[test]
    fn a_hostile_name_is_only_text() {
        let hostile = finding(Rule::UndefinedSymbol, Verdict::Refused, "x\u{1b}[2J\nroot: loads");
        let text = table(&report(vec![], vec![module("m\u{7}", vec![hostile])]));
        assert!(!text.contains(['\u{1b}', '\u{7}']) && !text.contains("\nroot"), "{text:?}");
    }

    #[test]
    fn an_empty_payload_says_so() {
        let missing = Finding {
            rule: Rule::RequiredModule,
            verdict: Verdict::Refused,
            subject: "m".to_owned(),
            message: "module m is required, and the payload does not hold it".to_owned(),
            found: None,
            wanted: None,
            remedy: "look in the build log".to_owned(),
        };
        let mut report = report(vec![missing], vec![]);
        report.verdict = Verdict::Refused;
        insta::assert_snapshot!(table(&report));
    }
}
