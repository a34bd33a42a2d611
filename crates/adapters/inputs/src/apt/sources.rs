//! Apt source entries. Parses the host's entries and derives the entries for the selected suites.

use std::{collections::BTreeMap, path::Path};

use deb822_fast::{Deb822, Paragraph};
use farrier_core::{image::checked::to_strings, kernel::AptSuites};

use crate::{FetchError, Result};

/// One archive with its suites, as in `sources.list(5)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceEntry {
    /// Addresses of the archive and of its mirrors.
    pub uris: Vec<String>,
    pub suites: Vec<String>,
    /// Components; empty for a flat archive.
    pub components: Vec<String>,
    /// Keys that sign the archive.
    pub signed_by: SignedBy,
    /// Options copied from the host because the archive does not work without them: `Check-Valid-Until` and `Check-Date`, for
    /// snapshots of a day in the past.
    pub checks: BTreeMap<&'static str, bool>,
}

/// Names of the options in `SourceEntry::checks`.
const CHECKS: [&str; 2] = ["Check-Valid-Until", "Check-Date"];

/// Keys that sign an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SignedBy {
    /// Any key that the host's apt trusts.
    #[default]
    Host,
    /// Keyring files or key fingerprints, verbatim.
    Named(String),
    /// A key embedded in the entry: the lines after the field's name.
    Embedded(Vec<String>),
}

/// Parses a `.list` file with one entry per line. Other lines are skipped.
pub fn parse_one_line(text: &str) -> Vec<SourceEntry> {
    text.lines().filter_map(one_line).collect()
}

fn one_line(line: &str) -> Option<SourceEntry> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?;
    let rest = rest.strip_prefix(|c: char| c.is_whitespace())?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inside) => inside.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let mut entry = SourceEntry {
        uris: vec![words.next()?],
        suites: vec![words.next()?],
        components: words.collect(),
        ..SourceEntry::default()
    };
    for (key, value) in options.split_whitespace().filter_map(|option| option.split_once('=')) {
        if key.eq_ignore_ascii_case("signed-by") {
            entry.signed_by = SignedBy::Named(value.trim_matches('"').replace(',', " "));
        }
        let check = CHECKS.into_iter().find(|check| key.eq_ignore_ascii_case(check));
        entry.checks.extend(check.zip(parse_boolean(value)));
    }
    Some(entry)
}

/// Parses a boolean as apt does. Other values are dropped, because a value of several lines would add another field.
fn parse_boolean(value: &str) -> Option<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "yes" | "true" | "with" | "on" | "enable" | "1" => Some(true),
        "no" | "false" | "without" | "off" | "disable" | "0" => Some(false),
        _ => None,
    }
}

/// Parses a `.sources` file of paragraphs. Unreadable paragraphs are skipped.
pub fn parse_deb822(text: &str) -> Vec<SourceEntry> {
    Deb822::iter_paragraphs_from_reader(text.as_bytes())
        .filter_map(|paragraph| deb822(&paragraph.ok()?))
        .collect()
}

fn deb822(paragraph: &Paragraph) -> Option<SourceEntry> {
    let value = |field| paragraph.get(field).unwrap_or_default().trim();
    let words = |field| -> Vec<String> { value(field).split_whitespace().map(str::to_owned).collect() };
    if parse_boolean(value("Enabled")) == Some(false) || !words("Types").iter().any(|kind| kind == "deb") {
        return None;
    }
    let signed_by = match value("Signed-By") {
        "" => SignedBy::Host,
        key if key.contains("BEGIN PGP") => {
            // A lone dot means an empty line.
            let line = |line: &str| if line.trim() == "." { String::new() } else { line.trim().to_owned() };
            SignedBy::Embedded(key.lines().map(line).collect())
        }
        names => SignedBy::Named(names.split_whitespace().collect::<Vec<_>>().join(" ")),
    };
    let checks =
        CHECKS.into_iter().filter_map(|field| Some((field, parse_boolean(paragraph.get(field)?)?))).collect();
    let entry = SourceEntry {
        uris: words("URIs"),
        suites: words("Suites"),
        components: words("Components"),
        signed_by,
        checks,
    };
    (!entry.uris.is_empty() && !entry.suites.is_empty()).then_some(entry)
}

/// Suites of Ubuntu's releases. They identify a suite as Ubuntu's on a host with another distribution.
const UBUNTU: [&str; 4] = ["focal", "jammy", "noble", "resolute"];
/// Placeholder address of Ubuntu's archive on a host without one; the site's `mirrors` map it to a real address.
const UBUNTU_ARCHIVE: &str = "https://ubuntu.invalid/ubuntu/";
/// Ubuntu's keyring, from Debian's package ubuntu-keyring.
const UBUNTU_KEYRING: &str = "/usr/share/keyrings/ubuntu-archive-keyring.gpg";

