//! Reports whether a kernel would load module files: `check MODULE.ko... Module.symvers CONFIG RELEASE`.

use std::{env, error::Error, fs, io::Write as _};

use kmod::{CheckRequest, KernelConfig, KernelFacts, Module, PayloadModule, SymbolTable, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [files @ .., symbols, config, release] = arguments.as_slice() else {
        return Err("usage: check MODULE.ko... Module.symvers CONFIG RELEASE".into());
    };
    let modules = files.iter().map(|path| {
        let module = Module::parse(&fs::read(path)?[..]);
        Ok(PayloadModule { path: path.clone(), module })
    });
    let modules = modules.collect::<Result<Vec<_>, std::io::Error>>()?;
    let arch = modules.iter().find_map(|payload| payload.module.as_ref().ok()).map(|module| module.arch);
    let arch = arch.ok_or("no file is a kernel module")?;
    let config = KernelConfig::parse(&fs::read_to_string(config)?)?;
    let mut kernel = KernelFacts::new(release.parse()?, arch, config);
    kernel.symbols = Some(SymbolTable::parse(&fs::read_to_string(symbols)?)?);
    let report = kmod::check(&CheckRequest::new(&kernel, &modules));
    write!(std::io::stdout(), "{report}")?;
    if report.verdict == Verdict::Refused { Err("the kernel would refuse it".into()) } else { Ok(()) }
}
