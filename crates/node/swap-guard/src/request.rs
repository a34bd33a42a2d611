//! Request for a swap, as text: one item per line, with the keyword first.

use std::{fmt, time::Duration};

/// First line of a request. A guard refuses requests of other versions.
const HEADER: &str = "farrier swap 1";

/// Subdirectory of a request with the modules of [`Request::load`].
pub const NEW: &str = "new";
/// Subdirectory of a request with the modules of [`Request::restore`].
pub const OLD: &str = "old";

/// A swap of kernel modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Digest of the new modules and their parameters. A swap that failed is not repeated with the same digest.
    pub digest: String,
    /// Time limit from the first unload until all API servers answer. Zero disables the check.
    pub limit: Duration,
    /// Names of the modules to unload, users first.
    pub unload: Vec<String>,
    /// Loaded modules for which the container planned the swap: names and identities. A module without an identity is not in the
    /// list.
    pub expect: Vec<(String, String)>,
    /// Modules to load in their place, in load order.
    pub load: Vec<Module>,
    /// Modules that come back if the swap fails, in load order.
    pub restore: Vec<Module>,
}

/// A module to load: the uncompressed file `NAME.ko` in [`NEW`] or [`OLD`] of the request's directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// Name as `lsmod` shows it.
    pub name: String,
    /// Whether the swap continues if the module does not load.
    pub optional: bool,
    /// Parameters as for `insmod`. Each is tried in order until the kernel accepts one; without any, the module is loaded
    /// without parameters.
    pub parameters: Vec<String>,
}

/// Error in the text of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Number of the line, from 1; 0 if the request lacks a line.
    pub line: usize,
    reason: &'static str,
}

impl std::error::Error for ParseError {}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request, line {}: {}", self.line, self.reason)
    }
}

impl Request {
    /// Formats the request.
    pub fn to_text(&self) -> String {
        let Self { digest, limit, unload, expect, load, restore } = self;
        let mut lines =
            vec![HEADER.to_owned(), format!("digest {digest}"), format!("limit {}", limit.as_secs())];
        lines.extend(unload.iter().map(|name| format!("unload {name}")));
        lines.extend(expect.iter().map(|(name, identity)| format!("expect {name} {identity}")));
        for (keyword, modules) in [("load", load), ("restore", restore)] {
            for Module { name, optional, parameters } in modules {
                let kind = if *optional { "optional" } else { "required" };
                lines.push(format!("{keyword} {name} {kind}"));
                lines.extend(parameters.iter().map(|text| format!("parameters {}", text.replace('\n', " "))));
            }
        }
        lines.push("end\n".to_owned());
        lines.join("\n")
    }

    /// Parses the output of [`to_text`](Self::to_text).
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        let incomplete = ParseError { line: 0, reason: "the request is incomplete" };
        if lines.next().is_none_or(|(_, line)| line != HEADER) {
            return Err(ParseError { line: 1, reason: "not a request of this version" });
        }
        let mut request = Self::default();
        let mut is_restore = false;
        for (line, text) in lines {
            let fail = |reason| ParseError { line, reason };
            let (keyword, rest) = text.split_once(' ').unwrap_or((text, ""));
            match keyword {
                "digest" if is_file_name(rest) => rest.clone_into(&mut request.digest),
                "limit" => {
                    let seconds = rest.parse().map_err(|_| fail("the limit is a number of seconds"))?;
                    request.limit = Duration::from_secs(seconds);
                }
                "unload" if is_module_name(rest) => request.unload.push(rest.to_owned()),
                "expect" => {
                    let (name, identity) = rest.split_once(' ').unwrap_or_default();
                    if !is_module_name(name) || !is_file_name(identity) {
                        return Err(fail("not a module and its identity"));
                    }
                    request.expect.push((name.to_owned(), identity.to_owned()));
                }
                "load" | "restore" => {
                    is_restore = keyword == "restore";
                    let module = Module::parse(rest).ok_or_else(|| fail("not a module"))?;
                    if is_restore { &mut request.restore } else { &mut request.load }.push(module);
                }
                "parameters" => {
                    let modules = if is_restore { &mut request.restore } else { &mut request.load };
                    let module = modules.last_mut().ok_or_else(|| fail("parameters of no module"))?;
                    module.parameters.push(rest.to_owned());
                }
                "end" if request.digest.is_empty() || request.load.is_empty() => return Err(incomplete),
                "end" => return Ok(request),
                _ => return Err(fail("unknown keyword or value")),
            }
        }
        Err(incomplete)
    }

    /// Returns the files that the request needs, relative to its directory.
    pub fn files(&self) -> impl Iterator<Item = String> {
        let new = self.load.iter().map(|module| (NEW, module));
        let old = self.restore.iter().map(|module| (OLD, module));
        new.chain(old).map(|(directory, module)| module.file(directory))
    }
}

impl Module {
    /// Returns the path of the file in [`NEW`] or [`OLD`], relative to the request's directory.
    pub fn file(&self, directory: &str) -> String {
        format!("{directory}/{}.ko", self.name)
    }

    /// Parses the fields after the keyword.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split(' ');
        let (name, kind) = (fields.next()?, fields.next()?);
        let is_valid = is_module_name(name) && fields.next().is_none();
        let optional = match kind {
            "optional" => true,
            "required" => false,
            _ => return None,
        };
        is_valid.then(|| Self { name: name.to_owned(), optional, parameters: Vec::new() })
    }
}

fn is_module_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Whether the name is a plain file name.
pub fn is_file_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> Request {
        let module = |name: &str, optional, parameters: &[&str]| Module {
            name: name.to_owned(),
            optional,
            parameters: parameters.iter().map(|text| (*text).to_owned()).collect(),
        };
        Request {
            digest: "1f".to_owned(),
            limit: Duration::from_secs(90),
            unload: vec!["mlx5_ib".to_owned(), "mlx5_core".to_owned()],
            expect: vec![("mlx5_ib".to_owned(), "A1B2".to_owned())],
            load: vec![module("mlxfw", true, &[]), module("mlx5_core", false, &["a=1 b=\"x y\""])],
            restore: vec![module("mlx5_core", false, &["prof_sel=2", ""])],
        }
    }

    #[test]
    fn a_request_round_trips() {
        let text = request().to_text();
        assert_eq!(Request::parse(&text), Ok(request()), "{text}");
    }

    #[test]
    fn a_truncated_request_is_refused() {
        let text = request().to_text();
        for length in 0..text.len() - 1 {
            assert!(Request::parse(&text[..length]).is_err(), "{}", &text[..length]);
        }
    }

    #[test]
    fn names_do_not_lead_out_of_the_directory() {
        for (from, to) in [
            ("load mlxfw", "load ../mlxfw"),
            ("load mlxfw", "load /mlxfw"),
            ("load mlxfw", "load .hidden"),
            ("unload mlx5_ib", "unload mlx5/ib"),
            ("unload mlx5_ib", "unload -f"),
            ("required", "perhaps"),
            ("expect mlx5_ib A1B2", "expect mlx5_ib ../A1"),
            ("expect mlx5_ib A1B2", "expect mlx5_ib"),
            ("limit 90", "limit 1m"),
            ("digest 1f", "digest ../1f"),
            ("farrier swap 1", "farrier swap 2"),
        ] {
            let text = request().to_text().replace(from, to);
            assert!(Request::parse(&text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_does_not_panic(text in "(farrier swap 1\n)?(.{0,12}\n){0,6}") {
            let _ = Request::parse(&text);
        }
    }
}
