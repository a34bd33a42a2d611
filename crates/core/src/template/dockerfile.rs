//! Splits a Dockerfile into instructions, and finds instructions for which an engine would access the network.

use super::lexer::{self, BLANKS, Lexer, Quotes};

/// An instruction, with its lines joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// The text without line-continuation characters, comments and here-documents.
    pub text: String,
    /// Index of the first line, from 0.
    pub first: usize,
    /// Index of the last line of the instruction, without its here-documents; `None` if the file ends before the instruction
    /// does.
    pub last: Option<usize>,
    /// The instruction's here-documents, in order.
    pub documents: Vec<Document>,
}

/// A here-document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The word that ends the document.
    pub name: String,
    /// The document's lines, including line breaks.
    pub content: String,
    /// Set by `<<-`: leading tabs of each line are removed.
    pub strip_tabs: bool,
    /// Set if the name is unquoted: variables in the document are expanded.
    pub expand: bool,
    /// Whether the Dockerfile contains the line that ends the document.
    pub ends: bool,
}

impl Instruction {
    /// Whether this is the given instruction, such as `FROM`, ignoring case.
    pub fn is(&self, word: &str) -> bool {
        self.split().0.eq_ignore_ascii_case(word)
    }

    /// Returns the keyword and the remaining text.
    pub(super) fn split(&self) -> (&str, &str) {
        first_word(&self.text)
    }
}

/// Returns the instructions of a Dockerfile, in order.
pub fn instructions(dockerfile: &str) -> Vec<Instruction> {
    split(dockerfile, Syntax { double_escape_continues: true, ..Syntax::CURRENT })
}

/// Returns the instructions if all builders that support here-documents find the same ones. Otherwise the error is the index,
/// from 0, of the first line at which the builders differ.
pub(super) fn unambiguous(dockerfile: &str) -> Result<Vec<Instruction>, usize> {
    let instructions = split(dockerfile, Syntax::CURRENT);
    for older_syntax in [
        Syntax { double_escape_continues: true, ..Syntax::CURRENT },
        Syntax { check_directive: false, ..Syntax::CURRENT },
    ] {
        let other = split(dockerfile, older_syntax);
        let common = instructions.iter().zip(&other).take_while(|(one, other)| one == other).count();
        if let Some(different) = instructions.get(common).or(other.get(common)) {
            return Err(different.first);
        }
    }
    Ok(instructions)
}

/// Syntax that differs between builders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Syntax {
    /// Whether here-documents are supported. Docker's classic builder does not support them and reads their lines as
    /// instructions.
    here_docs: bool,
    /// Whether a line that ends with two escape characters continues, as in older builders.
    double_escape_continues: bool,
    /// Whether `check` is a directive. Older builders treat it as a comment, which ends the directives.
    check_directive: bool,
}

impl Syntax {
    /// Syntax of current builders.
    pub(super) const CURRENT: Self =
        Self { here_docs: true, double_escape_continues: false, check_directive: true };
}

/// Returns the first `ADD` that does more than copy from the build context: its line, from 1, and what it adds. Engines fetch
/// URLs and repositories themselves, even if the build has no network.
pub fn fetching_add(dockerfile: &str) -> Option<(usize, String)> {
    // All combinations, because the builder is unknown.
    let syntaxes = (0..8).map(|bits| Syntax {
        here_docs: bits & 1 == 0,
        double_escape_continues: bits & 2 == 0,
        check_directive: bits & 4 == 0,
    });
    let instructions = syntaxes.flat_map(|syntax| split(dockerfile, syntax));
    instructions
        .filter_map(|instruction| Some((instruction.first + 1, external_source(&instruction.text)?)))
        .min()
}

