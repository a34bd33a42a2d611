//! Pods' containers in the Docker engine, with the privileges that a pod's container has.

use std::{collections::BTreeSet, process::Stdio, sync::Mutex};

use serde_json::Value;
use tokio::process::Command;

/// The engine that `docker` finds, restricted to this cluster's objects.
pub struct Engine {
    /// Value of the label that identifies this cluster's containers and volumes.
    id: String,
    pulled: Mutex<BTreeSet<String>>,
    /// Images from which empty volumes are initialized. Pods that start concurrently create each image once.
    seeds: tokio::sync::Mutex<BTreeSet<String>>,
}

const LABEL: &str = "farrier.test/cluster";

/// The end of a container.
pub struct End {
    pub exit_code: i64,
    pub killed_for_memory: bool,
    pub started: String,
    pub finished: String,
}

impl Engine {
    pub fn new(port: u16) -> Self {
        let id = format!("{}-{port}", std::process::id());
        Self { id, pulled: Mutex::default(), seeds: tokio::sync::Mutex::default() }
    }

    pub fn container(&self, uid: &str) -> String {
        format!("farrier-test-{}-{uid}", self.id)
    }

    /// Pulls an image unless it is present and the policy allows that. Returns whether the image was pulled.
    pub async fn pull(&self, image: &str, policy: &str) -> Result<bool, String> {
        if policy != "Always" && docker(&["image", "inspect", "--format", "{{.Id}}", image]).await.is_ok() {
            return Ok(false);
        }
        docker(&["pull", "--quiet", image]).await?;
        self.pulled.lock().unwrap().insert(image.to_owned());
        Ok(true)
    }

    pub async fn runs_as_root(&self, image: &str) -> bool {
        let user = docker(&["image", "inspect", "--format", "{{.Config.User}}", image]).await;
        let user = user.unwrap_or_default();
        matches!(user.split(':').next(), Some("" | "0" | "root") | None)
    }

