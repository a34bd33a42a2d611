//! Compares the check of kernel modules with real kernels. Mutates modules of a kernel, loads the mutants in a virtual machine
//! that runs the same kernel, and compares each answer of the kernel with the verdict of the check.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod compare;
mod elf;
mod kernel;
mod machine;
mod mutation;
mod own_modules;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
    slice,
};

use compare::{Comparison, compare};
use fastrand::Rng;
use kernel::{BaseModule, Kernel};
use kmod::{CheckReport, CheckRequest, KernelFacts, Module, PayloadModule, check};
use machine::{Answer, Load, MutantLoader};
use mutation::{Context, Mutant, mutant, rules};

const USAGE: &str = "usage: loader-fuzz [--seed N] [--mutants N] [--keep DIR] [--answers DIR] KERNEL...
       loader-fuzz --own-modules KERNEL...

  KERNEL       a directory with the unpacked Debian packages of a kernel's image and headers
  --mutants N  mutants of each kernel near the limit of each rule; 53 times as many change any field (default 20)
  --seed N     seed of the random numbers (default 1)
  --keep DIR   directory for the modules on which the check and the kernel differ
  --answers DIR
               directory for the kernels' answers. A run with the same kernel, seed and number of mutants reads them from there
               instead of starting a virtual machine, so that a changed rule is compared with the same answers
  --own-modules
               checks the kernel's own modules instead, each of which the kernel loads

Exit code 1 when the check and a kernel differ.";

/// Maximum number of modules from which the mutants of one kernel are made.
const MAX_BASE_MODULES: usize = 48;
/// Number of mutants that change any field, as a multiple of the mutants of a rule.
const ANY_FIELD_FACTOR: usize = 53;
/// Number of attempts to make a mutant, as a multiple of the number of mutants. An attempt fails if the mutation does not apply, or
/// repeats an earlier mutant.
const ATTEMPTS_FACTOR: usize = 20;
/// Maximum share of mutants that are unknown or trusted, in percent.
const MAX_UNKNOWN: usize = 2;
/// Number of mutants from which on their share counts.
const MIN_MUTANTS: usize = 2_000;
/// Number of reasons for `unknown` in the summary.
const SHOWN_REASONS: usize = 20;

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
    own_modules: bool,
    kernels: Vec<PathBuf>,
}

fn main() -> ExitCode {
    let options = match parse_options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let (mut all_load, mut total) = (true, RuleCounts::default());
    for root in &options.kernels {
        let result = if options.own_modules {
            own_modules::all_load(root).map(|loads| all_load &= loads)
        } else {
            compare_kernel(root, &options).map(|counts| total.add_all(&counts))
        };
        if let Err(error) = result {
            eprintln!("loader-fuzz: {}: {error}", root.display());
            return ExitCode::from(2);
        }
    }
    if all_load && total.is_agreement() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse_options() -> Result<Options> {
    let mut options =
        Options { seed: 1, mutants: 20, keep: None, answers: None, own_modules: false, kernels: Vec::new() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| fail(format!("{argument} needs a value")));
        match argument.as_str() {
            "--seed" => options.seed = value()?.parse().map_err(fail)?,
            "--mutants" => options.mutants = value()?.parse().map_err(fail)?,
            "--keep" => options.keep = Some(value()?.into()),
            "--answers" => options.answers = Some(value()?.into()),
            "--own-modules" => options.own_modules = true,
            _ if argument.starts_with('-') => return Err(fail(format!("unknown option {argument}"))),
            _ => options.kernels.push(argument.into()),
        }
    }
    if options.kernels.is_empty() { Err(fail("name at least one KERNEL")) } else { Ok(options) }
}

/// Number of mutants of one rule, by result.
#[derive(Default)]
struct RuleCounts {
    loaded: usize,
    refused: usize,
    died: usize,
    unknown: usize,
    /// Mutants that the check expects to load, because it trusts the same content as the kernel.
    trusted: usize,
    differs: usize,
}

/// Results of all mutants of a kernel.
#[derive(Default)]
struct Tally {
    rules: BTreeMap<&'static str, RuleCounts>,
    /// Mutants with the verdict `unknown`, by reason.
    unknown_reasons: BTreeMap<String, RuleCounts>,
}