fn is_ubuntu_suite(suite: &str) -> bool {
    UBUNTU.contains(&suite.split('-').next().unwrap_or_default())
}

/// Whether the entry is for Ubuntu's own archive. The suite alone is not sufficient: third parties use the same suite names, and
/// other Ubuntu releases have other suites.
fn is_ubuntu_archive(entry: &SourceEntry) -> bool {
    let mut names = entry.uris.iter().filter_map(|uri| uri.trim_end_matches('/').rsplit('/').next());
    let is_named = matches!(&entry.signed_by, SignedBy::Named(key) if key.contains("ubuntu-archive"));
    rank(entry).is_some() && (is_named || names.any(|name| name.starts_with("ubuntu")))
}

/// Returns the entries for the selected suites. A configured mirror wins. Otherwise each suite comes from the host's own entry for
/// it, or from the host's entry for the distribution's main archive with the suite replaced. Ubuntu's suites on a host with
/// another distribution get a placeholder address.
pub fn select(host: &[SourceEntry], selection: &AptSuites) -> Result<Vec<SourceEntry>> {
    let AptSuites { suites, components, mirror, signed_by } = selection;
    let mut selected: Vec<SourceEntry> = Vec::new();
    for suite in suites {
        let ubuntu = (is_ubuntu_suite(suite) && !host.iter().any(is_ubuntu_archive)).then(|| SourceEntry {
            uris: vec![UBUNTU_ARCHIVE.to_owned()],
            signed_by: SignedBy::Named(UBUNTU_KEYRING.to_owned()),
            ..SourceEntry::default()
        });
        let from_host = || own_entry(host, suite).or_else(|| main_archive(host, suite)).cloned();
        let entry = match mirror {
            Some(mirror) => SourceEntry {
                uris: vec![mirror.to_string()],
                signed_by: main_archive(host, "").map(|entry| entry.signed_by.clone()).unwrap_or_default(),
                ..SourceEntry::default()
            },
            None => ubuntu.or_else(from_host).ok_or_else(|| FetchError::NoAptSource(suite.to_string()))?,
        };
        let components = match is_flat(suite) {
            true if mirror.is_none() => {
                let why = "a flat archive needs its address: set `mirror`";
                return Err(FetchError::value("an apt suite", suite, why));
            }
            true => Vec::new(),
            false if components.is_empty() => vec!["main".to_owned()],
            false => to_strings(components),
        };
        let signed_by = match signed_by {
            Some(keyring) => SignedBy::Named(keyring.to_string_lossy().into_owned()),
            None => entry.signed_by,
        };
        let entry = SourceEntry { suites: vec![suite.to_string()], components, signed_by, ..entry };
        // Suites of one archive share a paragraph.
        match selected
            .iter_mut()
            .find(|other| SourceEntry { suites: entry.suites.clone(), ..(*other).clone() } == entry)
        {
            Some(paragraph) if paragraph.suites.iter().any(|existing| *suite == existing.as_str()) => {}
            Some(paragraph) => paragraph.suites.push(suite.to_string()),
            None => selected.push(entry),
        }
    }
    check(&selected)?;
    Ok(selected)
}

/// Whether the suite is a directory of a flat archive, which has no components.
pub(super) fn is_flat(suite: &str) -> bool {
    suite.ends_with('/')
}

/// Returns the host's entry for exactly this suite, from the distribution's own archive. The suite alone is not sufficient,
/// because third parties use the distribution's suite names too.
fn own_entry<'a>(host: &'a [SourceEntry], suite: &str) -> Option<&'a SourceEntry> {
    best(host.iter().filter(|entry| entry.suites.iter().any(|s| s == suite)))
}

/// Returns the host's entry for the distribution's main archive, or for its security archive if `suite` is a security suite.
fn main_archive<'a>(host: &'a [SourceEntry], suite: &str) -> Option<&'a SourceEntry> {
    let security = |suite: &str| suite.ends_with("-security") || suite.ends_with("/updates");
    if security(suite) {
        return best(host.iter().filter(|entry| entry.suites.iter().any(|s| security(s))));
    }
    best(host.iter().filter(|entry| entry.suites.iter().any(|s| !s.contains(['-', '/']))))
        .or_else(|| best(host.iter().filter(|entry| entry.suites.iter().any(|s| !security(s)))))
}

