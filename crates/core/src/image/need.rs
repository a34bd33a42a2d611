//! The dependencies that a driver image is compiled against, in addition to the kernel.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use crate::definition::{
    OneOf, TEXT,
    checked::{HeadersPath, ImageName},
    one_of,
};

/// Exposed headers that an image is compiled against. They come from another driver image for the same kernel, or from a tree
/// that the user provides, for example one collected from a host with its own driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum Need {
    /// Headers that the driver image of this name exposes.
    Image(ImageName),
    /// An existing tree.
    Tree {
        /// Name of the directory under `needs/` in the build context.
        name: ImageName,
        /// A directory or archive with the tree at its usual paths (`usr/src/ofa_kernel/...`), relative to the definitions
        /// directory. `{{release}}` is replaced with the kernel release.
        #[schemars(regex(pattern = HeadersPath::PATTERN))]
        tree: HeadersPath,
    },
}

impl Need {
    /// Name of the directory under `needs/` in the build context.
    pub fn name(&self) -> &ImageName {
        match self {
            Self::Image(name) | Self::Tree { name, tree: _ } => name,
        }
    }

    /// The needed driver image; `None` for a tree.
    pub fn image(&self) -> Option<&ImageName> {
        match self {
            Self::Image(name) => Some(name),
            Self::Tree { .. } => None,
        }
    }
}

impl<'de> Deserialize<'de> for Need {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Tree {
            name: ImageName,
            tree: HeadersPath,
        }

        let expected = "the name of a driver image, or `{name: NAME, tree: PATH}`";
        Ok(match one_of(deserializer, [TEXT, Unexpected::Map], expected)? {
            OneOf::First(name) => Self::Image(name),
            OneOf::Second(Tree { name, tree }) => Self::Tree { name, tree },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: serde_json::Value) -> Result<Need, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn an_image_or_a_tree() {
        let image = read(serde_json::json!("mofed")).unwrap();
        assert_eq!(image.image(), Some(image.name()));
        let tree =
            read(serde_json::json!({"name": "mofed", "tree": "trees/ofa-{{release}}.tar.gz"})).unwrap();
        assert_eq!((tree.name(), tree.image()), (image.name(), None));
        for need in [image, tree] {
            assert_eq!(read(serde_json::to_value(&need).unwrap()), Ok(need));
        }
    }

    #[test]
    fn a_mistake_is_told_with_its_reason() {
        let wrong = [
            serde_json::json!("Mofed"),
            serde_json::json!({"name": "mofed"}),
            serde_json::json!({"name": "mofed", "tree": "{{kernel}}"}),
            serde_json::json!({"name": "mofed", "tree": "/srv", "path": "/srv"}),
            serde_json::json!(1),
        ];
        let told: Vec<String> = wrong.map(|value| read(value).unwrap_err()).into();
        insta::assert_snapshot!(told.join("\n"));
    }
}
