//! Computes the input hash of a cell, its input hash without module signing, and its recipe hash.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    BUILD_FORMAT, CellNeed, CellPatch, ENTRYPOINT_FORMAT, NamedInputs, ResolvedImage, SIGNING_FORMAT,
    SignedWith, SkipReason, changed_inputs::DOCKERFILE,
};
use crate::{
    image::{
        Digest, DriverImageSpec, FieldHasher, ImageName, InputHash, RuntimeBase, RuntimeSpec, SourceSpec,
    },
    kernel::{Architecture, KernelLabel, KernelTarget, uname_script},
};

/// Inputs of the hashes besides the Dockerfile.
pub(super) struct HashInputs<'a> {
    pub(super) spec: &'a DriverImageSpec,
    pub(super) resolved: &'a ResolvedImage,
    pub(super) patches: &'a [CellPatch],
    pub(super) needs: &'a [CellNeed],
    pub(super) toolchain: &'a str,
    pub(super) headers: &'a str,
    pub(super) target: &'a KernelTarget,
}

/// Returns the hasher of the input hash, with all inputs added.
pub(super) fn input_hasher(inputs: &HashInputs<'_>, dockerfile: &str) -> Result<FieldHasher, SkipReason> {
    let mut hasher = kernel_hasher(inputs, dockerfile);
    add_definition(&mut hasher, inputs)?;
    add_base(&mut hasher, inputs)?;
    // Add nothing without signing, so that images with unsigned modules keep their hash.
    if let Some(SignedWith { certificate, signed }) = &inputs.resolved.signed_with {
        hasher
            .add("module-signing", SIGNING_FORMAT)
            .add("certificate", certificate.to_string())
            .add("signed", canonical("signed", signed)?);
    }
    Ok(hasher)
}

pub(super) fn unsigned_hash(inputs: &HashInputs<'_>, dockerfile: &str) -> Result<InputHash, SkipReason> {
    let mut hasher = kernel_hasher(inputs, dockerfile);
    add_definition(&mut hasher, inputs)?;
    // A base from `needs` changes whenever the signing key changes, and is not part of the payload.
    if !matches!(inputs.spec.runtime.base, Some(RuntimeBase::Need(_))) {
        add_base(&mut hasher, inputs)?;
    }
    Ok(hasher.finish())
}

/// Returns the inputs of the hash by name, with the template and the variables instead of the Dockerfile.
pub(super) fn named_inputs(
    hasher: &FieldHasher,
    spec: &DriverImageSpec,
    templates: &BTreeMap<String, String>,
    dockerfile: &str,
) -> Result<NamedInputs, SkipReason> {
    let mut inputs = hasher.recorded();
    inputs.remove("dockerfile");
    let mut extra = FieldHasher::new(BUILD_FORMAT);
    extra
        .add(DOCKERFILE, Digest::of(dockerfile.as_bytes()).as_str())
        .add("kernelVars", canonical("kernelVars", &spec.kernel_vars)?)
        .add("firmware", canonical("firmware", &spec.firmware)?);
    if let Some(text) = templates.get(spec.template.as_str()) {
        extra.add(&format!("template {}", spec.template), Digest::of(text.as_bytes()).as_str());
    }
    for (name, value) in &spec.vars {
        extra.add(&format!("vars.{name}"), value.to_string());
    }
    inputs.extend(extra.recorded());
    Ok(inputs)
}

fn kernel_hasher(inputs: &HashInputs<'_>, dockerfile: &str) -> FieldHasher {
    let HashInputs { spec: _, resolved, patches: _, needs: _, toolchain, headers, target } = inputs;
    let KernelTarget { os, os_version, release, arch } = target;
    let mut hasher = FieldHasher::new(BUILD_FORMAT);
    hasher
        .add("dockerfile", dockerfile)
        .add("os", os.as_str())
        .add("os-version", os_version.as_str())
        .add("release", release.as_str())
        .add("arch", arch.as_str())
        .add("headers", headers)
        .add("toolchain", toolchain)
        .add("version", &resolved.version);
    hasher
}

/// Returns the recipe hash. Cells with the same recipe hash may reuse each other's payload. The caller has removed the
/// base's name from the Dockerfile. This function replaces the kernel release and label with placeholders. Other
/// differences between kernels, such as an extra step, change the hash.
pub(super) fn recipe(
    inputs: &HashInputs<'_>,
    family: &ImageName,
    dockerfile: &str,
) -> Result<InputHash, SkipReason> {
    let HashInputs { spec: _, resolved, patches: _, needs: _, toolchain: _, headers: _, target } = inputs;
    let KernelTarget { os, os_version, release, arch } = target;
    let mut dockerfile = dockerfile.replace(release.as_str(), "{{kernel.release}}");
    if let Some(label) = KernelLabel::of(release) {
        dockerfile = dockerfile.replace(label.as_str(), "{{kernel.label}}");
    }
    let mut hasher = FieldHasher::new(BUILD_FORMAT);
    hasher
        .add("recipe", dockerfile)
        .add("os", os.as_str())
        .add("os-version", os_version.as_str())
        .add("arch", arch.as_str())
        .add("uname", uname_script("{{kernel.release}}", arch.gnu_name()))
        .add("family", family.as_str())
        .add("version", &resolved.version);
    add_definition(&mut hasher, inputs)?;
    add_base(&mut hasher, inputs)?;
    Ok(hasher.finish())
}

