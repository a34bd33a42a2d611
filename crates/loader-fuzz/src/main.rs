//! Compares the check of kernel modules with real kernels. It changes modules of a kernel, loads them in a virtual machine that
//! runs that kernel, and compares each answer with the verdict of the check.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod compare;
mod elf;
mod grammar;
mod kernel;
mod machine;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use compare::{Comparison, compare};
use fastrand::Rng;
use grammar::{Context, Mutant, mutant, rules};
use kernel::{Base, Kernel};
use kmod::{CheckReport, CheckRequest, KernelFacts, Module, PayloadModule, check};
use machine::{Answer, Guests, Load};

const USAGE: &str = "usage: loader-fuzz [--seed N] [--mutants N] [--keep DIR] [--answers DIR] KERNEL...

  KERNEL       a directory with the unpacked Debian packages of a kernel's image and headers
  --mutants N  mutants of each kernel near the limit of each rule; 53 times as many change any field (default 20)
  --seed N     seed of the random numbers (default 1)
  --keep DIR   directory for the modules on which the check and the kernel differ
  --answers DIR
               directory for the kernels' answers. A run with the same kernel, seed and number of mutants takes them from there
               and starts no virtual machine, so that a change of a rule can be compared with the same answers

Exit code 1 when the check and a kernel differ.";

/// Modules that mutants of one kernel are made from.
const BASES: usize = 48;
/// Mutants that change any field, for each mutant of a rule.
const OF_ANY_FIELD: usize = 53;
/// Maximum share of mutants for which the check does not decide, in percent.
const MAX_UNKNOWN: usize = 2;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Other(String),
}

type Result<T> = std::result::Result<T, Error>;

fn fail(error: impl Display) -> Error {
    Error::Other(error.to_string())
}

struct Options {
    seed: u64,
    mutants: usize,
    keep: Option<PathBuf>,
    answers: Option<PathBuf>,
    kernels: Vec<PathBuf>,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut agrees = true;
    for root in &options.kernels {
        match run(root, &options) {
            Ok(same) => agrees &= same,
            Err(error) => {
                eprintln!("loader-fuzz: {}: {error}", root.display());
                return ExitCode::from(2);
            }
        }
    }
    if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn options() -> Result<Options> {
    let mut options = Options { seed: 1, mutants: 20, keep: None, answers: None, kernels: Vec::new() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| fail(format!("{word} needs a value")));
        match word.as_str() {
            "--seed" => options.seed = value()?.parse().map_err(fail)?,
            "--mutants" => options.mutants = value()?.parse().map_err(fail)?,
            "--keep" => options.keep = Some(value()?.into()),
            "--answers" => options.answers = Some(value()?.into()),
            _ if word.starts_with('-') => return Err(fail(format!("unknown option {word}"))),
            _ => options.kernels.push(word.into()),
        }
    }
    if options.kernels.is_empty() { Err(fail("no kernel")) } else { Ok(options) }
}

/// Counts of one rule.
#[derive(Default)]
struct Row {
    loaded: usize,
    refused: usize,
    died: usize,
    unknown: usize,
    /// Crashes of the kernel by modules that the check expects to load. The kernel trusts the content of a module.
    crashes: usize,
    differs: usize,
}

/// Runs all mutants of a kernel and prints the table. Returns whether the check agrees with the kernel.
fn run(root: &Path, options: &Options) -> Result<bool> {
    let kernel = Kernel::read(root)?;
    let release = kernel.facts.release.as_str().to_owned();
    let mut random = Rng::with_seed(options.seed);
    let bases = kernel.bases(BASES, &mut random)?;
    let exports = exports(&kernel.facts);
    let mutants = mutants(&kernel, &bases, &exports, options.mutants, &mut random);
    let loads: Vec<Load<'_>> =
        mutants.iter().map(|(base, mutant)| Load { base: *base, bytes: &mutant.bytes }).collect();
    eprintln!("{release}: {} mutants of {} modules", loads.len(), bases.len());
    let record = options.answers.as_ref().map(|place| {
        place.join(format!("{release}-{}-{}-{:016x}", options.seed, options.mutants, digest(&loads)))
    });
    let known = record.as_ref().map(|file| machine::read_answers(file)).transpose()?.flatten();
    let answers = if let Some(answers) = known {
        answers
    } else {
        let answers = Guests::new(&kernel, &bases)?.load(&loads)?;
        if let Some(file) = &record {
            machine::write_answers(file, &answers)?;
        }
        answers
    };

    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    let mut unknowns: BTreeMap<String, usize> = BTreeMap::new();
    for (number, ((base, mutant), answer)) in mutants.iter().zip(&answers).enumerate() {
        let row = rows.entry(mutant.rule).or_default();
        match answer {
            Answer::Loaded => row.loaded += 1,
            Answer::Refused(..) => row.refused += 1,
            Answer::Died(_) => row.died += 1,
        }
        let report = checked(&kernel.facts, &mutant.bytes);
        match compare(&report, answer) {
            Comparison::Agrees => {}
            Comparison::Unknown(why) => {
                row.unknown += 1;
                *unknowns.entry(why).or_default() += 1;
            }
            Comparison::Crashes(console) => {
                row.crashes += 1;
                let cause = console.lines().find_map(|line| line.split_once("RIP: ").map(|(_, cause)| cause));
                let name = bases.get(*base).map_or("", |base| &base.name);
                let cause = cause.unwrap_or("no cause");
                println!(
                    "{release}: mutant {number} of {name}, {}: {}\n  crashes: {cause}",
                    mutant.rule, mutant.what
                );
            }
            Comparison::Differs(how) => {
                row.differs += 1;
                let name = bases.get(*base).map_or("", |base| &base.name);
                println!("{release}: mutant {number} of {name}, {}: {}\n  {how}", mutant.rule, mutant.what);
                if let Some(place) = &options.keep {
                    fs::create_dir_all(place)?;
                    fs::write(machine::kept(place, number, name), &mutant.bytes)?;
                }
            }
        }
    }
    Ok(summarize(&release, &rows, &unknowns))
}

