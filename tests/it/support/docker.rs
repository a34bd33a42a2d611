//! Leftovers of one farrier in the Docker engine. Other processes use the engine too, so labels with the creator's process id
//! identify the leftovers.

use std::process::Command;

/// Lists the containers and images that the farrier with this process id left, except images that are kept for later builds
/// (toolchains and bases).
pub fn left_by(pid: u32) -> Vec<String> {
    let label = r#"{{.ID}} {{.Label "farrier.dev/build"}}"#;
    let containers =
        docker(&["ps", "-a", "--no-trunc", "--filter", "label=farrier.dev/build", "--format", label]);
    let ids = docker(&["images", "-a", "-q", "--no-trunc", "--filter", "label=farrier.dev/build"]);
    let ids: Vec<&str> = ids.lines().collect();
    let mut images = String::new();
    if !ids.is_empty() {
        let labels = r#"{{.Id}} {{index .Config.Labels "farrier.dev/build"}} {{index .Config.Labels "farrier.dev/cache"}}"#;
        // The command fails when another process removes an image concurrently, but prints the other images anyway.
        images = docker(&[&["image", "inspect", "--format", labels], ids.as_slice()].concat());
    }
    let is_left = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let job = words.next().unwrap_or_default();
        words.next().is_none() && job.split('-').any(|part| part == pid.to_string())
    };
    containers.lines().chain(images.lines()).filter(is_left).map(str::to_owned).collect()
}

/// Returns whether a container of this farrier is running.
pub fn runs_container_of(pid: u32) -> bool {
    let label = r#"{{.Label "farrier.dev/build"}}"#;
    let jobs = docker(&["ps", "--filter", "label=farrier.dev/build", "--format", label]);
    jobs.lines().any(|job| job.split('-').any(|part| part == pid.to_string()))
}

/// Runs `docker` and returns its output.
pub fn docker(args: &[&str]) -> String {
    let output = Command::new("docker").args(args).output().expect("run docker (Debian package docker.io)");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
