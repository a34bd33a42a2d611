//! Runs the commands of the templates in ci/templates over a real plan and a real registry.
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::support::{published::publish_planned, site::Site};
use serde_json::Value;

const KERNELS: [&str; 2] = ["6.1.0-901-amd64", "6.1.0-902-amd64"];
/// All templates. The test for completeness keeps untested templates out.
const PLAYED: [&str; 4] = ["github-actions.yml", "gitlab-build.yml", "gitlab-ci.yml", "tekton.yaml"];

fn templates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/templates")
}

/// Returns the documents of a template.
fn read(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(templates().join(name)).unwrap();
    serde_saphyr::from_multiple(&text).unwrap()
}

/// A site with two nodes on different kernels and an image for both, with nothing published.
struct Pipeline {
    site: Site,
}

impl Pipeline {
    fn new() -> Self {
        let site = Site::new();
        site.stand_in_kernels();
        fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
        for (name, kernel) in ["edge-1.yaml", "edge-2.yaml"].into_iter().zip(KERNELS) {
            site.manifest(name, kernel);
        }
        Self { site }
    }

    /// Runs a template's script in a shell with the given variables, as the CI system does.
    fn run(&self, script: &str, variables: &BTreeMap<String, String>) -> Output {
        let farrier = Path::new(env!("CARGO_BIN_EXE_farrier")).parent().unwrap();
        let path = format!("{}:{}", farrier.display(), std::env::var("PATH").unwrap());
        let settings = self.site.command::<&str>(&[]);
        let mut shell = Command::new("sh");
        shell.args(["-euc", script]).current_dir(self.site.path("")).env("PATH", path);
        shell.envs(settings.get_envs().filter_map(|(key, value)| Some((key, value?)))).envs(variables);
        shell.output().unwrap()
    }

    /// Runs a script that must succeed, and returns what it prints.
    fn play(&self, script: &str, variables: &BTreeMap<String, String>) -> String {
        let output = self.run(script, variables);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}\n{stderr}");
        format!("{}{stderr}", String::from_utf8_lossy(&output.stdout))
    }

    /// Asserts that a script succeeds while every image can be built, and fails when a node's kernel has no headers.
    fn checks(&self, script: &str, variables: &BTreeMap<String, String>) {
        self.play(script, variables);
        self.site.manifest("edge-1.yaml", "6.1.0-999-amd64");
        let output = self.run(script, variables);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains("6.1.0-999-amd64"), "{script}\n{stderr}");
    }

    /// Publishes stand-ins for the planned images, so that each build finds its image and needs no engine.
    fn publish(&self) {
        let plan = self.site.farrier(&["plan", "-o", "json"]).exits(0).json();
        assert_eq!(publish_planned(&plan).len(), KERNELS.len());
    }

    /// Runs the build for each entry of the matrix and asserts that each finds the image published for its kernel.
    fn builds(&self, script: &str, matrix: &[BTreeMap<String, String>]) {
        assert_eq!(matrix.len(), KERNELS.len());
        self.publish();
        for (variables, kernel) in matrix.iter().zip(KERNELS) {
            let said = self.play(script, variables);
            assert!(said.contains(kernel) && said.contains("sha256:"), "{said}");
        }
    }
}

fn strings(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().unwrap().iter();
    entries.map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a string"))
}

/// Joins a job's script, which is a list of commands.
fn script(job: &Value) -> String {
    job["script"].as_array().unwrap().iter().map(text).collect::<Vec<_>>().join("\n")
}

fn step<'a>(job: &'a Value, part: &str) -> &'a Value {
    let mut steps = job["steps"].as_array().unwrap().iter();
    steps.find(|step| step["run"].as_str().is_some_and(|run| run.contains(part))).unwrap()
}

#[test]
fn github_actions() {
    let pipeline = Pipeline::new();
    let workflow = read("github-actions.yml").remove(0);
    let jobs = &workflow["jobs"];
    let output = pipeline.site.path("github-output");
    let given = [("GITHUB_OUTPUT".to_owned(), output.display().to_string())].into();
    pipeline.play(text(&step(&jobs["plan"], "farrier plan")["run"]), &given);
    let said = fs::read_to_string(&output).unwrap();
    let matrix: Value = serde_json::from_str(said.trim_end().strip_prefix("matrix=").unwrap()).unwrap();
    let build = step(&jobs["build"], "farrier build");
    // GitHub substitutes `${{ matrix.x }}`.
    let variables = |entry: &Value| {
        let filled = strings(&build["env"]).into_iter().map(|(key, value)| {
            let name = value.trim_start_matches("${{ matrix.").trim_end_matches(" }}");
            (key, text(&entry[name]).to_owned())
        });
        filled.collect()
    };
    let entries: Vec<_> = matrix["include"].as_array().unwrap().iter().map(variables).collect();
    pipeline.builds(text(&build["run"]), &entries);

    // When nothing is left to build, the second job's condition skips the job.
    pipeline.play(text(&step(&jobs["plan"], "farrier plan")["run"]), &given);
    let said = fs::read_to_string(&output).unwrap();
    let empty = said.lines().last().unwrap().strip_prefix("matrix=").unwrap();
    assert_eq!(text(&jobs["build"]["if"]), format!("needs.plan.outputs.matrix != '{empty}'"));
    pipeline.checks(text(&step(&jobs["check"], "farrier plan")["run"]), &given);
}