/// Compares the check with a kernel for all mutants, and prints the table.
fn compare_kernel(root: &Path, options: &Options) -> Result<RuleCounts> {
    let kernel = Kernel::read(root)?;
    let release = kernel.facts.release.as_str().to_owned();
    let mut random = Rng::with_seed(options.seed);
    let bases = kernel.base_modules(MAX_BASE_MODULES, &mut random)?;
    let exports = exports(&kernel.facts);
    let mutants = mutants(&kernel, &bases, &exports, options.mutants, &mut random);
    let loads: Vec<Load<'_>> =
        mutants.iter().map(|(base, mutant)| Load { base: *base, bytes: &mutant.bytes }).collect();
    eprintln!("{release}: {} mutants of {} modules", loads.len(), bases.len());
    let answers = answers(&kernel, &bases, &loads, options)?;

    let mut tally = Tally::default();
    for (number, ((base, mutant), answer)) in mutants.iter().zip(&answers).enumerate() {
        let comparison = compare(&check_module(&kernel.facts, &mutant.bytes), answer);
        tally.add(mutant.rule, answer, &comparison);
        let base = bases.get(*base).map_or("", |base| &base.name);
        let label = format!("{release}: mutant {number} of {base}, {}: {}", mutant.rule, mutant.description);
        match comparison {
            Comparison::Agrees | Comparison::Unknown(_) => {}
            Comparison::Trusted(answer) => println!("{label}\n  trusted: {answer}"),
            Comparison::Differs(difference) => {
                println!("{label}\n  {difference}");
                if let Some(directory) = &options.keep {
                    fs::create_dir_all(directory)?;
                    fs::write(directory.join(format!("{number}-{base}.ko")), &mutant.bytes)?;
                }
            }
        }
    }
    Ok(tally.summarize(&release))
}

/// Returns the kernel's answers, from the file that an earlier run recorded or else from virtual machines.
fn answers(
    kernel: &Kernel,
    bases: &[BaseModule],
    loads: &[Load<'_>],
    options: &Options,
) -> Result<Vec<Answer>> {
    let record_file = options.answers.as_ref().map(|directory| {
        let release = kernel.facts.release.as_str();
        directory.join(format!("{release}-{}-{}-{:016x}", options.seed, options.mutants, digest(loads)))
    });
    if let Some(file) = &record_file
        && let Some(answers) = machine::read_answers(file)?
    {
        return Ok(answers);
    }
    let loader = MutantLoader::new(kernel)?;
    let mut answers = loader.load(bases, loads)?;
    // Earlier mutants may have changed the machine's memory, so the answer of a fresh machine counts.
    for (load, answer) in loads.iter().zip(&mut answers) {
        let comparison = compare(&check_module(&kernel.facts, load.bytes), answer);
        if matches!(comparison, Comparison::Differs(_))
            && let Some(alone) = loader.load(bases, slice::from_ref(load))?.pop()
        {
            *answer = alone;
        }
    }
    if let Some(file) = &record_file {
        machine::write_answers(file, &answers)?;
    }
    Ok(answers)
}

/// Digest of the mutants, for the name of the file with the answers.
fn digest(loads: &[Load<'_>]) -> u64 {
    use std::hash::Hasher as _;
    // Use a hasher with fixed keys. The hasher of a `HashMap` has random keys.
    let mut hasher = std::hash::DefaultHasher::new();
    for load in loads {
        hasher.write(load.bytes);
    }
    hasher.finish()
}

impl Tally {
    fn add(&mut self, rule: &'static str, answer: &Answer, comparison: &Comparison) {
        let counts = self.rules.entry(rule).or_default();
        counts.add(answer);
        match comparison {
            Comparison::Agrees => {}
            Comparison::Unknown(reason) => {
                counts.unknown += 1;
                self.unknown_reasons.entry(reason.clone()).or_default().add(answer);
            }
            Comparison::Trusted(_) => counts.trusted += 1,
            Comparison::Differs(_) => counts.differs += 1,
        }
    }

    /// Prints the table. Returns the sum of all rules.
    fn summarize(&self, release: &str) -> RuleCounts {
        println!(
            "{release}:\n{:18} {:>7} {:>8} {:>6} {:>8} {:>8} {:>8}",
            "rule", "loaded", "refused", "died", "unknown", "trusted", "differs"
        );
        let mut total = RuleCounts::default();
        for (rule, counts) in &self.rules {
            counts.print(rule);
            total.add_all(counts);
        }
        total.print("all");
        let mut reasons: Vec<(&String, &RuleCounts)> = self.unknown_reasons.iter().collect();
        reasons.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.mutants()));
        for (reason, counts) in reasons.into_iter().take(SHOWN_REASONS) {
            let RuleCounts { loaded, refused, died, .. } = counts;
            let mutants = counts.mutants();
            println!("  {mutants} unknown ({loaded} loaded, {refused} refused, {died} died): {reason}");
        }
        total
    }
}

