//! Drafts a definition from a configuration of driverkit, which compiles Falco's kernel module. The fields
//! follow driverkit's `cmd/root_options.go` and `cmd/config_options.go` of summer 2026. A driverkit
//! configuration names one kernel; the definition covers all kernels.

use farrier_yaml::Node;

use super::{
    Context, Drafted,
    fields::{self, text_at},
    name_for,
};

/// Whether the document is a driverkit configuration.
pub fn is_configuration(document: &Node) -> bool {
    let has = |field: &str| text_at(document, field).is_some();
    has("kernelrelease") && (has("target") || has("driverversion"))
}

/// Drafts the definition of the configured module, for all kernels.
pub fn draft(drafted: &mut Drafted, options: &Node, context: &Context) {
    let option = |name: &str, otherwise: &str| text_at(options, name).unwrap_or_else(|| otherwise.to_owned());
    let (module, version) = (option("moduledrivername", "falco"), option("driverversion", "master"));
    let name = name_for(&module);
    let origin = format!("driverkit {name}");
    drafted.remarks.extend(fields::remarks(
        &origin,
        "",
        fields::leaves(options),
        include_str!("forms/driverkit.txt"),
    ));
    let mut draft = context.draft(&origin, name);
    let (owner, repository) = (option("repo.org", "falcosecurity"), option("repo.name", "libs"));
    draft.hint =
        format!("driverkit fetches https://github.com/{owner}/{repository}/archive/{version}.tar.gz");
    // Falco's libs configure the module with CMake, which needs a specific template.
    draft.template = "falco";
    draft.vars = [("moduleName", module.clone()), ("deviceName", option("moduledevicename", "falco"))].into();
    draft.build_packages = &["cmake", "g++"];
    (draft.version, draft.modules) = (version, vec![module]);
    let template = include_str!("forms/falco.Dockerfile.hbs").to_owned();
    drafted.files.insert("templates/falco.Dockerfile.hbs".to_owned(), template);
    drafted.add(draft, context);
}
