//! Records that farrier keeps in the registry beside images. A record is a manifest under a fixed tag; one annotation holds all
//! its data.

/// A record in the registry. Each writer merges its own data into the stored record.
pub trait RegistryRecord: Default + PartialEq + Send + Sync {
    /// Tag of the record.
    const TAG: &'static str;
    /// Title of the record, for display.
    const TITLE: &'static str;
    /// Media type of the record.
    const KIND: &'static str;
    /// Key of the annotation that holds the data.
    const ANNOTATION: &'static str;

    /// Parses the output of [`Self::to_text`], or returns why the text cannot be read.
    fn parse(text: &str) -> Result<Self, String>;
    /// Returns the annotation's value.
    fn to_text(&self) -> String;
    /// Merges two records. The result does not depend on the order in which records are merged.
    #[must_use]
    fn merged(&self, other: &Self) -> Self;
}