fn split(dockerfile: &str, syntax: Syntax) -> Vec<Instruction> {
    let dockerfile = dockerfile.strip_prefix('\u{feff}').unwrap_or(dockerfile);
    let escape = escape_character(dockerfile, syntax);
    let mut instructions: Vec<Instruction> = Vec::new();
    // Number of the last instruction's here-documents that have ended.
    let mut ended = 0;
    let mut is_continued = false;
    for (index, full_line) in dockerfile.split_inclusive('\n').enumerate() {
        let line = full_line.trim_end_matches(['\r', '\n']);
        let last = instructions.last_mut();
        if let Some(document) = last.and_then(|instruction| instruction.documents.get_mut(ended)) {
            document.ends = document.ends_at(line);
            if document.ends {
                ended += 1;
            } else {
                document.content.push_str(full_line);
            }
            continue;
        }
        // Comments and empty lines neither start nor end an instruction.
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        let may_continue = |text: &&str| syntax.double_escape_continues || !text.ends_with(escape);
        let continued = line.trim_end_matches([' ', '\t']).strip_suffix(escape).filter(may_continue);
        let text = continued.unwrap_or(line);
        match instructions.last_mut().filter(|_| is_continued) {
            Some(instruction) => instruction.text.push_str(text),
            None => instructions.push(Instruction {
                text: text.to_owned(),
                first: index,
                last: None,
                documents: Vec::new(),
            }),
        }
        is_continued = continued.is_some();
        if let Some(instruction) = instructions.last_mut().filter(|_| !is_continued) {
            instruction.last = Some(index);
            ended = 0;
            if syntax.here_docs {
                instruction.documents = Document::all_of(instruction.text.trim(), escape);
            }
        }
    }
    for instruction in &mut instructions {
        instruction.text = instruction.text.trim().to_owned();
    }
    instructions
}

/// Returns the first source of an `ADD` that may not be a path in the build context.
fn external_source(instruction: &str) -> Option<String> {
    let mut words = instruction.split_whitespace().peekable();
    // `ONBUILD` instructions run in a stage that is based on this stage.
    while words.next_if(|word| word.eq_ignore_ascii_case("onbuild")).is_some() {}
    words.next_if(|word| word.eq_ignore_ascii_case("add"))?;
    while words.next_if(|word| word.starts_with("--")).is_some() {}
    let words: Vec<&str> = words.collect();
    let list: Option<Vec<String>> = serde_json::from_str(&words.join(" ")).ok();
    let mut sources = list.unwrap_or_else(|| words.into_iter().map(str::to_owned).collect());
    // The final word is the destination. A single word is a mistake, and is treated as a source.
    if sources.len() > 1 {
        sources.pop();
    }
    sources.into_iter().find(|source| !is_local(source))
}

/// Whether a source is neither a URL nor `user@host:path`, and contains nothing that the engine would expand or unquote. A
/// here-document is local.
fn is_local(source: &str) -> bool {
    let is_literal = |c: char| c.is_alphanumeric() || "._-+~/*?[] ".contains(c);
    let source = source.strip_prefix("<<").map_or(source, |name| name.trim_matches(['-', '"', '\'']));
    source.chars().all(is_literal)
}

impl Document {
    /// Returns the here-documents that an instruction opens: `RUN <<EOF`, `COPY <<-"A" << B /x/`. Only whole, unquoted words open
    /// one.
    fn all_of(instruction: &str, escape: char) -> Vec<Self> {
        let (mut keyword, mut arguments) = first_word(instruction);
        if keyword.eq_ignore_ascii_case("onbuild") {
            (keyword, arguments) = first_word(lexer::options(arguments, escape).1);
        }
        let may_open = ["run", "copy", "add"].iter().any(|known| keyword.eq_ignore_ascii_case(known));
        let is_list = lexer::json_list(lexer::options(arguments, escape).1).is_some();
        if !may_open || is_list || !instruction.contains("<<") {
            return Vec::new();
        }
        let lexer = Lexer { escape: '\\', quotes: Quotes::Kept, raw_escapes: true, variables: None };
        let words = lexer.words(instruction).unwrap_or_default();
        words.iter().filter_map(|word| Self::opened_by(word)).collect()
    }

