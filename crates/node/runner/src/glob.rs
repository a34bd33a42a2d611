//! Patterns of `COPY`, with the semantics of Go's `filepath.Match`.

/// Whether a name matches a pattern. Neither contains a `/`. A malformed pattern matches only itself.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Position of the last `*`, and where its match ends: backtracking to the last star is enough.
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
            continue;
        }
        if p == pattern.len() && n == name.len() {
            return true;
        }
        let eaten = name.get(n).and_then(|c| one(&pattern[p..], *c));
        match (eaten, star) {
            (Some(length), _) => {
                p += length;
                n += 1;
            }
            (None, Some((at, from))) if from < name.len() => {
                star = Some((at, from + 1));
                p = at + 1;
                n = from + 1;
            }
            _ => return false,
        }
    }
}

/// Length of the pattern's first item, if that item matches the character.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == c).then_some(2),
        ['[', rest @ ..] => class(rest, c).map(|length| length + 1),
        [plain, ..] => (*plain == c).then_some(1),
        [] => None,
    }
}

/// Length up to the closing bracket of a class such as `a-z]` or `^a-z]`, if the class matches the character.
fn class(pattern: &[char], c: char) -> Option<usize> {
    let (not, mut at) = if pattern.first() == Some(&'^') { (true, 1) } else { (false, 0) };
    let start = at;
    let mut found = false;
    while at == start || *pattern.get(at)? != ']' {
        let low = member(pattern, &mut at)?;
        let high = if pattern.get(at) == Some(&'-') {
            at += 1;
            member(pattern, &mut at)?
        } else {
            low
        };
        found |= (low..=high).contains(&c);
    }
    (found != not).then_some(at + 1)
}

fn member(pattern: &[char], at: &mut usize) -> Option<char> {
    if pattern.get(*at) == Some(&'\\') {
        *at += 1;
    }
    *at += 1;
    pattern.get(*at - 1).copied()
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
