//! Patterns of `COPY`, with the semantics of Go's `filepath.Match`.

/// Whether a name matches a pattern. Neither contains a `/`. A malformed pattern matches only itself.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Position of the last `*` in the pattern, and where its match ends in the name. Backtracking to the last star is enough.
    let (mut pattern_index, mut name_index) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern_index < pattern.len() && pattern[pattern_index] == '*' {
            star = Some((pattern_index, name_index));
            pattern_index += 1;
            continue;
        }
        if pattern_index == pattern.len() && name_index == name.len() {
            return true;
        }
        let consumed = name.get(name_index).and_then(|c| match_item(&pattern[pattern_index..], *c));
        match (consumed, star) {
            (Some(length), _) => {
                pattern_index += length;
                name_index += 1;
            }
            (None, Some((star_index, match_end))) if match_end < name.len() => {
                star = Some((star_index, match_end + 1));
                pattern_index = star_index + 1;
                name_index = match_end + 1;
            }
            _ => return false,
        }
    }
}

/// Returns the length of the pattern's first item, if that item matches the character.
fn match_item(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == c).then_some(2),
        ['[', rest @ ..] => match_class(rest, c).map(|length| length + 1),
        [literal, ..] => (*literal == c).then_some(1),
        [] => None,
    }
}

/// Returns the length of a class such as `a-z]` or `^a-z]`, including its closing bracket, if the class matches the character.
fn match_class(pattern: &[char], c: char) -> Option<usize> {
    let (is_negated, mut position) = if pattern.first() == Some(&'^') { (true, 1) } else { (false, 0) };
    let start = position;
    let mut is_member = false;
    while position == start || *pattern.get(position)? != ']' {
        let low = next_char(pattern, &mut position)?;
        let high = if pattern.get(position) == Some(&'-') {
            position += 1;
            next_char(pattern, &mut position)?
        } else {
            low
        };
        is_member |= (low..=high).contains(&c);
    }
    (is_member != is_negated).then_some(position + 1)
}

/// Returns the next character of a class, which may be escaped, and advances `position`.
fn next_char(pattern: &[char], position: &mut usize) -> Option<char> {
    if pattern.get(*position) == Some(&'\\') {
        *position += 1;
    }
    *position += 1;
    pattern.get(*position - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_go() {
        for (pattern, name) in [
            ("*", "abc"),
            ("*", ""),
            ("a*c", "abbc"),
            ("a*b*c", "axbxbxc"),
            ("a?c", "abc"),
            ("[a-c]x", "bx"),
            ("[^a-c]x", "dx"),
            (r"a\*", "a*"),
            (r"[\]]", "]"),
            ("*.tar.gz", "x.tar.tar.gz"),
            ("é?", "éé"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("a", "ab"),
            ("a?", "a"),
            ("[a-c]", "d"),
            ("[^a-c]", "b"),
            (r"a\*", "ab"),
            ("[a", "a"),
            ("a*b", "ac"),
            ("", "a"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_pattern_panics_or_takes_long(pattern in r"[*?\[\]\\^a-]{0,40}", name in "[a*]{0,60}") {
            let _ = matches(&pattern, &name);
        }
    }
}
