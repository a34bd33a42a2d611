//! Pure: the instructions of a Dockerfile, and which of them an engine would fetch something for.

/// An instruction, its lines joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Without the characters that continue lines, comments and here-documents.
    pub text: String,
    /// The place of its first line, from 0.
    pub first: usize,
    /// The place of the last line of the instruction itself; `None` where the text ends before it does.
    pub last: Option<usize>,
}

impl Instruction {
    /// Is it this instruction, such as `FROM`? Case does not count.
    pub fn is(&self, word: &str) -> bool {
        first_word(&self.text).eq_ignore_ascii_case(word)
    }
}

/// The instructions of a Dockerfile, in order.
pub fn instructions(dockerfile: &str) -> Vec<Instruction> {
    split(dockerfile, Reading { here_docs: true, doubled: true })
}

/// Where builders read Dockerfiles in two ways.
#[derive(Clone, Copy, Debug)]
struct Reading {
    /// Docker's classic builder knows no here-documents: what stands in one are instructions to it.
    here_docs: bool,
    /// Does a line go on that ends with two escape characters? To newer builders it does not.
    doubled: bool,
}

/// The first `ADD` that is more than a copy out of the build context: from which line of the Dockerfile, and what it names.
/// Engines fetch addresses and repositories themselves, whatever network the build has.
pub(crate) fn fetching_add(dockerfile: &str) -> Option<(usize, String)> {
    let ways = [(true, true), (true, false), (false, true), (false, false)];
    let ways = ways.map(|(here_docs, doubled)| split(dockerfile, Reading { here_docs, doubled }));
    ways.into_iter()
        .flatten()
        .filter_map(|instruction| Some((instruction.first + 1, fetched(&instruction.text)?)))
        .min()
}

fn split(dockerfile: &str, reading: Reading) -> Vec<Instruction> {
    let escape = escape_character(dockerfile);
    let mut found: Vec<Instruction> = Vec::new();
    let mut open: Vec<HereDoc> = Vec::new();
    let mut goes_on = false;
    for (place, line) in dockerfile.lines().enumerate() {
        if let Some(document) = open.first() {
            if document.ends_at(line) {
                open.remove(0);
            }
            continue;
        }
        // Comments and empty lines neither start nor end an instruction.
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        let line = line.trim_end();
        let goes = |text: &&str| reading.doubled || !text.ends_with(escape);
        let head = line.strip_suffix(escape).filter(goes);
        let (text, continues) = (head.unwrap_or(line), head.is_some());
        match found.last_mut().filter(|_| goes_on) {
            Some(instruction) => instruction.text.push_str(text),
            None => found.push(Instruction { text: text.trim_start().to_owned(), first: place, last: None }),
        }
        goes_on = continues;
        if let Some(instruction) = found.last_mut().filter(|_| !continues) {
            instruction.last = Some(place);
            if reading.here_docs {
                open = HereDoc::of(&instruction.text);
            }
        }
    }
    found
}

/// What an `ADD` names that is not plainly a place in the build context.
fn fetched(instruction: &str) -> Option<String> {
    let mut words = instruction.split_whitespace().peekable();
    // A stage that has this stage for its base runs it.
    while words.next_if(|word| word.eq_ignore_ascii_case("onbuild")).is_some() {}
    words.next_if(|word| word.eq_ignore_ascii_case("add"))?;
    while words.next_if(|word| word.starts_with("--")).is_some() {}
    let rest: Vec<&str> = words.collect();
    let rest_text = rest.join(" ");
    let list: Option<Vec<String>> = serde_json::from_str(&rest_text).ok();
    let mut sources = list.unwrap_or_else(|| rest.into_iter().map(str::to_owned).collect());
    // The last one is where it goes; alone it is no destination but a mistake, which may be a source.
    if sources.len() > 1 {
        sources.pop();
    }
    sources.into_iter().find(|source| !is_local(source))
}

/// No address, no `user@host:path`, and nothing that the engine would still expand or unquote. A here-document is local.
fn is_local(source: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || "._-+~/*?[] ".contains(c);
    let source = source.strip_prefix("<<").map_or(source, |name| name.trim_matches(['-', '"', '\'']));
    source.chars().all(plain)
}

#[derive(Debug, PartialEq, Eq)]
struct HereDoc {
    terminator: String,
    strip_tabs: bool,
}

impl HereDoc {
    /// Those that an instruction opens: `RUN <<EOF`, `COPY <<-"A" <<B /x/`.
    fn of(instruction: &str) -> Vec<Self> {
        let word = first_word(instruction);
        if !["run", "copy", "add"].iter().any(|known| word.eq_ignore_ascii_case(known)) {
            return Vec::new();
        }
        instruction
            .split_whitespace()
            .filter_map(|word| {
                let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
                let (rest, strip_tabs) = rest.strip_prefix('-').map_or((rest, false), |rest| (rest, true));
                let terminator = rest.trim_matches(['"', '\'']);
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                (!terminator.is_empty() && terminator.chars().all(is_name))
                    .then(|| Self { terminator: terminator.to_owned(), strip_tabs })
            })
            .collect()
    }

    fn ends_at(&self, line: &str) -> bool {
        let line = if self.strip_tabs { line.trim_start_matches('\t') } else { line };
        line == self.terminator
    }
}

fn first_word(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// The escape character: a backslash, unless a parser directive at the top says a backtick. The first line that is no
/// known directive ends them.
fn escape_character(dockerfile: &str) -> char {
    dockerfile
        .lines()
        .map_while(|line| line.trim().strip_prefix('#')?.split_once('='))
        .map(|(key, value)| (key.trim().to_ascii_lowercase(), value.trim()))
        .take_while(|(key, _)| ["escape", "syntax", "check"].contains(&key.as_str()))
        .find(|(key, _)| key == "escape")
        .map_or('\\', |(_, value)| if value == "`" { '`' } else { '\\' })
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

    proptest::proptest! {
        #[test]
        fn no_dockerfile_panics(text in "(ADD|from|RUN|#|escape=`|<<A|A|\\\\|`|\\[\"|[ \n\ta-z/:\"]{0,5}){0,20}") {
            let _ = (instructions(&text), fetching_add(&text));
        }
    }
}
