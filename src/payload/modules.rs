//! Adapter: finds and opens the modules of a payload directory.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
};

use liblzma::stream::{CONCATENATED, Stream};
use object::read::ReadCache;

use super::error::Result;
use crate::kmod::{Module, ModuleError, PayloadModule};

/// Bytes of one module after decompression; the largest known one has 185 MB with its debug information.
const MAX_MODULE: u64 = 1 << 30;
/// Memory that an xz stream may ask for. The kernel's own build uses a dictionary of 2 MiB.
const MAX_XZ_MEMORY: u64 = 128 << 20;

/// How a module file is compressed, by its name, as `depmod` and the kernel's build tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    fn of(name: &str) -> Option<Self> {
        [(".ko", Self::None), (".ko.gz", Self::Gzip), (".ko.xz", Self::Xz), (".ko.zst", Self::Zstd)]
            .into_iter()
            .find_map(|(end, compression)| name.ends_with(end).then_some(compression))
    }
}

/// All modules (`*.ko`, plain or compressed with gzip, xz or zstd) below a directory, ordered by path. Symbolic
/// links are not followed. A file that is no module is a value, because the check reports it.
pub fn read_modules(payload: &Path) -> Result<Vec<PayloadModule>> {
    let read = |(file, compression): (PathBuf, _)| {
        let path = file.strip_prefix(payload).unwrap_or(&file).to_string_lossy().into_owned();
        Ok(PayloadModule { path, module: parse_file(&file, compression)? })
    };
    let mut modules = files(payload)?.into_iter().map(read).collect::<Result<Vec<_>>>()?;
    modules.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(modules)
}

/// The module files below a directory, and how they are compressed.
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

/// One module file; `None` when its name is not that of a module.
pub fn read_module(path: &Path) -> Result<Option<PayloadModule>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(compression) = Compression::of(&name) else { return Ok(None) };
    Ok(Some(PayloadModule {
        path: path.to_string_lossy().into_owned(),
        module: parse_file(path, compression)?,
    }))
}

/// Opens a module file, decompressed into a file without a name where it must be; `None` when its name is not that
/// of a module.
pub fn open_module(path: &Path) -> Result<Option<Result<File, ModuleError>>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Compression::of(&name).map(|compression| open_plain(path, compression)).transpose()
}

/// Is it the name of a module file?
pub fn is_module_file(name: &str) -> bool {
    Compression::of(name).is_some()
}

fn parse_file(path: &Path, compression: Compression) -> Result<Result<Module, ModuleError>> {
    Ok(open_plain(path, compression)?.and_then(|file| Module::parse(&ReadCache::new(file))))
}

pub(super) fn open_plain(path: &Path, compression: Compression) -> Result<Result<File, ModuleError>> {
    let file = fs_err::File::open(path)?;
    let mut reader: Box<dyn Read> = match compression {
        Compression::None => return Ok(Ok(file.into_parts().0)),
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(file)),
        Compression::Xz => match Stream::new_stream_decoder(MAX_XZ_MEMORY, CONCATENATED) {
            Ok(stream) => Box::new(liblzma::read::XzDecoder::new_stream(file, stream)),
            Err(error) => return Err(io::Error::from(error).into()),
        },
        Compression::Zstd => Box::new(zstd::Decoder::new(file)?),
    };
    // A file, not memory: with debug information a module can be larger than all else that farrier holds.
    let mut plain = tempfile::tempfile()?;
    match decompress(&mut reader, &mut plain, MAX_MODULE)? {
        Ok(()) => {}
        Err(error) => return Ok(Err(error)),
    }
    plain.rewind()?;
    Ok(Ok(plain))
}

/// Copies, telling faults of the compressed data (inner) from those of the disk (outer).
fn decompress(
    reader: &mut dyn Read,
    writer: &mut dyn Write,
    limit: u64,
) -> io::Result<Result<(), ModuleError>> {
    let mut buffer = vec![0; 128 << 10];
    let mut total = 0_u64;
    loop {
        let count = match reader.read(&mut buffer) {
            Ok(0) => return Ok(Ok(())),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Err(ModuleError::decompress(error))),
        };
        total += count as u64;
        if total > limit {
            return Ok(Err(ModuleError::decompress(format_args!("it holds more than {} MiB", limit >> 20))));
        }
        writer.write_all(buffer.get(..count).unwrap_or_default())?;
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::kmod::testing::ModuleFile;

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
        let modules = read_modules(dir.path()).unwrap();
        let paths: Vec<&str> = modules.iter().map(|module| module.path.as_str()).collect();
        assert_eq!(paths, ["lib/a.ko.gz", "lib/b.ko.zst", "lib/b/plain.ko", "lib/z.ko.xz"]);
        let expected = Module::parse(&plain[..]).unwrap();
        assert!(modules.iter().all(|module| module.module.as_ref() == Ok(&expected)));
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
            read_modules(dir.path()).unwrap().into_iter().map(|m| m.module.unwrap_err()).collect();
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.last().unwrap(), "the file is no ELF object");
        assert!(
            errors.iter().take(4).all(|error| error.starts_with("decompress the module: ")),
            "{errors:?}"
        );
    }

    #[test]
    fn a_bomb_stops_at_the_limit() {
        let bomb = zstd::encode_all(io::repeat(0).take(5 << 20), 1).unwrap();
        let mut out = Vec::new();
        let result = decompress(&mut zstd::Decoder::new(&bomb[..]).unwrap(), &mut out, 1 << 20).unwrap();
        assert_eq!(result, Err(ModuleError::decompress("it holds more than 1 MiB")));
        assert!(out.len() <= 1 << 20);
    }

    #[test]
    fn a_payload_that_is_not_there_is_a_fault() {
        let error = read_modules(Path::new("/nonexistent/payload")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/payload"), "{error}");
    }
}
