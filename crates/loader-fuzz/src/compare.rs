//! Compares the kernel's answer with the check's report.

use kmod::{CheckReport, Finding, ModuleAbout, Rule, Verdict};

use crate::machine::Answer;

const EBADMSG: i32 = 74;
const EKEYREJECTED: i32 = 129;

/// Result of comparing a verdict of the check with the kernel's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    Agrees,
    /// The check expects the module to load, because it trusts the same content as the kernel. The kernel follows an address in
    /// that content, and crashes or finds unusable data. With the end of the console or the messages.
    Trusted(String),
    /// The verdict is `unknown`. Holds the reason, without the numbers and names of this module.
    Unknown(String),
    /// The check and the kernel disagree; with both answers.
    Differs(String),
}

/// Compares a verdict with the kernel's answer. For a module that both refuse, compares the rule as well, if all rules decide.
pub fn compare(report: &CheckReport, answer: &Answer) -> Comparison {
    match (report.verdict, answer) {
        (Verdict::Loads, Answer::Loaded) | (Verdict::Refused, Answer::Died(_)) => Comparison::Agrees,
        (Verdict::Unknown, _) => Comparison::Unknown(unknown_reason(report)),
        (Verdict::Refused, Answer::Refused(error, messages)) => {
            let mut rules = rules_of_refusal(*error, messages);
            // For a file that is not a module, the check reports nothing but the rule `elf`.
            if report.modules.iter().any(|module| module.about == ModuleAbout::default()) {
                rules.push(Rule::Elf);
            }
            let reported: Vec<Rule> =
                findings(report, Verdict::Refused).map(|finding| finding.rule).collect();
            // The kernel may refuse content that another rule does not decide about.
            let is_undecided = findings(report, Verdict::Unknown).next().is_some();
            if rules.is_empty() || is_undecided || reported.iter().any(|rule| rules.contains(rule)) {
                return Comparison::Agrees;
            }
            Comparison::Differs(format!(
                "the check names another reason: {}; {}",
                report.summary(),
                describe(answer)
            ))
        }
        (Verdict::Loads, Answer::Died(console)) => {
            Comparison::Trusted(format!("the kernel dies: {}", crash_location(console)))
        }
        (Verdict::Loads, Answer::Refused(_, messages))
            if messages.iter().any(|message| names_trusted_content(message)) =>
        {
            Comparison::Trusted(describe(answer))
        }
        _ => Comparison::Differs(format!("the check: {}; {}", report.summary(), describe(answer))),
    }
}

/// Whether the kernel refuses content that the check does not know: the name of a parameter or the address of a function is behind a
/// pointer, which a relocation sets. The name of a type may be in the kernel's own type information.
fn names_trusted_content(message: &str) -> bool {
    let is_parameter =
        message.contains("cannot create duplicate filename '/module/") && message.contains("/parameters/");
    is_parameter || ["BPF: Invalid name", "ftrace failed to modify"].iter().any(|text| message.contains(text))
}

/// Returns the function and offset at which the kernel crashed, from its console.
fn crash_location(console: &str) -> &str {
    let location =
        console.lines().find_map(|line| line.split_once("RIP: 0010:").map(|(_, location)| location));
    location.unwrap_or("unknown location")
}

/// Returns the rule and the message of the first finding that is `unknown`. Replaces the finding's subject and all numbers, so that
/// the reason is the same for all modules.
fn unknown_reason(report: &CheckReport) -> String {
    let Some(finding) = findings(report, Verdict::Unknown).next() else { return String::new() };
    let message = finding.message.replace(&finding.subject, "X");
    let words = message
        .split(' ')
        .map(|word| if word.starts_with(|c: char| c.is_ascii_digit()) { "N" } else { word });
    format!("{}: {}", finding.rule, words.collect::<Vec<_>>().join(" "))
}

/// Findings with this verdict.
fn findings(report: &CheckReport, verdict: Verdict) -> impl Iterator<Item = &Finding> {
    let module_findings = report.modules.iter().flat_map(|module| &module.findings);
    report.findings.iter().chain(module_findings).filter(move |finding| finding.verdict == verdict)
}

/// Describes the kernel's answer.
fn describe(answer: &Answer) -> String {
    match answer {
        Answer::Loaded => "the kernel loads it".to_owned(),
        Answer::Refused(error, messages) => {
            format!("the kernel refuses it with error {error}: {}", messages.join(" | "))
        }
        Answer::Died(console) => format!("the kernel dies: {console}"),
    }
}

/// Rules that the kernel's messages and its error number point to; empty if they point to none.
fn rules_of_refusal(error: i32, messages: &[String]) -> Vec<Rule> {
    let rules_by_message: [(&str, &[Rule]); 16] = [
        ("disagrees about version of symbol", &[Rule::SymbolVersion]),
        ("no symbol version for", &[Rule::SymbolVersion]),
        ("version magic", &[Rule::Vermagic]),
        ("(err -2)", &[Rule::UndefinedSymbol, Rule::License]),
        ("(err -22)", &[Rule::SymbolVersion, Rule::Namespace]),
        ("from namespace", &[Rule::Namespace]),
        ("tries to import module namespace", &[Rule::Namespace]),
        ("exports duplicate symbol", &[Rule::DuplicateExport]),
        ("relocation", &[Rule::Relocation]),
        ("bytes percpu data", &[Rule::PerCpu]),
        ("livepatch", &[Rule::Kernel]),
        ("invalid WRITE|EXEC", &[Rule::Elf]),
        ("PLT section", &[Rule::Elf]),
        ("BTF", &[Rule::Btf]),
        ("cannot create duplicate filename", &[Rule::Elf, Rule::BuiltIn]),
        (".gnu.linkonce.this_module section size", &[Rule::ModuleSize]),
    ];
    let matching_rules = rules_by_message
        .iter()
        .filter(|(text, _)| messages.iter().any(|message| message.contains(text)))
        .flat_map(|(_, rules)| *rules);
    let mut rules: Vec<Rule> = matching_rules.copied().collect();
    if rules.is_empty() && (error == EBADMSG || error == EKEYREJECTED) {
        rules.push(Rule::Signature);
    }
    rules
}
