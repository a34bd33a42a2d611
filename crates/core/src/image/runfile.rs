//! A base image with the user space of NVIDIA's installer.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use crate::definition::{
    BootstrapSpec, OneOf, TEXT,
    checked::{ImageName, PackageToInstall, Suite},
    one_of,
};

/// User space and firmware from NVIDIA's installer (`.run`), on top of a distribution's packages. The installer is unpacked and
/// never executed.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum RunfileBase {
    /// Name of the source that contains the installer. The base has only the compute parts, on Debian 12.
    Compute(ImageName),
    /// The source, with options.
    Spec(RunfileSpec),
}

/// Parts of the installer that go into the base, and the packages below them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunfileSpec {
    /// Name of the image's source that contains the installer: its `.run` file, or the directory that the file unpacks to. The
    /// base is made from the whole installer, even if only a part of it (`subdir`) is compiled.
    pub source: ImageName,
    /// Include the graphics parts, too: OpenGL, EGL, Vulkan, OptiX, VDPAU, the X server's driver.
    #[serde(default)]
    pub graphics: bool,
    /// Sources that are NVIDIA's redistributable archives of the same version: fabric manager, NSCQ, IMEX.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub archives: Vec<ImageName>,
    /// Packages below the user space. Default: Debian 12 with kmod.
    #[serde(default = "debian")]
    pub bootstrap: BootstrapSpec,
}

impl RunfileBase {
    /// Returns the full specification, with defaults for the short form.
    pub fn spec(&self) -> RunfileSpec {
        match self {
            Self::Compute(source) => RunfileSpec {
                source: source.clone(),
                graphics: false,
                archives: Vec::new(),
                bootstrap: debian(),
            },
            Self::Spec(spec) => spec.clone(),
        }
    }
}

fn debian() -> BootstrapSpec {
    BootstrapSpec {
        suite: Suite::bookworm(),
        extra_suites: Vec::new(),
        components: Vec::new(),
        include: vec![PackageToInstall::kmod()],
        mirror: None,
        signed_by: None,
    }
}

impl<'de> Deserialize<'de> for RunfileBase {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "the name of a source, or `{source: NAME}` with further fields";
        Ok(match one_of(deserializer, [TEXT, Unexpected::Map], expected)? {
            OneOf::First(source) => Self::Compute(source),
            OneOf::Second(spec) => Self::Spec(spec),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_a_source_name_or_a_specification() {
        let read = |json| serde_json::from_value::<RunfileBase>(json).map_err(|error| error.to_string());
        let short = read(serde_json::json!("nvidia")).unwrap();
        let long = read(serde_json::json!({"source": "nvidia"})).unwrap();
        assert_eq!(short.spec(), long.spec());
        assert_eq!((long.spec().graphics, long.spec().bootstrap.include), (false, debian().include));
        let ubuntu = serde_json::json!({"suite": "jammy", "include": ["kmod", "nvidia-fabricmanager-535={{version}}-*"]});
        let graphics =
            read(serde_json::json!({"source": "nvidia", "graphics": true, "bootstrap": ubuntu})).unwrap();
        assert!(graphics.spec().graphics);
        assert_eq!(graphics.spec().bootstrap.suite, "jammy");
        for base in [short, long, graphics] {
            assert_eq!(read(serde_json::to_value(&base).unwrap()), Ok(base));
        }
        for wrong in
            [serde_json::json!("No Name"), serde_json::json!({"graphics": true}), serde_json::json!([])]
        {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
