//! Subjects of a check: module files, directories and images; and the symbol tables that they may use.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use farrier_core::kernel::KernelRelease;
use farrier_payload::{self as payload, DecompressionBudget};
use kmod::{NeededTable, SymbolTable, proprietary_modules};

use super::{
    Context,
    image::{Checked, OpenImage, module_paths},
};
use crate::{CliError, Result};

/// Size limit of a symbol table, in bytes; nvidia's has 100 kB, a kernel's 2 MB.
const MAX_TABLE: u64 = 64 << 20;

/// One argument, ready to be read.
pub(super) enum Subject {
    /// A module file or a directory.
    Path(PathBuf),
    /// An image with its layers fetched.
    Image(OpenImage),
}

impl Subject {
    /// Opens a subject: an existing path, or else an image.
    pub async fn open(context: &Context<'_>, argument: &str) -> Result<Self> {
        let path = Path::new(argument);
        if path.exists() {
            return Ok(Self::Path(path.to_owned()));
        }
        OpenImage::open(context, argument).await.map(Self::Image)
    }

    /// Returns the kernel that the image names.
    pub fn kernel(&self) -> Option<&KernelRelease> {
        match self {
            Self::Path(_) => None,
            Self::Image(image) => image.kernel.as_ref(),
        }
    }

    fn read(&self, release: &KernelRelease, budget: &DecompressionBudget) -> Result<Checked> {
        let path = match self {
            Self::Path(path) => path,
            Self::Image(image) => return image.read(release, budget),
        };
        // A single file keeps the path that the user gave. Paths of files in a directory are relative to it.
        let (modules, base) = if path.is_dir() {
            (payload::read_modules(path, budget)?, path.as_path())
        } else {
            (payload::read_module(path, budget)?.into_iter().collect(), Path::new(""))
        };
        if modules.is_empty() {
            return Err(CliError::usage(format!(
                "there is no module (.ko, .ko.gz, .ko.xz, .ko.zst) in {}",
                path.display()
            )));
        }
        Ok(Checked { files: module_paths(base, &modules), modules, ..Checked::default() })
    }
}

/// Reads all subjects for one kernel.
pub(super) fn read(
    subjects: &[Subject],
    release: &KernelRelease,
    budget: &DecompressionBudget,
) -> Result<Checked> {
    let mut all = Checked { firmware: Some(Vec::new()), ..Checked::default() };
    for subject in subjects {
        let Checked { modules, files, unpacked, firmware } = subject.read(release, budget)?;
        all.modules.extend(modules);
        all.files.extend(files);
        all.unpacked.extend(unpacked);
        all.firmware = all.firmware.zip(firmware).map(|(all, more)| [all, more].concat());
    }
    Ok(all)
}

/// Reads the symbol tables of `--needs`, with the licenses of the modules in the same directory.
pub(super) fn needs(paths: &[PathBuf], budget: &DecompressionBudget) -> Result<Vec<NeededTable>> {
    let mut tables = Vec::new();
    for path in paths {
        let files = table_files(path)?;
        let modules = if path.is_dir() { payload::read_modules(path, budget)? } else { Vec::new() };
        let proprietary = (!modules.is_empty()).then(|| proprietary_modules(&modules));
        for file in files {
            let table = |text: String| SymbolTable::parse(&text).map_err(|error| error.to_string());
            let symbols = read_text(&file).map_err(|error| error.to_string()).and_then(table);
            let symbols =
                symbols.map_err(|error| CliError::usage(format!("--needs {}: {error}", file.display())))?;
            let (image, proprietary) = (file.display().to_string(), proprietary.clone());
            tables.push(NeededTable { image, symbols, proprietary });
        }
    }
    Ok(tables)
}

/// Returns the file itself, or every `Module.symvers` below the directory in path order.
fn table_files(path: &Path) -> Result<Vec<PathBuf>> {
    let wrong = |reason: &str| CliError::usage(format!("--needs {}: {reason}", path.display()));
    let metadata = fs::metadata(path).map_err(|error| wrong(&error.to_string()))?;
    if !metadata.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in walkdir::WalkDir::new(path).sort_by_file_name() {
        let entry = entry.map_err(|error| wrong(&error.to_string()))?;
        if entry.file_type().is_file() && entry.file_name() == "Module.symvers" {
            files.push(entry.into_path());
        }
    }
    if files.is_empty() { Err(wrong("there is no Module.symvers in it")) } else { Ok(files) }
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_TABLE).read_to_string(&mut text)?;
    Ok(text)
}
