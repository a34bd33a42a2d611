//! Adapter: mistakes in definitions, with file, line, column and the offending text.

use std::fmt;

use super::File;
use crate::{
    site::without_logins,
    text::is_deceptive,
    yaml::{Node, Position, YamlError},
};

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionError {
    /// The file, relative to the definitions directory.
    pub file: String,
    /// Line, from 1; 0 where the mistake has no place.
    pub line: usize,
    /// Column in characters, from 1; 0 where the mistake has no place.
    pub column: usize,
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

    /// A mistake at its place.
    pub(super) fn at(file: &File, mistake: YamlError) -> Self {
        let YamlError { at: Position { line, column }, message } = mistake;
        Self { file: file.name.clone(), line, column, message, text: line_of(&file.text, line) }
    }
}

/// Takes up what is wrong with one document.
pub(super) struct Report<'a> {
    pub file: &'a File,
    pub document: &'a Node,
    pub errors: &'a mut Vec<DefinitionError>,
}

impl Report<'_> {
    /// The value at this path of names and numbers is wrong.
    pub fn wrong(&mut self, path: &[&str], message: impl Into<String>) {
        let mistake = YamlError { at: self.document.place_of(path), message: message.into() };
        self.errors.push(DefinitionError::at(self.file, mistake));
    }
}

/// The line of this number, for people: cut, without passwords, and without characters that a terminal would act on.
fn line_of(text: &str, line: usize) -> String {
    let found = line.checked_sub(1).and_then(|index| text.lines().nth(index));
    let harmless = |c: char| if is_deceptive(c) { ' ' } else { c };
    without_logins(found.unwrap_or_default()).chars().take(200).map(harmless).collect()
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
            // A place beyond the cut line is marked at its end.
            let indent = column.saturating_sub(1).min(text.chars().count());
            write!(f, "\n  {number} | {text}\n  {:width$} | {:indent$}^", "", "", width = number.len())?;
        }
        Ok(())
    }
}

impl DefinitionErrors {
    /// All mistakes, as people read them.
    pub fn render(&self) -> String {
        let mut lines: Vec<String> = self.0.iter().map(|error| format!("error: {error}")).collect();
        lines.push(self.to_string());
        lines.join("\n")
    }
}
