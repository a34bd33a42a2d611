//! What one farrier left in the Docker engine. Others use the engine too: things are found by the labels
//! that carry the process id of their maker.

use std::process::Command;

/// Containers and images that the farrier with this process id left, but for those that are kept for
/// later builds (toolchains and bases).
pub fn left_by(pid: u32) -> Vec<String> {
    let label = r#"{{.ID}} {{.Label "farrier.dev/build"}}"#;
    let containers =
        docker(&["ps", "-a", "--no-trunc", "--filter", "label=farrier.dev/build", "--format", label]);
    let ids = docker(&["images", "-a", "-q", "--no-trunc", "--filter", "label=farrier.dev/build"]);
    let ids: Vec<&str> = ids.lines().collect();
    let mut images = String::new();
    if !ids.is_empty() {
        let labels = r#"{{.Id}} {{index .Config.Labels "farrier.dev/build"}} {{index .Config.Labels "farrier.dev/cache"}}"#;
        // Images that somebody else removes meanwhile make it fail; the others are printed all the same.
        images = docker(&[&["image", "inspect", "--format", labels], ids.as_slice()].concat());
    }
    let is_left = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let job = words.next().unwrap_or_default();
        words.next().is_none() && job.split('-').any(|part| part == pid.to_string())
    };
    containers.lines().chain(images.lines()).filter(is_left).map(str::to_owned).collect()
}

/// Is a container of this farrier running?
pub fn runs_container_of(pid: u32) -> bool {
    let label = r#"{{.Label "farrier.dev/build"}}"#;
    let jobs = docker(&["ps", "--filter", "label=farrier.dev/build", "--format", label]);
    jobs.lines().any(|job| job.split('-').any(|part| part == pid.to_string()))
}

/// Runs `docker` and gives what it prints.
pub fn docker(args: &[&str]) -> String {
    let output = Command::new("docker").args(args).output().expect("run docker (Debian package docker.io)");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
