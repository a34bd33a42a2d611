//! Drafts definitions from resources of the Network Operator and the GPU Operator, whose drivers farrier
//! ships definitions for (docs/operators.md).

use std::sync::LazyLock;

use farrier_core::image::OperatorResource;
use farrier_definitions::shipped_image;
use farrier_yaml::Node;
use regex::Regex;

use super::{
    Context, Drafted,
    draft::quoted,
    fields::{self, text_at, value_at},
};

static OFED: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\d{2}\.\d{2}-\d+(\.\d+){3}").ok());

/// Returns the driver's section of a resource, if the operator installs a driver that farrier supports.
fn section(kind: OperatorResource, resource: &Node) -> Option<Node> {
    let section =
        kind.driver_path().iter().try_fold(value_at(resource, "spec")?, |node, key| value_at(&node, key))?;
    let has = |field: &str, value: &str| text_at(&section, field).as_deref() == Some(value);
    let is_off = has("enabled", "false") || has("useNvidiaDriverCRD", "true");
    let is_gpu = text_at(&section, "driverType").is_none_or(|kind| kind == "gpu");
    (!is_off && is_gpu).then_some(section)
}

/// Adds the shipped definitions of the resource's driver. Returns `false` if the operator installs no
/// supported driver.
pub fn draft(
    drafted: &mut Drafted,
    kind: OperatorResource,
    resource: &Node,
    context: &Context,
) -> Result<bool, String> {
    let Some(section) = section(kind, resource) else { return Ok(false) };
    let name = text_at(resource, "metadata.name").unwrap_or_default();
    let origin = format!("{kind} {name}");
    let path: String = ["spec"].iter().chain(kind.driver_path()).flat_map(|key| [*key, "."]).collect();
    let mut remarks =
        fields::remarks(&origin, &path, fields::leaves(&section), include_str!("forms/operators.txt"));
    let rollout = context.rollout_to_resource(kind, None, &name);
    if kind.is_of_gpu_operator() {
        let has = |field: &str, value: &str| text_at(&section, field).as_deref() == Some(value);
        let is_proprietary = has("kernelModuleType", "proprietary") || has("useOpenKernelModules", "false");
        let image = match (is_proprietary, has("rdma.enabled", "true")) {
            (true, _) => "nvidia-gpu-proprietary",
            (false, true) => "nvidia-peermem",
            (false, false) => "nvidia-gpu",
        };
        for remark in remarks.iter_mut().filter(|remark| remark.field == format!("{path}version")) {
            remark.becomes = None;
            remark.says =
                "Debian's package is used, in its version: the file's comments describe NVIDIA's own sources"
                    .into();
        }
        let text = shipped_image(image).unwrap_or_default();
        drafted.add_resource(image, text, &rollout, context)?;
        drafted.remarks.extend(remarks);
        return Ok(true);
    }
    drafted.remarks.extend(remarks);
    let mut text = shipped_image("mofed").unwrap_or_default().to_owned();
    let version = text_at(&section, "version").unwrap_or_default();
    if let (Some(old), Some(new)) = (ofed(&text), ofed(&version)) {
        let archive = format!("MLNX_OFED_SRC-debian-{new}.tgz");
        text = text.replace(&format!("MLNX_OFED_SRC-debian-{old}.tgz"), &archive);
        let (before, after) = text.split_once("  version: ").unwrap_or_default();
        let after = after.split_once('\n').unwrap_or_default().1;
        text = format!("{before}  version: {}\n{after}", quoted(&version));
        let step = format!("put {archive} where images/mofed.yaml looks for it");
        drafted.by_hand.extend((!drafted.by_hand.contains(&step)).then_some(step));
    }
    drafted.add_resource("mofed", &text, &rollout, context)?;
    Ok(true)
}

/// Finds OFED's version in a text, which may be a version of DOCA.
fn ofed(text: &str) -> Option<String> {
    Some(OFED.as_ref()?.find(text)?.as_str().to_owned())
}
