//! Pure: what is worth knowing about a module beside its verdict.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::Serialize;

use super::{KernelFacts, Module, Signature};

/// What is worth knowing about a module beside its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleAbout {
    /// `version` of its `.modinfo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `srcversion` of its `.modinfo`: a digest of its sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub srcversion: Option<String>,
    /// Its licence, as it says itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub licence: Option<String>,
    /// How it taints the kernel, by `Documentation/admin-guide/tainted-kernels.rst`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Who signed it, where that can be read. Whether the signature is right, only the kernel's keys tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<SignedBy>,
    /// Modules that it was linked against when it was built.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub depends: Vec<String>,
    /// What it is loaded for: devices, file systems, protocols.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Firmware files that it may ask for, relative to `/lib/firmware`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub firmware: Vec<String>,
    /// Those of them that the payload does not hold; none where no whole payload was checked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_firmware: Vec<String>,
    /// The kernel's own module of the same name, relative to its module directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadows: Option<String>,
}

/// Who signed a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SignedBy {
    /// The name in the certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
    /// The certificate's serial number, or the key's identifier.
    pub key_id: String,
    /// The digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
}

/// How a module taints the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "lowercase")]
pub enum Taint {
    /// Its licence is not GPL-compatible.
    Proprietary,
    /// It was not built with the kernel.
    #[strum(to_string = "out of tree")]
    OutOfTree,
    /// The kernel knows signatures, and it has none.
    Unsigned,
    /// It is from `drivers/staging`.
    Staging,
    /// It patches the running kernel.
    #[strum(to_string = "live patch")]
    LivePatch,
    /// It is a test of the kernel itself.
    Test,
}

impl Taint {
    /// The letter in `/proc/sys/kernel/tainted`'s text form and in the kernel's oopses.
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
    /// Puts together what a module says of itself and what the kernel has in its place. `files` are all files of
    /// the payload.
    pub(super) fn of(module: &Module, kernel: &KernelFacts, files: Option<&[String]>) -> Self {
        let field = |key| module.field(key).map(str::to_owned);
        let list = |key| module.fields(key).map(str::to_owned).collect::<Vec<_>>();
        let firmware = list("firmware");
        let missing = files.map(|files| missing(&firmware, files, kernel)).unwrap_or_default();
        let depends = module.field("depends").unwrap_or_default();
        Self {
            version: field("version"),
            srcversion: field("srcversion"),
            licence: field("license"),
            taints: taints(module, kernel),
            signed_by: signed_by(&module.signature),
            depends: depends.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
            aliases: list("alias"),
            missing_firmware: missing,
            firmware,
            shadows: shadowed(module, kernel),
        }
    }
}

/// `check_modinfo` and `module_augment_kernel_taints` in `kernel/module/main.c`.
fn taints(module: &Module, kernel: &KernelFacts) -> Vec<Taint> {
    let has = |key| module.field(key).is_some();
    let signed = matches!(module.signature, Signature::By(_) | Signature::Unread(_));
    let all = [
        (Taint::Proprietary, !module.is_gpl_compatible()),
        (Taint::OutOfTree, !has("intree")),
        (Taint::Unsigned, kernel.config.is_set("MODULE_SIG") && !signed),
        (Taint::Staging, has("staging")),
        (Taint::LivePatch, has("livepatch")),
        // Linux 6.0, commit 74829ddf5977.
        (Taint::Test, has("test") && kernel.since(6, 0)),
    ];
    all.into_iter().filter(|(_, is)| *is).map(|(taint, _)| taint).collect()
}

fn signed_by(signature: &Signature) -> Option<SignedBy> {
    let Signature::By(signer) = signature else { return None };
    Some(SignedBy {
        signer: signer.name.clone(),
        key_id: signer.key_id.clone(),
        hash: signer.hash.map(str::to_owned),
    })
}

fn shadowed(module: &Module, kernel: &KernelFacts) -> Option<String> {
    kernel.beyond_headers.in_tree.as_ref()?.value.modules.get(&module.name).cloned()
}

/// The directories are those of `fw_path` in `drivers/base/firmware_loader/main.c`, the endings those of
/// `CONFIG_FW_LOADER_COMPRESS`. A name may end in a pattern, which only tells people what to look for.
fn missing(firmware: &[String], files: &[String], kernel: &KernelFacts) -> Vec<String> {
    if firmware.is_empty() {
        return Vec::new();
    }
    let release = kernel.release.as_str();
    let (updates, own) = (format!("updates/{release}/"), format!("{release}/"));
    let present: BTreeSet<&str> = files
        .iter()
        .filter_map(|path| {
            let path = path.trim_start_matches("./").trim_start_matches('/');
            let path = path.strip_prefix("usr/").unwrap_or(path).strip_prefix("lib/firmware/")?;
            let inner = [updates.as_str(), "updates/", &own].iter().find_map(|part| path.strip_prefix(part));
            let name = inner.unwrap_or(path);
            Some([".xz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name))
        })
        .collect();
    let missing: BTreeSet<&String> = firmware
        .iter()
        .filter(|name| match name.find(['*', '?', '[']) {
            None => !present.contains(name.as_str()),
            Some(pattern) => !present.iter().any(|file| file.starts_with(name.get(..pattern).unwrap_or(""))),
        })
        .collect();
    missing.into_iter().cloned().collect()
}
