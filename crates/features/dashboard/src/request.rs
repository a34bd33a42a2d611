//! Parses forms, and determines the origin of a request from its headers.

use std::collections::HashMap;

use axum::http::{
    HeaderMap, HeaderName,
    header::{AUTHORIZATION, AsHeaderName, CONTENT_TYPE, HOST, ORIGIN},
};

fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or_default())
}

/// Parses a query string or a form. Returns a function that removes a field and returns its value, which is empty for a missing
/// field.
pub fn take_fields(text: &[u8]) -> impl FnMut(&str) -> String + use<> {
    let mut values: HashMap<_, _> = url::form_urlencoded::parse(text).into_owned().collect();
    move |name| values.remove(name).unwrap_or_default()
}

/// Headers in which proxies name their client. Headers that begin with `x-forwarded` or `x-original-` also do.
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

/// Whether a proxy forwarded the request. Its original sender may be on any machine.
pub fn is_proxied(headers: &HeaderMap) -> bool {
    headers.keys().map(HeaderName::as_str).any(|name| {
        PROXY_HEADERS.contains(&name) || name.starts_with("x-forwarded") || name.starts_with("x-original-")
    })
}

/// Whether a page of this server sent the request. Browsers state this in `Sec-Fetch-Site`. Older browsers, and browsers on an
/// untrusted connection, send only the page's `Origin`.
pub fn is_same_origin(headers: &HeaderMap) -> bool {
    match (text(headers, "sec-fetch-site"), text(headers, ORIGIN), text(headers, HOST)) {
        (Some(site), ..) => site == "same-origin",
        (None, Some(origin), Some(host)) => {
            origin.split_once("://").is_some_and(|(_, sender)| sender.eq_ignore_ascii_case(host))
        }
        _ => false,
    }
}

/// Whether a browser states that a page of another server caused the request. `none` is an address that the user typed.
pub fn is_cross_site(headers: &HeaderMap) -> bool {
    text(headers, "sec-fetch-site").is_some_and(|site| !["same-origin", "none"].contains(&site))
}

/// Whether a form has this content type.
pub fn is_form(headers: &HeaderMap) -> bool {
    let kind = text(headers, CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Returns the bearer token of a request.
pub fn bearer_token(headers: &HeaderMap) -> Option<&str> {
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
    fn requests_of_foreign_pages_are_recognized() {
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
            assert_eq!(is_same_origin(&headers(all)), *here, "{all:?}");
        }
    }

    #[test]
    fn forms_and_bearer_tokens_are_recognized() {
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
            assert_eq!(bearer_token(&headers(&[("authorization", sent)])), token, "{sent}");
        }
    }

    #[test]
    fn any_header_of_a_proxy_is_recognized() {
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
            assert!(is_proxied(&headers(&[("host", "localhost"), (name, "10.0.0.1")])), "{name}");
        }
        let own: &[(&str, &str)] = &[
            ("host", "localhost:81"),
            ("user-agent", "x"),
            ("sec-fetch-site", "same-origin"),
            ("x-requested-with", "fetch"),
            ("upgrade-insecure-requests", "1"),
        ];
        assert!(!is_proxied(&headers(own)));
    }
}
