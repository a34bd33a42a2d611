//! The work list: what init does in the virtual machine. Text, a line for each step, its fields parted by tabs.

use std::fmt::Write as _;

/// Where the initramfs holds the work list.
pub const WORK_PATH: &str = "/farrier/work";
/// Where the initramfs holds the [key](crate::report::Key).
pub const KEY_PATH: &str = "/farrier/key";

/// What init does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The device that the report goes to, such as `/dev/ttyS1`.
    pub report: String,
    /// Each of the payload's modules is unloaded before the next one is loaded; else all are loaded first.
    pub alone: bool,
    /// In order.
    pub steps: Vec<Step>,
}

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// A module of the payload, whose unloading is tried too; else one of the kernel's own.
    pub payload: bool,
    /// Its name as `lsmod` shows it.
    pub name: String,
    /// The file, not compressed.
    pub path: String,
    /// Its parameters, as `insmod` takes them.
    pub parameters: String,
}

impl Work {
    /// The text. Fields hold no tab and no newline: what would break the form is left out.
    pub fn to_text(&self) -> String {
        let field = |text: &str| text.replace(['\t', '\n', '\0'], "");
        let mode = if self.alone { "alone" } else { "together" };
        let mut text = format!("report\t{}\nmode\t{mode}\n", field(&self.report));
        for Step { payload, name, path, parameters } in &self.steps {
            let kind = if *payload { "module" } else { "dependency" };
            // Writing to a string does not fail.
            let _ = writeln!(text, "{kind}\t{}\t{}\t{}", field(name), field(path), field(parameters));
        }
        text
    }

    /// Reads [`Work::to_text`]. The error says which line is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |line: usize| Err(format!("line {line} of the work list is not understood"));
        let mut work = Self { report: String::new(), alone: false, steps: Vec::new() };
        for (number, line) in text.lines().enumerate() {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["report", device] => device.clone_into(&mut work.report),
                ["mode", mode @ ("alone" | "together")] => work.alone = mode == "alone",
                [kind @ ("module" | "dependency"), name, path, parameters] => work.steps.push(Step {
                    payload: kind == "module",
                    name: name.to_owned(),
                    path: path.to_owned(),
                    parameters: parameters.to_owned(),
                }),
                _ => return wrong(number + 1),
            }
        }
        if work.report.is_empty() { wrong(1) } else { Ok(work) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back() {
        let step = |payload, name: &str, parameters: &str| Step {
            payload,
            name: name.into(),
            path: format!("/modules/{name}.ko"),
            parameters: parameters.into(),
        };
        let steps = vec![step(false, "crc16", ""), step(true, "m", r#"a=1 b="x y""#)];
        let work = Work { report: "/dev/ttyS1".into(), alone: true, steps };
        assert_eq!(Work::parse(&work.to_text()), Ok(work));
    }

    #[test]
    fn a_field_cannot_become_a_line() {
        let step = Step {
            payload: true,
            name: "m".into(),
            path: "/m".into(),
            parameters: "a\nmodule\tx\t/x\t".into(),
        };
        let work = Work { report: "/dev/ttyS1".into(), alone: false, steps: vec![step] };
        assert_eq!(Work::parse(&work.to_text()).unwrap().steps.len(), 1);
    }

    #[test]
    fn other_text_is_refused_at_its_line() {
        let error = Work::parse("report\t/dev/ttyS1\nmode\tslow\n").unwrap_err();
        assert_eq!(error, "line 2 of the work list is not understood");
        assert!(Work::parse("").is_err());
    }
}