fn best<'a>(entries: impl Iterator<Item = &'a SourceEntry>) -> Option<&'a SourceEntry> {
    // Among equal ranks, take the first entry, as apt does.
    entries.filter_map(|entry| Some((rank(entry)?, entry))).min_by_key(|(rank, _)| *rank).map(|(_, e)| e)
}

/// Ranks how certain it is that an entry is the distribution's own archive; 0 is certain. Returns `None` for any other archive.
fn rank(entry: &SourceEntry) -> Option<u8> {
    const KEYRINGS: [&str; 3] = ["debian-archive", "ubuntu-archive", "debian-ports-archive"];
    const PATHS: [&str; 7] =
        ["debian", "debian-security", "debian-archive", "ubuntu", "ubuntu-ports", "ubuntu-security", "ports"];
    if !entry.components.iter().any(|component| component == "main") {
        return None;
    }
    let has_distribution_path = entry.uris.iter().all(|uri| {
        // `.../debian`, or `.../debian/20250101T000000Z` on a snapshot mirror.
        let mut parts = uri.trim_end_matches('/').rsplit('/');
        let last = parts.next().unwrap_or_default();
        let is_date =
            last.len() == 16 && last.ends_with('Z') && last.starts_with(|c: char| c.is_ascii_digit());
        let name = if is_date { parts.next().unwrap_or_default() } else { last };
        // The addresses of personal package archives end in the distribution's name as well.
        PATHS.contains(&name) && !uri.contains("/ppa") && !uri.contains("//ppa.")
    });
    match (&entry.signed_by, has_distribution_path) {
        (SignedBy::Named(key), _) if KEYRINGS.iter().any(|keyring| key.contains(keyring)) => Some(0),
        (SignedBy::Host, true) => Some(1),
        (SignedBy::Named(_) | SignedBy::Embedded(_), true) => Some(2),
        (_, false) => None,
    }
}

/// Returns the keyring's path for apt. apt reports a missing keyring as a missing signature, as if a retry could help.
pub(super) fn keyring(file: &Path, selection: &AptSuites) -> Result<String> {
    let path = file.to_string_lossy().into_owned();
    if file.is_file() && !path.contains(char::is_whitespace) {
        return Ok(path);
    }
    let why = if file.is_file() { "its path contains a blank" } else { "there is no such file" };
    let message = format!(
        "cannot verify the archive of {} with the keyring {path} (signedBy): {why}",
        selection.suites.join(", ")
    );
    Err(FetchError::unusable(
        message,
        "name a keyring by its absolute path, or by its path in the definitions directory",
    ))
}

/// Checks that no value can end a line or a field: definitions and the host's files are free text.
fn check(entries: &[SourceEntry]) -> Result<()> {
    let reject = |what, value: &str, why| Err(FetchError::value(what, value, why));
    for entry in entries {
        for uri in &entry.uris {
            if uri.chars().any(|c| c.is_whitespace() || c.is_control()) || !uri.contains(':') {
                return reject("the address of an apt archive", uri, "it is not an address");
            }
        }
        for name in entry.suites.iter().chain(&entry.components) {
            let valid = |c: char| c.is_ascii_alphanumeric() || "._+~/-".contains(c);
            if name.is_empty() || !name.chars().all(valid) || name.starts_with('-') || name.contains("..") {
                return reject("an apt suite or component", name, "it contains an invalid character");
            }
        }
        let key = match &entry.signed_by {
            SignedBy::Named(name) => name.as_str(),
            SignedBy::Host | SignedBy::Embedded(_) => "",
        };
        if key.chars().any(char::is_control) {
            return reject("a keyring", key, "it contains a control character");
        }
    }
    Ok(())
}

