//! Shows the commands and templates that a bundle's definitions would add on this machine, before the definitions are
//! written.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use farrier_core::{site::KeySource, text::is_deceptive};
use farrier_definitions as definitions;
use fs_err as fs;

use super::{BundleError, Result};

/// Templates in a definitions directory.
const TEMPLATES: &str = "templates";

/// Differences to review between the new files and the files at `to`; empty if none needs a review.
pub(super) fn review(from: &Path, to: &Path, new: &[PathBuf]) -> Result<String> {
    let mut differences = String::new();
    let existing = commands(to).unwrap_or_default();
    let bundled = commands(from);
    let adds_command = bundled.as_ref().is_none_or(|bundled| !bundled.is_subset(&existing));
    let text = |path: PathBuf| {
        Ok::<_, BundleError>(match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => String::from_utf8_lossy(&fs::read(path)?).into_owned(),
            Ok(meta) if meta.is_symlink() => {
                format!("a link to {}\n", fs::read_link(path)?.display())
            }
            _ => String::new(),
        })
    };
    for file in new {
        let is_template = file.starts_with(TEMPLATES);
        let is_definition = file.extension().is_some_and(|end| end == "yaml" || end == "yml");
        if is_template || (is_definition && adds_command) {
            let (old, new) = (text(to.join(file))?, text(from.join(file))?);
            let name = file.display().to_string().replace(is_deceptive, "");
            differences.extend(["--- ", &name, "\n", &diff(&old, &new)]);
        }
    }
    Ok(differences)
}

/// Programs that the definitions run for signing; `None` if the definitions are unreadable.
fn commands(dir: &Path) -> Option<BTreeSet<Vec<String>>> {
    let site = definitions::load(Some(dir)).ok()?.site;
    let keys =
        [site.module_signing.map(|signing| signing.key), site.image_signing.map(|signing| signing.key)];
    let command = |key| match key {
        KeySource::Command(words) => Some(words),
        KeySource::File(_) | KeySource::Secret(_) => None,
    };
    Some(keys.into_iter().flatten().filter_map(command).collect())
}

/// Lines that differ, without the common start and end. Control characters are removed, to protect the terminal.
fn diff(old: &str, new: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let head = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[head..], &new[head..]);
    let tail = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[..old.len() - tail], &new[..new.len() - tail]);
    let line = |mark: char, line: &&str| {
        let plain: String = line.chars().filter(|c| !is_deceptive(*c) || *c == '\t').collect();
        format!("{mark} {plain}\n")
    };
    let header = format!("@ line {}\n", head + 1);
    let old = old.iter().map(|text| line('-', text));
    std::iter::once(header).chain(old).chain(new.iter().map(|text| line('+', text))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, file: &str, text: &str) {
        let path = dir.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn site(key: &str) -> String {
        format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: s}}\nspec:\n  imageSigning:\n    \
             key: {key}\n    publicKey: p.pem\n"
        )
    }

    #[test]
    fn commands_and_templates_are_shown_and_nothing_else() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let look = |files: &[&str]| {
            let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
            review(from.path(), to.path(), &files).unwrap()
        };
        write(to.path(), "site.yaml", &site("{file: k.pem}"));
        write(from.path(), "site.yaml", &site("{file: other.pem}"));
        write(from.path(), "patches/a.patch", "+command: x\n");
        assert_eq!(look(&["site.yaml", "patches/a.patch"]), "");
        // YAML escapes do not hide a command.
        write(from.path(), "site.yaml", &site(r#"{"c\u006fmmand": ["/bin/sh", "-c", "id"]}"#));
        let differences = look(&["site.yaml"]);
        assert!(
            differences.contains("--- site.yaml\n@ line 6\n-     key: {file: k.pem}\n+     key: "),
            "{differences}"
        );
        // Commands that already exist here need no review.
        write(to.path(), "site.yaml", &site(r#"{command: ["/bin/sh", "-c", "id"]}"#));
        assert_eq!(look(&["site.yaml"]), "");
        // Definitions that this farrier cannot read could contain anything.
        write(from.path(), "site.yaml", "kind: Site\nlater: true\n");
        assert!(look(&["site.yaml"]).contains("+ later: true"));
        write(from.path(), "site.yaml", &site("{file: k.pem}"));

        write(to.path(), "templates/x.Dockerfile.hbs", "FROM a\nRUN make\nFROM scratch\n");
        write(from.path(), "templates/x.Dockerfile.hbs", "FROM a\nRUN evil\u{1b}[2J\nFROM scratch\n");
        let differences = look(&["templates/x.Dockerfile.hbs"]);
        assert_eq!(differences, "--- templates/x.Dockerfile.hbs\n@ line 2\n- RUN make\n+ RUN evil[2J\n");
    }
}
