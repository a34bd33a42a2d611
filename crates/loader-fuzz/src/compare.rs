//! Compares the kernel's answer with the check's report.

use kmod::{CheckReport, ModuleAbout, Rule, Verdict};

use crate::machine::Answer;

const EBADMSG: i32 = 74;
const EKEYREJECTED: i32 = 129;

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    Agrees,
    /// The kernel crashes, and the check expects it to load the module.
    Crashes(String),
    /// The check does not decide.
    Unknown(String),
    Differs(String),
}

/// Compares a verdict, and for a refused module also the rule, with the kernel's answer.
pub fn compare(report: &CheckReport, answer: &Answer) -> Comparison {
    match (report.verdict, answer) {
        (Verdict::Loads, Answer::Loaded) | (Verdict::Refused, Answer::Died(_)) => Comparison::Agrees,
        (Verdict::Unknown, _) => Comparison::Unknown(report.summary()),
        (Verdict::Refused, Answer::Refused(error, messages)) => {
            let mut rules = kernels_rules(*error, messages);
            // Of a file that is no module, the check reads no more than that.
            if report.modules.iter().any(|module| module.about == ModuleAbout::default()) {
                rules.push(Rule::Elf);
            }
            let ours: Vec<Rule> = refusing(report).collect();
            if rules.is_empty() || ours.iter().any(|rule| rules.contains(rule)) {
                return Comparison::Agrees;
            }
            Comparison::Differs(format!(
                "the check names another reason: {}; {}",
                report.summary(),
                said(answer)
            ))
        }
        (Verdict::Loads, Answer::Died(console)) => Comparison::Crashes(console.clone()),
        _ => Comparison::Differs(format!("the check: {}; {}", report.summary(), said(answer))),
    }
}

fn refusing(report: &CheckReport) -> impl Iterator<Item = Rule> {
    let of_modules = report.modules.iter().flat_map(|module| &module.findings);
    let refusing =
        report.findings.iter().chain(of_modules).filter(|finding| finding.verdict == Verdict::Refused);
    refusing.map(|finding| finding.rule)
}

/// Describes the kernel's answer.
fn said(answer: &Answer) -> String {
    match answer {
        Answer::Loaded => "the kernel loads it".to_owned(),
        Answer::Refused(error, messages) => {
            format!("the kernel refuses it with error {error}: {}", messages.join(" | "))
        }
        Answer::Died(console) => format!("the kernel dies: {console}"),
    }
}

/// Rules that the kernel's messages and its error can mean; empty if they are of no certain rule.
fn kernels_rules(error: i32, messages: &[String]) -> Vec<Rule> {
    let known: [(&str, &[Rule]); 16] = [
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
    let of_messages = known
        .iter()
        .filter(|(text, _)| messages.iter().any(|message| message.contains(text)))
        .flat_map(|(_, rules)| *rules);
    let mut rules: Vec<Rule> = of_messages.copied().collect();
    if rules.is_empty() && (error == EBADMSG || error == EKEYREJECTED) {
        rules.push(Rule::Signature);
    }
    rules
}
