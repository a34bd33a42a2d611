//! Mistakes in definitions, with file, line, column and the faulty text.

use std::fmt;

use farrier_core::{site::without_logins, text::is_deceptive};
use farrier_yaml::{Node, Position, YamlError};
use serde::Serialize;

use super::File;

/// A mistake in a definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DefinitionError {
    /// The file, relative to the definitions directory.
    pub file: String,
    /// Line, from 1; 0 if the mistake has no position.
    pub line: usize,
    /// Column in characters, from 1; 0 if the mistake has no position.
    pub column: usize,
    /// Description of the mistake.
    pub message: String,
    /// Text of the line with the mistake.
    pub text: String,
}

/// All mistakes in the definitions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} in the definitions", count(.0.len()))]
pub struct DefinitionErrors(pub Vec<DefinitionError>);

fn count(mistakes: usize) -> String {
    if mistakes == 1 { "1 mistake".to_owned() } else { format!("{mistakes} mistakes") }
}

impl DefinitionError {
    /// Creates a mistake of a whole file.
    pub(super) fn of_file(file: &str, message: String) -> Self {
        Self { file: file.to_owned(), line: 0, column: 0, message, text: String::new() }
    }

    /// Creates a mistake at its position.
    pub(super) fn at(file: &File, mistake: YamlError) -> Self {
        let YamlError { position: Position { line, column }, message } = mistake;
        Self { file: file.name.clone(), line, column, message, text: line_of(&file.text, line) }
    }
}

/// Collects the mistakes in one document.
pub(super) struct Report<'a> {
    pub file: &'a File,
    pub document: &'a Node,
    pub errors: &'a mut Vec<DefinitionError>,
}

impl Report<'_> {
    /// Adds a mistake in the value at this path of names and indexes.
    pub fn add(&mut self, path: &[&str], message: impl Into<String>) {
        let mistake = YamlError { position: self.document.position_of(path), message: message.into() };
        self.errors.push(DefinitionError::at(self.file, mistake));
    }

    /// Returns the position of a value as `file:line:column`.
    pub fn position(&self, path: &[&str]) -> String {
        let Position { line, column } = self.document.position_of(path);
        format!("{}:{line}:{column}", self.file.name)
    }
}

/// Returns a line for display: truncated, without passwords, and without characters that control a terminal.
fn line_of(text: &str, line: usize) -> String {
    let line = line.checked_sub(1).and_then(|index| text.lines().nth(index)).unwrap_or_default();
    let harmless = |c: char| if is_deceptive(c) { ' ' } else { c };
    without_logins(line).chars().take(200).map(harmless).collect()
}

impl fmt::Display for DefinitionError {
    /// Formats `images/x.yaml:7:3: message`, then the line and a mark below the position.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, message, text } = self;
        if *line == 0 {
            return write!(f, "{file}: {message}");
        }
        write!(f, "{file}:{line}:{column}: {message}")?;
        if !text.is_empty() {
            let number = line.to_string();
            // A position beyond the truncated line is marked at the line's end.
            let indent = column.saturating_sub(1).min(text.chars().count());
            write!(f, "\n  {number} | {text}\n  {:width$} | {:indent$}^", "", "", width = number.len())?;
        }
        Ok(())
    }
}

impl DefinitionErrors {
    /// Formats all mistakes for display.
    pub fn render(&self) -> String {
        let mut lines: Vec<String> = self.0.iter().map(|error| format!("error: {error}")).collect();
        lines.push(self.to_string());
        lines.join("\n")
    }
}
