//! Pure: `WWW-Authenticate` headers (RFC 9110, section 11.6.1).

use http_auth::ChallengeRef;

/// What a registry wants to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User name and password.
    Basic,
    /// A token from a token server
    /// (<https://distribution.github.io/distribution/spec/auth/token/>).
    Bearer {
        /// The token server.
        realm: String,
        /// What it knows the registry as.
        service: Option<String>,
    },
}

/// The challenges of one header, in its order, up to where it is damaged; unknown schemes are left out.
pub(super) fn parse(header: &str) -> Vec<Challenge> {
    let challenges = http_auth::ChallengeParser::new(header).map_while(Result::ok);
    let known = challenges.filter_map(|ChallengeRef { scheme, params }| {
        let find = |name: &str| {
            let found = params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        match scheme.to_ascii_lowercase().as_str() {
            "basic" => Some(Challenge::Basic),
            "bearer" => Some(Challenge::Bearer { realm: find("realm")?, service: find("service") }),
            _ => None,
        }
    });
    known.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>) -> Challenge {
        Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) }
    }

    #[test]
    fn registries_of_this_world() {
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
    fn damaged_headers() {
        for header in ["", "=", ",,,", "Bearer", r#"Bearer service="x""#, "Digest realm=x"] {
            assert_eq!(parse(header), [], "{header:?}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_an_answer(header in "\\PC{0,80}") {
            let _ = parse(&header);
        }
    }
}
