//! Parses the kernel's configuration from `include/config/auto.conf` or `.config`.

use std::collections::BTreeMap;

/// Options that are set. Absent and `is not set` are equivalent, as for the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelConfig {
    /// Names without the `CONFIG_` prefix, and values without quotes.
    options: BTreeMap<Box<str>, Box<str>>,
}

/// Error for a text that is not a kernel configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A line that is neither an option, a comment nor empty. Holds the line's number and text.
    #[error("line {0} of the kernel configuration is not an option: {1:?}")]
    Line(usize, String),
    /// The text sets no option.
    #[error("the kernel configuration sets no option")]
    Empty,
}

impl KernelConfig {
    /// Parses `CONFIG_NAME=value` lines. Values may be quoted (`.config`, and `auto.conf` before Linux 5.17) or unquoted
    /// (`auto.conf` since Linux 5.17).
    ///
    /// Memory: at most twelve times the text.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut options = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let option = line.strip_prefix("CONFIG_").and_then(|rest| rest.split_once('='));
            let Some((name, value)) = option.filter(|(name, _)| is_option_name(name)) else {
                return Err(ConfigError::Line(index + 1, line.chars().take(80).collect()));
            };
            options.insert(name.into(), unquote(value).into());
        }
        if options.is_empty() { Err(ConfigError::Empty) } else { Ok(Self { options }) }
    }

    /// Returns the value of an option, named without `CONFIG_`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.options.get(name).map(AsRef::as_ref)
    }

    /// Whether the option is `y`; named without `CONFIG_`.
    pub fn is_set(&self, name: &str) -> bool {
        self.get(name) == Some("y")
    }
}

fn is_option_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Removes Kconfig's quotes and backslash escapes.
fn unquote(value: &str) -> String {
    let Some(inner) = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')) else {
        return value.to_owned();
    };
    let mut text = String::with_capacity(inner.len());
    let mut characters = inner.chars();
    while let Some(character) = characters.next() {
        text.push(if character == '\\' { characters.next().unwrap_or('\\') } else { character });
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_both_spellings_of_a_string() {
        let quoted = KernelConfig::parse(
            "# CONFIG_B is not set\nCONFIG_SMP=y\nCONFIG_CC_VERSION_TEXT=\"gcc (GCC) 11.4.1 \\\"x\\\"\"\n",
        )
        .unwrap();
        let plain =
            KernelConfig::parse("CONFIG_SMP=y\r\nCONFIG_CC_VERSION_TEXT=gcc (GCC) 11.4.1 \"x\"\n").unwrap();
        assert_eq!(quoted, plain);
        assert!(quoted.is_set("SMP") && !quoted.is_set("B"));
    }

    #[test]
    fn a_module_option_is_not_set() {
        assert!(!KernelConfig::parse("CONFIG_X=m").unwrap().is_set("X"));
    }

    #[test]
    fn rejects_text_that_is_not_a_configuration() {
        assert_eq!(KernelConfig::parse("# nothing\n"), Err(ConfigError::Empty));
        assert_eq!(
            KernelConfig::parse("CONFIG_A=y\n<html>").unwrap_err().to_string(),
            "line 2 of the kernel configuration is not an option: \"<html>\""
        );
        assert!(KernelConfig::parse("CONFIG_=y").is_err());
        assert!(KernelConfig::parse("CONFIG_A B=y").is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC*") {
            let _ = KernelConfig::parse(&text);
        }

        #[test]
        fn quoting_round_trips(value in "[ -~]*") {
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            let config = KernelConfig::parse(&format!("CONFIG_V=\"{quoted}\"")).unwrap();
            prop_assert_eq!(config.get("V"), Some(value.as_str()));
        }
    }
}
