//! `kmodcheck`: predicts whether a kernel loads module files.

use std::{
    error::Error,
    ffi::OsString,
    fs::File,
    io::{self, Cursor, Read as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use kmod::{
    CachedFile, CheckReport, CheckRequest, Compression, KernelFacts, Module, ModuleError, PayloadModule,
    Rule, Verdict, Vmlinux,
};

const USAGE: &str = "\
Predicts whether a kernel loads module files (.ko, .ko.gz, .ko.xz, .ko.zst).

usage: kmodcheck [--json] [--kernel-image FILE] --headers DIR MODULE...
       kmodcheck --explain RULE

  --headers DIR        build tree of the kernel, such as /lib/modules/RELEASE/build
  --kernel-image FILE  image of the kernel (vmlinuz or vmlinux), for facts that the headers lack
  --json               print the report as JSON
  --explain RULE       explain a rule, such as `vermagic`

exit status: 0 if all modules load, 1 if one is refused or unknown, 2 for errors
";

/// Maximum size of a header file in bytes; Debian's `Module.symvers` has 2 MB.
const MAX_FILE: u64 = 64 << 20;
/// Maximum size of a decompressed module in bytes. The largest known one has 185 MB with debug information.
const MAX_MODULE: u64 = 1 << 30;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

#[derive(Default)]
struct Arguments {
    json: bool,
    headers: Option<PathBuf>,
    kernel_image: Option<PathBuf>,
    files: Vec<String>,
}

fn main() -> ExitCode {
    match arguments().and_then(|args| run(args.into_iter())) {
        Ok(Verdict::Loads) => ExitCode::SUCCESS,
        Ok(Verdict::Unknown | Verdict::Refused) => ExitCode::from(1),
        Err(error) => {
            // If standard error is closed, only the exit status reports the error.
            let _ = writeln!(io::stderr(), "error: {}", error_chain(&*error));
            ExitCode::from(2)
        }
    }
}

/// Formats an error with its sources.
fn error_chain(error: &dyn Error) -> String {
    let sources = std::iter::successors(error.source(), |&error| error.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}

fn arguments() -> Result<Vec<String>> {
    let to_utf8 =
        |arg: OsString| arg.into_string().map_err(|arg| format!("{}: not UTF-8", arg.display()).into());
    std::env::args_os().skip(1).map(to_utf8).collect()
}

fn run(mut args: impl Iterator<Item = String>) -> Result<Verdict> {
    let mut arguments = Arguments::default();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg}: the value is missing"));
        match arg.as_str() {
            "--explain" => return print(value()?.parse::<Rule>()?.explanation()),
            "--headers" => arguments.headers = Some(value()?.into()),
            "--kernel-image" => arguments.kernel_image = Some(value()?.into()),
            "--json" => arguments.json = true,
            "--help" | "-h" => return print(USAGE.trim_end()),
            flag if flag.starts_with('-') => return Err(format!("{flag}: no such option; see --help").into()),
            _ => arguments.files.push(arg),
        }
    }
    let Some(headers) = arguments.headers.filter(|_| !arguments.files.is_empty()) else {
        return Err("give --headers DIR and module files; see --help".into());
    };
    let mut kernel = read_headers(&headers)?;
    if let Some(image) = &arguments.kernel_image {
        add_image(&mut kernel, image)
            .map_err(|error| format!("{}: {}", image.display(), error_chain(&*error)))?;
    }
    let modules = arguments.files.iter().map(|path| read_module(path)).collect::<Result<Vec<_>>>()?;
    let report = kmod::check(&CheckRequest::new(&kernel, &modules));
    print(&if arguments.json { serde_json::to_string_pretty(&report)? } else { format_report(&report) })?;
    Ok(report.verdict)
}

fn format_report(report: &CheckReport) -> String {
    format!("{report}{}", report.explain_hint("kmodcheck").unwrap_or_default())
}

/// Prints a text. Returns the verdict for exit status 0.
fn print(text: &str) -> Result<Verdict> {
    writeln!(io::stdout(), "{}", text.trim_end())?;
    Ok(Verdict::Loads)
}

/// Reads a build tree such as `/lib/modules/RELEASE/build`. Headers that several kernels share are in the source tree beside it,
/// `/lib/modules/RELEASE/source`.
fn read_headers(build: &Path) -> Result<KernelFacts> {
    let source = build.parent().unwrap_or(Path::new("")).join("source");
    let file = |name: &str| read_text(&build.join(name));
    let header =
        |name: &str| file(name)?.map_or_else(|| read_text(&source.join(name)), |text| Ok(Some(text)));
    let facts = KernelFacts::of_headers(None, file, header);
    facts.map_err(|error| format!("{}: {}", build.display(), error_chain(&error)).into())
}

/// Reads a file; returns `None` if it does not exist.
fn read_text(path: &Path) -> io::Result<Option<String>> {
    let mut text = String::new();
    match File::open(path) {
        Ok(file) => file.take(MAX_FILE).read_to_string(&mut text).map(|_| Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Adds the facts from a kernel image. Decompresses the image in memory.
fn add_image(kernel: &mut KernelFacts, path: &Path) -> Result<()> {
    let mut vmlinux = Vmlinux::of_image(&mut File::open(path)?, Cursor::new(Vec::<u8>::new()))?;
    if let Some(release) = vmlinux.release()?.filter(|release| release != kernel.release.as_str()) {
        return Err(format!("this is the image of kernel {release}, not of {}", kernel.release).into());
    }
    kernel.beyond_headers = vmlinux.facts()?;
    Ok(())
}

fn read_module(path: &str) -> Result<PayloadModule> {
    let compression = Compression::of(path).unwrap_or(Compression::None);
    let file = File::open(path).map_err(|error| format!("{path}: {error}"))?;
    let mut module = if compression == Compression::None && file.metadata()?.len() > MAX_MODULE {
        Err(ModuleError::too_large(MAX_MODULE))
    } else if compression == Compression::None {
        Module::parse(&CachedFile::new(file))
    } else {
        let mut decompressed = Vec::new();
        let read = compression.reader(file)?.take(MAX_MODULE + 1).read_to_end(&mut decompressed);
        match read {
            Ok(_) if decompressed.len() as u64 > MAX_MODULE => {
                Err(ModuleError::decompress(format_args!("it holds more than {} MiB", MAX_MODULE >> 20)))
            }
            Ok(_) => Module::parse(&decompressed[..]),
            Err(error) => Err(ModuleError::decompress(error)),
        }
    };
    if let Ok(module) = &mut module {
        module.has_unsupported_xz_check = compression.has_unsupported_xz_check(File::open(path)?)?;
    }
    Ok(PayloadModule { path: path.to_owned(), module })
}
