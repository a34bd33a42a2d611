//! Reads the `modules` stage of a rendered Dockerfile as steps that run without an image builder.
//!
//! A line on which Docker's builders disagree is refused, so that a template gives the same result in place and with any image
//! builder. `docs/definitions.md` lists the instructions that a stage may contain.

mod copy;
mod refusal;
mod run;
mod stage;
#[cfg(test)]
mod tests;
mod variables;

use runner::plan::{Action, Step};
use serde_json::{Map, Value};

use super::{
    dockerfile::{Instruction, Syntax, directives, escape_character, unambiguous},
    lexer::{self, Lexer},
};
pub use refusal::StepsError;
use refusal::{Refusal, line_number, mistake, unsupported};
use stage::stage;
use variables::Variables;

/// Maximum total size of one Dockerfile's steps: texts, and the environment of each `RUN`.
const MAX_STEPS_SIZE: usize = 8 << 20;
/// Default shell for the shell form.
const SHELL: [&str; 2] = ["/bin/sh", "-c"];

/// The base image of a stage, as described by its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Base {
    /// The name that `FROM` uses.
    pub name: String,
    /// Environment variables of the image.
    pub env: Vec<(String, String)>,
    /// Working directory; empty means `/`.
    pub workdir: String,
    /// User; empty means root.
    pub user: String,
    /// Command for the shell form; empty means `/bin/sh -c`.
    pub shell: Vec<String>,
    /// Whether the image has `ONBUILD` triggers, which an image builder would run.
    pub has_triggers: bool,
}

impl Base {
    /// Reads the complete configuration document of an image.
    pub fn of(name: &str, config: &Map<String, Value>) -> Self {
        let config = config.get("config");
        let text = |key| config?.get(key)?.as_str().map(str::to_owned);
        let list = |key| {
            let items = config.and_then(|config| config.get(key)?.as_array()).into_iter().flatten();
            items.filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
        };
        let pair = |variable: String| {
            variable.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        Self {
            name: name.to_owned(),
            env: list("Env").into_iter().filter_map(pair).collect(),
            workdir: text("WorkingDir").unwrap_or_default(),
            user: text("User").unwrap_or_default(),
            shell: list("Shell"),
            has_triggers: !list("OnBuild").is_empty(),
        }
    }
}

/// Steps of a `modules` stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Notes for the user about instructions that an image builder follows and a build in place ignores.
    pub notes: Vec<Note>,
}

/// A note about a line.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("line {line}: {text}")]
pub struct Note {
    /// Line number, from 1.
    pub line: u32,
    /// Text of the note.
    pub text: String,
}

/// Reads the steps of the stage `modules`. There are no build arguments: `ARG` has its default value.
pub fn read(dockerfile: &str, base: &Base) -> Result<Recipe, StepsError> {
    if let Some(index) = dockerfile.lines().position(|line| line.contains('\0')) {
        return Err(mistake("there is a NUL character").at(line_number(index)));
    }
    check_directives(dockerfile)?;
    let instructions = unambiguous(dockerfile).map_err(|index| {
        let reason = "builders do not agree where this instruction ends: one of its lines ends with two escape \
                      characters, or an `escape` directive follows a `check`";
        unsupported(reason).at(line_number(index))
    })?;
    for instruction in &instructions {
        if let Some(document) = instruction.documents.iter().find(|document| !document.ends) {
            let reason = format!("the here-document {} does not end", document.name);
            return Err(mistake(reason).at(line_number(instruction.first)));
        }
    }
    let escape = escape_character(dockerfile, Syntax::CURRENT);
    let (variables, from_line, body) = stage(&instructions, base, escape)?;
    let mut reader = Reader {
        escape,
        variables,
        workdir: resolve_path("/", &base.workdir),
        shell: if base.shell.is_empty() { SHELL.map(str::to_owned).to_vec() } else { base.shell.clone() },
        size: 0,
        recipe: Recipe::default(),
    };
    if !["", "root", "0", "root:root", "0:0"].contains(&base.user.as_str()) {
        reader.note(from_line, "the base's user is ignored: all steps run as root of the build");
    }
    for instruction in body {
        let line = Line { number: line_number(instruction.first), instruction };
        reader.read(line).map_err(|refusal| refusal.at(line.number))?;
    }
    Ok(reader.recipe)
}

/// Validates the directives that change the Dockerfile's syntax.
fn check_directives(dockerfile: &str) -> Result<(), StepsError> {
    let mut seen = Vec::new();
    for (index, (key, value)) in directives(dockerfile, Syntax::CURRENT).enumerate() {
        let line = line_number(index);
        if seen.contains(&key) {
            return Err(mistake(format!("the directive {key} is repeated")).at(line));
        }
        if key == "escape" && value != "\\" && value != "`" {
            return Err(mistake(format!("the escape character is \\ or `, not {value}")).at(line));
        }
        if key == "syntax"
            && !["docker/dockerfile:", "docker.io/docker/dockerfile:"]
                .iter()
                .any(|known| value.starts_with(known))
        {
            return Err(unsupported(format!("the syntax {value} is not Docker's own")).at(line));
        }
        seen.push(key);
    }
    Ok(())
}

