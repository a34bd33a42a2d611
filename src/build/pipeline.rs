//! Adapter: a build from a cell to a published image, stage after stage.

use super::{
    assemble, base, check, compile, document, headers,
    job::{Against, Job},
    needs, publish, reuse, sign,
};
use crate::{
    image::Digest,
    images::can_sign_images,
    kernel::lacks_compiler,
    kmod::CheckReport,
    oci::ReusedFrom,
    parts::{FindingKind, Parts, Result, TargetError},
    plan::Cell,
};

/// How one build is to be done.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuildOptions {
    /// Publish the result.
    pub push: bool,
    /// Compile even where another kernel's payload would do.
    pub compile: bool,
}

/// The result of a build.
#[derive(Debug)]
pub struct Built {
    /// The image's manifest digest.
    pub digest: Digest,
    /// The report of the check.
    pub report: CheckReport,
    /// The image whose payload this is; `None` where it was compiled.
    pub reused_from: Option<ReusedFrom>,
    /// Bytes sent to the registry; 0 when nothing was pushed.
    pub pushed_bytes: u64,
}

/// Builds one cell, or takes over a published payload.
pub async fn build(parts: &Parts, cell: &Cell, options: BuildOptions) -> Result<Built> {
    let job = Job::of(parts, cell)?;
    // What would stop the build at its end is found before the work.
    check::can_check(&job).await?;
    if options.push {
        can_sign_images(parts).await?;
    }
    let headers = headers::fetch(&job).await?;
    sign::can_sign(&job, &headers).await?;
    let needed = needs::fetch(&job).await?;
    let against = Against { headers, needed };

    let reused = if options.compile { None } else { reuse::find(&job, &against).await? };
    let checked = if let Some(checked) = reused {
        checked
    } else {
        if let Some(detail) = lacks_compiler(job.family, against.headers.compiler) {
            return Err(TargetError::finding(FindingKind::Compile, detail, None));
        }
        let base = base::prepare(&job, &against.headers).await?;
        let payload = compile::compile(&job, &base, &against).await?;
        check::check(&job, &against, payload, None).await?
    };

    let image = assemble::assemble(&job, &checked).await?;
    let documents = document::document(&job, &checked, &image).await?;
    let digest = image.assembled.digest.clone();
    let pushed_bytes = if options.push { publish::publish(&job, &image, &documents).await? } else { 0 };
    Ok(Built { digest, report: checked.report, reused_from: checked.payload.reused_from, pushed_bytes })
}
