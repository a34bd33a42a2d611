//! Pure: a base whose driver comes out of NVIDIA's own installer.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use crate::definition::{
    BootstrapSpec, OneOf, TEXT,
    checked::{ImageName, PackageToInstall, Suite},
    one_of,
};

/// User space and firmware of NVIDIA's installer (`.run`), which is read and never run, on packages of a distribution.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum RunfileBase {
    /// The source that is the installer: what computes, on Debian 12.
    Compute(ImageName),
    /// The same, and what is wanted of it.
    Spec(RunfileSpec),
}

/// What of the installer goes into the base, and what is below it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunfileSpec {
    /// The source of the image that is the installer, or the directory that it unpacks to. Whatever part of it is compiled
    /// (`subdir`), the base is made of the whole.
    pub source: ImageName,
    /// What draws, too: OpenGL, EGL, Vulkan, OptiX, VDPAU, the driver of an X server.
    #[serde(default)]
    pub graphics: bool,
    /// Sources that are NVIDIA's redistributable archives of the same version: fabric manager, NSCQ, IMEX.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub archives: Vec<ImageName>,
    /// The packages below it; Debian 12 with kmod when absent.
    #[serde(default = "debian")]
    pub bootstrap: BootstrapSpec,
}

impl RunfileBase {
    /// All that it says.
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
        let expected = "the name of a source, or `{source: NAME}` with what else is wanted";
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
    fn a_name_or_more_words() {
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
