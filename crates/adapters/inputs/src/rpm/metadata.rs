//! Parses the metadata of RPM repositories as createrepo_c writes it (`repomd.xml`, `primary.xml`, `filelists.xml`), and lists of
//! mirrors.
//!
//! The parser processes one event at a time, so its memory does not grow with the size of the metadata.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, Read},
};

use farrier_core::kernel::Architecture;
use quick_xml::{
    Reader, XmlVersion,
    escape::resolve_predefined_entity,
    events::{BytesStart, Event},
};
use serde::{Deserialize, Serialize};

use super::package::{RpmPackage, release_in};
use crate::{checksum::Checksum, error::MetadataError};

/// Maximum size of an unpacked metadata file in bytes, four times the size of Fedora's lists of files.
pub(super) const MAX_METADATA_SIZE: u64 = 4 << 30;
/// Maximum size of a tag or a text, in bytes.
const MAX_TAG_SIZE: usize = 1 << 20;
/// Maximum nesting of elements; the metadata has five levels.
const MAX_DEPTH: usize = 32;
/// Maximum number of kernel packages kept per repository, and of releases per package. RHEL has some hundreds of packages.
const MAX_PACKAGES: usize = 20_000;
const MAX_RELEASES: usize = 64;
/// Maximum length of a name, version or address.
const MAX_TEXT_SIZE: usize = 1024;
/// Maximum number of mirrors.
const MAX_MIRRORS: usize = 50;

impl From<quick_xml::Error> for MetadataError {
    fn from(error: quick_xml::Error) -> Self {
        match error {
            // The reader's own limits, and decompression errors.
            quick_xml::Error::Io(limit) => Self(limit.to_string()),
            other => Self(format!("it is not XML in UTF-8: {other}")),
        }
    }
}

fn malformed(reason: impl Into<String>) -> MetadataError {
    MetadataError(reason.into())
}

/// A metadata file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Location relative to the repository's address.
    pub location: String,
    /// Checksum of the compressed file.
    pub checksum: Checksum,
}

/// Content of `repomd.xml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repomd {
    /// List of packages.
    pub primary: Part,
    /// List of the packages' files.
    pub filelists: Option<Part>,
    /// Module streams of the packages.
    pub modules: Option<Part>,
}

/// Parses `repomd.xml`.
pub fn repomd(from: impl BufRead) -> Result<Repomd, MetadataError> {
    let mut parts: BTreeMap<String, Part> = BTreeMap::new();
    let (mut kind, mut algorithm, mut checksum, mut location) = <(String, String, String, String)>::default();
    walk(from, |step| {
        match step {
            Step::Start("data", tag) => {
                kind = attribute(tag, "type")?;
                (algorithm, checksum, location) = <(String, String, String)>::default();
            }
            Step::Start("checksum", tag) => algorithm = attribute(tag, "type")?,
            Step::Start("location", tag) => location = attribute(tag, "href")?,
            Step::End("checksum", text) => text.clone_into(&mut checksum),
            Step::End("data", _) if ["primary", "filelists", "modules"].contains(&kind.as_str()) => {
                let checksum = parse_checksum(&algorithm, &checksum, &kind)?;
                parts.insert(kind.clone(), Part { location: location.clone(), checksum });
            }
            Step::Start(..) | Step::End(..) => {}
        }
        Ok(())
    })?;
    let primary = parts.remove("primary").ok_or_else(|| malformed("it names no primary metadata"))?;
    Ok(Repomd { primary, filelists: parts.remove("filelists"), modules: parts.remove("modules") })
}

fn parse_checksum(algorithm: &str, checksum: &str, what: &str) -> Result<Checksum, MetadataError> {
    let found = Checksum::parse(algorithm, checksum);
    found.ok_or_else(|| {
        malformed(format!("the checksum of {what} ({algorithm:?}) is neither a sha256 nor a sha512"))
    })
}

