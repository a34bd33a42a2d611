//! Variables of `ARG` and `ENV`.

use super::{
    super::lexer::{BLANKS, Lexer, quoted_words},
    Refusal, mistake, unsupported,
};

/// Docker's default value if the base sets none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Prefixes of the variables that only newer builders predefine: `TARGETARCH`, `BUILDPLATFORM`.
const PLATFORM_PREFIXES: [&str; 2] = ["TARGET", "BUILD"];
const PLATFORM_PARTS: [&str; 5] = ["PLATFORM", "OS", "OSVERSION", "ARCH", "VARIANT"];
/// Size limit of the environment in bytes. Linux does not accept a larger one for a program.
const MAX_ENVIRONMENT_SIZE: usize = 128 << 10;

/// The variables of a stage, or the variables before the first stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Variables {
    /// Variables of `ENV` and of the base. They override `args`.
    env: Vec<(String, String)>,
    args: Vec<(String, String)>,
    /// Values of `ARG` before the first `FROM`, which an `ARG` without a default in a stage takes.
    global: Vec<(String, String)>,
}

impl Variables {
    /// Returns the variables at the start of a stage.
    pub(super) fn of_stage(env: &[(String, String)], global: Self) -> Self {
        let mut variables = Self { global: global.args, ..Self::default() };
        for (name, value) in env {
            set(&mut variables.env, name, value.clone());
        }
        if variables.get("PATH").is_none() {
            set(&mut variables.env, "PATH", PATH.to_owned());
        }
        variables
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        find(&self.env, name).or_else(|| find(&self.args, name)).map(str::to_owned)
    }

    /// Returns the environment of a `RUN`.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let mut environment = self.env.clone();
        for (name, value) in &self.args {
            if find(&environment, name).is_none() {
                environment.push((name.clone(), value.clone()));
            }
        }
        if find(&environment, "HOME").is_none() {
            environment.push(("HOME".to_owned(), "/root".to_owned()));
        }
        environment
    }

    /// Reads the words of an `ARG`.
    pub(super) fn arg(&mut self, arguments: &str, escape: char) -> Result<(), Refusal> {
        let words = quoted_words(arguments, escape);
        if words.is_empty() {
            return Err(mistake("ARG has no name"));
        }
        let previous = self.clone();
        for word in words {
            let (name, default) = word.split_once('=').map_or((word.as_str(), None), |(n, d)| (n, Some(d)));
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(mistake(format!("ARG {name} is not a variable name")));
            }
            let value = match default {
                Some(default) => {
                    let value = self.expand(default, escape)?;
                    if previous.expand(default, escape)? != value {
                        return Err(unsupported(format!(
                            "builders do not agree on the value of {name}, which uses a variable of the same \
                             line; write a second ARG"
                        )));
                    }
                    Some(value)
                }
                None => find(&self.global, name).map(str::to_owned),
            };
            let Some(value) = value else {
                let part = PLATFORM_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
                if part.is_some_and(|part| PLATFORM_PARTS.contains(&part)) {
                    return Err(unsupported(format!(
                        "some builders give {name} a value; write {{{{arch}}}} instead"
                    )));
                }
                continue;
            };
            if find(&self.env, name).is_some_and(|env| env != value) {
                return Err(unsupported(format!(
                    "builders do not agree whether this ARG or the variable {name} of the environment takes precedence; give it another name"
                )));
            }
            set(&mut self.args, name, value);
        }
        self.check_size()
    }

    /// Reads the words of an `ENV`.
    pub(super) fn env(&mut self, arguments: &str, escape: char) -> Result<(), Refusal> {
        let words = quoted_words(arguments, escape);
        let pairs = match words.first() {
            None => return Err(mistake("ENV has no name")),
            // The older form, without quotes: `ENV name value with blanks`.
            Some(first) if !first.contains('=') => match arguments.split_once(BLANKS) {
                Some((name, value)) => vec![(name, value.trim_start_matches(BLANKS))],
                None => return Err(mistake(format!("ENV {arguments} has no value"))),
            },
            Some(_) => match words.iter().map(|word| word.split_once('=').ok_or(word)).collect() {
                Ok(pairs) => pairs,
                Err(word) => return Err(mistake(format!("ENV: {word} has no ="))),
            },
        };
        // All values of a line are expanded with the values from before that line.
        let expanded = pairs
            .into_iter()
            .map(|(name, value)| Ok((self.expand(name, escape)?, self.expand(value, escape)?)))
            .collect::<Result<Vec<_>, Refusal>>()?;
        for (name, value) in expanded {
            if name.is_empty() || name.contains('=') {
                return Err(mistake(format!("ENV {name:?} is not a variable name")));
            }
            set(&mut self.env, &name, value);
        }
        self.check_size()
    }

    fn expand(&self, text: &str, escape: char) -> Result<String, Refusal> {
        let value = |name: &str| self.get(name);
        Lexer::expanding(escape, &value).text(text)
    }

    fn check_size(&self) -> Result<(), Refusal> {
        let size: usize =
            self.env.iter().chain(&self.args).map(|(name, value)| name.len() + value.len()).sum();
        if size > MAX_ENVIRONMENT_SIZE { Err(mistake("the environment exceeds 128 KiB")) } else { Ok(()) }
    }
}

fn find<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

fn set(pairs: &mut Vec<(String, String)>, name: &str, value: String) {
    match pairs.iter_mut().find(|(key, _)| key == name) {
        Some(pair) => pair.1 = value,
        None => pairs.push((name.to_owned(), value)),
    }
}
