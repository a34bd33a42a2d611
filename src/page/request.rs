//! Pure: where a request comes from, as its headers say.

use std::collections::HashMap;

use axum::http::{
    HeaderMap,
    header::{AUTHORIZATION, AsHeaderName, CONTENT_TYPE, FORWARDED, HOST, ORIGIN, VIA},
};

fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or_default())
}

/// Takes values out of an address or a form, by their names; a name that is not there has none.
pub fn fields(text: &[u8]) -> impl FnMut(&str) -> String + use<> {
    let mut said: HashMap<_, _> = url::form_urlencoded::parse(text).into_owned().collect();
    move |name| said.remove(name).unwrap_or_default()
}

/// Does it name this machine's loopback device? A name from elsewhere that leads there is a foreign page's.
pub fn names_this_machine(headers: &HeaderMap) -> bool {
    let host = text(headers, HOST).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    matches!(name, "127.0.0.1" | "localhost" | "[::1]")
}

/// Has a proxy passed it on, for who knows whom?
pub fn is_passed_on(headers: &HeaderMap) -> bool {
    headers.contains_key(FORWARDED) || headers.contains_key(VIA) || headers.contains_key("x-forwarded-for")
}

/// Was it sent by one of these pages? Browsers say so (`Sec-Fetch-Site`); older ones, and those that do not trust the connection, name
/// where the page is from.
pub fn is_of_this_page(headers: &HeaderMap) -> bool {
    match (text(headers, "sec-fetch-site"), text(headers, ORIGIN), text(headers, HOST)) {
        (Some(site), ..) => site == "same-origin",
        (None, Some(origin), Some(host)) => {
            origin.split_once("://").is_some_and(|(_, from)| from.eq_ignore_ascii_case(host))
        }
        _ => false,
    }
}

/// Is it what a form sends?
pub fn is_form(headers: &HeaderMap) -> bool {
    let kind = text(headers, CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// The bearer token.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = text(headers, AUTHORIZATION)?.split_once(' ')?;
    Some(token.trim()).filter(|token| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(all: &[(&str, &str)]) -> HeaderMap {
        let header = |(name, value): &(&str, &str)| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        };
        all.iter().map(header).collect()
    }

    #[test]
    fn a_foreign_page_is_told_from_this_one() {
        let cases: &[(&[(&str, &str)], bool)] = &[
            (&[("sec-fetch-site", "same-origin"), ("origin", "null")], true),
            (
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("origin", "http://localhost:81"),
                    ("host", "localhost:81"),
                ],
                false,
            ),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "none")], false),
            (&[("sec-fetch-site", "")], false),
            (&[("origin", "http://localhost:81"), ("host", "localhost:81")], true),
            (&[("origin", "http://localhost:82"), ("host", "localhost:81")], false),
            (&[("origin", "http://localhost:81.attacker.test"), ("host", "localhost:81")], false),
            (&[("origin", "null"), ("host", "localhost:81")], false),
            (&[("host", "localhost:81")], false),
            (&[], false),
        ];
        for (all, here) in cases {
            assert_eq!(is_of_this_page(&headers(all)), *here, "{all:?}");
        }
    }

    #[test]
    fn names_forms_and_tokens() {
        for (host, here) in [
            ("127.0.0.1:8080", true),
            ("localhost", true),
            ("[::1]:81", true),
            ("attacker.test:81", false),
            ("127.0.0.1.attacker.test", false),
            ("localhost@attacker.test", false),
            ("", false),
        ] {
            assert_eq!(names_this_machine(&headers(&[("host", host)])), here, "{host}");
        }
        for (kind, form) in [
            ("application/x-www-form-urlencoded", true),
            ("Application/X-WWW-Form-Urlencoded; charset=utf-8", true),
            ("text/plain", false),
            ("multipart/form-data; boundary=application/x-www-form-urlencoded", false),
            ("", false),
        ] {
            assert_eq!(is_form(&headers(&[("content-type", kind)])), form, "{kind}");
        }
        for (sent, token) in [
            ("Bearer abc.def", Some("abc.def")),
            ("bearer  abc", Some("abc")),
            ("Bearer ", None),
            ("Bearer", None),
            ("Basic abc", None),
            ("Bearer \u{fc}", None),
        ] {
            assert_eq!(bearer(&headers(&[("authorization", sent)])), token, "{sent}");
        }
        assert!(is_passed_on(&headers(&[("x-forwarded-for", "10.0.0.1")])) && !is_passed_on(&headers(&[])));
    }
}