/// Returns the packages in `primary.xml` whose names `is_selected` accepts, for this architecture or `noarch`. A package that
/// provides `...-uname-r` states its kernel release there.
pub fn primary(
    from: impl BufRead,
    arch: Architecture,
    is_selected: &dyn Fn(&str) -> bool,
) -> Result<Vec<RpmPackage>, MetadataError> {
    let mut packages = Vec::new();
    each_package(from, arch, is_selected, |package| {
        if packages.len() == MAX_PACKAGES {
            return Err(malformed(format!("it has more than {MAX_PACKAGES} packages of these names")));
        }
        packages.push(package);
        Ok(())
    })?;
    Ok(packages)
}

/// Calls `visit` with each selected package; see [`primary`].
pub fn each_package(
    from: impl BufRead,
    arch: Architecture,
    is_selected: &dyn Fn(&str) -> bool,
    mut visit: impl FnMut(RpmPackage) -> Result<(), MetadataError>,
) -> Result<(), MetadataError> {
    let mut current = PackageBuilder::default();
    walk(from, |step| {
        match step {
            Step::Start("package", _) => current = PackageBuilder::default(),
            Step::End("name", text) if current.name.is_empty() => text.clone_into(&mut current.name),
            Step::End("arch", text) => text.clone_into(&mut current.arch),
            Step::End("package", _) if current.is_selected(arch, is_selected) => {
                visit(std::mem::take(&mut current).finish()?)?;
            }
            // Skip the attributes of other packages, which are the majority.
            _ if !current.name.is_empty() && !is_selected(&current.name) => {}
            step => current.add_step(&step)?,
        }
        Ok(())
    })
}

/// A package being parsed.
#[derive(Default)]
struct PackageBuilder {
    name: String,
    arch: String,
    epoch: u64,
    version: String,
    algorithm: String,
    checksum: String,
    location: String,
    base: Option<String>,
    in_provides: bool,
    releases: BTreeSet<String>,
}

impl PackageBuilder {
    fn is_selected(&self, arch: Architecture, is_selected: &dyn Fn(&str) -> bool) -> bool {
        (self.arch == arch.gnu_name() || self.arch == "noarch") && is_selected(&self.name)
    }

    fn add_step(&mut self, step: &Step<'_>) -> Result<(), MetadataError> {
        match step {
            Step::Start("version", tag) => {
                self.epoch = attribute(tag, "epoch")?.parse().unwrap_or_default();
                self.version = version(tag)?;
            }
            Step::Start("checksum", tag) => self.algorithm = attribute(tag, "type")?,
            Step::Start("location", tag) => {
                self.location = attribute(tag, "href")?;
                self.base = Some(attribute(tag, "xml:base")?).filter(|base| !base.is_empty());
            }
            Step::Start("provides", _) => self.in_provides = true,
            Step::Start("entry", tag)
                if self.in_provides && attribute(tag, "name")?.ends_with("-uname-r") =>
            {
                add(&mut self.releases, version(tag)?);
            }
            Step::End("checksum", text) => (*text).clone_into(&mut self.checksum),
            Step::End("provides", _) => self.in_provides = false,
            Step::Start(..) | Step::End(..) => {}
        }
        Ok(())
    }

    fn finish(self) -> Result<RpmPackage, MetadataError> {
        let Self { name, arch, epoch, version, location, base, .. } = self;
        // The solver reads a package's name and version from a line of text.
        if [&name, &version].iter().any(|text| text.contains(|c: char| c.is_whitespace() || c.is_control())) {
            return Err(malformed(format!("package {name:?} has a blank in its name or its version")));
        }
        let checksum = parse_checksum(&self.algorithm, &self.checksum, &format!("package {name}"))?;
        let releases = self.releases.into_iter().collect();
        Ok(RpmPackage { name, epoch, version, arch, checksum, location, base, releases })
    }
}

/// Returns `ver` and `rel` of a tag.
fn version(tag: &BytesStart<'_>) -> Result<String, MetadataError> {
    let (version, release) = (attribute(tag, "ver")?, attribute(tag, "rel")?);
    Ok(if release.is_empty() { version } else { format!("{version}-{release}") })
}

fn add(releases: &mut BTreeSet<String>, release: String) {
    if releases.len() < MAX_RELEASES {
        releases.insert(release);
    }
}

