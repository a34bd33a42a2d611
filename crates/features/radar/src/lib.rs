//! Compatibility radar: names the header change behind a driver's first error on a newer kernel, and drafts the entry of
//! `patches` for it.
#![forbid(unsafe_code)]

mod declaration;
mod draft;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};

use serde::Serialize;
use walkdir::WalkDir;

pub use declaration::declaration;
pub use draft::{PatchDraft, draft};

/// Maximum number of names of an error that are looked up.
const MAX_NAMES: usize = 8;

/// A declaration that differs between two header sets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeaderChange {
    /// Function or macro.
    pub function: String,
    /// Header in the kernel's build tree, such as `include/linux/pci.h`.
    pub file: String,
    /// Declaration in the older headers; `None` if the header has none.
    pub old: Option<String>,
    /// Declaration in the newer headers; `None` if the header has none.
    pub new: Option<String>,
}

/// Returns the identifiers that a compiler's or modpost's message quotes, without duplicates.
pub fn names_in(message: &str) -> Vec<String> {
    let quote = |c: char| matches!(c, '\'' | '‘' | '’' | '"' | '`');
    let mut names: Vec<String> = Vec::new();
    for quoted in message.split(quote).skip(1).step_by(2) {
        // Clang quotes a declaration's type as well.
        let is_name = |word: &str| {
            word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                && word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        };
        if is_name(quoted) && !names.iter().any(|known| known == quoted) && names.len() < MAX_NAMES {
            names.push(quoted.to_owned());
        }
    }
    names
}

/// Compares the declarations of these functions in two header sets. Blocks the thread.
pub fn changes(names: &[String], old: &Path, new: &Path) -> io::Result<Vec<HeaderChange>> {
    let (old, new) = (declarations(names, old)?, declarations(names, new)?);
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut changes = Vec::new();
    for key in keys {
        let (old, new) = (old.get(key).cloned(), new.get(key).cloned());
        if old != new {
            let (function, file) = key.clone();
            changes.push(HeaderChange { function, file, old, new });
        }
    }
    Ok(changes)
}

/// Finds the declarations of functions below `root`, by function and header.
fn declarations(names: &[String], root: &Path) -> io::Result<BTreeMap<(String, String), String>> {
    let mut declarations = BTreeMap::new();
    for entry in WalkDir::new(root).sort_by_file_name() {
        let entry = entry?;
        let path = entry.path();
        if !entry.file_type().is_file() || path.extension().is_none_or(|extension| extension != "h") {
            continue;
        }
        let Some(file) = in_build_tree(path.strip_prefix(root).unwrap_or(path)) else { continue };
        let bytes = fs_err::read(path)?;
        let text = String::from_utf8_lossy(&bytes);
        for name in names.iter().filter(|name| text.contains(name.as_str())) {
            if let Some(declaration) = declaration(name, &text) {
                declarations.entry((name.clone(), file.clone())).or_insert(declaration);
            }
        }
    }
    Ok(declarations)
}

/// Returns a header's path in the build tree: from `include/` or `arch/` on.
fn in_build_tree(path: &Path) -> Option<String> {
    let names: Vec<_> = path.iter().collect();
    let top = names.iter().position(|name| *name == "include" || *name == "arch")?;
    Some(names[top..].iter().collect::<PathBuf>().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use farrier_core::kernel::HeaderText;

    use super::*;

    /// `include/linux/pci.h` of Debian's 6.1.0-47 and 6.1.0-56, around the function.
    const OLD: &str = include_str!("fixtures/pci-6.1.0-47.h");
    const NEW: &str = include_str!("fixtures/pci-6.1.0-56.h");

    fn header_set(release: &str, text: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join(format!("usr/src/linux-headers-{release}-common/include/linux"));
        fs_err::create_dir_all(&place).unwrap();
        fs_err::write(place.join("pci.h"), text).unwrap();
        fs_err::write(place.join("other.h"), "int pci_resize_resource_of_another(void);\n").unwrap();
        root
    }

    #[test]
    fn the_change_of_debian_12_s_pci_resize_resource_is_named() {
        let message = "nvidia/nv-pci.c:177:13: too few arguments to function ‘pci_resize_resource’";
        let names = names_in(message);
        assert_eq!(names, ["pci_resize_resource"]);
        let (old, new) = (header_set("6.1.0-47", OLD), header_set("6.1.0-56", NEW));
        let changes = changes(&names, old.path(), new.path()).unwrap();
        let [change] = &changes[..] else { panic!("{changes:#?}") };
        let wanted = HeaderChange {
            function: "pci_resize_resource".to_owned(),
            file: "include/linux/pci.h".to_owned(),
            old: Some("int __must_check pci_resize_resource(struct pci_dev *dev, int i, int size)".to_owned()),
            new: Some(
                "int __must_check pci_resize_resource(struct pci_dev *dev, int i, int size, int exclude_bars)"
                    .to_owned(),
            ),
        };
        assert_eq!(change, &wanted);
        let draft = draft("nvidia-gpu", change).unwrap();
        let when: &HeaderText = &draft.when;
        assert!(when.is_match(NEW) && !when.is_match(OLD), "{when}");
        assert_eq!(
            draft.to_string(),
            r"- {path: patches/nvidia-gpu-pci_resize_resource.patch, when: {header: include/linux/pci.h, matches: 'pci_resize_resource\([^;]*int\s+exclude_bars'}}"
        );
    }

    #[test]
    fn other_line_breaks_and_comments_are_no_change() {
        let moved = OLD.replace("int i, int size)", "int i, /* a BAR */\n\t\tint size)");
        assert_ne!(moved, OLD);
        let (old, new) = (header_set("6.1.0-47", OLD), header_set("6.1.0-48", &moved));
        let names = ["pci_resize_resource".to_owned()];
        assert_eq!(changes(&names, old.path(), new.path()).unwrap(), []);
    }

    #[test]
    fn a_message_names_what_it_quotes() {
        for (message, names) in [
            (
                "a.c:1:2: implicit declaration of function 'del_timer'; did you mean 'do_timer'?",
                &["del_timer", "do_timer"][..],
            ),
            ("ERROR: modpost: \"oslec_create\" [/build/dahdi.ko] undefined!", &["oslec_create"]),
            (
                "conflicting types for 'trace_hrtimer_start'; have 'void(struct hrtimer *)'",
                &["trace_hrtimer_start"],
            ),
            ("expected ';' before '}' token", &[]),
        ] {
            assert_eq!(names_in(message), names, "{message}");
        }
    }
}
