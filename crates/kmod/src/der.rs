//! The subset of DER (ITU-T X.690) that module signatures use.
//!
//! This custom parser exists beside crate `der` for two reasons. It accepts the encodings of the kernel's `lib/asn1_decoder.c`,
//! which is less strict than DER. It also distinguishes encodings that the kernel refuses from those that only this parser does
//! not support.

/// Reason why an encoding cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DerError {
    /// The kernel's parser refuses the encoding as well.
    Invalid,
    /// Only this parser does not support the encoding, which the kernel's parser may accept.
    Unsupported(&'static str),
}

pub const INTEGER: u8 = 0x02;
pub const OCTET_STRING: u8 = 0x04;
pub const NULL: u8 = 0x05;
pub const OBJECT_ID: u8 = 0x06;
pub const SEQUENCE: u8 = 0x30;
pub const SET: u8 = 0x31;
/// Context tags: `[0]` to `[3]` constructed, `[0]` primitive.
pub const CONTEXT_0: u8 = 0xa0;
pub const CONTEXT_1: u8 = 0xa1;
pub const CONTEXT_2: u8 = 0xa2;
pub const CONTEXT_3: u8 = 0xa3;
pub const KEY_ID: u8 = 0x80;

/// Elements of one level of a DER encoding. Callers open nested levels explicitly, so the parser does not recurse.
pub struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn element(&mut self) -> Result<(u8, &'a [u8]), DerError> {
        let (&tag, rest) = self.0.split_first().ok_or(DerError::Invalid)?;
        let (&first, rest) = rest.split_first().ok_or(DerError::Invalid)?;
        // `lib/asn1_decoder.c` accepts tags of one byte, and lengths of up to four bytes.
        if tag & 0x1f == 0x1f {
            return Err(DerError::Invalid);
        }
        let (length, rest) = match first {
            0..0x80 => (usize::from(first), rest),
            0x80 => return Err(DerError::Unsupported("has elements of indefinite length")),
            0x81..=0x84 => {
                let (bytes, rest) =
                    rest.split_at_checked(usize::from(first - 0x80)).ok_or(DerError::Invalid)?;
                (bytes.iter().fold(0_usize, |value, &byte| value << 8 | usize::from(byte)), rest)
            }
            _ => return Err(DerError::Invalid),
        };
        let (content, rest) = rest.split_at_checked(length).ok_or(DerError::Invalid)?;
        self.0 = rest;
        Ok((tag, content))
    }

    pub fn expect(&mut self, expected_tag: u8) -> Result<&'a [u8], DerError> {
        let (tag, content) = self.element()?;
        if tag == expected_tag { Ok(content) } else { Err(DerError::Invalid) }
    }

    pub fn open(&mut self, tag: u8) -> Result<Self, DerError> {
        self.expect(tag).map(Self)
    }
}

/// Encodes one element from the encodings of its contents.
pub fn encode(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = vec![tag];
    if let Ok(short @ 0..0x80) = u8::try_from(length) {
        out.push(short);
    } else {
        let bytes = length.to_be_bytes();
        let from = bytes.iter().take_while(|byte| **byte == 0).count();
        let significant = bytes.get(from..).unwrap_or_default();
        // A length has at most eight bytes.
        out.push(0x80 | u8::try_from(significant.len()).unwrap_or(8));
        out.extend_from_slice(significant);
    }
    for part in parts {
        out.extend_from_slice(part);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn encoded_elements_are_parsed(tag in 0_u8..0x1f, length in prop_oneof![0_usize..300, 0_usize..70_000]) {
            let content = vec![tag; length];
            let (first, second) = content.split_at(length / 3);
            let whole = encode(tag, &[first, second]);
            let mut der = Der::new(&whole);
            prop_assert_eq!(der.element(), Ok((tag, &content[..])));
            prop_assert!(der.is_empty());
        }

        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut der = Der::new(&bytes);
            while let Ok((_, content)) = der.element() {
                prop_assert!(content.len() < bytes.len());
            }
        }
    }
}