/// Returns the kernel releases found in the file names of the `package_ids` packages, by the packages' checksums.
pub fn filelists(
    from: impl BufRead,
    package_ids: &BTreeSet<&str>,
) -> Result<BTreeMap<String, BTreeSet<String>>, MetadataError> {
    let mut releases: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut current: Option<String> = None;
    walk(from, |step| {
        match step {
            Step::Start("package", tag) => {
                current = Some(attribute(tag, "pkgid")?).filter(|id| package_ids.contains(id.as_str()));
            }
            Step::End("file", text) => {
                if let (Some(id), Some(release)) = (&current, current.as_ref().and_then(|_| release_in(text)))
                    && release.len() <= MAX_TEXT_SIZE
                {
                    add(releases.entry(id.clone()).or_default(), release);
                }
            }
            Step::End("package", _) => current = None,
            Step::Start(..) | Step::End(..) => {}
        }
        Ok(())
    })?;
    Ok(releases)
}

/// Returns the repository's addresses in a list of mirrors: a plain list with one per line, or a metalink (RFC 5854 and its
/// predecessor), which names the address of `repomd.xml`.
pub fn mirrors(list: &[u8]) -> Result<Vec<String>, MetadataError> {
    let mut addresses: Vec<String> = Vec::new();
    let mut add_address = |text: &str| {
        let text = text.trim();
        let text = text.strip_suffix("repodata/repomd.xml").unwrap_or(text);
        let is_address = ["https://", "http://"].iter().any(|scheme| text.starts_with(scheme));
        if is_address && text.len() <= MAX_TEXT_SIZE && addresses.len() < MAX_MIRRORS {
            addresses.push(text.to_owned());
        }
    };
    if list.trim_ascii_start().starts_with(b"<") {
        walk(list, |step| {
            if let Step::End("url", text) = step {
                add_address(text);
            }
            Ok(())
        })?;
    } else {
        String::from_utf8_lossy(list).lines().for_each(add_address);
    }
    if addresses.is_empty() { Err(malformed("it names no mirror by http or https")) } else { Ok(addresses) }
}

/// The start of an element, or its end with the text directly before it.
enum Step<'a> {
    Start(&'a str, &'a BytesStart<'a>),
    End(&'a str, &'a str),
}

/// Visits each element of a document, by its name without the namespace.
fn walk(
    from: impl BufRead,
    mut visit: impl FnMut(Step<'_>) -> Result<(), MetadataError>,
) -> Result<(), MetadataError> {
    let limited = LimitedReader { inner: from, remaining: 0, remaining_total: MAX_METADATA_SIZE };
    let mut reader = Reader::from_reader(limited);
    let (mut buffer, mut text, mut depth) = (Vec::new(), String::new(), 0_usize);
    loop {
        buffer.clear();
        reader.get_mut().remaining = MAX_TAG_SIZE;
        match reader.read_event_into(&mut buffer)? {
            Event::Start(tag) => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(malformed(format!("more than {MAX_DEPTH} nested elements")));
                }
                text.clear();
                visit(Step::Start(tag.local_name().as_ref(), &tag))?;
            }
            Event::Empty(tag) => {
                visit(Step::Start(tag.local_name().as_ref(), &tag))?;
                visit(Step::End(tag.local_name().as_ref(), ""))?;
                text.clear();
            }
            Event::End(tag) => {
                depth = depth.saturating_sub(1);
                visit(Step::End(tag.local_name().as_ref(), text.trim()))?;
                text.clear();
            }
            Event::Text(part) => text.push_str(&part),
            Event::CData(part) => text.push_str(&part),
            Event::GeneralRef(part) => match part.resolve_char_ref()? {
                Some(character) => text.push(character),
                None => text.push_str(resolve_predefined_entity(&part).unwrap_or_default()),
            },
            Event::Eof => break,
            Event::Decl(_) | Event::PI(_) | Event::DocType(_) | Event::Comment(_) => {}
        }
        if text.len() > MAX_TAG_SIZE {
            return Err(malformed("it has a text of more than 1 MiB"));
        }
    }
    if depth == 0 { Ok(()) } else { Err(malformed("the document is truncated")) }
}

