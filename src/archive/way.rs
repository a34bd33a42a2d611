//! Relative links.

use std::path::{Path, PathBuf};

/// What a link in a directory says to mean a place, both relative to the same root and free of `.`, `..` and links.
pub fn way(directory: &Path, place: &Path) -> PathBuf {
    let common = directory.iter().zip(place).take_while(|(a, b)| a == b).count();
    let up = directory.iter().skip(common).map(|_| Path::new(".."));
    let way: PathBuf = up.chain(place.iter().skip(common).map(Path::new)).collect();
    if way.as_os_str().is_empty() { PathBuf::from(".") } else { way }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways() {
        for (directory, place, wanted) in [
            ("", "a/b", "a/b"),
            ("a", "a/b", "b"),
            ("a/b", "a/c/d", "../c/d"),
            ("a/b", "c", "../../c"),
            ("a/b", "a/b", "."),
            ("a/b", "a", ".."),
            ("", "", "."),
        ] {
            assert_eq!(way(Path::new(directory), Path::new(place)), Path::new(wanted), "{directory} {place}");
        }
    }
}
