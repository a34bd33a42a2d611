//! Parameter files at `/drivers`, which the operator mounts from the user's ConfigMap. They are checked before anything
//! is unloaded: a silently lost parameter is worse than a driver that does not start.

use std::fs;

use crate::{error::Error, files::if_exists, node::Node};

/// Modules with a parameter file, `/drivers/<name>.conf`.
pub(crate) const MODULES: [&str; 5] =
    ["nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-peermem", "nvidia-drm"];

/// Maximum size of a file: the kernel accepts at most a page of parameters per module.
const MAX_SIZE: usize = 4096;

/// Checks the existing parameter files of these modules, and logs their contents.
pub(crate) fn check(node: &Node<'_>, modules: &[&str]) -> Result<(), Error> {
    for name in modules {
        let path = format!("/drivers/{name}.conf");
        let invalid = |reason: String| {
            Error::new(
                format!("the parameters of {name} in {path} cannot be used: {reason}"),
                "correct the ConfigMap that spec.driver.kernelModuleConfig names: one or more NAME=VALUE per line",
            )
        };
        let read = if_exists(fs::read(node.paths.at(&path)));
        let Some(bytes) = read.map_err(|error| invalid(error.to_string()))? else { continue };
        let text = String::from_utf8(bytes).map_err(|_| invalid("it is not UTF-8 text".to_owned()))?;
        let words = parse(&text).map_err(invalid)?;
        if !words.is_empty() {
            node.log.step(format!("parameters of {name} from {path}: {}", words.join(" ")));
        }
    }
    Ok(())
}

/// Parses the parameters of a file; the error describes the problem.
fn parse(text: &str) -> Result<Vec<&str>, String> {
    if text.len() > MAX_SIZE {
        return Err(format!("it has {} bytes, more than {MAX_SIZE}", text.len()));
    }
    let mut words = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with('#') {
            continue;
        }
        if line.chars().any(|c| c.is_control() && c != '\t') {
            return Err(format!("line {number} contains a control character"));
        }
        if line.matches('"').count() % 2 == 1 {
            return Err(format!("a quotation mark in line {number} is not closed"));
        }
        for word in words_of(line) {
            let name = word.split('=').next().unwrap_or_default();
            if name.is_empty()
                || !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
            {
                return Err(format!("{word:?} in line {number} is not NAME=VALUE"));
            }
            words.push(word);
        }
    }
    Ok(words)
}

/// Splits a line at white space, except between quotation marks, as the kernel's `next_arg` does.
fn words_of(line: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let words = line.split(move |c: char| {
        is_quoted ^= c == '"';
        c.is_whitespace() && !is_quoted
    });
    words.filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn missing_files_mean_no_parameters() {
        let bench = Bench::new();
        check(&bench.node(), &MODULES).unwrap();
        assert_eq!(bench.log(), "");
    }

    #[test]
    fn lines_contain_one_or_more_parameters() {
        let text = "# ours\nNVreg_EnableGpuFirmware=0\n\n a=1  b=2\tc\nd=\"x y\" e=1";
        assert_eq!(
            parse(text).unwrap(),
            ["NVreg_EnableGpuFirmware=0", "a=1", "b=2", "c", "d=\"x y\"", "e=1"]
        );
    }

    #[test]
    fn invalid_parameters_are_refused_with_their_line() {
        let invalid = |text: &str| parse(text).unwrap_err();
        assert_eq!(invalid("a=1\nb=\u{0}"), "line 2 contains a control character");
        assert_eq!(invalid("a=\"1"), "a quotation mark in line 1 is not closed");
        assert_eq!(invalid("a=1\n=2"), r#""=2" in line 2 is not NAME=VALUE"#);
        assert_eq!(invalid("a;b=2"), r#""a;b=2" in line 1 is not NAME=VALUE"#);
        assert_eq!(invalid("options nvidia a=1 (see docs)"), r#""(see" in line 1 is not NAME=VALUE"#);
        assert_eq!(invalid(&"a".repeat(5000)), "it has 5000 bytes, more than 4096");
    }

    #[test]
    fn a_binary_file_is_refused_with_its_name() {
        let bench = Bench::new();
        bench.write("/drivers/nvidia-uvm.conf", "");
        fs::write(bench.at("/drivers/nvidia-uvm.conf"), [0xff, 0xfe]).unwrap();
        let error = check(&bench.node(), &MODULES).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the parameters of nvidia-uvm in /drivers/nvidia-uvm.conf cannot be used: it is not UTF-8 text"
        );
    }
}