/// An instruction and its line number.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: u32,
    instruction: &'a Instruction,
}

/// State of a stage between two instructions.
struct Reader {
    escape: char,
    variables: Variables,
    workdir: String,
    shell: Vec<String>,
    /// Total size of the steps so far, in bytes.
    size: usize,
    recipe: Recipe,
}

impl Reader {
    fn read(&mut self, line: Line<'_>) -> Result<(), Refusal> {
        let (keyword, arguments) = line.instruction.split();
        let (options, arguments) = lexer::options(arguments, self.escape);
        let keyword = keyword.to_ascii_uppercase();
        let accepts_options = ["RUN", "COPY", "ADD", "HEALTHCHECK", "ONBUILD"].contains(&keyword.as_str());
        if !accepts_options && let Some(option) = options.first() {
            return Err(mistake(format!("{keyword} has no option {option}")));
        }
        match keyword.as_str() {
            "RUN" => self.run(line, &options, arguments)?,
            "COPY" => self.copy(line, options, arguments)?,
            "ARG" => self.variables.arg(arguments, self.escape)?,
            "ENV" => self.variables.env(arguments, self.escape)?,
            "WORKDIR" => {
                let path = self.expand(arguments)?;
                if path.is_empty() {
                    return Err(mistake("WORKDIR names no directory"));
                }
                self.workdir = resolve_path(&self.workdir, &path);
                if self.workdir != "/" {
                    self.step(line, Action::Directory(self.workdir.clone()))?;
                }
            }
            "SHELL" => match lexer::json_list(arguments) {
                Some(Ok(shell)) if !shell.is_empty() => self.shell = shell,
                _ => return Err(mistake("SHELL needs a list of strings, as in [\"/bin/bash\", \"-c\"]")),
            },
            "USER" => self.note(line.number, "USER is ignored: all steps run as root of the build"),
            "VOLUME" => self.note(line.number, "VOLUME is ignored: files that are written there stay"),
            "LABEL" | "EXPOSE" | "CMD" | "ENTRYPOINT" | "STOPSIGNAL" | "HEALTHCHECK" | "MAINTAINER" => {}
            "ADD" => {
                return Err(unsupported(
                    "ADD unpacks archives and downloads files; add them to the image's `sources`, and COPY them",
                ));
            }
            "ONBUILD" => {
                return Err(unsupported("ONBUILD is not supported: no image is based on this stage"));
            }
            _ => return Err(mistake(format!("unknown instruction {keyword}"))),
        }
        Ok(())
    }

    fn step(&mut self, line: Line<'_>, action: Action) -> Result<(), Refusal> {
        let text = line.instruction.text.clone();
        self.size += text.len() + size(&action);
        if self.size > MAX_STEPS_SIZE {
            return Err(mistake(
                "the stage's steps exceed 8 MiB: look for variables that contain other variables",
            ));
        }
        self.recipe.steps.push(Step { line: line.number, text, action });
        Ok(())
    }

    /// Adds a note, unless the same text was already noted for another line.
    fn note(&mut self, line_number: u32, text: &str) {
        if !self.recipe.notes.iter().any(|note| note.text == text) {
            self.recipe.notes.push(Note { line: line_number, text: text.to_owned() });
        }
    }

    fn expand(&self, text: &str) -> Result<String, Refusal> {
        let value = |name: &str| self.variables.get(name);
        Lexer::expanding(self.escape, &value).text(text)
    }
}

/// Approximate size in bytes.
fn size(action: &Action) -> usize {
    use runner::plan::{Run, Source};
    match action {
        Action::Directory(path) => path.len(),
        Action::Copy { sources, dest, mode: _ } => {
            let size = |source: &Source| match source {
                Source::Context(pattern) => pattern.len(),
                Source::Document { name, content } => name.len() + content.len(),
            };
            dest.len() + sources.iter().map(size).sum::<usize>()
        }
        Action::Run(Run { argv, env, workdir, script }) => {
            let env = env.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
            let argv = argv.iter().map(String::len).sum::<usize>();
            env + argv + workdir.len() + script.as_ref().map_or(0, String::len)
        }
    }
}

/// Resolves a path relative to a directory. The result is absolute, without `.`, `..` and a trailing `/`.
fn resolve_path(directory: &str, path: &str) -> String {
    let base = if path.starts_with('/') { "" } else { directory };
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}