    /// Returns the here-document that a word opens, without content.
    pub(super) fn opened_by(word: &str) -> Option<Self> {
        let text = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
        let (delimiter, strip_tabs) = text.strip_prefix('-').map_or((text, false), |text| (text, true));
        // A shell's shift operator (`$((1 << 2))`) does not open a here-document.
        let is_shift =
            |name: &str| name.starts_with(|c: char| c.is_ascii_digit()) || name.contains(['(', ')', '$']);
        if delimiter.starts_with(BLANKS) && is_shift(delimiter.trim_start()) {
            return None;
        }
        let delimiter = delimiter.trim_start();
        let single_word = |quotes| {
            let lexer = Lexer { escape: '\\', quotes, raw_escapes: false, variables: None };
            <[String; 1]>::try_from(lexer.words(delimiter).ok()?).ok().map(|[word]| word)
        };
        if delimiter.contains('<') {
            return None;
        }
        let (name, quoted) = (single_word(Quotes::Removed)?, single_word(Quotes::Kept)?);
        // The name was quoted if `Quotes::Removed` removed any quotes.
        let quote_count = |text: &str| text.matches(['\'', '"']).count();
        let expand = quote_count(&name) == quote_count(&quoted);
        Some(Self { name, content: String::new(), strip_tabs, expand, ends: false })
    }

    fn ends_at(&self, line: &str) -> bool {
        let line = if self.strip_tabs { line.trim_start_matches('\t') } else { line };
        line == self.name
    }

    /// Returns the content, without leading tabs if they are to be removed.
    pub(super) fn plain_content(&self) -> String {
        let lines = self.content.split_inclusive('\n');
        lines.map(|line| if self.strip_tabs { line.trim_start_matches('\t') } else { line }).collect()
    }
}

fn first_word(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(BLANKS).unwrap_or((text, ""));
    (word, rest.trim_start_matches(BLANKS))
}

/// Returns the escape character: a backslash, unless a parser directive at the top sets a backtick.
pub(super) fn escape_character(dockerfile: &str, syntax: Syntax) -> char {
    let escape = directives(dockerfile, syntax).find(|(key, _)| key == "escape");
    if escape.is_some_and(|(_, value)| value == "`") { '`' } else { '\\' }
}

