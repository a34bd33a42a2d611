//! Options of what shows the plan.

use clap::{Args, ValueEnum};

use super::{ClusterArg, RegistryArg};
use crate::plan;

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    #[command(flatten)]
    pub cluster: ClusterArg,
}

#[derive(Debug, Args)]
pub struct PlanCommandArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Print only what is to be built, as the list from which a CI system makes jobs of `farrier build --push`
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    pub matrix: Option<MatrixForm>,
}

/// Forms of a list of builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixForm {
    /// {"include": [...]} for strategy.matrix of GitHub Actions
    Github,
    /// A job `build` with parallel: matrix, for a child pipeline of GitLab CI
    Gitlab,
    /// An array of strings for a Tekton matrix: image, kernel, OS, OS version, architecture with blanks between them
    Tekton,
    /// The same, one on each line
    Lines,
}

impl From<MatrixForm> for plan::MatrixForm {
    fn from(form: MatrixForm) -> Self {
        match form {
            MatrixForm::Github => Self::Github,
            MatrixForm::Gitlab => Self::Gitlab,
            MatrixForm::Tekton => Self::Tekton,
            MatrixForm::Lines => Self::Lines,
        }
    }
}