    /// Creates the container of a pod and its volumes.
    pub async fn create(&self, pod: &Value) -> Result<String, String> {
        let spec = &pod["spec"];
        let container = &spec["containers"][0];
        let image = container["image"].as_str().unwrap_or_default();
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let name = self.container(uid);
        let mut words: Vec<String> =
            ["create", "--network", "none", "--log-opt", "max-size=16m", "--name"].map(str::to_owned).into();
        words.extend([name.clone(), "--label".to_owned(), format!("{LABEL}={}", self.id)]);
        words.extend([
            "--hostname".to_owned(),
            pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        ]);
        words.extend(security(spec, container));
        words.extend(limits(&container["resources"]["limits"]));
        if let Some(directory) = container["workingDir"].as_str() {
            words.extend(["--workdir".to_owned(), directory.to_owned()]);
        }
        for variable in container["env"].as_array().into_iter().flatten() {
            let text = |field: &str| variable[field].as_str().unwrap_or_default();
            words.extend(["--env".to_owned(), format!("{}={}", text("name"), text("value"))]);
        }
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            words.push("--mount".to_owned());
            words.push(self.mount(uid, spec, mount).await?);
        }
        let list = |field: &str| -> Vec<String> {
            let given = container[field].as_array().into_iter().flatten();
            given.filter_map(|word| word.as_str().map(str::to_owned)).collect()
        };
        let mut command = list("command").into_iter();
        if let Some(program) = command.next() {
            words.extend(["--entrypoint".to_owned(), program]);
        }
        words.push(image.to_owned());
        words.extend(command.chain(list("args")));
        docker(&words).await
    }

    /// Returns the mount of an `emptyDir`: in memory, or a world-writable volume.
    async fn mount(&self, uid: &str, spec: &Value, mount: &Value) -> Result<String, String> {
        let (name, path) = (&mount["name"], mount["mountPath"].as_str().unwrap_or_default());
        let mut volumes = spec["volumes"].as_array().into_iter().flatten();
        let volume = volumes.find(|volume| volume["name"] == *name).map(|volume| &volume["emptyDir"]);
        let Some(Value::Object(empty)) = volume else {
            return Err(format!("the fake kubelet has no volume such as {name}"));
        };
        let read_only = if mount["readOnly"] == true { ",readonly" } else { "" };
        if empty.get("medium").is_some_and(|medium| medium == "Memory") {
            let size = empty.get("sizeLimit").and_then(quantity);
            let size = size.map(|size| format!(",tmpfs-size={}", rounded(size))).unwrap_or_default();
            return Ok(format!("type=tmpfs,destination={path},tmpfs-mode=0777{size}{read_only}"));
        }
        let volume = format!("{}-{}", self.container(uid), name.as_str().unwrap_or_default());
        if docker(&["volume", "inspect", &volume]).await.is_err() {
            docker(&["volume", "create", "--label", &format!("{LABEL}={}", self.id), &volume]).await?;
            // Docker copies the mode of the image's directory at the mount point to a new volume.
            let seed = self.seed(spec["securityContext"]["fsGroup"].as_u64()).await?;
            let mount = format!("type=volume,source={volume},destination=/volume");
            let seeding = docker(&["create", "--network", "none", "--mount", &mount, &seed, "none"]).await?;
            docker(&["rm", &seeding]).await?;
        }
        Ok(format!("type=volume,source={volume},destination={path},volume-nocopy{read_only}"))
    }

    /// Creates an image with one world-writable directory that belongs to a group.
    async fn seed(&self, group: Option<u64>) -> Result<String, String> {
        let name = format!("localhost/farrier-test/{}:{}", self.id, group.unwrap_or(0));
        let mut made = self.seeds.lock().await;
        if made.contains(&name) {
            return Ok(name);
        }
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(if group.is_some() { 0o2777 } else { 0o777 });
        header.set_uid(0);
        header.set_gid(group.unwrap_or(0));
        header.set_size(0);
        let mut archive = tar::Builder::new(Vec::new());
        archive.append_data(&mut header, "volume/", &[][..]).map_err(|fault| fault.to_string())?;
        let file = tempfile::NamedTempFile::new().map_err(|fault| fault.to_string())?;
        std::fs::write(file.path(), archive.into_inner().unwrap()).map_err(|fault| fault.to_string())?;
        docker(&["import", &file.path().display().to_string(), &name]).await?;
        made.insert(name.clone());
        Ok(name)
    }

    pub async fn start(&self, uid: &str) -> Result<(), String> {
        docker(&["start", &self.container(uid)]).await.map(drop)
    }

    /// Waits until the container has ended.
    pub async fn wait(&self, uid: &str) {
        let _ = docker(&["wait", &self.container(uid)]).await;
    }

    pub async fn stop(&self, uid: &str, grace: u64) {
        let _ = docker(&["stop", "--time", &grace.to_string(), &self.container(uid)]).await;
    }

    /// Returns the end that `docker inspect` reports. On a busy machine, the engine misses an out-of-memory kill when the
    /// container's control group is gone before the engine reads its events, so that the kernel log counts, too.
    pub async fn end(&self, uid: &str) -> End {
        let told = docker(&["inspect", "--format", "{{json .State}}", &self.container(uid)]).await;
        let state: Value = serde_json::from_str(&told.unwrap_or_default()).unwrap_or_default();
        let exit_code = state["ExitCode"].as_i64().unwrap_or(137);
        let killed_for_memory =
            state["OOMKilled"] == true || (exit_code == 137 && self.is_in_kernel_log(uid).await);
        let time = |field: &str| -> String {
            let time = state[field].as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
            super::pod_fate::text(time.unwrap_or_else(jiff::Timestamp::now))
        };
        End { exit_code, killed_for_memory, started: time("StartedAt"), finished: time("FinishedAt") }
    }

    /// Returns whether the kernel reported an out-of-memory kill in the container's control group.
    async fn is_in_kernel_log(&self, uid: &str) -> bool {
        let Ok(id) = docker(&["inspect", "--format", "{{.Id}}", &self.container(uid)]).await else {
            return false;
        };
        let Ok(output) = Command::new("dmesg").output().await else { return false };
        let log = String::from_utf8_lossy(&output.stdout);
        log.lines().any(|line| line.contains("oom-kill:") && line.contains(&id))
    }

    /// Returns the last lines of the container's log.
    pub async fn last_words(&self, uid: &str) -> String {
        let output =
            Command::new("docker").args(["logs", "--tail", "80", &self.container(uid)]).output().await;
        let Ok(output) = output else { return String::new() };
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2048)..]).into_owned()
    }

    /// Removes the container with its volumes.
    pub async fn remove(&self, uid: &str, spec: &Value) {
        let name = self.container(uid);
        let _ = docker(&["rm", "--force", "--volumes", &name]).await;
        for volume in spec["volumes"].as_array().into_iter().flatten() {
            let volume = format!("{name}-{}", volume["name"].as_str().unwrap_or_default());
            let _ = docker(&["volume", "rm", "--force", &volume]).await;
        }
    }

    fn filter(&self) -> String {
        format!("label={LABEL}={}", self.id)
    }

    /// Returns the names of the existing containers.
    pub fn containers(&self) -> Vec<String> {
        let listed = crate::support::docker::docker(&[
            "ps",
            "--all",
            "--filter",
            &self.filter(),
            "--format",
            "{{.Names}}",
        ]);
        listed.lines().map(str::to_owned).collect()
    }

    /// Removes everything that this cluster created or pulled.
    pub fn clear(&self) {
        use crate::support::docker::docker;
        for name in self.containers() {
            docker(&["rm", "--force", "--volumes", &name]);
        }
        for volume in docker(&["volume", "ls", "--quiet", "--filter", &self.filter()]).lines() {
            docker(&["volume", "rm", "--force", volume]);
        }
        let pulled = self.pulled.lock().unwrap().clone();
        let seeds = self.seeds.try_lock().map(|seeds| seeds.clone()).unwrap_or_default();
        for image in pulled.iter().chain(&seeds) {
            docker(&["image", "rm", image]);
        }
    }
}