/// Adds the definition's fields and their resolved values.
fn add_definition(hasher: &mut FieldHasher, inputs: &HashInputs<'_>) -> Result<(), SkipReason> {
    let HashInputs { spec, resolved, patches, needs, toolchain: _, headers: _, target: _ } = inputs;
    // Name every field, so that a new field cannot be forgotten. Fields are ignored with `_` for two reasons: they do not
    // change the content of the image, or another input already contains them. The Dockerfile contains `template`,
    // `vars` and `firmware`, and the toolchain contains `build_packages`.
    let DriverImageSpec {
        version: _,
        template: _,
        vars: _,
        kernel_vars: _,
        sources,
        patches: _,
        firmware: _,
        build_packages: _,
        needs: _,
        exposes,
        nodes: _,
        kernels: _,
        release: _,
        supplier: _,
        license: _,
        redistribute: _,
        modules,
        check: _,
        reuse: _,
        runtime,
        output,
        outputs: _,
        build: _,
        tags: _,
        on_conflict: _,
        rollout: _,
    } = spec;
    let RuntimeSpec { base: _, entrypoint, env } = runtime;
    hasher
        .add("modules", canonical("modules", modules)?)
        .add("output", canonical("output", output)?)
        .add("entrypoint", canonical("runtime.entrypoint", entrypoint)?)
        .add("env", canonical("runtime.env", env)?);
    // Add nothing for an empty list, so that images without the list keep their hash.
    if !exposes.is_empty() {
        hasher.add("exposes", canonical("exposes", exposes)?);
    }
    for SourceSpec { name, from: _, unpack, subdir, license: _, redistribute: _ } in sources {
        let identity = resolved
            .sources
            .get(name.as_str())
            .ok_or_else(|| SkipReason::Unresolved { detail: format!("source {name} was not looked up") })?;
        hasher
            .add("source", name.as_str())
            .add("identity", identity)
            .add("unpack", canonical("unpack", unpack)?)
            .add("subdir", canonical("subdir", subdir)?);
    }
    for CellPatch { index: _, name, sha256 } in *patches {
        hasher.add("patch", name).add("sha256", sha256);
    }
    // Leave out the image that exposes the headers: another image with the same exposed headers is equivalent.
    for CellNeed { name, version: _, exposed, image: _ } in *needs {
        hasher.add("need", name.as_str()).add("exposed", exposed.to_string());
    }
    Ok(())
}

/// Adds the runtime base and `driver-entrypoint`.
fn add_base(hasher: &mut FieldHasher, inputs: &HashInputs<'_>) -> Result<(), SkipReason> {
    let HashInputs { spec, resolved, patches: _, needs, toolchain: _, headers: _, target } = inputs;
    match (&spec.runtime.base, &resolved.base_identity) {
        (None, _) => {}
        (Some(RuntimeBase::Need(name)), _) => {
            let need = needs.iter().find(|need| need.name == *name);
            let image = need.and_then(|need| need.image.as_ref());
            let image = image.ok_or_else(|| SkipReason::Definition {
                detail: format!("runtime.base: {name} is not among the driver images of `needs`"),
            })?;
            hasher.add("base", image.version.to_string());
        }
        (Some(_), Some(identity)) => {
            hasher.add("base", identity);
        }
        (Some(_), None) => {
            return Err(SkipReason::Unresolved { detail: "the runtime base was not looked up".to_owned() });
        }
    }
    // Add nothing without `driver-entrypoint`, so that such images keep their hash.
    if spec.contains_entrypoint() {
        check_entrypoint_exists(resolved, target.arch)?;
        hasher.add("driver-entrypoint", ENTRYPOINT_FORMAT);
    }
    Ok(())
}

/// Fails if no `driver-entrypoint` binary exists for this architecture.
fn check_entrypoint_exists(resolved: &ResolvedImage, arch: Architecture) -> Result<(), SkipReason> {
    if resolved.entrypoints.contains(&arch) {
        return Ok(());
    }
    let detail = match resolved.entrypoints.first() {
        Some(other) => format!(
            "the driver-entrypoint here is for {other}, and the target is {arch} (build it with `cargo build --profile \
             entrypoint` in crates/node/driver-entrypoint for {arch}, and put it beside the other as driver-entrypoint-{arch})"
        ),
        None => "driver-entrypoint was not looked up".to_owned(),
    };
    Err(SkipReason::Unresolved { detail })
}

/// Returns the canonical form of a part of a definition: JSON with fields in declaration order and maps in key order.
pub(super) fn canonical(part: &str, value: &impl Serialize) -> Result<String, SkipReason> {
    serde_json::to_string(value)
        .map_err(|error| SkipReason::Definition { detail: format!("{part} cannot be hashed: {error}") })
}
