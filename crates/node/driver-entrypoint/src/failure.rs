//! Record of a replacement of drivers that failed on this node. Without it, each restart of the container would take the
//! node's interfaces down twice. A boot removes a record below `/run`.

use sha2::{Digest as _, Sha256};

use crate::{error::Error, files, modules::load::Loader, node::Node};

pub(crate) struct FailureRecord<'a> {
    pub(crate) node: &'a Node<'a>,
    /// File with the digest of the image that failed, and the reason.
    pub(crate) file: String,
    /// Path of another record, which outlives a boot and also has to be removed where it exists.
    pub(crate) lasting_file: Option<String>,
    /// Digest of this image's modules and their parameters.
    pub(crate) image: String,
}

impl FailureRecord<'_> {
    /// Fails if the replacement with this image has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Self { node, file, lasting_file, image } = self;
        let text = files::text(node.paths.at(file)).unwrap_or_default();
        let (with, boot) = match lasting_file {
            Some(other) => (format!(", with {other} where it exists,"), ""),
            None if file.starts_with("/run/") => (String::new(), ", and so does a boot"),
            None => (String::new(), ""),
        };
        match text.split_once('\n') {
            Some((failed, reason)) if failed == image => Err(Error::new(
                format!("this image's drivers failed on this node, and are not tried again: {reason}"),
                format!(
                    "roll out another image, or change the parameters; the removal of {file}{with} on the node allows another try{boot}"
                ),
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

/// Digest of the identity and parameters of an image's modules `names`, and of the text `extra_text`.
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
