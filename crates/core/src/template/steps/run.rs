//! Reads `RUN` instructions.

use runner::plan::{Action, Run};

use super::{
    super::{dockerfile::Document, lexer},
    Line, Reader, Refusal, mistake, unsupported,
};

impl Reader {
    /// Reads a `RUN` instruction: its options and command.
    pub(super) fn run(&mut self, line: Line<'_>, options: &[String], arguments: &str) -> Result<(), Refusal> {
        for option in options {
            match option.split_once('=').unwrap_or((option, "")) {
                // These options are the default in every build.
                ("--network", "none") | ("--security", "sandbox") => {}
                ("--network", _) => return Err(unsupported(format!("RUN {option}: a build has no network"))),
                ("--mount", _) => {
                    return Err(unsupported(format!(
                        "RUN {option}: a build sees only its toolchain and copied files; COPY the files that it needs"
                    )));
                }
                _ => return Err(unsupported(format!("RUN has the option {option}"))),
            }
        }
        let mut run =
            Run { env: self.variables.environment(), workdir: self.workdir.clone(), ..Run::default() };
        match lexer::json_list(arguments) {
            Some(Ok(argv)) => run.argv = argv,
            Some(Err(())) => return Err(mistake("RUN: the list may contain only strings")),
            None => {
                let documents = &line.instruction.documents;
                let is_document = Document::opened_by(arguments).is_some();
                match documents.first().filter(|_| is_document).map(Document::plain_content) {
                    Some(script) if script.starts_with("#!") => run.script = Some(script),
                    command => {
                        let command = command.unwrap_or_else(|| with_documents(arguments, documents));
                        run.argv = self.shell.iter().cloned().chain([command]).collect();
                    }
                }
            }
        }
        if arguments.is_empty() || run.script.is_none() && run.argv.is_empty() {
            return Err(mistake("RUN has no command"));
        }
        self.step(line, Action::Run(run))
    }
}

/// Appends the here-documents unchanged, for a shell command that is not itself a here-document.
fn with_documents(command: &str, documents: &[Document]) -> String {
    documents
        .iter()
        .fold(command.to_owned(), |text, document| format!("{text}\n{}{}", document.content, document.name))
}