impl RuleCounts {
    fn add(&mut self, answer: &Answer) {
        match answer {
            Answer::Loaded => self.loaded += 1,
            Answer::Refused(..) => self.refused += 1,
            Answer::Died(_) => self.died += 1,
        }
    }

    fn add_all(&mut self, other: &Self) {
        let Self { loaded, refused, died, unknown, trusted, differs } = other;
        self.loaded += loaded;
        self.refused += refused;
        self.died += died;
        self.unknown += unknown;
        self.trusted += trusted;
        self.differs += differs;
    }

    /// Whether no answer differs, and at most [`MAX_UNKNOWN`] percent of many mutants are unknown or trusted.
    fn is_agreement(&self) -> bool {
        let mutants = self.mutants();
        let undecided = self.unknown + self.trusted;
        self.differs == 0 && (mutants < MIN_MUTANTS || undecided * 100 <= MAX_UNKNOWN * mutants)
    }

    fn mutants(&self) -> usize {
        self.loaded + self.refused + self.died
    }

    fn print(&self, rule: &str) {
        let Self { loaded, refused, died, unknown, trusted, differs } = self;
        println!("{rule:18} {loaded:7} {refused:8} {died:6} {unknown:8} {trusted:8} {differs:8}");
    }
}

/// Makes the mutants of all rules, in random order, each with the index of its base module.
fn mutants(
    kernel: &Kernel,
    bases: &[BaseModule],
    exports: &BTreeMap<usize, Vec<String>>,
    count: usize,
    random: &mut Rng,
) -> Vec<(usize, Mutant)> {
    let mut mutants = Vec::new();
    for (rule, name) in rules().enumerate() {
        let target = if name == "any" { count * ANY_FIELD_FACTOR } else { count };
        let mut seen = BTreeSet::new();
        let mut count_of_rule = 0;
        for _ in 0..target * ATTEMPTS_FACTOR {
            if count_of_rule == target {
                break;
            }
            let number = random.usize(0..bases.len());
            let Some(base) = bases.get(number) else { break };
            let Some(mutant) = mutant(&Context { kernel: &kernel.facts, base, exports }, rule, random) else {
                continue;
            };
            if seen.insert((number, mutant.description.clone())) {
                mutants.push((number, mutant));
                count_of_rule += 1;
            }
        }
    }
    random.shuffle(&mut mutants);
    mutants
}

/// Symbols that the kernel image exports without a namespace, by the length of their names.
fn exports(kernel: &KernelFacts) -> BTreeMap<usize, Vec<String>> {
    let mut exports: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let all = kernel.symbols.iter().flat_map(kmod::SymbolTable::iter);
    for symbol in all.filter(|symbol| symbol.module == "vmlinux" && symbol.namespace.is_none()) {
        exports.entry(symbol.name.len()).or_default().push(symbol.name.to_owned());
    }
    exports
}

fn check_module(kernel: &KernelFacts, bytes: &[u8]) -> CheckReport {
    let modules = [PayloadModule { path: "module.ko".to_owned(), module: Module::parse(bytes) }];
    check(&CheckRequest::new(kernel, &modules))
}
