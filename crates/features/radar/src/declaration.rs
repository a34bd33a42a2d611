//! Finds the declaration of a function or macro in a header's text.

/// Words before a name that show that the name is called there and not declared.
const CALLS: [&str; 8] = ["return", "else", "do", "case", "goto", "sizeof", "if", "while"];

/// Returns the first declaration of a function or function-like macro, in one line with single blanks. Calls do not count.
pub fn declaration(name: &str, header: &str) -> Option<String> {
    let text = without_comments(header);
    let is_identifier_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices(name).find_map(|(start, _)| {
        let (before, after) = (text.get(..start)?, text.get(start + name.len()..)?);
        if before.ends_with(is_identifier_part) || after.starts_with(is_identifier_part) {
            return None;
        }
        if before.lines().last().is_some_and(|line| line.split_whitespace().eq(["#define"])) {
            return macro_definition(name, after);
        }
        let parameters = parenthesized(after.trim_start())?;
        let following = after.trim_start().get(parameters.len()..)?.trim_start();
        // An attribute may follow the parameters.
        let is_declaration =
            following.starts_with([';', '{', '_']) || following.starts_with(char::is_alphabetic);
        let kind = type_before(before).filter(|_| is_declaration)?;
        Some(one_line(&format!("{kind} {name}{parameters}")).replace("* ", "*"))
    })
}

/// Returns the definition of a macro with parameters, in one line. `after` is the text after the macro's name.
fn macro_definition(name: &str, after: &str) -> Option<String> {
    if !after.starts_with('(') {
        return None;
    }
    let mut lines = Vec::new();
    for line in after.lines() {
        lines.push(line.trim_end_matches('\\'));
        if !line.ends_with('\\') {
            break;
        }
    }
    Some(one_line(&format!("#define {name}{}", lines.join(" "))))
}

/// Returns the type before a declared name, or `None` if the name is not declared there.
fn type_before(before: &str) -> Option<String> {
    let start = before.rfind([';', '{', '}']).map_or(0, |index| index + 1);
    // A declaration begins after the last preprocessor directive or empty line.
    let lines: Vec<&str> = before.get(start..)?.lines().collect();
    let last = lines.iter().rposition(|line| line.trim_start().starts_with('#') || line.trim().is_empty());
    let kind = one_line(&lines.get(last.map_or(0, |last| last + 1)..)?.join(" "));
    let is_type = kind.chars().all(|c| c.is_ascii_alphanumeric() || " _*(),\"".contains(c));
    let is_balanced = kind.matches('(').count() == kind.matches(')').count();
    let is_call = kind.split([' ', '(']).any(|word| CALLS.contains(&word));
    let starts_with_word = kind.starts_with(|c: char| c.is_alphabetic() || c == '_');
    (is_type && is_balanced && !is_call && starts_with_word).then_some(kind)
}

/// Returns the text from an opening parenthesis to its closing one.
fn parenthesized(text: &str) -> Option<&str> {
    let mut depth = 0_usize;
    for (index, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return text.get(..=index);
                }
            }
            _ if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

fn one_line(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    joined.replace("( ", "(").replace(" )", ")").replace(" ,", ",")
}

/// Replaces each comment with a blank.
fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut remaining = text;
    while let Some(start) = remaining.find('/') {
        let (before, comment) = remaining.split_at(start);
        plain.push_str(before);
        let end = match comment.get(..2) {
            Some("/*") => comment.find("*/").map_or(comment.len(), |end| end + 2),
            Some("//") => comment.find('\n').unwrap_or(comment.len()),
            _ => {
                plain.push('/');
                1
            }
        };
        if end > 1 {
            plain.push(' ');
        }
        remaining = comment.get(end..).unwrap_or_default();
    }
    plain + remaining
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r"#ifndef _A_H
#define _A_H
/* del_timer(x) is a comment. */
#define from_timer(var, callback_timer, timer_fieldname) \
	container_of(callback_timer, typeof(*var), timer_fieldname)
#define NAME_ONLY del_timer
extern int del_timer(struct timer_list * timer);
static inline void call(void)
{
	del_timer_sync(0);
	return do_timer(1);
}
__printf(2, 3)
struct class *class_create(struct module *owner,
			   const char *name) __must_check;
int (*ops)(void);
static inline unsigned long do_timer(unsigned long ticks) { return old(ticks); }
#endif
";

    #[test]
    fn declarations_are_told_from_calls() {
        for (name, wanted) in [
            ("del_timer", Some("extern int del_timer(struct timer_list *timer)")),
            (
                "from_timer",
                Some(
                    "#define from_timer(var, callback_timer, timer_fieldname) container_of(callback_timer, typeof(*var), timer_fieldname)",
                ),
            ),
            (
                "class_create",
                Some("__printf(2, 3) struct class *class_create(struct module *owner, const char *name)"),
            ),
            ("do_timer", Some("static inline unsigned long do_timer(unsigned long ticks)")),
            ("del_timer_sync", None),
            ("old", None),
            ("timer", None),
            ("NAME_ONLY", None),
            ("absent", None),
        ] {
            assert_eq!(declaration(name, HEADER).as_deref(), wanted, "{name}");
        }
    }

    #[test]
    fn unfinished_text_is_no_declaration() {
        for text in ["int f(", "int f(int", "/* int f(int);", "f", "int f)", "/", "int f(a) /", "int f;"] {
            assert_eq!(declaration("f", text), None, "{text}");
        }
    }
}
