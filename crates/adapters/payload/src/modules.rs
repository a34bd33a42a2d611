//! Finds and opens the modules of a payload directory.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use kmod::{CachedFile, Compression, Module, ModuleError, PayloadModule};

use super::{decompression::DecompressionBudget, error::Result};

/// Reads all modules (`*.ko`, plain or compressed with gzip, xz or zstd) below a directory, ordered by path. Symbolic links are
/// not followed. A damaged module is not an error of this function: its entry has the error, which the check reports.
pub fn read_modules(payload: &Path, budget: &DecompressionBudget) -> Result<Vec<PayloadModule>> {
    let mut modules = Vec::new();
    for (file, compression) in files(payload)? {
        let name = file.strip_prefix(payload).unwrap_or(&file);
        let module = read(&file, name, compression, budget)?;
        modules.push(PayloadModule { path: name.to_string_lossy().into_owned(), module });
    }
    modules.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(modules)
}

/// Returns the module files below a directory, with their compression.
pub(super) fn files(payload: &Path) -> Result<Vec<(PathBuf, Compression)>> {
    let mut files = Vec::new();
    for entry in walkdir::WalkDir::new(payload).follow_links(false).follow_root_links(true) {
        let entry = entry?;
        let compression = Compression::of(&entry.file_name().to_string_lossy());
        if let Some(compression) = compression.filter(|_| entry.file_type().is_file()) {
            files.push((entry.into_path(), compression));
        }
    }
    Ok(files)
}

/// Reads one module file; returns `None` if the file does not have a module's name.
pub fn read_module(path: &Path, budget: &DecompressionBudget) -> Result<Option<PayloadModule>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(compression) = Compression::of(&name) else { return Ok(None) };
    let module = read(path, path, compression, budget)?;
    Ok(Some(PayloadModule { path: path.to_string_lossy().into_owned(), module }))
}

/// Opens a module file; returns `None` if the file does not have a module's name. A compressed one is decompressed into an
/// unnamed temporary file. The outer error concerns the disk or the budget, the inner error the compressed data, or the size of the
/// module.
pub fn open_module(path: &Path, budget: &DecompressionBudget) -> Result<Option<Result<File, ModuleError>>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Compression::of(&name).map(|compression| budget.open(path, path, compression)).transpose()
}

/// Whether a file with this name is a module.
pub fn is_module_file(name: &str) -> bool {
    Compression::of(name).is_some()
}

