//! Reads a kernel's facts from the files of its header set.

use std::{error::Error, io};

use super::{Architecture, KernelConfig, KernelFacts, KernelRelease, SymbolTable, VermagicHeaders};

/// Reason why files are not the header set of a kernel.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The header set does not state its release or its kernel's configuration: it has neither of these files.
    #[error("the header set holds neither {0}")]
    Unprepared(&'static str),
    /// The header set belongs to another kernel.
    #[error("the header set states {0:?}, which is not the release of this kernel")]
    Release(String),
    /// The header set is configured for another architecture.
    #[error("the header set is configured for another architecture")]
    Architecture,
    /// The file of this name is damaged.
    #[error("cannot read {0} of the header set")]
    Damaged(&'static str, #[source] Box<dyn Error + Send + Sync>),
    /// A file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl KernelFacts {
    /// Reads a header set. `build_file` returns the text of a file in the build tree, such as `include/config/auto.conf`,
    /// and `header` the text of a header in the build tree or its source tree. Both return `None` for a missing file.
    /// Without `expected`, release and architecture are read from the header set.
    pub fn of_headers(
        expected: Option<(&KernelRelease, Architecture)>,
        build_file: impl Fn(&str) -> io::Result<Option<String>>,
        header: impl Fn(&str) -> io::Result<Option<String>>,
    ) -> Result<Self, HeaderError> {
        let text = release(&build_file)?;
        let release: KernelRelease = text.parse().map_err(|_| HeaderError::Release(text.clone()))?;
        if expected.is_some_and(|(expected, _)| *expected != release) {
            return Err(HeaderError::Release(text));
        }
        let text = match build_file("include/config/auto.conf")? {
            Some(text) => text,
            None => build_file(".config")?
                .ok_or(HeaderError::Unprepared("include/config/auto.conf nor .config"))?,
        };
        let config = KernelConfig::parse(&text)
            .map_err(|error| HeaderError::Damaged("the configuration", error.into()))?;
        let arch = [("X86_64", Architecture::Amd64), ("ARM64", Architecture::Arm64)]
            .into_iter()
            .filter(|(_, arch)| expected.is_none_or(|(_, expected)| expected == *arch))
            .find_map(|(option, arch)| config.is_set(option).then_some(arch))
            .ok_or(HeaderError::Architecture)?;
        let symbols = build_file("Module.symvers")?
            .map(|text| SymbolTable::parse(&text))
            .transpose()
            .map_err(|error| HeaderError::Damaged("Module.symvers", error.into()))?
            // Trees that were only prepared have an empty table, so the symbols are unknown.
            .filter(|table| !table.is_empty());
        let vermagic_headers = vermagic_headers(arch, header)?;
        Ok(Self { symbols, vermagic_headers, ..Self::new(release, arch, config) })
    }
}

/// Returns the release of the build tree. `utsrelease.h` takes precedence, because its value becomes part of the modules'
/// vermagic: Debian's `kernel.release` says `6.1.192` where the kernel is `6.1.0-56-amd64`.
fn release(build_file: impl Fn(&str) -> io::Result<Option<String>>) -> Result<String, HeaderError> {
    let header = build_file("include/generated/utsrelease.h")?;
    let uts_release = header.as_deref().and_then(|text| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix("#define UTS_RELEASE"))?;
        Some(line.trim().trim_matches('"').to_owned())
    });
    let kernel_release = build_file("include/config/kernel.release")?.map(|text| text.trim().to_owned());
    let release = uts_release
        .or(kernel_release)
        .ok_or(HeaderError::Unprepared("include/generated/utsrelease.h nor include/config/kernel.release"))?;
    Ok(release.chars().take(80).collect())
}

/// Reads the headers that define the kernel's vermagic; `None` if the header set lacks them.
fn vermagic_headers(
    arch: Architecture,
    header: impl Fn(&str) -> io::Result<Option<String>>,
) -> io::Result<Option<VermagicHeaders>> {
    let arch_header = match arch {
        Architecture::Amd64 => "arch/x86/include/asm/vermagic.h",
        Architecture::Arm64 => "arch/arm64/include/asm/vermagic.h",
    };
    let (Some(vermagic), Some(arch)) = (header("include/linux/vermagic.h")?, header(arch_header)?) else {
        return Ok(None);
    };
    let seeds = ["include/generated/randstruct_hash.h", "include/generated/randomize_layout_hash.h"];
    let layout_seed =
        seeds.into_iter().find_map(|seed| header(seed).transpose()).transpose()?.unwrap_or_default();
    Ok(Some(VermagicHeaders { vermagic, arch, layout_seed }))
}
