//! Parses `WWW-Authenticate` headers (RFC 9110, section 11.6.1).

/// Authentication scheme that a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User name and password.
    Basic,
    /// A token from the token server at `realm`, which knows the registry as `service`
    /// (<https://distribution.github.io/distribution/spec/auth/token/>).
    Bearer { realm: String, service: Option<String> },
}

/// Returns the challenges of one header, in order. Skips unknown schemes.
pub(super) fn parse(header: &str) -> Vec<Challenge> {
    let mut challenges = Vec::new();
    let mut current: Option<(String, Vec<(String, String)>)> = None;
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if word.is_empty() {
            // The header has ended, or cannot be parsed after a misplaced `=`.
            break;
        }
        let next = after.trim_start_matches([' ', '\t']);
        if let Some(value) = next.strip_prefix('=') {
            let (value, after_value) = split_value(value.trim_start_matches([' ', '\t']));
            if let Some((_, parameters)) = &mut current {
                parameters.push((word.to_ascii_lowercase(), value));
            }
            rest = after_value;
        } else {
            challenges.extend(current.take().and_then(to_challenge));
            current = Some((word.to_ascii_lowercase(), Vec::new()));
            rest = after;
        }
    }
    challenges.extend(current.and_then(to_challenge));
    challenges
}

/// Splits a token or a quoted string off the text. Returns its value and the remaining text.
fn split_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[index + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            _ => value.push(character),
        }
    }
    (value, "")
}

fn to_challenge((scheme, parameters): (String, Vec<(String, String)>)) -> Option<Challenge> {
    let find = |name: &str| parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    match scheme.as_str() {
        "basic" => Some(Challenge::Basic),
        "bearer" => Some(Challenge::Bearer { realm: find("realm")?, service: find("service") }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>) -> Challenge {
        Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) }
    }

    #[test]
    fn headers_of_common_registries_are_parsed() {
        assert_eq!(
            parse(
                r#"Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push""#
            ),
            [bearer("https://auth.example/token", Some("registry.example"))]
        );
        assert_eq!(parse(r#"Basic realm="basic-realm""#), [Challenge::Basic]);
        assert_eq!(parse("BASIC"), [Challenge::Basic]);
        assert_eq!(
            parse(r#"Negotiate, Basic realm="a, b", bearer REALM = "https://x" , service=y"#),
            [Challenge::Basic, bearer("https://x", Some("y"))]
        );
        assert_eq!(parse(r#"Bearer realm="a\"b"#), [bearer(r#"a"b"#, None)]);
    }

    #[test]
    fn malformed_headers_have_no_challenges() {
        for header in ["", "=", ",,,", "Bearer", r#"Bearer service="x""#, "Digest realm=x"] {
            assert_eq!(parse(header), [], "{header:?}");
        }
    }

    proptest! {
        #[test]
        fn no_header_panics(header in "\\PC{0,80}") {
            let _ = parse(&header);
        }
    }
}
