//! Drafts the entry of `patches` for a changed declaration.

use std::fmt;

use farrier_core::kernel::HeaderText;
use serde::Serialize;

use super::HeaderChange;

/// Entry of `patches` in a driver image. The patch itself is still to be written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PatchDraft {
    /// Path of the patch in the definitions directory.
    pub path: String,
    /// Condition that holds for the newer headers and not for the older ones.
    pub when: HeaderText,
}

impl fmt::Display for PatchDraft {
    /// Formats as an item of a YAML list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, when: HeaderText { header, matches } } = self;
        let matches = matches.to_string().replace('\'', "''");
        write!(f, "- {{path: {path}, when: {{header: {header}, matches: '{matches}'}}}}")
    }
}

/// Drafts the entry for a change. Returns `None` if no condition tells the headers apart, as for a removed function.
pub fn draft(image: &str, change: &HeaderChange) -> Option<PatchDraft> {
    let HeaderChange { function, file, old, new } = change;
    let (old, new) = (old.as_deref().unwrap_or_default(), new.as_deref()?);
    let (old_parameters, new_parameters) = (parameters(function, old), parameters(function, new));
    // Candidates for the pattern, the most specific first: an added parameter, the number of parameters, the function itself.
    let added = new_parameters.iter().filter(|parameter| !old_parameters.contains(parameter));
    let pattern = |text: &str| text.split(' ').map(regex::escape).collect::<Vec<_>>().join(r"\s+");
    let commas = new_parameters.len().saturating_sub(1);
    let by_count = format!(r"{function}\([^,;()]*(,[^,;()]*){{{commas}}}\)");
    let candidates = added.map(|parameter| format!(r"{function}\([^;]*{}", pattern(parameter)));
    let candidates = candidates.chain([by_count, format!(r"\b{function}\(")]);
    let tells_apart =
        |when: &HeaderText| when.is_match(&format!("{new};")) && !when.is_match(&format!("{old};"));
    let mut conditions = candidates.filter_map(|matches| {
        serde_json::from_value(serde_json::json!({"header": file, "matches": matches})).ok()
    });
    let path = format!("patches/{image}-{function}.patch");
    Some(PatchDraft { path, when: conditions.find(tells_apart)? })
}

/// Splits the parameters of a declaration.
fn parameters<'a>(function: &str, declaration: &'a str) -> Vec<&'a str> {
    let Some((_, list)) = declaration.split_once(&format!("{function}(")) else { return Vec::new() };
    let (mut depth, mut start, mut parameters) = (0_usize, 0, Vec::new());
    for (index, c) in list.char_indices() {
        match c {
            '(' => depth += 1,
            ',' | ')' if depth == 0 => {
                parameters.extend(list.get(start..index).map(str::trim));
                start = index + 1;
                if c == ')' {
                    break;
                }
            }
            ')' => depth -= 1,
            _ => {}
        }
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafted(old: Option<&str>, new: Option<&str>) -> Option<String> {
        let change = HeaderChange {
            function: "f".to_owned(),
            file: "include/linux/f.h".to_owned(),
            old: old.map(str::to_owned),
            new: new.map(str::to_owned),
        };
        Some(draft("acme", &change)?.when.matches.to_string())
    }

    #[test]
    fn the_condition_holds_for_the_newer_headers_alone() {
        let two = Some("int f(struct a *a, int (*g)(int, int))");
        for (old, new, wanted) in [
            (Some("int f(struct a *a)"), two, Some(r"f\([^;]*int\s+\(\*g\)\(int,\s+int\)")),
            // One parameter fewer: only the number tells them apart.
            (Some("int f(int a, int b)"), Some("int f(int a)"), Some(r"f\([^,;()]*(,[^,;()]*){0}\)")),
            (Some("int f(int a)"), Some("int f(long a)"), Some(r"f\([^;]*long\s+a")),
            (None, Some("int f(int a)"), Some(r"f\([^;]*int\s+a")),
            (Some("int f(int a)"), None, None),
            // Only the type of the result changed.
            (Some("int f(int a)"), Some("void f(int a)"), None),
        ] {
            assert_eq!(drafted(old, new).as_deref(), wanted, "{old:?} {new:?}");
        }
    }
}