/// Renders the entries as a `.sources` file.
pub fn render(entries: &[SourceEntry]) -> String {
    let mut lines = Vec::new();
    for SourceEntry { uris, suites, components, signed_by, checks } in entries {
        lines.push("Types: deb".to_owned());
        let fields = [("URIs", uris), ("Suites", suites), ("Components", components)];
        for (field, words) in fields.into_iter().filter(|(_, words)| !words.is_empty()) {
            lines.push(format!("{field}: {}", words.join(" ")));
        }
        match signed_by {
            SignedBy::Host => {}
            SignedBy::Named(name) => lines.push(format!("Signed-By: {name}")),
            SignedBy::Embedded(key) => {
                lines.push("Signed-By:".to_owned());
                let key = key.iter().skip_while(|line| line.is_empty());
                lines.extend(key.map(|line| format!(" {}", if line.is_empty() { "." } else { line })));
            }
        }
        lines.extend(checks.iter().map(|(field, on)| format!("{field}: {}", if *on { "yes" } else { "no" })));
        lines.push(String::new());
    }
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use farrier_core::image::checked::{Mirror, Suite};

    use super::*;

    const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

    fn debian() -> Vec<SourceEntry> {
        parse_deb822(&format!(
            "Types: deb deb-src\n# a comment\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\n\
             Components: main\nSigned-By: {KEYRING}\n\n\
             Types: deb\nURIs: http://mirror.test/debian-security/\nSuites: bookworm-security\n\
             Components: main\nSigned-By: {KEYRING}\nCheck-Valid-Until: no\n"
        ))
    }

    fn select_suites(host: &[SourceEntry], suites: &[&str]) -> Result<String, FetchError> {
        let suites = suites.iter().map(|suite| suite.parse().unwrap()).collect();
        select(host, &AptSuites { suites, ..AptSuites::default() }).map(|entries| render(&entries))
    }

    #[test]
    fn the_hosts_own_entries() {
        let text = select_suites(&debian(), &["bookworm", "bookworm-security", "sid"]).unwrap();
        insta::assert_snapshot!(text.trim_end(), @r"
        Types: deb
        URIs: http://mirror.test/debian
        Suites: bookworm sid
        Components: main
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

        Types: deb
        URIs: http://mirror.test/debian-security/
        Suites: bookworm-security
        Components: main
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
        Check-Valid-Until: no
        ");
    }

    #[test]
    fn a_flat_archive_has_an_address_and_no_components() {
        let mirror = Some("https://vendor.test/debian/".parse().unwrap());
        let suites = || vec!["./".parse().unwrap()];
        let entries = select(&debian(), &AptSuites { suites: suites(), mirror, ..AptSuites::default() });
        insta::assert_snapshot!(render(&entries.unwrap()).trim_end(), @r"
        Types: deb
        URIs: https://vendor.test/debian/
        Suites: ./
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
        ");
        let error = select_suites(&debian(), &["./"]).unwrap_err().to_string();
        assert!(error.contains("set `mirror`"), "{error}");
    }

    #[test]
    fn a_missing_keyring_is_named_and_not_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let wanted = AptSuites { suites: vec!["sid".parse().unwrap()], ..AptSuites::default() };
        let file = directory.path().join("vendor.asc");
        let error = keyring(&file, &wanted).unwrap_err();
        let path = file.display();
        let message = format!(
            "cannot verify the archive of sid with the keyring {path} (signedBy): there is no such file"
        );
        assert_eq!((error.to_string(), error.is_transient()), (message, false));
        std::fs::write(&file, "").unwrap();
        assert_eq!(keyring(&file, &wanted).unwrap(), path.to_string());
    }

    #[test]
    fn a_security_suite_only_from_a_security_archive() {
        let text = select_suites(&debian(), &["trixie-security"]).unwrap();
        assert!(text.contains("debian-security/\nSuites: trixie-security\n"), "{text}");
        let error = select_suites(&debian()[..1], &["trixie-security"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot find an apt source for suite trixie-security: the host has no entry for it"
        );
        assert!(error.hint().unwrap().contains("mirror"));
    }

    #[test]
    fn ubuntu_s_suites_are_not_looked_for_in_debian_s_archive() {
        let text = select_suites(&debian(), &["noble", "noble-updates", "noble-security"]).unwrap();
        insta::assert_snapshot!(text.trim_end(), @r"
        Types: deb
        URIs: https://ubuntu.invalid/ubuntu/
        Suites: noble noble-updates noble-security
        Components: main
        Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
        ");
        let of_ubuntu = parse_one_line("deb http://mirror.test/ubuntu jammy main");
        let text = select_suites(&of_ubuntu, &["noble"]).unwrap();
        assert!(text.contains("http://mirror.test/ubuntu\nSuites: noble\n"), "{text}");
    }

    #[test]
    fn a_configured_mirror_wins() {
        let wanted = AptSuites {
            suites: vec!["noble".parse().unwrap()],
            components: vec!["main".parse().unwrap(), "universe".parse().unwrap()],
            mirror: Some("https://ubuntu.test/ubuntu".parse().unwrap()),
            signed_by: Some("/keys/ubuntu.gpg".parse().unwrap()),
        };
        let text = render(&select(&debian(), &wanted).unwrap());
        insta::assert_snapshot!(text.trim_end(), @r"
        Types: deb
        URIs: https://ubuntu.test/ubuntu
        Suites: noble
        Components: main universe
        Signed-By: /keys/ubuntu.gpg
        ");
    }

    #[test]
    fn one_line_entries() {
        let entries = parse_one_line(
            "# deb http://no.test/debian bookworm main\n\
             deb-src http://no.test/debian bookworm main\n\
             deb [ arch=amd64 signed-by=/k.gpg trusted=yes check-valid-until=no ] http://a.test/debian/ bookworm main contrib # x\n\
             \tdeb\thttp://b.test/debian ./\n\
             deb [unclosed http://c.test/debian bookworm main\n\
             deb\n",
        );
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].signed_by, SignedBy::Named("/k.gpg".into()));
        assert_eq!(entries[0].checks, BTreeMap::from([("Check-Valid-Until", false)]));
        assert_eq!(entries[0].components, ["main", "contrib"]);
        assert_eq!(entries[1].suites, ["./"]);
        // An option to trust an unsigned archive is never copied.
        assert!(!render(&entries).to_lowercase().contains("trusted"));
    }

    /// The fuzzer found the first case.
    #[test]
    fn an_option_is_handed_on_once_and_never_becomes_another_field() {
        let text = format!(
            "deb [signed-by={KEYRING} check-valid-until=x check-valid-until=no] http://a.test/debian bookworm main\n\
             deb [signed-by={KEYRING} check-date=yes check-date=off] http://b.test/debian-security bookworm-security main\n"
        );
        let one_line = select_suites(&parse_one_line(&text), &["bookworm", "bookworm-security"]).unwrap();
        assert_eq!(one_line.matches("Check-Valid-Until: no\n").count(), 1, "{one_line}");
        assert_eq!(one_line.matches("Check-Date: no\n").count(), 1, "{one_line}");
        let folded = debian_with("Check-Date: no\n Trusted: yes\n");
        let written = select_suites(&parse_deb822(&folded), &["bookworm"]).unwrap();
        assert!(!written.contains("Trusted") && !written.contains("Check-Date"), "{written}");
    }

    fn debian_with(field: &str) -> String {
        format!(
            "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm\nComponents: main\nSigned-By: {KEYRING}\n{field}"
        )
    }

    #[test]
    fn third_parties_are_never_taken_for_the_distribution() {
        let third = parse_one_line(
            "deb [signed-by=/k/vendor.gpg] https://apt.vendor.test bookworm main\n\
             deb [signed-by=/k/docker.asc] https://download.vendor.test/linux/debian bookworm stable\n\
             deb https://ppa.vendor.test/someone/ppa/ubuntu bookworm main\n\
             deb https://packages.vendor.test/debian/12/prod bookworm main\n",
        );
        assert!(select_suites(&third, &["bookworm"]).is_err());
        let both = [third, parse_one_line("deb http://mirror.test/debian bookworm main")].concat();
        assert!(select_suites(&both, &["bookworm"]).unwrap().contains("http://mirror.test/debian\n"));
        assert!(select_suites(&both, &["sid"]).unwrap().contains("http://mirror.test/debian\n"));
    }

    #[test]
    fn embedded_keys_and_disabled_entries() {
        let text = "Types: deb\nEnabled: no\nURIs: http://a.test/debian\nSuites: bookworm\nComponents: main\n\n\
            Types: deb\nURIs: http://c.test/debian\nSuites: bookworm\nComponents: main\nEnabled: False\n\n\
            Types: deb\nURIs: http://b.test/debian\nSuites: bookworm\nComponents: main\n\
            Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc=\n -----END PGP PUBLIC KEY BLOCK-----\n";
        let text = select_suites(&parse_deb822(text), &["bookworm"]).unwrap();
        insta::assert_snapshot!(text.trim_end(), @r"
        Types: deb
        URIs: http://b.test/debian
        Suites: bookworm
        Components: main
        Signed-By:
         -----BEGIN PGP PUBLIC KEY BLOCK-----
         .
         abc=
         -----END PGP PUBLIC KEY BLOCK-----
        ");
    }

    #[test]
    fn hostile_values_reach_no_file() {
        for suite in ["", "a b", "x\nURIs: http://evil", "../x", "-o", "a[b]"] {
            assert!(suite.parse::<Suite>().is_err(), "{suite:?}");
        }
        for mirror in ["", "no-scheme", "http://a b", "http://a\nTrusted: yes"] {
            assert!(mirror.parse::<Mirror>().is_err(), "{mirror:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses(text in "(deb|Types: deb|URIs:| |\\[|\\]|\n|a|#|\\PC){0,60}") {
            parse_one_line(&text);
            parse_deb822(&text);
        }
    }
}
