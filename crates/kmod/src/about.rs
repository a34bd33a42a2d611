//! Descriptive facts about a module that do not affect its verdict.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::Serialize;

use super::{KernelFacts, Module, Signature};

/// Descriptive facts about a module that do not affect its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleAbout {
    /// `version` of the module's `.modinfo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `srcversion` of the module's `.modinfo`: a digest of its sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub srcversion: Option<String>,
    /// License that the module declares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    /// Taints that the module causes (`Documentation/admin-guide/tainted-kernels.rst`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Signer, if the signature can be parsed. Whether the signature is valid depends on the kernel's keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<SignedBy>,
    /// Modules that this module depends on, as recorded when it was built.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub depends: Vec<String>,
    /// Devices, file systems and protocols for which the module is loaded automatically.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Firmware files that the module may request, relative to `/lib/firmware`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub firmware: Vec<String>,
    /// Firmware files that the image lacks; empty unless a whole image was checked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_firmware: Vec<String>,
    /// The kernel's own module of the same name, relative to its module directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadows: Option<String>,
}

/// Signer of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SignedBy {
    /// Common name of the certificate's issuer, or else its organization.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
    /// Serial number of the certificate, or identifier of the key.
    pub key_id: String,
    /// Digest algorithm of the signature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
}

/// Kernel taint that a module causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "lowercase")]
pub enum Taint {
    /// License that is not GPL-compatible.
    Proprietary,
    /// Module that was not built with the kernel.
    #[strum(to_string = "out of tree")]
    OutOfTree,
    /// Unsigned module, on a kernel that supports signatures.
    Unsigned,
    /// Module from `drivers/staging`.
    Staging,
    /// Module that patches the running kernel.
    #[strum(to_string = "live patch")]
    LivePatch,
    /// Module that tests the kernel itself.
    Test,
}

impl Taint {
    /// Letter of the taint in the text form of `/proc/sys/kernel/tainted` and in oops messages.
    pub fn letter(self) -> char {
        match self {
            Self::Proprietary => 'P',
            Self::OutOfTree => 'O',
            Self::Unsigned => 'E',
            Self::Staging => 'C',
            Self::LivePatch => 'K',
            Self::Test => 'N',
        }
    }
}

impl ModuleAbout {
    /// Describes a module. `present` is the firmware of the image ([`firmware_names`]), if known.
    pub(super) fn of(module: &Module, kernel: &KernelFacts, present: Option<&BTreeSet<&str>>) -> Self {
        let field = |key| module.field(key).map(str::to_owned);
        let list = |key| module.fields(key).map(str::to_owned).collect::<Vec<_>>();
        let firmware = list("firmware");
        let missing_firmware =
            present.map(|present| missing_firmware(&firmware, present)).unwrap_or_default();
        let depends = module.field("depends").unwrap_or_default();
        Self {
            version: field("version"),
            srcversion: field("srcversion"),
            license: field("license"),
            taints: taints(module, kernel),
            signed_by: signed_by(&module.signature),
            depends: depends.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
            aliases: list("alias"),
            missing_firmware,
            firmware,
            shadows: in_tree_file(module, kernel),
        }
    }
}

/// Lists the taints that a module causes, like `check_modinfo` and `module_augment_kernel_taints` in `kernel/module/main.c`.
fn taints(module: &Module, kernel: &KernelFacts) -> Vec<Taint> {
    let has = |key| module.field(key).is_some();
    let is_signed = matches!(module.signature, Signature::By(_) | Signature::Unread(_));
    let conditions = [
        (Taint::Proprietary, !module.is_gpl_compatible()),
        (Taint::OutOfTree, !has("intree")),
        (Taint::Unsigned, kernel.config.is_set("MODULE_SIG") && !is_signed),
        (Taint::Staging, has("staging")),
        (Taint::LivePatch, has("livepatch")),
        // Since Linux 6.0, commit 74829ddf5977.
        (Taint::Test, has("test") && kernel.since(6, 0)),
    ];
    conditions.into_iter().filter(|(_, applies)| *applies).map(|(taint, _)| taint).collect()
}

fn signed_by(signature: &Signature) -> Option<SignedBy> {
    let Signature::By(signer) = signature else { return None };
    Some(SignedBy {
        signer: signer.name.clone(),
        key_id: signer.key_id.clone(),
        hash: signer.hash.map(str::to_owned),
    })
}

/// Returns the file of the in-tree module of the same name.
fn in_tree_file(module: &Module, kernel: &KernelFacts) -> Option<String> {
    kernel.beyond_headers.in_tree.as_ref()?.value.modules.get(&module.name).cloned()
}

/// Returns the names of the firmware among the files of an image. The directories come from `fw_path` in
/// `drivers/base/firmware_loader/main.c`, the endings from `CONFIG_FW_LOADER_COMPRESS`.
pub(super) fn firmware_names<'a>(files: &'a [String], kernel: &KernelFacts) -> BTreeSet<&'a str> {
    let release = kernel.release.as_str();
    let (updates_directory, release_directory) = (format!("updates/{release}/"), format!("{release}/"));
    files
        .iter()
        .filter_map(|path| {
            let path = path.trim_start_matches("./").trim_start_matches('/');
            let path = path.strip_prefix("usr/").unwrap_or(path).strip_prefix("lib/firmware/")?;
            let directories = [updates_directory.as_str(), "updates/", &release_directory];
            let name = directories.iter().find_map(|directory| path.strip_prefix(directory)).unwrap_or(path);
            Some([".xz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name))
        })
        .collect()
}

/// Lists firmware that the image lacks. A pattern counts as present if a file starts with the text before its first wildcard.
fn missing_firmware(firmware: &[String], present: &BTreeSet<&str>) -> Vec<String> {
    let missing: BTreeSet<&String> = firmware
        .iter()
        .filter(|name| match name.find(['*', '?', '[']) {
            None => !present.contains(name.as_str()),
            Some(wildcard) => {
                let start = name.get(..wildcard).unwrap_or("");
                // The names with a common start follow each other.
                !present.range::<&str, _>(start..).next().is_some_and(|file| file.starts_with(start))
            }
        })
        .collect();
    missing.into_iter().cloned().collect()
}
