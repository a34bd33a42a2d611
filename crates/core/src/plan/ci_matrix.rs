//! Pure: what a pipeline elsewhere has to build, in the forms that its tools take.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Outcome, Phase, Plan, PlannedCell};
use crate::{image::ImageName, kernel::KernelTarget};

/// A tool that makes jobs of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixForm {
    /// `strategy.matrix` of GitHub Actions: `{"include": [...]}` on one line.
    Github,
    /// A job `build` with `parallel: matrix`, for a child pipeline of GitLab CI.
    Gitlab,
    /// An array of strings, for the matrix of a Tekton pipeline.
    Tekton,
    /// Lines, for a shell.
    Lines,
}

/// One call of `farrier build --push`, which builds what the image needs before it.
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

    /// None of these holds a blank, nor anything that a shell takes for more than a word.
    fn words(&self) -> String {
        let Self { image, kernel, os, os_version, arch } = self;
        format!("{image} {kernel} {os} {os_version} {arch}")
    }
}

/// What is to be built, in one of the forms: an image that others of the list are compiled against is not in it for
/// itself, because it is built before them.
pub fn ci_matrix(plan: &Plan, form: MatrixForm) -> String {
    let needed = |planned: &PlannedCell| match &planned.outcome {
        Outcome::Waiting { needs } => needs.iter().map(|need| CiBuild::new(need, &planned.target)).collect(),
        _ => Vec::new(),
    };
    let needed: BTreeSet<CiBuild> = plan.cells.iter().flat_map(needed).collect();
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

/// An empty matrix, and a pipeline without jobs, are errors to GitLab: with nothing to build there is a job that does
/// nothing.
fn gitlab(builds: &BTreeSet<CiBuild>) -> String {
    /// In this order, whatever features of its crate a build has on.
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

/// Strings and lists: there is nothing in it that JSON cannot hold.
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
