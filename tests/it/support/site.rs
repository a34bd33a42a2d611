//! A site with definitions, a directory of manifests and a registry, for the real `farrier`.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    docker,
    kernels::link_shared,
    registry_process::{RegistryProcess, Wants},
};

/// Parts of the cache that store fetched content by digest. All sites share them, so that a test run fetches headers and
/// toolchains once. Logs, records and work directories belong to each site.
const SHARED: [&str; 10] = [
    "apt",
    "debs",
    "downloads",
    "headers",
    "kernel-images",
    "packages-root",
    "minimal-root",
    "trees",
    "sources",
    "locks",
];

/// Definitions, cluster, registry and cache of one test, removed on drop.
pub struct Site {
    pub registry: RegistryProcess,
    /// Value of `--registry`.
    pub location: String,
    /// Value of `--engine`; the default engine unless a test needs another one.
    engine: &'static str,
    directory: tempfile::TempDir,
}

/// A `farrier` process that has ended.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub pid: u32,
}

/// Returns a `site.yaml` with immutable tags at a registry, and further lines of its `spec`.
pub fn with_immutable_tags(host: &str, spec: &str) -> String {
    format!(
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: plant}}\nspec:\n  \
         hosts: [{{host: '{host}', immutableTags: true}}]\n{spec}"
    )
}

impl Site {
    /// Creates a site with the fixtures' definitions and a cluster without nodes.
    pub fn new() -> Self {
        Self::with_registry(Wants::default())
    }

