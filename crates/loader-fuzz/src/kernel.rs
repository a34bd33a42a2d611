//! Reads kernels from directories with unpacked Debian packages.

use std::{
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
};

use kmod::{
    Architecture, Compression, FactSource, InTree, KernelConfig, KernelFacts, KernelRelease, Known, Module,
    SymbolTable, VermagicHeaders, Vmlinux,
};

use crate::{Result, elf::Object, fail};

/// Maximum size of the file of a base module in bytes. The virtual machine gets many mutants of each.
const MAX_FILE: u64 = 64 << 10;
/// Maximum size of a decompressed base module in bytes.
const MAX_MODULE: usize = 128 << 10;

/// A kernel with its modules, and the facts that the check needs.
pub struct Kernel {
    pub facts: KernelFacts,
    pub vmlinuz: PathBuf,
    /// `lib/modules/<release>`.
    modules: PathBuf,
}

/// A module of the kernel from which mutants are made.
#[derive(Clone)]
pub struct BaseModule {
    pub name: String,
    /// Contents of the file in the kernel's package, including the signature.
    pub signed: Vec<u8>,
    /// ELF object without the signature. The relocations of its init and exit pointers are removed, so the kernel loads the module
    /// without running it.
    pub object: Object,
    pub module: Module,
}

impl Kernel {
    /// Reads the kernel from the unpacked packages of its image and its headers.
    pub fn read(root: &Path) -> Result<Self> {
        let modules = ["lib/modules", "usr/lib/modules"]
            .iter()
            .find_map(|directory| {
                fs::read_dir(root.join(directory))
                    .ok()?
                    .flatten()
                    .map(|entry| entry.path())
                    .find(|p| p.join("kernel").is_dir())
            })
            .ok_or_else(|| fail(format!("{} has no lib/modules/RELEASE/kernel", root.display())))?;
        let release = modules.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let headers = root.join("usr/src").join(format!("linux-headers-{release}"));
        let common_headers = fs::read_dir(root.join("usr/src"))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.join("include/linux/vermagic.h").is_file())
            .ok_or_else(|| fail(format!("{} has no usr/src/*/include/linux/vermagic.h", root.display())))?;
        let config = KernelConfig::parse(&fs::read_to_string(headers.join("include/config/auto.conf"))?)
            .map_err(fail)?;
        let (arch, arch_header) = if config.is_set("ARM64") {
            (Architecture::Arm64, "arch/arm64/include/asm/vermagic.h")
        } else {
            (Architecture::Amd64, "arch/x86/include/asm/vermagic.h")
        };
        let release: KernelRelease = release.parse().map_err(fail)?;
        let candidates = [root.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")];
        let vmlinuz = candidates
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| fail(format!("{} has no boot/vmlinuz-{release}", root.display())))?;
        let mut facts = KernelFacts::new(release, arch, config);
        facts.symbols =
            Some(SymbolTable::parse(&fs::read_to_string(headers.join("Module.symvers"))?).map_err(fail)?);
        facts.vermagic_headers = Some(VermagicHeaders {
            vermagic: fs::read_to_string(common_headers.join("include/linux/vermagic.h"))?,
            arch: fs::read_to_string(common_headers.join(arch_header))?,
            layout_seed: String::new(),
        });
        let mut kernel = Self { facts, vmlinuz, modules };
        kernel.add_facts()?;
        Ok(kernel)
    }

    /// Adds the facts that only the kernel image and the kernel's own modules contain.
    fn add_facts(&mut self) -> Result<()> {
        let mut image = File::open(&self.vmlinuz)?;
        let mut vmlinux = Vmlinux::of_image(&mut image, tempfile::tempfile()?).map_err(fail)?;
        let mut extra = vmlinux.facts().map_err(fail)?;
        let mut index = InTree::default();
        for file in self.module_files()? {
            index.add_module(&file.strip_prefix(&self.modules).unwrap_or(&file).to_string_lossy());
        }
        index.add_builtin(&fs::read_to_string(self.modules.join("modules.builtin")).unwrap_or_default());
        extra.in_tree = Some(Known { value: index, source: FactSource::ModuleIndex });
        let sample =
            self.module_files()?.into_iter().next().ok_or_else(|| fail("the kernel has no modules"))?;
        extra.add_own_module(Module::parse(&read_module_file(&sample)?[..]).map_err(fail)?);
        self.facts.beyond_headers = extra;
        Ok(())
    }

    /// Lists all module files of the kernel, sorted.
    pub fn module_files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let mut directories = vec![self.modules.join("kernel")];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory)? {
                let path = entry?.path();
                if path.is_dir() {
                    directories.push(path);
                } else if Compression::of(&path.to_string_lossy()).is_some() {
                    files.push(path);
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Chooses up to `count` small modules that depend on no other module, up to half of them with exports and up to half without.
    pub fn base_modules(&self, count: usize, random: &mut fastrand::Rng) -> Result<Vec<BaseModule>> {
        let mut files = self.module_files()?;
        random.shuffle(&mut files);
        let (mut without_exports, mut exporting) = (Vec::new(), Vec::new());
        for file in files {
            if without_exports.len() + exporting.len() == count {
                break;
            }
            if fs::metadata(&file)?.len() >= MAX_FILE {
                continue;
            }
            let Some(base) = BaseModule::read(&file)? else { continue };
            let group = if base.module.exports.is_empty() { &mut without_exports } else { &mut exporting };
            if group.len() < count.div_ceil(2) {
                group.push(base);
            }
        }
        without_exports.append(&mut exporting);
        Ok(without_exports)
    }
}

impl BaseModule {
    /// Reads a module; returns `None` if the module is too large, depends on other modules, or cannot be parsed.
    fn read(file: &Path) -> Result<Option<Self>> {
        let signed = read_module_file(file)?;
        let Ok(module) = Module::parse(&signed[..]) else { return Ok(None) };
        let (object, _) = kmod::without_signature(&signed);
        if signed.len() > MAX_MODULE || module.field("depends").is_some_and(|names| !names.is_empty()) {
            return Ok(None);
        }
        let mut object = Object::new(object.to_vec());
        object.remove_init_and_exit();
        let module = Module::parse(&object.bytes[..]).map_err(fail)?;
        Ok(Some(Self { name: module.name.clone(), signed, object, module }))
    }
}

/// Reads a module file, and decompresses it.
pub fn read_module_file(file: &Path) -> Result<Vec<u8>> {
    let compression = Compression::of(&file.to_string_lossy()).unwrap_or(Compression::None);
    let mut bytes = Vec::new();
    compression.reader(File::open(file)?)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}