#[test]
fn gitlab_ci() {
    let pipeline = Pipeline::new();
    let parent = read("gitlab-ci.yml").remove(0);
    let child = read("gitlab-build.yml").remove(0);
    let matrix = || -> Value {
        pipeline.play(&script(&parent["plan"]), &BTreeMap::new());
        let [artifact] = &parent["plan"]["artifacts"]["paths"].as_array().unwrap()[..] else { panic!() };
        assert_eq!(*artifact, parent["images"]["trigger"]["include"][1]["artifact"]);
        let text = fs::read_to_string(pipeline.site.path(artifact.as_str().unwrap())).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let found = matrix();
    let entries = found["build"]["parallel"]["matrix"].as_array().unwrap();
    pipeline.builds(&script(&child["build"]), &entries.iter().map(strings).collect::<Vec<_>>());
    // GitLab merges the two jobs key by key, and the later file takes precedence.
    pipeline.play(&script(&matrix()["build"]), &BTreeMap::new());
    pipeline.checks(&script(&parent["check"]), &BTreeMap::new());
}

#[test]
fn tekton() {
    let pipeline = Pipeline::new();
    let documents = read("tekton.yaml");
    let named = |name: &str| documents.iter().find(|found| found["metadata"]["name"] == name).unwrap();
    let step = |task: &str| named(task)["spec"]["steps"][0]["script"].as_str().unwrap().to_owned();
    let result = pipeline.site.path("result");
    let given = |options: &str| -> BTreeMap<String, String> {
        let result = result.display().to_string();
        [("MATRIX".to_owned(), result), ("OPTIONS".to_owned(), options.to_owned())].into()
    };
    pipeline.play(&step("farrier-plan"), &given(""));
    let array: Vec<String> = serde_json::from_str(&fs::read_to_string(&result).unwrap()).unwrap();
    let variables = |build: String| BTreeMap::from([("BUILD".to_owned(), build)]);
    pipeline.builds(&step("farrier-build"), &array.into_iter().map(variables).collect::<Vec<_>>());

    let tasks = |list: &str| named("driver-images")["spec"][list].as_array().unwrap();
    let [check] = &tasks("finally")[..] else { panic!("one task") };
    let mut parameters = check["params"].as_array().unwrap().iter();
    let options = parameters.find(|parameter| parameter["name"] == "options").unwrap();
    pipeline.checks(&step(text(&check["taskRef"]["name"])), &given(text(&options["value"])));

    // The pipeline passes every parameter that its tasks declare.
    for task in tasks("tasks").iter().chain([check]) {
        let spec = &named(text(&task["taskRef"]["name"]))["spec"];
        let declared = |list: &Value| -> Vec<String> {
            let parameters = list.as_array().map(Vec::as_slice).unwrap_or_default().iter();
            parameters.map(|item| text(&item["name"]).to_owned()).collect()
        };
        let mut given = [declared(&task["params"]), declared(&task["matrix"]["params"])].concat();
        let mut asked = declared(&spec["params"]);
        given.sort();
        asked.sort();
        assert_eq!(given, asked);
    }
}

#[test]
fn lines_are_for_a_shell() {
    let pipeline = Pipeline::new();
    let lines = pipeline.play("farrier plan --matrix lines", &BTreeMap::new());
    assert_eq!(lines.lines().count(), KERNELS.len(), "{lines}");
    pipeline.publish();
    // When nothing is left to build, the loop does nothing.
    assert_eq!(pipeline.play(&shell_loop(), &BTreeMap::new()), "");
}

/// Returns the loop in docs/pipelines.md.
fn shell_loop() -> String {
    let page = fs::read_to_string(templates().join("../../docs/pipelines.md")).unwrap();
    let (_, block) = page.split_once("Any other system can loop:\n\n").unwrap();
    block.lines().map_while(|line| line.strip_prefix("    ")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_shell_loop_fails_with_a_build_and_with_the_plan() {
    let directory = tempfile::tempdir().unwrap();
    let stand_in = directory.path().join("farrier");
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    for (plan, build, wanted) in
        [("echo a k; echo b k", 0, 0), ("echo a k; echo b k", 4, 4), ("exit 3", 0, 3)]
    {
        let text = format!("#!/bin/sh\ncase \"$1 $2\" in plan*) {plan} ;; 'build a') exit {build} ;; esac\n");
        fs::write(&stand_in, text).unwrap();
        fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", &shell_loop()]).current_dir(directory.path()).env("PATH", &path);
        assert_eq!(shell.status().unwrap().code(), Some(wanted), "{plan}");
    }
}

#[test]
fn there_is_no_template_that_is_not_played() {
    assert_eq!(crate::support::site::entries(&templates()), PLAYED);
}
