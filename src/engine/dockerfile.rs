//! Pure: the little that engines change in a Dockerfile.

/// The Dockerfile with a `LABEL` after each `FROM`, so that every image and container of the run carries
/// it from its first step on and can be found again, whatever happens.
pub(super) fn label_stages(dockerfile: &str, labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return dockerfile.to_owned();
    }
    let escape = escape_character(dockerfile);
    let label: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
    let label = format!("LABEL {}\n", label.join(" "));
    let mut out = String::with_capacity(dockerfile.len() + 256);
    let mut state = State::Fresh;
    for line in dockerfile.lines() {
        out.push_str(line);
        out.push('\n');
        state = state.after(line, escape);
        if state == State::FromEnded {
            out.push_str(&label);
            state = State::Fresh;
        }
    }
    out
}

/// The Dockerfile with a last stage that holds nothing but the `modules` stage's `/out`.
pub(super) fn with_out_stage(dockerfile: &str) -> String {
    format!("{}\n{OUT_STAGE}\n", dockerfile.trim_end())
}

/// What [`with_out_stage`] adds.
const OUT_STAGE: &str = "FROM scratch\nCOPY --from=modules /out /out";
/// The step of it that fails when there is no `/out`.
pub(super) const OUT_STEP: &str = "COPY --from=modules /out /out";

/// What the next line belongs to.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// A new instruction.
    Fresh,
    /// An instruction that goes on; is it a `FROM`?
    Continued { from: bool },
    /// A `FROM` is complete.
    FromEnded,
    /// Here-documents that are still open, by their terminators.
    HereDoc(Vec<HereDoc>),
}

#[derive(Debug, PartialEq, Eq)]
struct HereDoc {
    terminator: String,
    strip_tabs: bool,
}

impl State {
    fn after(self, line: &str, escape: char) -> Self {
        let trimmed = line.trim();
        match self {
            Self::HereDoc(mut open) => {
                let ended = open.first().is_some_and(|doc| {
                    let line = if doc.strip_tabs { line.trim_start_matches('\t') } else { line };
                    line == doc.terminator
                });
                if ended {
                    open.remove(0);
                }
                if open.is_empty() { Self::Fresh } else { Self::HereDoc(open) }
            }
            // Comments and empty lines neither start nor end an instruction.
            state if trimmed.is_empty() || trimmed.starts_with('#') => state,
            state => {
                let from = match state {
                    Self::Continued { from } => from,
                    _ => first_word(trimmed).eq_ignore_ascii_case("from"),
                };
                let here_docs = here_docs(trimmed);
                if trimmed.ends_with(escape) {
                    Self::Continued { from }
                } else if from {
                    Self::FromEnded
                } else if here_docs.is_empty() {
                    Self::Fresh
                } else {
                    Self::HereDoc(here_docs)
                }
            }
        }
    }
}

fn first_word(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// The here-documents that an instruction opens: `RUN <<EOF`, `COPY <<-"A" <<B /x/`.
fn here_docs(line: &str) -> Vec<HereDoc> {
    let word = first_word(line);
    if !["run", "copy", "add"].iter().any(|instruction| word.eq_ignore_ascii_case(instruction)) {
        return Vec::new();
    }
    line.split_whitespace()
        .filter_map(|word| {
            let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
            let (rest, strip_tabs) = rest.strip_prefix('-').map_or((rest, false), |rest| (rest, true));
            let terminator = rest.trim_matches(['"', '\'']);
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            (!terminator.is_empty() && terminator.chars().all(is_name))
                .then(|| HereDoc { terminator: terminator.to_owned(), strip_tabs })
        })
        .collect()
}

/// The escape character: a backslash, unless a parser directive at the top says a backtick.
fn escape_character(dockerfile: &str) -> char {
    dockerfile
        .lines()
        .map_while(|line| line.trim().strip_prefix('#')?.split_once('='))
        .find(|(key, _)| key.trim().eq_ignore_ascii_case("escape"))
        .map_or('\\', |(_, value)| if value.trim() == "`" { '`' } else { '\\' })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(text: &str) -> String {
        label_stages(text, &[("farrier.dev/build", "a-1")])
    }

    #[test]
    fn every_stage_is_labelled_at_its_start() {
        assert_eq!(
            label("ARG X=1\nFROM base AS modules\nRUN make\n\nFROM scratch\nCOPY --from=modules /out /\n"),
            "ARG X=1\nFROM base AS modules\nLABEL farrier.dev/build=\"a-1\"\nRUN make\n\n\
             FROM scratch\nLABEL farrier.dev/build=\"a-1\"\nCOPY --from=modules /out /\n"
        );
    }

    #[test]
    fn continued_lines_stay_together() {
        let text = "from base \\\n# why\n  AS modules\nRUN a \\\nFROM b\nRUN c";
        assert_eq!(
            label(text),
            "from base \\\n# why\n  AS modules\nLABEL farrier.dev/build=\"a-1\"\nRUN a \\\nFROM b\nRUN c\n"
        );
    }

    #[test]
    fn here_documents_are_left_alone() {
        let text = "FROM base\nRUN <<-\"EOF\" python3\nFROM x import y\n\tEOF\nRUN true\n";
        assert_eq!(label(text).matches("LABEL").count(), 1);
    }

    #[test]
    fn a_shifted_number_opens_no_here_document() {
        let text = "FROM base\nRUN echo $((1 << 2))\nFROM scratch\n";
        assert_eq!(label(text).matches("LABEL").count(), 2);
    }

    #[test]
    fn the_escape_directive_is_heeded() {
        let text = "# escape=`\nFROM base `\n AS x\nRUN dir C:\\\nFROM y\n";
        assert_eq!(label(text).matches("LABEL").count(), 2);
    }

    #[test]
    fn the_out_stage_comes_last() {
        assert_eq!(
            with_out_stage("FROM a AS modules\nRUN x\n\n"),
            "FROM a AS modules\nRUN x\nFROM scratch\nCOPY --from=modules /out /out\n"
        );
        assert!(OUT_STAGE.ends_with(OUT_STEP));
    }
}
