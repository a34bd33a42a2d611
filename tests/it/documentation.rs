//! README and docs/: commands and their outputs, links from elsewhere, form.

use std::{fs, path::Path, process::Command};

use regex::Regex;

use crate::support::{
    kernels,
    pages::{blocks, page, play},
    site::Site,
};

/// Pages with `sh` blocks, and the file that runs the blocks.
const PLAYERS: [(&str, &str); 7] = [
    ("README.md", "tests/it/documentation.rs"),
    ("docs/own-driver.md", "tests/it/documentation.rs"),
    ("docs/air-gap.md", "ci/air-gap"),
    ("docs/deploy.md", "ci/install"),
    ("docs/gpu.md", "tests/it/gpudirect.rs"),
    ("docs/peer-memory.md", "tests/it/gpudirect.rs"),
    ("docs/rotation.md", "tests/it/rotation.rs"),
];

/// README and the tutorial in one shell, as a newcomer: nothing but the cache is configured.
#[test]
fn own_driver() {
    let (site, kernels) = (Site::new(), kernels::newest());
    let readme = page("README.md");
    let played = [readme.as_str(), &page("docs/own-driver.md")].map(blocks).into_iter().flatten();
    let here = |text: &str| {
        text.replace("127.0.0.1:5000", &site.registry.host)
            .replace("6.1.0-56-amd64", &kernels.newer)
            .replace("6.1.0-55-amd64", &kernels.older)
    };
    let compared = play(&site, None, played, here);
    assert_eq!(compared, 3, "outputs to compare");
    let image = fs::read_to_string(site.path("demo/cluster/demo.yaml")).unwrap();
    assert!(image.contains(&format!("image: \"{}/drivers/hello@sha256:", site.registry.host)), "{image}");
}

/// Returns the names of the pages directly in docs/.
fn names() -> impl Iterator<Item = String> {
    let docs = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")).unwrap();
    let paths = docs.map(|entry| entry.unwrap().path());
    let pages = paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.map(|path| format!("docs/{}", path.file_name().unwrap().to_str().unwrap()))
}

/// Each `sh` block has a test that runs it; blocks with placeholders are `console`.
#[test]
fn every_command_block_is_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in names().chain(["README.md".to_owned()]) {
        let has_blocks = page(&name).contains("```sh\n");
        let player = PLAYERS.iter().find(|(page, _)| *page == name);
        assert_eq!(has_blocks, player.is_some(), "{name}: its `sh` blocks and PLAYERS");
        if let Some((_, player)) = player {
            let text = fs::read_to_string(root.join(player)).unwrap();
            assert!(text.contains(&*name), "{player} does not mention {name}");
        }
    }
}

/// Returns the anchor of a heading, as Git hosts and mdBook make it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
}

/// Pages and anchors in messages, comments, manifests and templates exist. `ci/site` checks the links between pages.
#[test]
fn links_into_the_pages_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let link = Regex::new(r"docs/([a-z/-]+\.md)(?:#([a-z0-9-]+))?").unwrap();
    let files = Command::new("git")
        .args(["ls-files", "ci", "crates", "deploy", "images", "kernels", "src", "templates"])
        .current_dir(root)
        .output()
        .unwrap();
    let mut links = 0;
    for file in String::from_utf8(files.stdout).unwrap().lines() {
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue };
        for found in link.captures_iter(&text) {
            links += 1;
            let path = root.join("docs").join(&found[1]);
            let page = fs::read_to_string(&path).unwrap_or_else(|_| panic!("{file}: docs/{}", &found[1]));
            let mut anchors = page.lines().filter(|line| line.starts_with('#')).map(anchor);
            let wanted = found.get(2).map(|anchor| anchor.as_str());
            assert!(
                wanted.is_none_or(|wanted| anchors.any(|anchor| anchor == wanted)),
                "{file}: {}",
                &found[0]
            );
        }
    }
    assert!(links > 40, "{links} links");
}

/// README has at most 150 lines, and a paragraph or list item at most five.
#[test]
fn pages_are_short() {
    assert!(page("README.md").lines().count() <= 150, "README.md is too long");
    let item = Regex::new(r"^\s*([-*]|\d+\.) ").unwrap();
    for name in names().chain(["README.md", "CONTRIBUTING.md"].map(String::from)) {
        let (mut is_code, mut length) = (false, 0);
        for (number, line) in page(&name).lines().enumerate() {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            let is_text = !is_code && !is_fence && !line.is_empty() && !line.starts_with(['|', '#']);
            let is_prose = is_text && !(length == 0 && line.starts_with("    "));
            length = if !is_prose {
                0
            } else if item.is_match(line) {
                1
            } else {
                length + 1
            };
            assert!(length <= 5, "{name}:{}: split this paragraph", number + 1);
        }
    }
}