/// Runs `docker` and returns its output, or its error message.
async fn docker<S: AsRef<std::ffi::OsStr>>(words: &[S]) -> Result<String, String> {
    let output = Command::new("docker")
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|fault| format!("docker: {fault}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// Returns a security setting of the container, or the pod's if the container has none.
pub fn security_of<'a>(spec: &'a Value, container: &'a Value, field: &str) -> &'a Value {
    match &container["securityContext"][field] {
        Value::Null => &spec["securityContext"][field],
        given => given,
    }
}

fn security(spec: &Value, container: &Value) -> Vec<String> {
    let mut words = Vec::new();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    let of = |field: &str| security_of(spec, container, field);
    if let Some(user) = of("runAsUser").as_u64() {
        let group = of("runAsGroup").as_u64().unwrap_or(0);
        option("--user", format!("{user}:{group}"));
    }
    if let Some(group) = spec["securityContext"]["fsGroup"].as_u64() {
        option("--group-add", group.to_string());
    }
    let own = &container["securityContext"];
    for (field, name) in [("drop", "--cap-drop"), ("add", "--cap-add")] {
        for capability in own["capabilities"][field].as_array().into_iter().flatten() {
            option(name, capability.as_str().unwrap_or_default().to_owned());
        }
    }
    if own["allowPrivilegeEscalation"] == false {
        option("--security-opt", "no-new-privileges".to_owned());
    }
    // A kubelet without `seccompDefault` applies a filter only when a pod requests one.
    if !matches!(of("seccompProfile")["type"].as_str(), Some("RuntimeDefault" | "Localhost")) {
        option("--security-opt", "seccomp=unconfined".to_owned());
    }
    if own["readOnlyRootFilesystem"] == true {
        words.push("--read-only".to_owned());
    }
    if own["privileged"] == true {
        words.push("--privileged".to_owned());
    }
    words
}

fn limits(limits: &Value) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(memory) = quantity(&limits["memory"]).map(rounded) {
        words.extend([format!("--memory={memory}"), format!("--memory-swap={memory}")]);
    }
    if let Some(cpus) = quantity(&limits["cpu"]) {
        words.push(format!("--cpus={cpus}"));
    }
    words
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are small and positive")]
fn rounded(size: f64) -> u64 {
    size as u64
}

/// Parses a quantity such as `500m`, `2`, `64Mi`.
fn quantity(given: &Value) -> Option<f64> {
    const UNITS: [(&str, f64); 9] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("m", 0.001),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
    ];
    let text = match given {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    let unit = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (number, factor) = unit.unwrap_or((&text, 1.0));
    number.parse::<f64>().ok().map(|number| number * factor)
}

#[test]
fn quantities_are_what_the_api_means() {
    let read = |text: &str| quantity(&serde_json::json!(text)).map(rounded);
    assert_eq!(read("64Mi"), Some(64 << 20));
    assert_eq!(read("1G"), Some(1_000_000_000));
    assert_eq!(read("1500m"), Some(1));
    assert_eq!(read("1.5Gi"), Some(3 << 29));
    assert_eq!(read("much"), None);
}
