//! Branches of drivers that their suppliers ended, so that the plan can warn about them.

/// Table of ended branches, one on each line: template, start of the version, end, successor and source.
const TABLE: &str = include_str!("ended_branches.txt");

/// Returns a warning if the supplier of a driver ended the branch of this version. The image's template identifies the driver.
pub fn ended_branch(template: &str, version: &str) -> Option<String> {
    for row in TABLE.lines().filter(|line| !line.starts_with('#')) {
        if let [driver, start, ended, successor, source] = row.split(" | ").collect::<Vec<_>>()[..]
            && driver == template
            && version.starts_with(start)
        {
            let branch = start.trim_end_matches('.');
            return Some(format!(
                "version {version}: the supplier ended branch {branch} in {ended}; use {successor}, see {source}"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_of_an_ended_branch_is_named_with_its_successor() {
        let warning = ended_branch("nvidia-gpu", "535.261.03").unwrap();
        let words = "version 535.261.03: the supplier ended branch 535 in June 2026; use 580 (until June 2028), see https://";
        assert!(warning.starts_with(words), "{warning}");
        for (template, version) in [("nvidia-gpu", "580.95.05"), ("nvidia-gpu", "5350.1"), ("dkms", "535.1")]
        {
            assert_eq!(ended_branch(template, version), None, "{template} {version}");
        }
    }

    /// The page has each row of the table, and each row is complete.
    #[test]
    fn the_page_of_versions_has_the_ended_branches() {
        let page = include_str!("../../../../docs/versions.md");
        for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
            let [template, start, when, instead, source] = line.split(" | ").collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            assert!(ended_branch(template, &format!("{start}1")).is_some(), "{line}");
            let branch = start.trim_end_matches('.');
            let row = format!("| `{template}` | {branch} | {when} | {instead} | [source]({source}) |");
            assert!(page.contains(&row), "docs/versions.md lacks {row}");
        }
    }
}
