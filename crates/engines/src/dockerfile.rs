//! Changes that engines make to a Dockerfile before they run it.

use std::collections::BTreeSet;

use farrier_core::template::instructions;

/// Adds a `LABEL` after each `FROM`, so that every image and container of the run has the label from the first step on.
/// The cleanup finds these objects by the label, even after a crash.
pub(super) fn label_stages(dockerfile: &str, labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return dockerfile.to_owned();
    }
    let label: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
    let label = format!("LABEL {}\n", label.join(" "));
    let stages = instructions(dockerfile).into_iter().filter(|instruction| instruction.is("from"));
    let starts: BTreeSet<usize> = stages.filter_map(|stage| stage.last).collect();
    let mut out = String::with_capacity(dockerfile.len() + 256);
    for (number, line) in dockerfile.lines().enumerate() {
        out.push_str(line);
        out.push('\n');
        if starts.contains(&number) {
            out.push_str(&label);
        }
    }
    out
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
}
