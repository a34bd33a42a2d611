//! Limits the nesting of a template before it is parsed: the parser recurses for each level, and its run time is quadratic in the
//! depth. Also refuses parsed templates that could render forever.

use handlebars::{Template, template::TemplateElement};

/// Maximum nesting depth: blocks, further branches of a block (`{{else if}}`), and words in parentheses and brackets.
const MAX_DEPTH: usize = 64;
/// Maximum number of blocks and further branches in a template.
const MAX_BLOCKS: usize = 1000;
/// Maximum number of loops (`{{#each}}`) inside each other: their numbers of rounds multiply.
const MAX_LOOPS: usize = 2;

/// Returns the first violation of a limit: its line, from 1, and the reason.
pub(super) fn exceeded_limit(text: &str) -> Option<(usize, String)> {
    // Number of branches of each open block, the outermost first.
    let mut open_blocks = Vec::new();
    let mut blocks = 0;
    for (start, words) in (Tags { text, index: 0 }) {
        let line = || 1 + text.as_bytes().iter().take(start).filter(|byte| **byte == b'\n').count();
        if exceeds_depth(words) {
            return Some((line(), format!("parentheses and brackets are nested more than {MAX_DEPTH} deep")));
        }
        let word = words.trim_start_matches(|c: char| c == '~' || c.is_ascii_whitespace());
        if word.starts_with('#') {
            open_blocks.push(1);
            blocks += 1;
        } else if word.starts_with('/') {
            open_blocks.pop();
        } else if is_further_branch(word)
            && let Some(branches) = open_blocks.last_mut()
        {
            *branches += 1;
            blocks += 1;
        }
        if open_blocks.iter().sum::<usize>() > MAX_DEPTH {
            return Some((line(), format!("blocks are nested more than {MAX_DEPTH} deep")));
        }
        if blocks > MAX_BLOCKS {
            return Some((line(), format!("there are more than {MAX_BLOCKS} blocks")));
        }
    }
    None
}

/// Returns the first element that could make a template render forever: its line, and the reason. A partial can name itself.
pub(super) fn refused_element(template: &Template) -> Option<(usize, String)> {
    refused_below(template, 0, 1)
}

/// `loops` is the number of loops around the template, and `start` the line of the block that contains the template.
fn refused_below(template: &Template, loops: usize, start: usize) -> Option<(usize, String)> {
    template.elements.iter().enumerate().find_map(|(index, element)| {
        // A branch after `{{else if}}` has no position.
        let line = template.mapping.get(index).map_or(start, |position| position.0);
        match element {
            TemplateElement::HelperBlock(block) => {
                let loops = loops + usize::from(block.name.as_name() == Some("each"));
                if loops > MAX_LOOPS {
                    return Some((line, format!("more than {MAX_LOOPS} loops are inside each other")));
                }
                let mut branches = [&block.template, &block.inverse].into_iter().flatten();
                branches.find_map(|branch| refused_below(branch, loops, line))
            }
            TemplateElement::RawString(_)
            | TemplateElement::HtmlExpression(_)
            | TemplateElement::Expression(_)
            | TemplateElement::Comment(_) => None,
            _ => Some((line, "partials and decorators are not supported".to_owned())),
        }
    })
}

/// Iterates over the tags of a text, each with its start and its words from `{{` to the next `}}`. Comments, escaped tags and
/// the content of raw blocks are skipped.
struct Tags<'a> {
    text: &'a str,
    /// Index from which the next tag is searched.
    index: usize,
}

