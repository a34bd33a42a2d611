//! Pure: Dockerfile templates, rendered strictly.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::kernel::KernelTarget;

/// What a template may name. An unknown variable is an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TemplateContext {
    /// `{{toolchain}}`: the local name of an image that holds the compiler and, at its natural paths,
    /// the header set (`/lib/modules/<release>/build`).
    pub toolchain: String,
    /// `{{kernel.release}}`, `{{kernel.label}}`, `{{kernel.version}}` (`x.y.z`), `{{kernel.major}}`, `{{kernel.minor}}`.
    pub kernel: BTreeMap<String, String>,
    /// `{{os.id}}`, `{{os.version}}`.
    pub os: BTreeMap<String, String>,
    /// `{{arch}}`: `amd64`.
    pub arch: String,
    /// `{{image.name}}`, `{{image.version}}`.
    pub image: BTreeMap<String, String>,
    /// `{{#each modules}}`.
    pub modules: Vec<String>,
    /// `{{#each sources}}`: names; each is in the context as `sources/<name>/`.
    pub sources: Vec<String>,
    /// `{{#each patches}}`: file names below `patches/`, in order.
    pub patches: Vec<String>,
    /// `{{vars.<name>}}`.
    pub vars: BTreeMap<String, String>,
}

/// Why a template was not rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("template {template} line {line}: {reason}")]
pub struct TemplateError {
    /// The template's name.
    pub template: String,
    /// Line, from 1; 0 where it is not known.
    pub line: usize,
    /// What is wrong, naming the variable.
    pub reason: String,
}

impl TemplateContext {
    /// The context of one image for one kernel.
    pub fn new(toolchain: &str, image: (&str, &str), target: &KernelTarget) -> Self {
        let _ = (toolchain, image, target);
        todo!("template")
    }
}

/// Renders a template; `name` is for messages.
pub fn render(name: &str, text: &str, context: &TemplateContext) -> Result<String, TemplateError> {
    let _ = (name, text, context);
    todo!("template")
}
