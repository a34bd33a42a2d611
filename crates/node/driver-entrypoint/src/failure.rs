//! Record of a replacement of drivers that failed on this node. Without it, each restart of the container would take the
//! node's interfaces down twice: for the new drivers, and to restore the old ones. A boot removes a record below `/run`.

use sha2::{Digest as _, Sha256};

use crate::{error::Error, files, modules::load::Loader, node::Node};

pub(crate) struct FailureRecord<'a> {
    pub(crate) node: &'a Node<'a>,
    /// File with the digest of the image that failed, and the reason.
    pub(crate) file: String,
    /// Record on disk, from which the guard restores `file` after a boot. Only a person removes it.
    pub(crate) lasting_file: Option<String>,
    /// Digest of this image's modules and their parameters.
    pub(crate) image: String,
}

impl FailureRecord<'_> {
    /// Fails if the replacement with this image has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Self { node, file, lasting_file, image } = self;
        let text = files::text(node.paths.at(file)).unwrap_or_default();
        let remedy = match lasting_file {
            Some(other) => format!("remove {file} and {other} on the node"),
            None if file.starts_with("/run/") => format!("remove {file} on the node, or reboot it"),
            None => format!("remove {file} on the node"),
        };
        match text.split_once('\n') {
            Some((failed, reason)) if failed == image => Err(Error::new(
                format!("this image's drivers failed on this node, and are not tried again: {reason}"),
                format!("roll out another image or change the parameters; to try this image again, {remedy}"),
            )),
            _ => Ok(()),
        }
    }

    /// Records that the replacement failed, or removes the record. An error that other programs cause is not recorded:
    /// the next try may succeed.
    pub(crate) fn update(&self, replaced: &Result<(), Error>) {
        let Self { node, file, lasting_file: _, image } = self;
        match replaced {
            Ok(()) => node.log.warn_of(files::remove(node, file)),
            Err(error) if error.is_transient() => {}
            Err(error) => node.log.warn_of(files::write(node, file, &format!("{image}\n{}", error.cause()))),
        }
    }
}

/// Returns the digest of the identities and parameters of an image's modules `names`, and of `extra_text`.
pub(crate) fn digest<'a>(
    loader: &Loader<'_>,
    names: impl IntoIterator<Item = &'a String>,
    extra_text: &str,
) -> Result<String, Error> {
    let mut digest = Sha256::new();
    for name in names {
        let Some(file) = loader.index.image_file(name) else { continue };
        let info = file.info()?;
        let identity = info.identity().unwrap_or_default();
        digest.update(format!("{name} {identity} {}\n", loader.parameters.of(name)));
    }
    digest.update(extra_text);
    Ok(hex::encode(digest.finalize()))
}