/// Returns the parser directives. The first line that is not a known directive ends them.
pub(super) fn directives(dockerfile: &str, syntax: Syntax) -> impl Iterator<Item = (String, &str)> {
    dockerfile
        .strip_prefix('\u{feff}')
        .unwrap_or(dockerfile)
        .lines()
        .map_while(|line| line.trim().strip_prefix('#')?.split_once('='))
        .map(|(key, value)| (key.trim().to_ascii_lowercase(), value.trim()))
        .take_while(move |(key, _)| {
            ["escape", "syntax"].contains(&key.as_str()) || syntax.check_directive && key == "check"
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_would_fetch_is_found() {
        for (dockerfile, line, source) in [
            ("FROM a\nADD https://x.example/y.tgz /src/\n", 2, "https://x.example/y.tgz"),
            ("FROM a\n  add  --chown=0:0 --link HTTP://x/ /y", 2, "HTTP://x/"),
            ("FROM a\nADD local.tgz git@x.example:a/b.git /y", 2, "git@x.example:a/b.git"),
            ("FROM a\nADD git://x/y#main /y", 2, "git://x/y#main"),
            ("FROM a\nADD [\"\\u0068ttp://x\", \"/y\"]", 2, "http://x"),
            ("FROM a\nADD [\"https://x/a b\", \"/y\"", 2, "[\"https://x/a"),
            ("FROM a\nARG U=https://x/\nADD $U /y", 3, "$U"),
            ("FROM a\nADD ht\\tps://x /y", 2, "ht\\tps://x"),
            ("FROM a\nADD 'https://x' /y", 2, "'https://x'"),
            ("FROM a\nRUN x\nADD \\\n# why\n  ht\\\ntps://x /y", 3, "https://x"),
            ("# escape=`\nFROM a\nADD `\nhttps://x /y", 3, "https://x"),
            ("# x=1\n# escape=`\nFROM a\nADD ht\\\ntps://x /y", 4, "https://x"),
            ("FROM a AS x\nONBUILD ADD https://x /y\nFROM x", 2, "https://x"),
            ("FROM a\nRUN <<EOF\nADD https://x /y\nEOF", 3, "https://x"),
            ("FROM a\nADD https://x", 2, "https://x"),
            ("FROM a\nADD\\\n  https://x /y", 2, "https://x"),
            ("FROM a\nRUN x \\\\\nADD https://x /y", 3, "https://x"),
            // Older builders end the directives at `check`, so the backslash remains the escape character.
            ("# check=skip=all\n# escape=`\nFROM a\nADD a \\\nhttps://x /y", 4, "https://x"),
            // Without support for here-documents, the line that ends one continues.
            ("FROM a\nRUN <<'A\\'\nA\\\nADD https://x /y", 4, "https://x"),
        ] {
            assert_eq!(fetching_add(dockerfile), Some((line, source.to_owned())), "{dockerfile}");
        }
    }

    #[test]
    fn a_copy_out_of_the_context_is_none() {
        for dockerfile in [
            "FROM a\nADD sources/x-1.2+b~c.tgz patches/*.patch /src/",
            "FROM a\nADD --chown=me:me [\"sources/a.tgz\", \"/src/$X\"]",
            "FROM a\nADD <<EOF /etc/x\nhttps://x\nEOF\n",
            "FROM a\nRUN wget https://x && \\\n  ADD https://x /y",
            "FROM a\n# ADD https://x /y\nCOPY x /y",
            "FROM a\nENV ADD=https://x",
        ] {
            assert_eq!(fetching_add(dockerfile), None, "{dockerfile}");
        }
    }

    #[test]
    fn here_documents_are_whole_words_without_quotes() {
        for (dockerfile, documents) in [
            ("RUN <<A\nx\n\ty\n A\nA\nRUN z", vec![("A", "x\n\ty\n A\n", false, true)]),
            (
                "COPY <<-'A B' 3<< \"C\" /x/\n\tx\n\tA B\n\tC\nC",
                vec![("A B", "\tx\n", true, false), ("C", "\tC\n", false, false)],
            ),
            ("onbuild run cat <<A\r\nx\r\nA\r\n", vec![("A", "x\r\n", false, true)]),
            (
                "RUN cat <<A && \\\n  cat <<B\n1\nA\n2\nB",
                vec![("A", "1\n", false, true), ("B", "2\n", false, true)],
            ),
            ("RUN echo 'a <<A b' \"<<A\" x<<A $((1<<2)) <<<A \\<<A ${x:-<<A}\nRUN y", vec![]),
            ("RUN [\"<<A\"]\nRUN y", vec![]),
            ("ENV A=<<A\nRUN y", vec![]),
        ] {
            let found = instructions(dockerfile);
            let documents = documents.into_iter().map(|(name, content, strip_tabs, expand)| Document {
                name: name.to_owned(),
                content: content.to_owned(),
                strip_tabs,
                expand,
                ends: true,
            });
            assert_eq!(found[0].documents, documents.collect::<Vec<_>>(), "{dockerfile}");
            assert_eq!(found.len(), 1 + usize::from(dockerfile.contains("\nRUN")), "{dockerfile}");
        }
        let open = instructions("RUN <<A\nx\n A");
        assert!(!open[0].documents[0].ends && open[0].last == Some(0));
        // Before the end of a here-document, comments and empty lines are content.
        assert_eq!(instructions("COPY <<A /x\n\n# y\nA")[0].documents[0].content, "\n# y\n");
    }

    proptest::proptest! {
        #[test]
        fn no_dockerfile_panics(text in "(ADD|from|RUN|#|escape=`|<<A|A|\\\\|`|\\[\"|[ \n\ta-z/:\"]{0,5}){0,20}") {
            let _ = (instructions(&text), fetching_add(&text));
        }
    }
}
