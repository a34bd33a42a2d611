//! Renders Dockerfile templates with strict variable checks, and parses the resulting Dockerfiles.

mod dockerfile;
mod lexer;
mod nesting;
pub mod steps;

use std::{collections::BTreeMap, io};

use handlebars::{
    Context, Handlebars, Helper, HelperDef, HelperResult, JsonTruthy, Output, RenderContext, RenderError,
    RenderErrorReason, Renderable, Template, TemplateErrorReason,
};
use serde::Serialize;

pub use dockerfile::fetching_add;
pub use dockerfile::{Document, Instruction, instructions};

use crate::kernel::{KernelLabel, KernelTarget};

/// Variables of a template. An unknown variable is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TemplateContext {
    /// `{{toolchain}}`: local name of the image with the compiler and, at its usual paths, the header set
    /// (`/lib/modules/<release>/build`).
    pub toolchain: String,
    /// `{{kernel.release}}`, `{{kernel.label}}`, `{{kernel.version}}` (`x.y.z`), `{{kernel.major}}`, `{{kernel.minor}}`,
    /// `{{kernel.flags}}`.
    pub kernel: BTreeMap<String, String>,
    /// `{{os.id}}`, `{{os.version}}`.
    pub os: BTreeMap<String, String>,
    /// `{{arch}}`: `amd64`.
    pub arch: String,
    /// `{{image.name}}`, `{{image.version}}`.
    pub image: BTreeMap<String, String>,
    /// `{{#each modules}}`.
    pub modules: Vec<String>,
    /// `{{#each sources}}`: names. Each source is in the build context as `sources/<name>/`.
    pub sources: Vec<String>,
    /// `{{#each needs}}`: names. The exposed headers of each are in the build context as `needs/<name>/`, at their usual paths.
    pub needs: Vec<String>,
    /// `{{#each patches}}`: file names below `patches/`, in order.
    pub patches: Vec<String>,
    /// `{{#each firmware}}`: source and destination of a `COPY` that adds firmware to the payload.
    pub firmware: Vec<String>,
    /// `{{vars.<name>}}`; [`Templates::render_vars`] renders the values.
    pub vars: BTreeMap<String, String>,
}

/// Maximum size of a rendered text in bytes.
const MAX_RENDERED: usize = 4 << 20;

/// `{{kernel.flags}}` for modules without type information. Debug information would be stripped, so none is generated.
const WITHOUT_BTF: &str = "KCFLAGS=-g0";
/// `{{kernel.flags}}` for modules with type information, which pahole generates from debug information. With a timestamp, kbuild
/// does not run pahole in parallel; parallel runs give different bytes each time (`scripts/Makefile.btf`).
const WITH_BTF: &str = "KCFLAGS=-g KBUILD_BUILD_TIMESTAMP=@0";

/// Reason why a template cannot be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("template {template} line {line}: {reason}")]
pub struct TemplateError {
    /// The template's name.
    pub template: String,
    /// Line, from 1; 0 if unknown.
    pub line: usize,
    /// Description of the problem, with the name of the variable.
    pub reason: String,
    /// Name of the variable in `vars` that is missing.
    pub missing_var: Option<String>,
}

impl TemplateError {
    fn new(template: &str, line: Option<usize>, reason: String) -> Self {
        Self { template: template.to_owned(), line: line.unwrap_or_default(), reason, missing_var: None }
    }
}

