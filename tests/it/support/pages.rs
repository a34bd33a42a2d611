//! Commands and outputs in README and docs/.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

/// Commands of an `sh` block, and the `text` block that directly follows it.
pub struct Block {
    pub commands: String,
    pub output: Option<String>,
}

/// Returns a page of this repository.
pub fn page(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// Returns the `sh` blocks of a page, with their outputs.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for part in page.split("\n```sh\n").skip(1) {
        let (commands, rest) = part.split_once("\n```\n").expect("a block ends");
        let output =
            rest.strip_prefix("\n```text\n").map(|text| text.split("```").next().unwrap().to_owned());
        blocks.push(Block { commands: commands.to_owned(), output });
    }
    blocks
}

/// Replaces values that differ between runs, with `ci/normalize.sed`.
pub fn normalized(text: &str) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/normalize.sed");
    let mut sed = Command::new("sed")
        .args(["--regexp-extended", "--file"])
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    sed.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = sed.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}
