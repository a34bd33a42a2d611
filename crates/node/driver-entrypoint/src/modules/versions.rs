//! Checks that a module was compiled against the loaded drivers. Compares the module's symbol versions with the
//! `Module.symvers` that the drivers expose. The kernel also refuses a mismatch, but only after it has loaded the module's
//! dependencies, and without a hint.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use super::{load::Loader, loaded::Loaded};
use crate::{
    error::Error,
    files::{entries, name_of},
    module_file::{ModuleInfo, kernel_name},
    node::Node,
};

/// Maximum number of bytes read of a table. The table of a distribution's whole kernel has 2 MiB.
const MAX_TABLE_SIZE: u64 = 16 << 20;

/// A driver of another container that exposes its symbol versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    Gpu,
    Ofed,
}

impl Driver {
    fn name(self) -> &'static str {
        match self {
            Self::Gpu => "the GPU driver",
            Self::Ofed => "OFED",
        }
    }

    /// Candidate paths of the driver's `Module.symvers` for the running kernel.
    fn table_paths(self, node: &Node<'_>) -> Vec<PathBuf> {
        let release = node.kernel.release();
        let directories = match self {
            Self::Gpu => {
                // An image for several kernels exposes the table of only one of them, so ignore it.
                if entries(node.paths.at("/run/nvidia/driver/lib/modules")).len() > 1 {
                    return Vec::new();
                }
                let mut sources = entries(node.paths.at("/run/nvidia/driver/usr/src"));
                sources.retain(|path| name_of(path).starts_with("nvidia-"));
                sources
            }
            Self::Ofed => {
                let top = node.paths.at("/run/mellanox/drivers/usr/src/ofa_kernel");
                // The layout is `<architecture>/<release>` or `<release>`; `default` is a link to one of these.
                let others = [top.join(&release), top.join("default")];
                entries(&top).into_iter().map(|directory| directory.join(&release)).chain(others).collect()
            }
        };
        directories.into_iter().map(|directory| directory.join("Module.symvers")).collect()
    }
}

/// Versions of the symbols that loaded modules export, each with its module.
#[derive(Debug, Default)]
pub(crate) struct ExportedVersions(BTreeMap<String, (u32, String)>);