/// Reads a module file, whose name in messages is `name`.
fn read(
    path: &Path,
    name: &Path,
    compression: Compression,
    budget: &DecompressionBudget,
) -> Result<Result<Module, ModuleError>> {
    let file = budget.open(path, name, compression)?;
    let mut module = file.and_then(|file| Module::parse(&CachedFile::new(file)));
    if let Ok(module) = &mut module {
        module.has_unsupported_xz_check = compression.has_unsupported_xz_check(fs_err::File::open(path)?)?;
    }
    Ok(module)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{self, Read as _},
        os::unix::fs::symlink,
    };

    use kmod::testing::ModuleFile;

    use super::*;

    fn read_all(dir: &Path) -> Vec<PayloadModule> {
        read_modules(dir, &DecompressionBudget::without_build()).unwrap()
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        liblzma::read::XzEncoder::new(bytes, 1).read_to_end(&mut out).unwrap();
        out
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        flate2::read::GzEncoder::new(bytes, flate2::Compression::fast()).read_to_end(&mut out).unwrap();
        out
    }

    #[test]
    fn reads_every_compression_in_order_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let plain = ModuleFile::named("m").build();
        fs::create_dir_all(dir.path().join("lib/b")).unwrap();
        fs::write(dir.path().join("lib/b/plain.ko"), &plain).unwrap();
        fs::write(dir.path().join("lib/z.ko.xz"), xz(&plain)).unwrap();
        fs::write(dir.path().join("lib/b.ko.zst"), zstd::encode_all(&plain[..], 1).unwrap()).unwrap();
        fs::write(dir.path().join("lib/a.ko.gz"), gzip(&plain)).unwrap();
        fs::write(dir.path().join("lib/readme.kore"), "no module").unwrap();
        symlink("plain.ko", dir.path().join("lib/b/link.ko")).unwrap();
        symlink("/", dir.path().join("lib/root")).unwrap();
        let modules = read_all(dir.path());
        let paths: Vec<&str> = modules.iter().map(|module| module.path.as_str()).collect();
        assert_eq!(paths, ["lib/a.ko.gz", "lib/b.ko.zst", "lib/b/plain.ko", "lib/z.ko.xz"]);
        let mut expected = Module::parse(&plain[..]).unwrap();
        for module in modules {
            // The integrity check of the xz stream is CRC64, which the kernel does not support.
            expected.has_unsupported_xz_check = Compression::of(&module.path) == Some(Compression::Xz);
            assert_eq!(module.module.as_ref(), Ok(&expected), "{}", module.path);
        }
    }

    #[test]
    fn damaged_compression_is_the_modules_fault() {
        let dir = tempfile::tempdir().unwrap();
        let plain = ModuleFile::named("m").build();
        let half = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
        fs::write(dir.path().join("a.ko.xz"), half(xz(&plain))).unwrap();
        fs::write(dir.path().join("b.ko.zst"), half(zstd::encode_all(&plain[..], 1).unwrap())).unwrap();
        fs::write(dir.path().join("c.ko.gz"), half(gzip(&plain))).unwrap();
        fs::write(dir.path().join("d.ko.xz"), "no xz at all").unwrap();
        fs::write(dir.path().join("e.ko"), "").unwrap();
        let errors: Vec<ModuleError> =
            read_all(dir.path()).into_iter().map(|m| m.module.unwrap_err()).collect();
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.last().unwrap(), "the file is not an ELF object");
        assert!(
            errors.iter().take(4).all(|error| error.starts_with("cannot decompress the module: ")),
            "{errors:?}"
        );
    }

    #[test]
    fn compressed_modules_share_one_budget() {
        let dir = tempfile::tempdir().unwrap();
        let bomb = zstd::encode_all(io::repeat(0).take(1 << 20), 1).unwrap();
        for name in ["a.ko.zst", "b.ko.zst", "c.ko.zst"] {
            fs::write(dir.path().join(name), &bomb).unwrap();
        }
        let enough = DecompressionBudget::of_bytes(3 << 20);
        assert_eq!(read_modules(dir.path(), &enough).unwrap().len(), 3);
        let error =
            read_modules(dir.path(), &DecompressionBudget::of_bytes(2 << 20)).unwrap_err().to_string();
        assert!(
            error.contains(".ko.zst: stopped after 131072 bytes") && error.contains("2097152 bytes"),
            "{error}"
        );
        assert!(!error.contains('/'), "{error}");
    }

    /// A hole takes no disk space, but signing would read it into memory.
    #[test]
    fn a_module_with_a_huge_hole_is_the_modules_fault() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.ko"), ModuleFile::named("m").build()).unwrap();
        let file = fs::File::options().write(true).open(dir.path().join("a.ko")).unwrap();
        file.set_len(1 << 30).unwrap();
        assert!(read_all(dir.path())[0].module.is_ok());
        file.set_len((1 << 30) + 1).unwrap();
        let error = read_all(dir.path()).remove(0).module.unwrap_err();
        assert_eq!(error.to_string(), "the module is larger than 1024 MiB");
        assert_eq!(error.verdict(), kmod::Verdict::Refused);
    }

    #[test]
    fn a_payload_that_is_not_there_is_a_fault() {
        let error = read_modules(Path::new("/nonexistent/payload"), &DecompressionBudget::without_build())
            .unwrap_err();
        assert!(error.to_string().contains("/nonexistent/payload"), "{error}");
    }
}