    pub fn with_registry(wants: Wants) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let registry = RegistryProcess::start(wants);
        let location = format!("{}/drivers", registry.host);
        let site = Self { registry, location, engine: "auto", directory };
        copy_tree(&fixtures().join("definitions"), &site.definitions());
        for name in ["cluster", "cache", "docker"] {
            fs::create_dir(site.path(name)).unwrap();
        }
        site.link_shared();
        site
    }

    /// Creates a site whose canary node has the fictional kernel 6.1.0-901-amd64 (see [`Self::stand_in_kernels`]).
    pub fn with_stand_in() -> Self {
        let site = Self::new();
        site.stand_in_kernels();
        site.canary("6.1.0-901-amd64");
        site
    }

    /// Creates a site that builds in Docker.
    pub fn in_docker() -> Self {
        Self { engine: "docker", ..Self::new() }
    }

    /// Creates a site whose definitions are the chain a -> b, c -> d. Nodes request only d.
    pub fn chain() -> Self {
        let site = Self::new();
        fs::remove_dir_all(site.definitions()).unwrap();
        copy_tree(&fixtures().join("chain"), &site.definitions());
        site
    }

    /// Links the shared parts into the cache directory.
    pub fn link_shared(&self) {
        link_shared(&self.cache(), &SHARED);
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn definitions(&self) -> PathBuf {
        self.path("definitions")
    }

    pub fn cluster(&self) -> PathBuf {
        self.path("cluster")
    }

    pub fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    /// Writes one of the fixtures' manifests to the cluster, with `KERNEL` and `IMAGE` replaced.
    pub fn manifest(&self, name: &str, kernel: &str) {
        let text = fs::read_to_string(fixtures().join("cluster").join(name)).unwrap();
        let text = text.replace("KERNEL", kernel).replace("IMAGE", FIRST_IMAGE);
        fs::write(self.cluster().join(name), text).unwrap();
    }

    /// Creates a cluster with only the canary node and the DaemonSet that selects it.
    pub fn canary(&self, kernel: &str) {
        self.manifest("edge-2.yaml", kernel);
        self.manifest("daemonset.yaml", kernel);
    }

    /// Defines headers for the fictional kernels 6.1.0-901 to 6.1.0-905; without headers nothing would be planned.
    pub fn stand_in_kernels(&self) {
        self.define(
            "kernels/05-stand-in.yaml",
            "apiVersion: farrier.dev/v1alpha1\n\
             kind: KernelFamily\n\
             metadata: {name: stand-in}\n\
             spec:\n  match: {release: '6\\.1\\.0-90[1-5]-amd64'}\n  headers: {tarball: {path: 'headers/{{release}}'}}\n  \
             toolchain: {bootstrap: {suite: bookworm, include: [gcc-12, make]}}\n",
        );
        for number in 901..=905 {
            let (release, tree) = (format!("6.1.0-{number}-amd64"), format!("headers/6.1.0-{number}-amd64"));
            self.define(&format!("{tree}/Makefile"), "");
            self.define(&format!("{tree}/.config"), "CONFIG_X86_64=y\nCONFIG_MODULES=y\n");
            let utsrelease = format!("#define UTS_RELEASE \"{release}\"\n");
            self.define(&format!("{tree}/include/generated/utsrelease.h"), &utsrelease);
        }
    }

    /// Replaces text in a file of the definitions; the text must exist.
    pub fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.definitions().join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from:?}");
        fs::write(path, text.replace(from, to)).unwrap();
    }

    /// Writes a file of the definitions.
    pub fn define(&self, file: &str, text: &str) {
        let path = self.definitions().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns a `farrier` command with this site's definitions, cache and registry in its environment.
    pub fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
        command
            .args(args)
            .env("FARRIER_DEFINITIONS", self.definitions())
            .env("FARRIER_CACHE_DIR", self.cache())
            .env("FARRIER_REGISTRY", &self.location)
            .env("FARRIER_CLUSTER", format!("dir:{}", self.cluster().display()))
            .env("FARRIER_ENGINE", self.engine)
            .env("DOCKER_CONFIG", self.path("docker"))
            .env("HOME", self.path("home"))
            .env_remove("REGISTRY_AUTH_FILE")
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("FARRIER_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn start<S: AsRef<OsStr>>(&self, args: &[S]) -> Child {
        self.command(args).spawn().unwrap()
    }

    /// Runs `farrier` and asserts that it left nothing behind.
    pub fn farrier<S: AsRef<OsStr>>(&self, args: &[S]) -> Run {
        self.finish(self.start(args))
    }

    pub fn finish(&self, child: Child) -> Run {
        let run = Run::of(child);
        self.assert_nothing_left(&run);
        run
    }

    /// Runs one reconcile.
    pub fn run_once(&self) -> Run {
        self.farrier(&["run", "--once"])
    }

    /// Runs `farrier build` for a Debian 12 kernel, with further arguments.
    pub fn build(&self, image: &str, kernel: &str, args: &[&str]) -> Run {
        let target =
            ["build", image, "--kernel", kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
        self.farrier(&[&target, args].concat())
    }

    /// Asserts that no container, image or temporary file of this run is left.
    pub fn assert_nothing_left(&self, run: &Run) {
        assert_eq!(docker::left_by(run.pid), [""; 0], "left in the engine by\n{run}");
        assert_eq!(entries(&self.cache().join("work")), [""; 0], "left in work/ by\n{run}");
        for kind in ["blobs", "logs", "records/failures"] {
            let temporary = |name: &String| name.starts_with(".tmp");
            assert!(!entries(&self.cache().join(kind)).iter().any(temporary), "left in {kind}/ by\n{run}");
        }
    }

    /// Returns the content of every manifest of the cluster.
    pub fn manifests(&self) -> BTreeMap<String, String> {
        read_all(&self.cluster())
    }

    /// Returns the image in the cluster's DaemonSet.
    pub fn image(&self) -> String {
        image_of(&fs::read_to_string(self.cluster().join("daemonset.yaml")).unwrap())
    }

    /// Returns the registry's tags of one of the site's images, without fallback tags for referrers; empty without such a
    /// repository.
    pub fn tags(&self, image: &str) -> Vec<String> {
        let mut tags = self.all_tags(image);
        tags.retain(|tag| !tag.starts_with("sha256-"));
        tags
    }

    /// Returns all tags of one of the site's repositories; empty without such a repository.
    pub fn all_tags(&self, image: &str) -> Vec<String> {
        let repository = format!("docker://{}/{image}", self.location);
        let output = skopeo(&["list-tags", "--tls-verify=false", &repository]);
        let Ok(list) = serde_json::from_slice::<Value>(&output.stdout) else { return Vec::new() };
        list["Tags"].as_array().unwrap().iter().map(|tag| tag.as_str().unwrap().to_owned()).collect()
    }

    /// Returns the output of `skopeo inspect` about one of the site's images.
    pub fn inspect(&self, name: &str) -> Value {
        let reference = format!("docker://{}/{name}", self.location);
        let output = skopeo(&["inspect", "--tls-verify=false", &reference]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns a manifest of one of the site's images, as fetched by `skopeo`.
    pub fn inspect_raw(&self, name: &str) -> Value {
        let reference = format!("docker://{}/{name}", self.location);
        let output = skopeo(&["inspect", "--raw", "--tls-verify=false", &reference]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Replaces this machine's and this run's paths, names and digests in a text, for snapshots.
    pub fn neutral(&self, text: &str) -> String {
        let text = text.replace(&self.directory.path().display().to_string(), "SITE");
        neutral_digests(&text.replace(&self.registry.host, "REGISTRY"))
    }
}

/// Initial image in the fixtures' DaemonSet.
pub const FIRST_IMAGE: &str = "registry.example/none:1";

impl Run {
    /// Waits for the process to end.
    pub fn of(child: Child) -> Self {
        let pid = child.id();
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: status.code(), stdout: text(stdout), stderr: text(stderr), pid }
    }

    /// Asserts the exit code.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self}");
        self
    }

    /// Returns standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// Returns the first line of either stream that contains `words`, or panics.
    #[track_caller]
    pub fn line(&self, words: &str) -> &str {
        let mut lines = self.stdout.lines().chain(self.stderr.lines());
        lines.find(|line| line.contains(words)).unwrap_or_else(|| panic!("no line with {words:?}: {self}"))
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, stdout, stderr, pid: _ } = self;
        write!(f, "exit code {code:?}\n--- stdout\n{stdout}--- stderr\n{stderr}---")
    }
}

/// Waits for a condition.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_mins(3);
    while !condition() {
        assert!(Instant::now() < until, "waited three minutes for {what}");
        // No notification exists; the sleep only limits the polling rate.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Unpacks an image like a runtime, to `tree` in the returned directory.
pub fn unpacked(reference: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let (blobs, tree) = (directory.path().join("blobs"), directory.path().join("tree"));
    let (from, to) = (format!("docker://{reference}"), format!("dir:{}", blobs.display()));
    let output = skopeo(&["copy", "--src-tls-verify=false", &from, &to]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::create_dir(&tree).unwrap();
    let manifest: Value = serde_json::from_slice(&fs::read(blobs.join("manifest.json")).unwrap()).unwrap();
    for layer in manifest["layers"].as_array().unwrap() {
        let blob = blobs.join(layer["digest"].as_str().unwrap().trim_start_matches("sha256:"));
        let mut command = Command::new("tar");
        super::packages::run(command.arg("-xf").arg(blob).arg("-C").arg(&tree));
    }
    fs::remove_dir_all(blobs).unwrap();
    directory
}

/// Runs `skopeo`.
pub fn skopeo(args: &[&str]) -> Output {
    Command::new("skopeo").args(args).output().expect("run skopeo (Debian package skopeo)")
}

/// Returns the value of the first `image:` in a manifest, without its comment.
pub fn image_of(manifest: &str) -> String {
    let line = manifest.lines().find_map(|line| line.trim().strip_prefix("image: ")).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

/// Returns the sorted names in a directory; none if the directory does not exist.
pub fn entries(directory: &Path) -> Vec<String> {
    let Ok(listing) = fs::read_dir(directory) else { return Vec::new() };
    let names = listing.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Returns the text of every file below a directory.
pub fn read_all(directory: &Path) -> BTreeMap<String, String> {
    let files = walkdir::WalkDir::new(directory).into_iter().map(Result::unwrap);
    let files = files.filter(|entry| entry.file_type().is_file());
    files.map(|file| (file.path().display().to_string(), fs::read_to_string(file.path()).unwrap())).collect()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn copy_tree(from: &Path, to: &Path) {
    for entry in walkdir::WalkDir::new(from).into_iter().map(Result::unwrap) {
        let place = to.join(entry.path().strip_prefix(from).unwrap());
        if entry.file_type().is_dir() {
            fs::create_dir_all(place).unwrap();
        } else {
            fs::copy(entry.path(), place).unwrap();
        }
    }
}

/// Replaces runs of at least twelve hexadecimal digits with `HASH`, and build directories with `WORK`.
fn neutral_digests(text: &str) -> String {
    let digests = regex::Regex::new(r"\b[0-9a-f]{12,64}\b").unwrap();
    let work = regex::Regex::new(r#"work/build-[^ "]+"#).unwrap();
    work.replace_all(&digests.replace_all(text, "HASH"), "WORK").into_owned()
}