impl TemplateContext {
    /// Creates the context of one image (name, version) for one kernel, without lists and `vars`.
    pub fn new(toolchain: &str, image: (&str, &str), target: &KernelTarget) -> Self {
        let KernelTarget { os, os_version, release, arch } = target;
        let map =
            |pairs: &[(&str, String)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        let version = release.version();
        let mut kernel: BTreeMap<String, String> = map(&[
            ("release", release.to_string()),
            ("version", version.to_string()),
            ("major", version.major.to_string()),
            ("minor", version.minor.to_string()),
            ("flags", WITHOUT_BTF.to_owned()),
        ]);
        if let Some(label) = KernelLabel::of(release) {
            kernel.insert("label".to_owned(), label.to_string());
        }
        Self {
            toolchain: toolchain.to_owned(),
            kernel,
            os: map(&[("id", os.to_string()), ("version", os_version.to_string())]),
            arch: arch.to_string(),
            image: map(&[("name", image.0.to_owned()), ("version", image.1.to_owned())]),
            ..Self::default()
        }
    }

    /// Enables type information (BTF) for modules, as the kernel's family requests.
    pub(crate) fn enable_btf(&mut self) {
        self.kernel.insert("flags".to_owned(), WITH_BTF.to_owned());
    }

    /// Returns a value with a line break, which would start a new instruction in the Dockerfile.
    fn value_with_line_break(&self) -> Option<&str> {
        let Self { toolchain, kernel, os, arch, image, modules, sources, needs, patches, firmware, vars } =
            self;
        let maps = [kernel, os, image, vars].into_iter().flat_map(BTreeMap::values);
        let lists = [modules, sources, needs, patches, firmware].into_iter().flatten();
        maps.chain(lists)
            .chain([toolchain, arch])
            .map(String::as_str)
            .find(|value| value.contains(['\n', '\r']))
    }
}

/// Cache of parsed templates and tag patterns, so that each is parsed once for all cells. A name must always have the same text.
#[derive(Debug)]
pub struct Templates(Handlebars<'static>);

impl Default for Templates {
    fn default() -> Self {
        Self(engine())
    }
}

impl Templates {
    /// Renders a template. `name` is used in messages and as the cache key of `text`.
    pub fn render(
        &mut self,
        name: &str,
        text: &str,
        context: &TemplateContext,
    ) -> Result<String, TemplateError> {
        if let Some(value) = context.value_with_line_break() {
            return Err(TemplateError::new(name, None, format!("the value {value:?} contains a line break")));
        }
        if !self.0.has_template(name) {
            register(&mut self.0, name, text)?;
        }
        self.render_limited(name, context).map_err(|error| TemplateError {
            missing_var: missing_var(&error),
            ..TemplateError::new(name, error.line_no, reason(&error))
        })
    }

    /// Renders the values of `vars` that contain `{{`, from the other variables. The error does not name the template.
    pub fn render_vars(&mut self, context: &mut TemplateContext) -> Result<(), String> {
        let mut vars = std::mem::take(&mut context.vars);
        for (name, value) in vars.iter_mut().filter(|(_, value)| value.contains("{{")) {
            *value = self.render_line(value, context).map_err(|reason| format!("vars.{name}: {reason}"))?;
        }
        context.vars = vars;
        Ok(())
    }

    fn render_limited(&self, name: &str, values: &impl Serialize) -> Result<String, RenderError> {
        let mut rendered = Rendered::default();
        self.0.render_to_write(name, values, &mut rendered)?;
        Ok(String::from_utf8(rendered.0)?)
    }

    /// Renders one line, such as a tag pattern, from named values. The error does not name the template.
    pub(crate) fn render_line(&mut self, text: &str, values: &impl Serialize) -> Result<String, String> {
        // The blank in the name prevents a collision with names of templates.
        let name = format!("line {text}");
        if !self.0.has_template(&name) {
            if let Some((_, reason)) = nesting::exceeded_limit(text) {
                return Err(reason);
            }
            let template = Template::compile(text).map_err(|_| format!("invalid Handlebars: {text}"))?;
            if let Some((_, reason)) = nesting::refused_element(&template) {
                return Err(reason);
            }
            self.0.register_template(&name, template);
        }
        self.render_limited(&name, values).map_err(|error| {
            let values = serde_json::to_value(values).unwrap_or_default();
            let names = values.as_object().into_iter().flat_map(serde_json::Map::keys);
            format!("{}; known: {}", reason(&error), names.map(String::as_str).collect::<Vec<_>>().join(", "))
        })
    }
}

/// Rendered text of at most [`MAX_RENDERED`] bytes.
#[derive(Default)]
struct Rendered(Vec<u8>);

impl io::Write for Rendered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED {
            return Err(io::Error::other(format!("the rendered text exceeds {} MiB", MAX_RENDERED >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Renders a template once, without a cache. `name` is used in messages.
pub fn render(name: &str, text: &str, context: &TemplateContext) -> Result<String, TemplateError> {
    Templates::default().render(name, text, context)
}

/// Checks the Handlebars syntax of a template. Unknown variables are detected when the template is rendered.
pub fn parse(name: &str, text: &str) -> Result<(), TemplateError> {
    register(&mut engine(), name, text)
}

fn register(engine: &mut Handlebars<'_>, name: &str, text: &str) -> Result<(), TemplateError> {
    if let Some((line, reason)) = nesting::exceeded_limit(text) {
        return Err(TemplateError::new(name, Some(line), reason));
    }
    let template = Template::compile_with_name(text, name.to_owned()).map_err(|error| {
        let reason = match error.reason() {
            // Handlebars' message would list all grammar rules that were expected.
            TemplateErrorReason::InvalidSyntax(_) => {
                "invalid Handlebars from here on; perhaps a `{{` or a block is not closed".to_owned()
            }
            other => other.to_string(),
        };
        TemplateError::new(name, error.pos().map(|(line, _)| line), reason)
    })?;
    if let Some((line, reason)) = nesting::refused_element(&template) {
        return Err(TemplateError::new(name, Some(line), reason));
    }
    engine.register_template(name, template);
    Ok(())
}

/// Creates a strict engine, in which a mistyped variable is an error instead of an empty string. Nothing is escaped, because a
/// Dockerfile is not HTML.
fn engine() -> Handlebars<'static> {
    let mut engine = Handlebars::new();
    engine.set_strict_mode(true);
    engine.register_escape_fn(handlebars::no_escape);
    register_strict_helpers(&mut engine);
    engine
}

fn reason(error: &handlebars::RenderError) -> String {
    match error.reason() {
        RenderErrorReason::MissingVariable(Some(path)) => format!("there is no variable {path}"),
        RenderErrorReason::MissingVariable(None) => "`lookup` finds no such variable".to_owned(),
        RenderErrorReason::ParamNotFoundForIndex(helper, index) => {
            format!("word {} after `{helper}` is missing or an unknown variable", index + 1)
        }
        other => other.to_string(),
    }
}

fn missing_var(error: &handlebars::RenderError) -> Option<String> {
    match error.reason() {
        RenderErrorReason::MissingVariable(Some(path)) => path.strip_prefix("vars.").map(str::to_owned),
        _ => None,
    }
}

/// A strict `if`. Handlebars' own `if` ignores strict mode (`each`, `with` and `lookup` respect it): a typo such as `{{#if
/// vars.debgu}}` would silently choose the other branch.
struct StrictIf {
    name: &'static str,
    /// The value that selects the main branch.
    main_value: bool,
}

/// Replaces the built-in helpers with strict ones, in which an unknown variable is an error instead of false.
fn register_strict_helpers(engine: &mut Handlebars<'_>) {
    for (name, main_value) in [("if", true), ("unless", false)] {
        engine.register_helper(name, Box::new(StrictIf { name, main_value }));
    }
}

impl HelperDef for StrictIf {
    fn call<'reg: 'rc, 'rc>(
        &self,
        helper: &Helper<'rc>,
        engine: &'reg Handlebars<'reg>,
        context: &'rc Context,
        render: &mut RenderContext<'reg, 'rc>,
        out: &mut dyn Output,
    ) -> HelperResult {
        let param = helper.param(0).ok_or(RenderErrorReason::ParamNotFoundForIndex(self.name, 0))?;
        if param.is_value_missing() {
            return Err(RenderError::strict_error(param.relative_path()));
        }
        let is_main = param.value().is_truthy(false) == self.main_value;
        let branch = if is_main { helper.template() } else { helper.inverse() };
        branch.map_or(Ok(()), |branch| branch.render(engine, context, render, out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> TemplateContext {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: crate::kernel::Architecture::Amd64,
        };
        let mut context = TemplateContext::new("localhost/base:1", ("mstflint", "4.33"), &target);
        context.sources = vec!["mstflint".to_owned()];
        context.vars.insert("dir".to_owned(), "kernel<&>".to_owned());
        context
    }

    #[test]
    fn every_value_is_given_and_nothing_is_escaped() {
        let text = "FROM {{toolchain}}\n{{#each sources}}COPY sources/{{this}}/ /build/\n{{/each}}RUN make K={{kernel.release}} \
                    V={{kernel.version}} {{kernel.major}}.{{kernel.minor}} {{os.id}}{{os.version}} {{arch}} {{image.name}} {{vars.dir}}\n";
        insta::assert_snapshot!(render("t", text, &context()).unwrap(), @r"
        FROM localhost/base:1
        COPY sources/mstflint/ /build/
        RUN make K=6.1.0-47-amd64 V=6.1.0 6.1 debian12 amd64 mstflint kernel<&>
        ");
    }

    #[test]
    fn values_of_vars_are_rendered() {
        let mut context = context();
        let rendered = |context: &mut TemplateContext| Templates::default().render_vars(context);
        context.vars.insert("args".to_owned(), "KVER={{kernel.release}} A={{arch}}".to_owned());
        rendered(&mut context).unwrap();
        assert_eq!(context.vars["args"], "KVER=6.1.0-47-amd64 A=amd64");
        assert_eq!(context.vars["dir"], "kernel<&>");
        for (value, reason) in [
            ("{{kernel.relase}}", "vars.args: there is no variable kernel.relase"),
            ("{{vars.dir}}", "vars.args: there is no variable vars.dir"),
            ("{{kernel", "vars.args: invalid Handlebars: {{kernel"),
        ] {
            context.vars.insert("args".to_owned(), value.to_owned());
            let error = rendered(&mut context.clone()).unwrap_err();
            assert!(error.starts_with(reason), "{error}");
        }
    }

    #[test]
    fn an_unknown_variable_is_an_error_with_its_line() {
        let message = |text: &str| render("kbuild", text, &context()).unwrap_err().to_string();
        insta::assert_snapshot!(message("FROM {{toolchain}}\nRUN {{kernel.relase}}\n"), @"template kbuild line 2: there is no variable kernel.relase");
        insta::assert_snapshot!(message("FROM x\n\n{{vars.missing}}\n"), @"template kbuild line 3: there is no variable vars.missing");
        insta::assert_snapshot!(message("{{#each sources}}\nCOPY {{this}}\n{{nonesuch}}\n{{/each}}"), @"template kbuild line 3: there is no variable nonesuch");
        insta::assert_snapshot!(message("x\n{{#if vars.nonesuch}}\nx\n{{/if}}"), @"template kbuild line 2: there is no variable vars.nonesuch");
        insta::assert_snapshot!(message("x\n{{#if arch}}\nx\n{{#unless oss}}{{/unless}}{{/if}}"), @"template kbuild line 4: there is no variable oss");
        insta::assert_snapshot!(message("{{#unless arch}}a{{else if arhc}}b{{/unless}}"), @"template kbuild line 1: there is no variable arhc");
        insta::assert_snapshot!(message("{{#if os.id}}{{#each patchs}}x{{/each}}{{/if}}"), @"template kbuild line 1: there is no variable patchs");
        insta::assert_snapshot!(message("{{#if (eq arhc \"amd64\")}}x{{/if}}"), @"template kbuild line 1: word 1 after `eq` is missing or an unknown variable");
        insta::assert_snapshot!(message("{{#with vars}}{{nonesuch}}{{/with}}"), @"template kbuild line 1: there is no variable nonesuch");
        insta::assert_snapshot!(message("{{lookup vars \"nonesuch\"}}"), @"template kbuild line 1: `lookup` finds no such variable");
        insta::assert_snapshot!(message("a\n{{> header}}"), @"template kbuild line 2: partials and decorators are not supported");
        insta::assert_snapshot!(message("a\n{{uppercase arch}}"), @"template kbuild line 2: Helper not found uppercase");
    }

    #[test]
    fn text_that_is_no_template_is_an_error_with_its_line() {
        let message = |text: &str| parse("kbuild", text).unwrap_err().to_string();
        insta::assert_snapshot!(message("a\n{{#if arch}}x"), @"template kbuild line 2: invalid Handlebars from here on; perhaps a `{{` or a block is not closed");
        insta::assert_snapshot!(message("a\nb\n{{#if arch}}x{{/each}}"), @r#"template kbuild line 3: helper "if" was opened, but "each" is closing"#);
        insta::assert_snapshot!(message("a\nb {{arch}\n"), @"template kbuild line 2: invalid Handlebars from here on; perhaps a `{{` or a block is not closed");
    }

    #[test]
    fn a_rendered_text_has_a_limit() {
        let mut context = context();
        context.modules = vec!["x".repeat(3000); 50];
        let text = "{{#each modules}}{{#each ../modules}}{{this}}{{/each}}{{/each}}";
        let error = render("t", text, &context).unwrap_err();
        assert!(error.reason.contains("exceeds 4 MiB"), "{error}");
        context.modules.truncate(10);
        assert_eq!(render("t", text, &context).unwrap().len(), 300_000);
    }

    #[test]
    fn branches_are_chosen_by_value() {
        let text = "{{#if patches}}P{{else}}-{{/if}}{{#unless vars.dir}}U{{else}}-{{/unless}}{{#if (eq arch \"amd64\")}}A{{/if}}";
        assert_eq!(render("t", text, &context()).unwrap(), "--A");
    }

    #[test]
    fn a_line_break_in_a_value_starts_no_instruction() {
        let mut context = context();
        context.vars.insert("dir".to_owned(), "x\nRUN curl".to_owned());
        assert!(render("t", "{{vars.dir}}", &context).unwrap_err().reason.contains("line break"));
        let mut context = self::context();
        context.patches.push("a\rb".to_owned());
        assert!(render("t", "no variable at all", &context).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_template_panics(text in "([{]{2,3}[#/>^&! ]?[a-z. @\"()|=]{0,12}[}]{1,3}|[a-z\n]{0,5}){0,6}") {
            let _ = render("t", &text, &context());
        }
    }
}