/// Digest of the mutants, which identifies the recorded answers to them.
fn digest(loads: &[Load<'_>]) -> u64 {
    use std::hash::Hasher as _;
    // With fixed keys, unlike that of a `HashMap`.
    let mut hasher = std::hash::DefaultHasher::new();
    for load in loads {
        hasher.write(load.bytes);
    }
    hasher.finish()
}

/// Prints the table. Returns whether no answer differs, and few are unknown.
fn summarize(release: &str, rows: &BTreeMap<&str, Row>, unknowns: &BTreeMap<String, usize>) -> bool {
    println!(
        "{release}:\n{:18} {:>7} {:>8} {:>6} {:>8} {:>8} {:>8}",
        "rule", "loaded", "refused", "died", "unknown", "crashes", "differs"
    );
    let mut total = Row::default();
    for (rule, row) in rows {
        let Row { loaded, refused, died, unknown, crashes, differs } = row;
        println!("{rule:18} {loaded:7} {refused:8} {died:6} {unknown:8} {crashes:8} {differs:8}");
        total.loaded += loaded;
        total.refused += refused;
        total.died += died;
        total.unknown += unknown;
        total.crashes += crashes;
        total.differs += differs;
    }
    let Row { loaded, refused, died, unknown, crashes, differs } = total;
    println!("{:18} {loaded:7} {refused:8} {died:6} {unknown:8} {crashes:8} {differs:8}", "all");
    let mut most: Vec<(&String, &usize)> = unknowns.iter().collect();
    most.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (why, count) in most.into_iter().take(20) {
        println!("  {count} unknown: {why}");
    }
    differs == 0 && (unknown + crashes) * 100 <= MAX_UNKNOWN * (loaded + refused + died)
}

/// Mutants of all rules in random order, with the numbers of their bases.
fn mutants(
    kernel: &Kernel,
    bases: &[Base],
    exports: &BTreeMap<usize, Vec<String>>,
    count: usize,
    random: &mut Rng,
) -> Vec<(usize, Mutant)> {
    let mut mutants = Vec::new();
    for (rule, name) in rules().enumerate() {
        let wanted = if name == "any" { count * OF_ANY_FIELD } else { count };
        let mut seen = BTreeSet::new();
        let mut made = 0;
        for _ in 0..wanted * 20 {
            if made == wanted {
                break;
            }
            let number = random.usize(0..bases.len());
            let Some(base) = bases.get(number) else { break };
            let Some(mutant) = mutant(&Context { kernel: &kernel.facts, base, exports }, rule, random) else {
                continue;
            };
            if seen.insert((number, mutant.what.clone())) {
                mutants.push((number, mutant));
                made += 1;
            }
        }
    }
    random.shuffle(&mut mutants);
    mutants
}

/// Symbols that the kernel image exports, by length.
fn exports(kernel: &KernelFacts) -> BTreeMap<usize, Vec<String>> {
    let mut exports: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let all = kernel.symbols.iter().flat_map(kmod::SymbolTable::iter);
    for symbol in all.filter(|symbol| symbol.module == "vmlinux" && symbol.namespace.is_none()) {
        exports.entry(symbol.name.len()).or_default().push(symbol.name.to_owned());
    }
    exports
}

fn checked(kernel: &KernelFacts, bytes: &[u8]) -> CheckReport {
    let modules = [PayloadModule { path: "module.ko".to_owned(), module: Module::parse(bytes) }];
    check(&CheckRequest::new(kernel, &modules))
}
