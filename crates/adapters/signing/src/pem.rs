//! Parses PEM files (RFC 7468, and the older headers of OpenSSL).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use zeroize::Zeroizing;

/// A PEM block.
pub(super) struct Block {
    /// Text after `BEGIN`.
    pub(super) label: String,
    /// Whether the block is encrypted with OpenSSL's legacy encryption (`Proc-Type: 4,ENCRYPTED`).
    pub(super) old_encryption: bool,
    /// Decoded content; `None` if it is not valid base64.
    pub(super) bytes: Option<Zeroizing<Vec<u8>>>,
}

/// All blocks of a text; text between them is ignored.
pub(super) fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let label = line.trim().strip_prefix("-----BEGIN ").and_then(|rest| rest.strip_suffix("-----"));
        let Some(label) = label else { continue };
        let (mut body, mut old_encryption) = (Zeroizing::new(String::with_capacity(text.len())), false);
        for line in lines.by_ref().map(str::trim).take_while(|line| !line.starts_with("-----END ")) {
            old_encryption |= line.starts_with("Proc-Type:") && line.ends_with("ENCRYPTED");
            if !line.contains(':') {
                body.push_str(line);
            }
        }
        let bytes = STANDARD.decode(body.as_bytes()).ok().map(Zeroizing::new);
        blocks.push(Block { label: label.to_owned(), old_encryption, bytes });
    }
    blocks
}
