//! Adapter: mistakes in definitions, with file, line, column and the offending text.

use std::fmt;

use super::File;

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionError {
    /// The file, relative to the definitions directory.
    pub file: String,
    /// Line, from 1; 0 where the mistake has no place.
    pub line: u64,
    /// Column in characters, from 1; 0 where the mistake has no place.
    pub column: u64,
    /// What is wrong.
    pub message: String,
    /// The line with the mistake.
    pub text: String,
}

/// All mistakes that were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} in the definitions", count(.0.len()))]
pub struct DefinitionErrors(pub Vec<DefinitionError>);

fn count(mistakes: usize) -> String {
    if mistakes == 1 { "1 mistake".to_owned() } else { format!("{mistakes} mistakes") }
}

impl DefinitionError {
    /// A mistake of a whole file.
    pub(super) fn of_file(file: &str, message: String) -> Self {
        Self { file: file.to_owned(), line: 0, column: 0, message, text: String::new() }
    }

    /// What the parser refused.
    pub(super) fn of_yaml(file: &File, error: &serde_saphyr::Error) -> Self {
        let (line, column) = error.location().map_or((0, 0), |place| (place.line(), place.column()));
        let message = error.without_snippet().to_string();
        // The parser names its place at the end of the message, and this error names it before.
        let place = format!(" at line {line}, column {column}");
        let message = message.lines().next().unwrap_or_default().replace(&place, "");
        Self { file: file.name.clone(), line, column, message, text: line_of(&file.text, line) }
    }

    /// A mistake in a value, placed where the value first stands.
    pub(super) fn at_text(file: &File, value: &str, message: String) -> Self {
        let place = file.text.lines().zip(1..).find_map(|(line, number)| Some((number, line.find(value)?, line)));
        let (line, column, text) = match place {
            Some((number, byte, line)) => (number, line[..byte].chars().count() as u64 + 1, line.to_owned()),
            None => (0, 0, String::new()),
        };
        Self { file: file.name.clone(), line, column, message, text }
    }
}

fn line_of(text: &str, line: u64) -> String {
    let index = usize::try_from(line).unwrap_or(0);
    let found = index.checked_sub(1).and_then(|index| text.lines().nth(index));
    found.unwrap_or_default().chars().take(200).collect()
}

impl fmt::Display for DefinitionError {
    /// `images/x.yaml:7:3: message`, then the line and a mark below the place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, message, text } = self;
        if *line == 0 {
            return write!(f, "{file}: {message}");
        }
        write!(f, "{file}:{line}:{column}: {message}")?;
        if !text.is_empty() {
            let number = line.to_string();
            let indent = usize::try_from(*column).unwrap_or(1).saturating_sub(1);
            write!(f, "\n  {number} | {text}\n  {:width$} | {:indent$}^", "", "", width = number.len())?;
        }
        Ok(())
    }
}

impl DefinitionErrors {
    /// All mistakes, as people read them.
    pub fn render(&self) -> String {
        let mut text: String = self.0.iter().map(|error| format!("error: {error}\n")).collect();
        text.push_str(&self.to_string());
        text
    }
}
