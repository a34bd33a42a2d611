//! Pure: what the registry remembers beside images: a manifest under a tag that moves, with all that is known in an annotation.

/// Something that is remembered. Writers put together what they and others know.
pub trait Record: Default + PartialEq + Send + Sync {
    /// Its tag.
    const TAG: &'static str;
    /// What it is, for people.
    const TITLE: &'static str;
    /// Its media type.
    const KIND: &'static str;
    /// Its annotation.
    const NOTE: &'static str;

    /// Reads what [`Self::to_text`] writes, or says why it cannot be read.
    fn parse(text: &str) -> Result<Self, String>;
    /// The annotation's value.
    fn to_text(&self) -> String;
    /// What both say. In whatever order records are put together, the same comes out.
    #[must_use]
    fn joined(&self, other: &Self) -> Self;
}
