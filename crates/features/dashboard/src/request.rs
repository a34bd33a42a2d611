//! Determines the origin of a request from its headers.

use std::collections::HashMap;

use axum::http::{
    HeaderMap, HeaderName,
    header::{AUTHORIZATION, AsHeaderName, CONTENT_TYPE, HOST, ORIGIN},
};

fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or_default())
}

/// Returns a function that takes values out of an address or a form by name. A missing name gives an empty
/// value.
pub fn fields(text: &[u8]) -> impl FnMut(&str) -> String + use<> {
    let mut said: HashMap<_, _> = url::form_urlencoded::parse(text).into_owned().collect();
    move |name| said.remove(name).unwrap_or_default()
}

/// Headers by which proxies name their client, in addition to all that begin with `x-forwarded` or
/// `x-original-`.
const PROXY_HEADERS: [&str; 11] = [
    "cf-connecting-ip",
    "client-ip",
    "fastly-client-ip",
    "forwarded",
    "true-client-ip",
    "via",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-proxyuser-ip",
    "x-real-ip",
];

/// Whether a proxy forwarded the request, so that anyone may have sent it.
pub fn is_passed_on(headers: &HeaderMap) -> bool {
    headers.keys().map(HeaderName::as_str).any(|name| {
        PROXY_HEADERS.contains(&name) || name.starts_with("x-forwarded") || name.starts_with("x-original-")
    })
}

/// Whether one of these pages sent the request. Browsers state this in `Sec-Fetch-Site`. Older browsers, and
/// browsers on an untrusted connection, only send the page's `Origin`.
pub fn is_of_this_page(headers: &HeaderMap) -> bool {
    match (text(headers, "sec-fetch-site"), text(headers, ORIGIN), text(headers, HOST)) {
        (Some(site), ..) => site == "same-origin",
        (None, Some(origin), Some(host)) => {
            origin.split_once("://").is_some_and(|(_, from)| from.eq_ignore_ascii_case(host))
        }
        _ => false,
    }
}

/// Whether the content type is a form's.
pub fn is_form(headers: &HeaderMap) -> bool {
    let kind = text(headers, CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Returns the bearer token.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = text(headers, AUTHORIZATION)?.split_once(' ')?;
    Some(token.trim()).filter(|token| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

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
    fn forms_and_tokens() {
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
    }

    #[test]
    fn a_proxys_request_is_told_by_any_of_its_headers() {
        for name in [
            "cf-connecting-ip",
            "forwarded",
            "true-client-ip",
            "via",
            "x-client-ip",
            "x-cluster-client-ip",
            "x-envoy-external-address",
            "x-forwarded",
            "x-forwarded-access-token",
            "x-forwarded-email",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-original-forwarded-for",
            "x-original-url",
            "x-proxyuser-ip",
            "x-real-ip",
        ] {
            assert!(is_passed_on(&headers(&[("host", "localhost"), (name, "10.0.0.1")])), "{name}");
        }
        let own: &[(&str, &str)] = &[
            ("host", "localhost:81"),
            ("user-agent", "x"),
            ("sec-fetch-site", "same-origin"),
            ("x-requested-with", "fetch"),
            ("upgrade-insecure-requests", "1"),
        ];
        assert!(!is_passed_on(&headers(own)));
    }
}