impl ExportedVersions {
    /// Adds the symbols of a table; returns whether the table could be read.
    pub(crate) fn add(&mut self, table: &Path, loaded: &Loaded) -> bool {
        let mut bytes = Vec::new();
        let read = File::open(table).and_then(|file| file.take(MAX_TABLE_SIZE).read_to_end(&mut bytes));
        for line in String::from_utf8_lossy(&bytes).lines() {
            // Fields: 0x<crc> <symbol> <module's path> <export> <namespace>
            let mut fields = line.split('\t');
            let (Some(crc), Some(symbol), Some(module)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let crc = crc.strip_prefix("0x").and_then(|crc| u32::from_str_radix(crc, 16).ok());
            let module = kernel_name(module.rsplit('/').next().unwrap_or(module));
            // A CRC of 0 comes from a kernel without modversions. Modules that are not loaded do not provide the
            // symbol.
            if let Some(crc) = crc.filter(|crc| *crc != 0 && loaded.contains(&module)) {
                self.0.insert(symbol.to_owned(), (crc, module));
            }
        }
        read.is_ok()
    }

    /// Lists symbols for which the module expects a version other than the exported one, each with the exporter.
    fn mismatches(&self, module: &ModuleInfo) -> Vec<String> {
        let mismatch = |(symbol, crc): &(String, u32)| {
            let (exported_crc, exporter) = self.0.get(symbol)?;
            (exported_crc != crc).then(|| format!("{symbol} of {exporter}"))
        };
        module.versions.iter().filter_map(mismatch).collect()
    }
}

/// Refuses a module that was compiled against drivers other than the loaded drivers. Also checks those of the module's
/// dependencies that are not loaded yet.
pub(crate) fn check(loader: &Loader<'_>, name: &str, drivers: &[Driver]) -> Result<(), Error> {
    let Loader { node, .. } = loader;
    let loaded_modules = Loaded::read(&node.paths)?;
    let mut exported = ExportedVersions::default();
    for driver in drivers {
        if !driver.table_paths(node).iter().any(|table| exported.add(table, &loaded_modules)) {
            node.log.step(format!(
                "{} exposes no Module.symvers for this kernel: whether {name} was compiled against it is left to the kernel",
                driver.name()
            ));
        }
    }
    for step in loader.plan(name, &loaded_modules)?.into_iter().filter(|step| !step.optional) {
        let info = step.file.info()?;
        if info.versions.is_empty() {
            node.log.step(format!("module {} has no symbol versions to compare", step.name));
        }
        if let Some((first, more)) = exported.mismatches(&info).split_first() {
            let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
            let drivers = drivers.iter().map(|driver| driver.name()).collect::<Vec<_>>().join(" and ");
            return Err(Error::new(
                format!(
                    "module {} is not loaded: it was compiled against a different version of symbol {first}{more}",
                    step.name
                ),
                format!("build its image with {drivers} in spec.needs, and roll them out together"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, RELEASE, elf};

    const BOTH: [Driver; 2] = [Driver::Gpu, Driver::Ofed];

    fn versions(entries: &[(&str, u32)]) -> Vec<u8> {
        let entry = |(name, crc): &(&str, u32)| {
            let mut bytes = u64::from(*crc).to_le_bytes().to_vec();
            bytes.extend(name.as_bytes());
            bytes.resize(64, 0);
            bytes
        };
        entries.iter().flat_map(entry).collect()
    }

    /// A node with both drivers loaded and their tables exposed, and an `nv_peer_mem` module with these sections.
    fn bench(sections: &[(&str, &[u8])]) -> Bench {
        let bench = Bench::new();
        for name in ["ib_core", "nvidia"] {
            bench.host_module(name, "");
        }
        bench.load_from_host(&["ib_core", "nvidia"]);
        let mut all: Vec<(&str, &[u8])> = vec![(".modinfo", b"depends=ib_core,nvidia\0")];
        all.extend(sections);
        bench.image_module("nv_peer_mem", "");
        std::fs::write(bench.at(&format!("/lib/modules/{RELEASE}/updates/nv_peer_mem.ko")), elf(&all))
            .unwrap();
        bench.write(
            &format!("/run/mellanox/drivers/usr/src/ofa_kernel/x86_64/{RELEASE}/Module.symvers"),
            "0x0000000a\tib_register\t/b/drivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n\
             0x0000000b\tgone\t/b/other\tEXPORT_SYMBOL\t\nnonsense\n0x0\tib_free\tib-core\tEXPORT_SYMBOL\n",
        );
        bench.write(
            "/run/nvidia/driver/usr/src/nvidia-550/Module.symvers",
            "0x0000000c\tnvidia_p2p_get_pages\t/b/nvidia\tEXPORT_SYMBOL\t\n",
        );
        bench
    }

    fn checked(bench: &Bench) -> Result<(), Error> {
        let node = bench.node();
        check(&Loader::of_node(&node)?, "nv_peer_mem", &BOTH)
    }

    #[test]
    fn a_module_with_matching_versions_is_accepted() {
        let fits =
            [("ib_register", 10), ("nvidia_p2p_get_pages", 12), ("gone", 1), ("ib_free", 1), ("printk", 1)];
        let bench = bench(&[("__versions", &versions(&fits))]);
        checked(&bench).unwrap();
        assert_eq!(bench.log(), "");
    }

    #[test]
    fn a_module_with_other_versions_is_refused_in_both_formats() {
        let (crcs, names) =
            ([99u32.to_le_bytes(), 98u32.to_le_bytes()].concat(), b"ib_register\0nvidia_p2p_get_pages\0");
        let stale = versions(&[("ib_register", 99), ("nvidia_p2p_get_pages", 98)]);
        let extended: [(&str, &[u8]); 2] = [("__version_ext_crcs", &crcs), ("__version_ext_names", names)];
        for sections in [&[("__versions", stale.as_slice())][..], &extended] {
            let error = checked(&bench(sections)).unwrap_err();
            assert_eq!(
                (error.to_string().as_str(), error.hint()),
                (
                    "module nv_peer_mem is not loaded: it was compiled against a different version of symbol \
                     ib_register of ib_core and 1 more",
                    "build its image with the GPU driver and OFED in spec.needs, and roll them out together"
                )
            );
        }
    }

    #[test]
    fn missing_versions_are_logged_and_left_to_the_kernel() {
        let bench = bench(&[]);
        std::fs::remove_dir_all(bench.at("/run/mellanox")).unwrap();
        for release in [RELEASE, "6.1.0-1-amd64"] {
            bench.write(&format!("/run/nvidia/driver/lib/modules/{release}/x"), "");
        }
        checked(&bench).unwrap();
        let log = bench.log();
        for line in [
            "the GPU driver exposes no Module.symvers for this kernel: whether nv_peer_mem was compiled against it is left",
            "OFED exposes no Module.symvers",
            "module nv_peer_mem has no symbol versions to compare",
        ] {
            assert!(log.contains(line), "{log}");
        }
    }

    /// Unterminated names, versions without a name, and truncated sections.
    #[test]
    fn hostile_sections_are_read_as_far_as_possible() {
        let names = [&[b'x'; 9000][..], b"\0ok\0"].concat();
        let crcs = [1u32.to_le_bytes(), 2u32.to_le_bytes(), 3u32.to_le_bytes()].concat();
        let info = |sections: &[(&str, &[u8])]| {
            let mut all: Vec<(&str, &[u8])> = vec![(".modinfo", b"")];
            all.extend(sections);
            ModuleInfo::parse(&elf(&all)).unwrap().versions
        };
        let extended = info(&[("__version_ext_crcs", &crcs), ("__version_ext_names", &names)]);
        assert_eq!(extended, [("ok".to_owned(), 2)]);
        assert_eq!(info(&[("__versions", &[b'y'; 100])]), [("y".repeat(56), 0x7979_7979)]);
        assert_eq!(info(&[("__versions", &[b'y'; 63])]), []);
    }
}
