//! Reads `COPY` instructions.

use runner::plan::{Action, Source};

use super::{
    super::{
        dockerfile::Document,
        lexer::{self, BLANKS, Lexer, Quotes},
    },
    Line, Reader, Refusal, mistake, resolve_path, unsupported,
};

impl Reader {
    /// Reads a `COPY` instruction: its options and words.
    pub(super) fn copy(&mut self, line: Line<'_>, options: Vec<String>, words: &str) -> Result<(), Refusal> {
        let mode = self.copy_options(line.number, options)?;
        let list = match lexer::json_list(words) {
            Some(Ok(list)) => list,
            Some(Err(())) => return Err(mistake("COPY: the list may contain only strings")),
            None => words.split(BLANKS).filter(|word| !word.is_empty()).map(str::to_owned).collect(),
        };
        let Some((dest, sources)) = list.split_last().filter(|(_, sources)| !sources.is_empty()) else {
            return Err(mistake("COPY needs a source and a destination"));
        };
        if Document::opened_by(dest).is_some() {
            return Err(mistake("COPY: a here-document cannot be the destination"));
        }
        let (mut paths, mut documents) = (Vec::new(), Vec::new());
        for source in sources {
            match Document::opened_by(source) {
                Some(opened) => documents.push(self.document(line, &opened)?),
                None => paths.push(Source::Context(context_path(&self.expand(source)?)?)),
            }
        }
        // Builders also open a document for `<< NAME`, which is two words here, so that its name counts as a path.
        if documents.len() != line.instruction.documents.len() {
            return Err(mistake("COPY: `<<` and the name of a here-document must be one word"));
        }
        // Builders copy here-documents last.
        let sources: Vec<Source> = paths.into_iter().chain(documents).collect();
        let dest = self.destination(&self.expand(dest)?)?;
        if sources.len() > 1 && !dest.ends_with('/') {
            return Err(mistake(format!(
                "COPY has several sources: {dest} must be a directory, with a / at its end"
            )));
        }
        self.step(line, Action::Copy { sources, dest, mode })
    }

    fn copy_options(&mut self, line_number: u32, options: Vec<String>) -> Result<Option<u32>, Refusal> {
        let mut mode = None;
        let mut seen: Vec<String> = Vec::new();
        for option in options {
            let (name, value) =
                option.split_once('=').map_or((option.as_str(), None), |(name, value)| (name, Some(value)));
            if seen.iter().any(|known| known == name) {
                return Err(mistake(format!("COPY has the option {name} twice")));
            }
            seen.push(name.to_owned());
            match (name, value) {
                ("--chown", Some(_)) => {
                    self.note(line_number, "--chown is ignored: all files of a build belong to one user");
                }
                ("--chmod", Some(value)) => mode = Some(permissions(&self.expand(value)?)?),
                ("--link", None) => {}
                ("--link", Some(value))
                    if ["true", "false"].iter().any(|word| word.eq_ignore_ascii_case(value)) => {}
                ("--from", _) => {
                    return Err(unsupported(
                        "COPY takes files from another stage or image; name them in the image's `sources` or `needs`",
                    ));
                }
                ("--chown" | "--chmod", None) => {
                    return Err(mistake(format!("COPY: {name} needs a value")));
                }
                ("--link", Some(value)) => {
                    return Err(mistake(format!(
                        "COPY: the value of --link is true or false, not {value:?}"
                    )));
                }
                _ => return Err(unsupported(format!("COPY has the option {name}"))),
            }
        }
        Ok(mode)
    }

    /// Returns the content of a here-document. If two have the same name, the last one's content applies.
    fn document(&self, line: Line<'_>, opened: &Document) -> Result<Source, Refusal> {
        let name = opened.name.clone();
        let Some(document) = line.instruction.documents.iter().rev().find(|document| document.name == name)
        else {
            return Err(mistake(format!("COPY: the here-document {name} is missing below")));
        };
        if name.contains('/') || [".", ".."].contains(&name.as_str()) {
            return Err(mistake(format!("COPY: the here-document {name} is not a file name")));
        }
        let mut content = document.plain_content();
        if document.expand {
            let value = |name: &str| self.variables.get(name);
            // As in BuildKit: quotes are ordinary text, and the escape character is `\`, whatever the directive `escape` says.
            content = Lexer { quotes: Quotes::Plain, ..Lexer::expanding('\\', &value) }.text(&content)?;
        }
        Ok(Source::Document { name, content })
    }

    /// Returns an absolute destination. It ends with `/` if the original names a directory with a trailing `/` or `.`.
    fn destination(&self, dest: &str) -> Result<String, Refusal> {
        if dest.is_empty() {
            return Err(mistake("COPY: the destination is empty"));
        }
        let is_directory = dest == "." || dest.ends_with('/') || dest.ends_with("/.");
        let path = resolve_path(&self.workdir, dest);
        Ok(if is_directory && path != "/" { path + "/" } else { path })
    }
}

/// Returns a path in the build context, relative to its root; `.` is the whole context.
fn context_path(source: &str) -> Result<String, Refusal> {
    if source.is_empty() {
        return Err(mistake("COPY: a source is empty"));
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in source.split('/').filter(|part| !["", "."].contains(part)) {
        if part != ".." {
            parts.push(part);
        } else if parts.pop().is_none() {
            return Err(mistake(format!("COPY: {source} is outside of the build context")));
        }
    }
    Ok(if parts.is_empty() { ".".to_owned() } else { parts.join("/") })
}

fn permissions(text: &str) -> Result<u32, Refusal> {
    // Newer builders also accept symbolic permissions, such as `u=rwX,go=rX`.
    if !text.chars().all(|c| c.is_ascii_digit()) {
        return Err(unsupported(format!("--chmod={text} is not an octal number")));
    }
    // No builder accepts other numbers.
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(mistake(format!("--chmod={text} is not an octal number up to 7777"))),
    }
}
