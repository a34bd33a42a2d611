//! Pure: why a header set was not imported, and what to do about it.

use std::path::PathBuf;

use crate::{
    kernel::{Architecture, KernelRelease},
    oci::LayerError,
};

/// Why a header set was not imported. Nothing of it is left in the cache or the store.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A source that is not there.
    #[error("import {path}: there is no such file or directory")]
    Absent {
        /// As named.
        path: String,
    },
    /// Two answers to one question.
    #[error("import {}: each of them is {what}", sources.join(", "))]
    Ambiguous {
        /// What there can be only one of.
        what: &'static str,
        /// The sources.
        sources: Vec<String>,
    },
    /// No build tree.
    #[error("find the build directory of {release} in {sources}: {reason}")]
    NoBuild {
        /// The kernel.
        release: KernelRelease,
        /// Where it was looked for.
        sources: String,
        /// What there is instead.
        reason: String,
    },
    /// A build directory (`O=`) without the sources that it was configured from.
    #[error(
        "use the build directory {build}: it was made from {source_tree}, which is not among the sources"
    )]
    NoSourceTree {
        /// The build directory.
        build: String,
        /// What its Makefile names.
        source_tree: String,
    },
    /// A link that would lead into the build container or the machine that builds.
    #[error("use link {link}: it leads to {target}, which is not part of the header set")]
    Escapes {
        /// The link.
        link: String,
        /// What it says.
        target: String,
    },
    /// A device, a socket, a FIFO.
    #[error("use {path}: it is neither a file, a directory nor a link")]
    Kind {
        /// Which.
        path: String,
    },
    /// A tree that is larger than any header set.
    #[error("use {path}: a header set has at most {limit}")]
    Limit {
        /// The tree.
        path: String,
        /// What was exceeded.
        limit: String,
    },
    /// A program that kbuild runs for every module.
    #[error("find {tool} in the header set: kbuild runs it for every module")]
    NoTool {
        /// Relative to the build directory.
        tool: &'static str,
    },
    /// The same, for another machine.
    #[error("run {tool} of the header set on {wanted}: it is {found}")]
    ToolKind {
        /// Relative to the build directory.
        tool: &'static str,
        /// What it is.
        found: String,
        /// What it should be for.
        wanted: Architecture,
    },
    /// Nothing says which compiler the kernel was built with.
    #[error("find CONFIG_CC_VERSION_TEXT in the configuration of {release}: the compiler is not known")]
    NoCompiler {
        /// The kernel.
        release: KernelRelease,
    },
    /// Another header set stands there.
    #[error(
        "import headers of {release} ({arch}): {place} holds others, with content {holds}, not {content}"
    )]
    Different {
        /// The kernel.
        release: KernelRelease,
        /// The architecture.
        arch: Architecture,
        /// Repository and tag, or the cache.
        place: String,
        /// What is there.
        holds: String,
        /// What was to be imported.
        content: String,
    },
    /// An artifact of the store that says something impossible of itself.
    #[error("use the headers in {place}: its annotation {key} holds {value:?}")]
    Annotation {
        /// Repository and tag.
        place: String,
        /// Which one.
        key: &'static str,
        /// Its value, cut to 80 characters.
        value: String,
    },
    /// An artifact of the store that holds something else than its notes say.
    #[error("use the headers in {place}: their content is {found}, its annotation says {stated}")]
    Content {
        /// Repository and tag.
        place: String,
        /// As computed.
        found: String,
        /// As stated.
        stated: String,
    },
    /// What was found in the store a moment ago.
    #[error("fetch the headers of {release} ({arch}) from the store: they are not there any more")]
    Vanished {
        /// The kernel.
        release: KernelRelease,
        /// The architecture.
        arch: Architecture,
    },
    /// The layer cannot be written.
    #[error("write the header set's layer {path}")]
    Layer {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: LayerError,
    },
}

impl ImportError {
    /// Is it what the command names that is wrong, rather than the store or this machine?
    pub fn is_usage(&self) -> bool {
        !matches!(
            self,
            Self::Annotation { .. } | Self::Content { .. } | Self::Vanished { .. } | Self::Layer { .. }
        )
    }

    /// What to do about it.
    pub fn remedy(&self) -> Option<String> {
        let text = match self {
            Self::Absent { .. } => "name a tarball, a directory, or .deb or .rpm files",
            Self::Ambiguous { .. } => "name the sources of one header set only",
            Self::NoBuild { release, .. } => {
                return Some(format!(
                    "name the kernel's build directory or an archive of it as a further source; `make tar-pkg` packs \
                     modules but no headers. A package or archive of headers has usr/src/ or lib/modules/{release}/build"
                ));
            }
            Self::NoSourceTree { source_tree, .. } => {
                return Some(format!("name {source_tree}, or an archive of it, as a further source"));
            }
            Self::Escapes { .. } => {
                "name what it leads to as a further source, or remove the link; nothing of the header set was kept"
            }
            Self::Kind { .. } => "remove it: a header set holds only files, directories and links",
            Self::Limit { .. } => "name a kernel's build tree or header package, not a directory above it",
            Self::NoTool { .. } => {
                "run `make modules_prepare` in the build tree, with the kernel's own .config, and import again"
            }
            Self::ToolKind { wanted, .. } => {
                return Some(format!(
                    "make it on a machine of this architecture: `make modules_prepare` (or `make scripts`) on {wanted}, \
                     then import again"
                ));
            }
            Self::NoCompiler { .. } => {
                "run `make olddefconfig modules_prepare` in the build tree with the kernel's own .config and compiler"
            }
            Self::Different { place, .. } => {
                return Some(format!(
                    "a release's headers should never change: give the changed kernel another local version; or, if \
                     {place} is wrong, import with --replace: new builds for this kernel then use the new headers, and \
                     images that were built with the old ones get another input hash"
                ));
            }
            Self::Annotation { place, .. } | Self::Content { place, .. } => {
                return Some(format!("import the headers again with --replace, or delete {place}"));
            }
            Self::Vanished { .. } => {
                "import them again, or let farrier look for them elsewhere: run it again"
            }
            Self::Layer { .. } => return None,
        };
        Some(text.to_owned())
    }
}