/// Returns an attribute's value; empty if there is none.
fn attribute(tag: &BytesStart<'_>, name: &str) -> Result<String, MetadataError> {
    let attribute = tag.try_get_attribute(name).map_err(quick_xml::Error::from)?;
    let Some(attribute) = attribute else { return Ok(String::new()) };
    let value = attribute.normalized_value(XmlVersion::Implicit1_0)?;
    if value.len() > MAX_TEXT_SIZE {
        return Err(malformed(format!("attribute {name} has more than {MAX_TEXT_SIZE} bytes")));
    }
    Ok(value.into_owned())
}

/// A reader that fails after `remaining` bytes, because the XML reader keeps a whole event in memory, and at about
/// `remaining_total` bytes, because a small compressed file can take days to read.
struct LimitedReader<R> {
    inner: R,
    remaining: usize,
    remaining_total: u64,
}

impl<R: BufRead> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

impl<R: BufRead> BufRead for LimitedReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.remaining == 0 {
            return Err(io::Error::other("a tag or text has more than 1 MiB"));
        }
        if self.remaining_total == 0 {
            return Err(io::Error::other("it has more than 4 GiB"));
        }
        let filled = self.inner.fill_buf()?;
        Ok(filled.get(..self.remaining).unwrap_or(filled))
    }

    fn consume(&mut self, count: usize) {
        self.remaining = self.remaining.saturating_sub(count);
        self.remaining_total = self.remaining_total.saturating_sub(count as u64);
        self.inner.consume(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPOMD: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<repomd xmlns="http://linux.duke.edu/metadata/repo" xmlns:rpm="http://linux.duke.edu/metadata/rpm">
  <revision>1</revision>
  <data type="primary">
    <checksum type="sha256">SUM</checksum>
    <open-checksum type="sha256">0000</open-checksum>
    <location href="repodata/p.xml.gz"/>
  </data>
  <data type="primary_db"><checksum type="md5">1</checksum><location href="x"/></data>
</repomd>"#;

    const PRIMARY: &str = r#"<metadata xmlns="http://linux.duke.edu/metadata/common" xmlns:rpm="http://linux.duke.edu/metadata/rpm" packages="3">
<package type="rpm"><name>bash</name><arch>x86_64</arch><version epoch="0" ver="5" rel="1"/><checksum type="sha" pkgid="YES">1</checksum><location href="b.rpm"/></package>
<package type="rpm">
  <name>kernel-devel</name><arch>x86_64</arch><version epoch="1" ver="5.14.0" rel="503.el9"/>
  <checksum type="sha256" pkgid="YES">SUM</checksum><summary>a &amp; b</summary><location href="Packages/k/kernel-devel.rpm"/>
  <format>
    <rpm:provides>
      <rpm:entry name="kernel-devel" flags="EQ" epoch="0" ver="5.14.0" rel="503.el9"/>
      <rpm:entry name="kernel-devel-uname-r" flags="EQ" epoch="0" ver="5.14.0" rel="503.el9.x86_64"/>
    </rpm:provides>
    <rpm:requires><rpm:entry name="kernel-core-uname-r" ver="6"/></rpm:requires>
    <file>/usr/src/kernels</file>
  </format>
</package>
<package type="rpm"><name>kernel-devel</name><arch>aarch64</arch><version epoch="0" ver="5" rel="1"/><checksum type="sha256">SUM</checksum></package>
</metadata>"#;

    fn sum() -> String {
        "ab".repeat(32)
    }

    fn read(text: &str) -> Result<Vec<RpmPackage>, MetadataError> {
        primary(text.replace("SUM", &sum()).as_bytes(), Architecture::Amd64, &|name| name == "kernel-devel")
    }

    #[test]
    fn the_parts_of_a_repository() {
        let found = repomd(REPOMD.replace("SUM", &sum()).as_bytes()).unwrap();
        let checksum = Checksum::sha256(&sum());
        let primary = Part { location: "repodata/p.xml.gz".to_owned(), checksum };
        assert_eq!(found, Repomd { primary, filelists: None, modules: None });
        let reason = |text: &str| repomd(text.as_bytes()).unwrap_err().to_string();
        insta::assert_snapshot!(
            [
                reason(REPOMD),
                reason("<repomd></repomd>"),
                reason("<repomd>"),
                reason("<a></b>"),
                reason("\u{0}<")
            ]
            .join("\n")
        );
    }

    #[test]
    fn packages_say_which_kernel_they_are_for() {
        let found = read(PRIMARY).unwrap();
        let [package] = &found[..] else { panic!("{found:?}") };
        assert_eq!((package.epoch, package.version.as_str()), (1, "5.14.0-503.el9"));
        assert_eq!(package.location, "Packages/k/kernel-devel.rpm");
        assert_eq!(package.releases, ["5.14.0-503.el9.x86_64"]);
        assert_eq!(package.base, None);
        let merged = PRIMARY.replace("<location href", r#"<location xml:base="https://b.test/os/" href"#);
        assert_eq!(read(&merged).unwrap()[0].base.as_deref(), Some("https://b.test/os/"));
        let error = read(&PRIMARY.replace("type=\"sha256\"", "type=\"sha\"")).unwrap_err().to_string();
        assert_eq!(error, r#"the checksum of package kernel-devel ("sha") is neither a sha256 nor a sha512"#);
    }

    #[test]
    fn files_say_it_where_packages_do_not() {
        let text = r#"<filelists><package pkgid="a"><version ver="1"/><file type="dir">/lib/modules/6.1.0-x&amp;y</file></package>
            <package pkgid="b"><file>/lib/modules/6.2</file></package></filelists>"#;
        let found = filelists(text.as_bytes(), &["a"].into()).unwrap();
        assert_eq!(found, [("a".to_owned(), ["6.1.0-x&y".to_owned()].into())].into());
    }

    #[test]
    fn lists_of_mirrors() {
        let plain = "# a comment\nhttps://a.test/os/\n\nftp://b.test/\nhttp://c.test/os\n";
        assert_eq!(mirrors(plain.as_bytes()).unwrap(), ["https://a.test/os/", "http://c.test/os"]);
        let metalink = r#"<?xml version="1.0"?><metalink><files><file name="repomd.xml"><resources>
            <url protocol="https">https://a.test/os/repodata/repomd.xml</url><url protocol="rsync">rsync://b.test/x</url>
            </resources></file></files></metalink>"#;
        assert_eq!(mirrors(metalink.as_bytes()).unwrap(), ["https://a.test/os/"]);
        assert!(mirrors(b"<html></html>").is_err() && mirrors(b"").is_err());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let long =
            format!("<metadata><package><name>{}</name></package></metadata>", "x".repeat(MAX_TAG_SIZE + 1));
        let deep = "<a>".repeat(MAX_DEPTH + 1);
        let parts = format!(
            "<a>{}</a>",
            "<![CDATA[".to_owned() + &"x".repeat(MAX_TAG_SIZE - 10) + "]]>x&amp;<![CDATA[xxxxxxxxxxxx]]>"
        );
        let reasons = [&long, &deep, &parts].map(|text| read(text).unwrap_err().to_string());
        insta::assert_snapshot!(reasons.join("\n"));
        let mut reader = LimitedReader { inner: &b"<a></a>"[..], remaining: 100, remaining_total: 4 };
        reader.consume(4);
        assert_eq!(reader.fill_buf().unwrap_err().to_string(), "it has more than 4 GiB");
    }

    #[test]
    fn a_name_or_version_that_would_be_several_lines_is_refused() {
        for (from, to) in [
            ("ver=\"5.14.0\"", "ver=\"5&#10;job install name evil\""),
            ("503.el9\"/>\n  <ch", "503 el9\"/>\n  <ch"),
        ] {
            assert!(PRIMARY.contains(from), "{from}");
            let error = read(&PRIMARY.replacen(from, to, 1)).unwrap_err().to_string();
            assert_eq!(error, r#"package "kernel-devel" has a blank in its name or its version"#);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses(text in "(<package>|</package>|<name>|</name>|<version ver=\"|\"/>|&amp;|<|>|\\PC){0,60}") {
            let _ = (read(&text), repomd(text.as_bytes()), filelists(text.as_bytes(), &["a"].into()), mirrors(text.as_bytes()));
        }
    }
}