impl<'a> Iterator for Tags<'a> {
    type Item = (usize, &'a str);

    fn next(&mut self) -> Option<(usize, &'a str)> {
        loop {
            let start = self.index + self.text.get(self.index..)?.find("{{")?;
            let (before, inner) = (self.text.get(..start)?, self.text.get(start + 2..)?);
            let index_after = |end: &str| Some(start + 2 + inner.find(end)? + end.len());
            // With several backslashes, the last one is itself escaped, so that a tag follows.
            if before.ends_with('\\') && !before.ends_with("\\\\") {
                self.index = start + if inner.starts_with("{{") { 4 } else { 2 };
            } else if inner.starts_with('!') {
                let long_comment = if inner.starts_with("!--") { index_after("--}}") } else { None };
                self.index = long_comment.or_else(|| index_after("}}"))?;
            } else if inner.starts_with("{{") && !inner.starts_with("{{/") {
                self.index = index_after("{{{{/").unwrap_or(start + 4);
            } else {
                let words = inner.find("}}").map_or(inner, |end| inner.get(..end).unwrap_or_default());
                self.index = start + 2 + words.len();
                return Some((start, words));
            }
        }
    }
}

/// Whether a tag starts a further branch: `{{else if x}}`, `{{^ x}}`.
fn is_further_branch(word: &str) -> bool {
    let condition = word.strip_prefix("else").or_else(|| word.strip_prefix('^'));
    condition.is_some_and(|condition| !condition.trim_end_matches('~').trim().is_empty())
}

/// Whether a tag nests words in too many parentheses or brackets.
fn exceeds_depth(words: &str) -> bool {
    let mut depth = 0_usize;
    words.chars().any(|c| {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_DEPTH
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(depth: usize) -> String {
        format!("{}x{}", "{{#if arch}}\n".repeat(depth), "{{~/if}}".repeat(depth))
    }

    #[test]
    fn what_templates_need_is_allowed() {
        let flat =
            "{{#if arch}}{{else if os}}{{else}}{{/if}}\\{{#if}}{{! {{#if }}{{!-- {{#if}} }} --}}{{vars.x}}\n";
        let raw = "{{{{raw}}}}{{#if}}{{{{/raw}}}}".repeat(100);
        for text in
            ["", "{{", "{{!", "{{!--", "x", "{{{{", &flat.repeat(MAX_BLOCKS / 2), &raw, &blocks(MAX_DEPTH)]
        {
            assert_eq!(exceeded_limit(text), None, "{text}");
        }
    }

    #[test]
    fn the_place_of_what_is_too_deep_is_told() {
        let told = |text: &str| exceeded_limit(text).unwrap();
        for depth in [MAX_DEPTH + 1, 20_000] {
            let (line, reason) = told(&blocks(depth));
            assert_eq!((line, reason.as_str()), (MAX_DEPTH + 1, "blocks are nested more than 64 deep"));
        }
        let branches = format!("{{{{#if a}}}}{}", "\n{{else if b}}".repeat(20_000));
        assert_eq!(told(&branches).0, MAX_DEPTH + 1);
        for (open, close) in [("(not ", ")"), ("[", "]"), ("{\"a\": ", "}")] {
            let words = format!("\n{{{{#if {}1{}}}}}", open.repeat(20_000), close.repeat(20_000));
            assert_eq!(told(&words), (2, "parentheses and brackets are nested more than 64 deep".to_owned()));
        }
        assert_eq!(told(&format!("{{{{#if {}", "(not ".repeat(20_000))).0, 1, "a tag without an end");
    }

    #[test]
    fn loops_inside_each_other_and_partials_are_refused() {
        let told = |text: &str| refused_element(&Template::compile(text).unwrap());
        let each = |times| format!("{}x{}", "{{#each a}}".repeat(times), "{{/each}}".repeat(times));
        assert_eq!((told(&each(2)), told(&each(2).repeat(9))), (None, None));
        let hidden = "{{! -- }}{{/each}} --}}";
        let else_each = "{{#if a}}{{else each b}}{{#each c}}{{~#each d}}x{{/each}}{{/each}}{{/if}}";
        let last_else = "{{#each a}}{{#each b}}{{#if c}}{{else each d}}x{{/if}}{{/each}}{{/each}}";
        for text in [each(3), each(3).replace('x', hidden), else_each.to_owned(), last_else.to_owned()] {
            let expected = Some((1, "more than 2 loops are inside each other".to_owned()));
            assert_eq!(told(&text), expected, "{text}");
        }
        for text in ["{{> a}}", "{{ ~ > a}}", "{{#> a}}x{{/a}}", "{{#*inline \"a\"}}{{/inline}}", "{{* a}}"] {
            let expected = Some((2, "partials and decorators are not supported".to_owned()));
            assert_eq!(told(&format!("{{{{#if a}}}}\n{text}{{{{/if}}}}")), expected, "{text}");
        }
    }

    /// Blanks are allowed on both sides of a tilde.
    #[test]
    fn a_blank_before_a_tilde_hides_no_block() {
        assert!(exceeded_limit(&"{{ ~ #if a}}".repeat(MAX_DEPTH + 1)).is_some());
        assert_eq!(exceeded_limit(&"{{ ~#if a}}{{ ~/if}}".repeat(MAX_DEPTH + 1)), None);
    }

    /// Text that does not end a block in the parser must not end one here.
    #[test]
    fn nothing_hides_a_block() {
        for between in [
            "\\{{/if}}",
            "\\{{{{/if}}",
            "{{! {{/if}}",
            "{{!-- {{/if}} --}}",
            "{{{{raw}}}}{{/if}}{{{{/raw}}}}",
            "{{x \"{{/if\"}}",
        ] {
            let text = format!("{{{{#if a}}}}{between}\n").repeat(MAX_DEPTH + 1);
            assert_eq!(exceeded_limit(&text).unwrap().0, MAX_DEPTH + 1, "{between}");
        }
        let flat = "{{#if a}}{{/if}}".repeat(MAX_BLOCKS + 1);
        assert_eq!(exceeded_limit(&flat).unwrap().1, "there are more than 1000 blocks");
    }
}
