//! Commands and outputs in README and docs/.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use super::site::Site;

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

/// Runs blocks in one shell in a site's directory, as a newcomer: nothing but the cache is configured. Compares the outputs, and
/// returns their number. `here` replaces what differs on this machine.
pub fn play(
    site: &Site,
    entrypoint: Option<&Path>,
    played: impl IntoIterator<Item = Block>,
    here: impl Fn(&str) -> String,
) -> usize {
    let (mut script, mut expected) = (String::new(), Vec::new());
    for (number, block) in played.into_iter().enumerate() {
        let output = site.path(format!("output-{number}"));
        writeln!(script, "{{\n{}\n}} > {}", here(&block.commands), output.display()).unwrap();
        expected.extend(block.output.map(|text| (block.commands, here(&text), output)));
    }
    let farrier = site.command::<&str>(&[]);
    let programs = Path::new(farrier.get_program()).parent().unwrap().display().to_string();
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", &script]).current_dir(site.path(""));
    bash.env("PATH", format!("{programs}:{}", env::var("PATH").unwrap()));
    for name in ["FARRIER_DEFINITIONS", "FARRIER_REGISTRY", "FARRIER_CLUSTER", "FARRIER_ENGINE"] {
        bash.env_remove(name);
    }
    bash.env("FARRIER_CACHE_DIR", site.cache()).env("HOME", site.path("home"));
    bash.envs(entrypoint.map(|entrypoint| ("FARRIER_ENTRYPOINT", entrypoint)));
    bash.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    site.finish(bash.spawn().unwrap()).exits(0);
    let (mut wanted, mut found) = (String::new(), String::new());
    for (commands, text, output) in &expected {
        for (outputs, output) in [(&mut wanted, text), (&mut found, &fs::read_to_string(output).unwrap())] {
            write!(outputs, "$ {commands}\n{}\n", normalized(output)).unwrap();
        }
    }
    assert!(found == wanted, "outputs:\n{found}\nthe pages have:\n{wanted}");
    expected.len()
}
