//! Runs the stages of a build, from a cell to a published image.

use farrier_core::{facts::ReusedFrom, image::Digest, kernel::missing_compiler, plan::Cell};
use kmod::CheckReport;

use super::{
    assemble, base,
    cell_build::{CellBuild, CompileInputs},
    check, compile, document, headers, needs, publish, reuse, sign,
};
use crate::{
    images::{ImageSigner, output_maker},
    services::{BuildError, BuildServices, ProblemKind, Result},
};

#[derive(Clone, Copy, Debug, Default)]
pub struct BuildOptions {
    /// Publish the result.
    pub push: bool,
    /// Compile even if another kernel's payload could be reused.
    pub compile: bool,
}

/// Result of a build.
#[derive(Debug)]
pub struct Built {
    /// Manifest digest of the image.
    pub digest: Digest,
    pub report: CheckReport,
    /// The image whose payload was reused; `None` if the payload was compiled.
    pub reused_from: Option<ReusedFrom>,
    /// Bytes sent to the registry; 0 if nothing was pushed.
    pub pushed_bytes: u64,
}

/// Builds one cell, or reuses a published payload.
pub async fn build(services: &BuildServices, cell: &Cell, options: BuildOptions) -> Result<Built> {
    let build = CellBuild::of(services, cell)?;
    // Fail fast: check signing and boot prerequisites before compiling.
    check::ensure_boot_check_is_possible(&build).await?;
    if options.push {
        ImageSigner::load(services).await?;
        output_maker(&services.tools, build.image)?;
    }
    let headers = headers::fetch(&build).await?;
    sign::ensure_can_sign_modules(&build, &headers).await?;
    let needed = needs::fetch(&build).await?;
    let compile_inputs = CompileInputs { headers, needed };

    let reused = if options.compile { None } else { reuse::find(&build, &compile_inputs).await? };
    let checked = if let Some(checked) = reused {
        checked
    } else {
        if let Some(detail) = missing_compiler(build.family, compile_inputs.headers.compiler) {
            return Err(BuildError::problem(ProblemKind::Compile, detail, None));
        }
        let base = base::prepare(&build, &compile_inputs.headers).await?;
        let payload = compile::compile(&build, &base, &compile_inputs).await?;
        check::check(&build, &compile_inputs, payload, None).await?
    };

    let image = assemble::assemble(&build, &checked).await?;
    let documents = document::document(&build, &checked, &image).await?;
    let digest = image.assembled.digest.clone();
    let pushed_bytes = if options.push { publish::publish(&build, &image, &documents).await? } else { 0 };
    Ok(Built { digest, report: checked.report, reused_from: checked.payload.reused_from, pushed_bytes })
}
