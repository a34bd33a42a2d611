//! The list of builds for an external CI pipeline, in the formats of common CI tools.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Outcome, Phase, Plan, PlannedCell};
use crate::{image::ImageName, kernel::KernelTarget};

/// CI tool that expands a list into jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixForm {
    /// `strategy.matrix` of GitHub Actions: `{"include": [...]}` on one line.
    Github,
    /// Job `build` with `parallel: matrix`, for a child pipeline of GitLab CI.
    Gitlab,
    /// Array of strings, for the matrix of a Tekton pipeline.
    Tekton,
    /// One line per build, for a shell.
    Lines,
}

/// Arguments of one `farrier build --push`, which first builds the images that the image needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct CiBuild {
    image: ImageName,
    kernel: String,
    os: String,
    os_version: String,
    arch: String,
}

impl CiBuild {
    fn new(image: &ImageName, target: &KernelTarget) -> Self {
        let KernelTarget { os, os_version, release, arch } = target;
        Self {
            image: image.clone(),
            kernel: release.to_string(),
            os: os.to_string(),
            os_version: os_version.to_string(),
            arch: arch.to_string(),
        }
    }

    /// Joins the fields with blanks. No field contains a blank or a shell metacharacter.
    fn words(&self) -> String {
        let Self { image, kernel, os, os_version, arch } = self;
        format!("{image} {kernel} {os} {os_version} {arch}")
    }
}

/// Returns the missing builds in one of the formats. An image that another listed image is compiled against is omitted,
/// because `farrier build` builds it first.
pub fn ci_matrix(plan: &Plan, form: MatrixForm) -> String {
    let needs_of = |planned: &PlannedCell| match &planned.outcome {
        Outcome::Waiting { needs } => needs.iter().map(|need| CiBuild::new(need, &planned.target)).collect(),
        _ => Vec::new(),
    };
    let needed: BTreeSet<CiBuild> = plan.cells.iter().flat_map(needs_of).collect();
    let builds = plan.cells_in(Phase::Missing).chain(plan.cells_in(Phase::Waiting));
    let builds = builds.map(|planned| CiBuild::new(&planned.image, &planned.target));
    let builds: BTreeSet<CiBuild> = builds.filter(|build| !needed.contains(build)).collect();
    match form {
        MatrixForm::Github => json(&map("include", &builds)),
        MatrixForm::Gitlab => gitlab(&builds),
        MatrixForm::Tekton => json(&builds.iter().map(CiBuild::words).collect::<Vec<_>>()),
        MatrixForm::Lines => builds.iter().map(|build| build.words() + "\n").collect(),
    }
}

/// Returns a job that does nothing when there is nothing to build: GitLab rejects an empty matrix and a pipeline
/// without jobs.
fn gitlab(builds: &BTreeSet<CiBuild>) -> String {
    /// Variables of one job. A struct keeps the order of the keys with every feature set of serde_json.
    #[derive(Serialize)]
    #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
    struct Variables<'a> {
        image: &'a str,
        kernel: &'a str,
        os: &'a str,
        os_version: &'a str,
        arch: &'a str,
    }
    fn variables(build: &CiBuild) -> Variables<'_> {
        let CiBuild { image, kernel, os, os_version, arch } = build;
        Variables { image: image.as_str(), kernel, os, os_version, arch }
    }
    if builds.is_empty() {
        return json(&map("build", map("script", ["echo nothing to build"])));
    }
    let rows: Vec<_> = builds.iter().map(variables).collect();
    json(&map("build", map("parallel", map("matrix", rows))))
}

fn map<T>(key: &str, value: T) -> BTreeMap<&str, T> {
    [(key, value)].into()
}

/// Serializes strings and lists, which cannot fail.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::{K47, K48, World};

    #[test]
    fn the_forms() {
        let plan = World::new(&[K47, K48]).plan();
        insta::assert_snapshot!(ci_matrix(&plan, MatrixForm::Github), @r#"{"include":[{"image":"mft","kernel":"6.1.0-47-amd64","os":"debian","osVersion":"12","arch":"amd64"},{"image":"mft","kernel":"6.1.0-48-amd64","os":"debian","osVersion":"12","arch":"amd64"}]}"#);
        insta::assert_snapshot!(ci_matrix(&plan, MatrixForm::Gitlab), @r#"{"build":{"parallel":{"matrix":[{"IMAGE":"mft","KERNEL":"6.1.0-47-amd64","OS":"debian","OS_VERSION":"12","ARCH":"amd64"},{"IMAGE":"mft","KERNEL":"6.1.0-48-amd64","OS":"debian","OS_VERSION":"12","ARCH":"amd64"}]}}}"#);
        insta::assert_snapshot!(ci_matrix(&plan, MatrixForm::Tekton), @r#"["mft 6.1.0-47-amd64 debian 12 amd64","mft 6.1.0-48-amd64 debian 12 amd64"]"#);
        insta::assert_snapshot!(ci_matrix(&plan, MatrixForm::Lines), @r"
        mft 6.1.0-47-amd64 debian 12 amd64
        mft 6.1.0-48-amd64 debian 12 amd64
        ");
    }

    #[test]
    fn nothing_to_build() {
        let plan = Plan::default();
        assert!(plan.matrix_hides_reasons(), "an empty list says nothing");
        assert_eq!(ci_matrix(&plan, MatrixForm::Github), r#"{"include":[]}"#);
        assert_eq!(ci_matrix(&plan, MatrixForm::Gitlab), r#"{"build":{"script":["echo nothing to build"]}}"#);
        assert_eq!(ci_matrix(&plan, MatrixForm::Tekton), "[]");
        assert_eq!(ci_matrix(&plan, MatrixForm::Lines), "");
    }

    #[test]
    fn of_a_chain_only_the_last_is_listed() {
        let plan = World::chain(&[K47]).plan();
        assert!(plan.count(Phase::Waiting) > 0);
        let lines = ci_matrix(&plan, MatrixForm::Lines);
        let images: Vec<&str> = lines.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(images, ["mft", "peer"]);
    }
}
