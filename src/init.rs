//! `farrier init`: drafts a working definitions directory from the cluster and other tools' files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::{self, IsTerminal as _, Read as _, Write as _},
    path::{Path, PathBuf},
};

use clap::Args;
use farrier_cluster::nodes_and_daemon_sets;
use farrier_core::{
    image::{Definitions, DriverImage},
    plan::{NodeFacts, SnapshotScope, WriteNamespaces},
    shell::shell_word,
};
use farrier_definitions::{self as definitions, DefinitionErrors};
use farrier_local::files::open_regular;
use farrier_migrate::{Context, Draft, Drafted, MAX_FORM, Remark, source};
use farrier_store::registry::RegistryLocation;
use fs_err as fs;
use serde::Serialize;
use tokio::sync::oneshot;
use walkdir::{DirEntry, WalkDir};

use super::{
    CliError, Exit, env_vars as vars, output,
    session::{Session, kube_options},
    settings,
};

/// Maximum number of files in a source tree that are inspected to find out how it is built, and their maximum
/// depth.
const MAX_FILES: usize = 20_000;
const MAX_DEPTH: usize = 5;

/// Command line for `farrier init` without a terminal.
const NONINTERACTIVE_USAGE: &str = "farrier init DIR --cluster CLUSTER --registry LOCATION, and --source DIR, --driver IMAGE, or --from FILE --source SOURCE";

#[derive(Debug, Args)]
pub struct InitArgs {
    /// Directory to create; existing files are kept [default: that of --definitions, or `definitions`]
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Cluster to read: kube or kube:CONTEXT, or dir:PATH
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
    /// Registry for the published images: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// Driver image that farrier ships, such as mofed or nvidia-gpu (repeatable)
    #[arg(long, value_name = "IMAGE")]
    pub driver: Vec<String>,
    /// File of another tool that describes a driver (repeatable): a KMM Module, a configuration of driverkit,
    /// a dkms.conf next to its sources, an operator's resource [default, without --driver: those in the
    /// cluster]
    #[arg(long, value_name = "FILE")]
    pub from: Vec<PathBuf>,
    /// Sources of such a driver: a directory, an archive, URL#sha256=HEX or apt:PACKAGE@SUITE; with NAME= in
    /// front if there are several drivers. Without --driver and --from, a directory with a Makefile, Kbuild or
    /// dkms.conf is a driver itself, and NAME= names its image
    #[arg(long, value_name = "[NAME=]SOURCE")]
    pub source: Vec<String>,
}

/// JSON output of `farrier init`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    written: Vec<PathBuf>,
    /// Existing files, which were not changed.
    kept: Vec<PathBuf>,
    remarks: Vec<Remark>,
    /// Steps to do by hand.
    by_hand: Vec<String>,
    /// Commands to continue with.
    next: Vec<String>,
}

/// Reads the cluster and the files, asks for missing values, and writes the files that do not exist.
pub async fn init(session: &Session, mut args: InitArgs) -> Result<Exit, CliError> {
    let directory = args.directory.take().or_else(|| session.global.definitions.clone());
    let directory = directory.unwrap_or_else(|| PathBuf::from("definitions"));
    let (cluster, manifests, mut context) = read_cluster(session, args.cluster.take()).await?;
    let question = "where are images published: host[:port]/path, or oci:PATH";
    let check = async |registry: String| -> Result<_, CliError> {
        settings::parse::<RegistryLocation>("--registry", &registry)?;
        Ok(registry)
    };
    context.registry = value_or_prompt(args.registry.take(), "--registry", question, check).await?;
    let mut drafted = draft_drivers(args, &cluster, &manifests, &mut context).await?;
    make_sources_relative(&mut drafted.drafts, &directory)?;
    let (files, definitions) = valid_files(&mut drafted)?;
    let (written, kept) = write(&directory, &files)?;
    write(&directory, &schemas()?)?;
    let Drafted { mut remarks, by_hand, .. } = drafted;
    remarks.retain(|remark| !kept.contains(&directory.join(&remark.origin)));
    let next = next_commands(&directory, &cluster, &context.registry, &definitions);
    session.show(&Report { written, kept, remarks, by_hand, next }, text)?;
    Ok(Exit::Done)
}

/// Connects to the given cluster, or asks for it. Returns its name, its manifests, and the nodes and DaemonSets in these.
async fn read_cluster(
    session: &Session,
    given: Option<String>,
) -> Result<(String, Vec<String>, Context), CliError> {
    let question = "which cluster: kube, kube:CONTEXT, or dir:PATH for a directory of manifests";
    let connect = async |cluster: String| -> Result<_, CliError> {
        let scope = SnapshotScope::default();
        let connection = session.connect(&cluster, WriteNamespaces::default(), scope).await?;
        Ok((cluster, connection.cluster.manifests().await?, connection.kube.is_some()))
    };
    let (cluster, manifests, in_cluster) = value_or_prompt(given, "--cluster", question, connect).await?;
    let mut context = Context { in_cluster, ..Context::default() };
    for text in &manifests {
        let (nodes, daemon_sets) =
            nodes_and_daemon_sets(text).map_err(|error| unreadable(&cluster, &error.message))?;
        context.nodes.extend(nodes);
        context.daemon_sets.extend(daemon_sets);
    }
    Ok((cluster, manifests, context))
}

fn unreadable(cluster: &str, reason: &str) -> CliError {
    CliError::usage(format!("a manifest of {cluster}: {reason}"))
}

/// Drafts the drivers that `--driver` and `--from` name. Without these options, drafts the drivers in the cluster's
/// manifests, else those in the source directories. If there is no driver, asks for one.
async fn draft_drivers(
    args: InitArgs,
    cluster: &str,
    manifests: &[String],
    context: &mut Context,
) -> Result<Drafted, CliError> {
    let InitArgs { driver, from, source, .. } = args;
    let mut drafted = Drafted::default();
    for path in &from {
        read(&mut drafted, path, context)?;
    }
    // A rollout can write the resources in manifests, also those of a directory.
    context.in_cluster = true;
    let mut has_driver = !from.is_empty();
    if from.is_empty() && driver.is_empty() {
        for text in manifests {
            let found = drafted.read(text, Path::new(""), context);
            has_driver |= found.map_err(|reason| unreadable(cluster, &reason))?;
        }
    }
    let from_trees = !has_driver && driver.is_empty() && !source.is_empty();
    if from_trees {
        draft_trees(&mut drafted, &source, context)?;
    }
    for name in drivers(driver, has_driver || from_trees, &context.nodes).await? {
        drafted.add_shipped(&name, context).map_err(CliError::usage)?;
    }
    find_sources(&mut drafted.drafts, if from_trees { &[] } else { &source }).await?;
    Ok(drafted)
}

/// Returns the files of the drafts, and the definitions in the files. Resets invalid fields of the drafts, and validates the
/// files as `--definitions` does.
fn valid_files(drafted: &mut Drafted) -> Result<(BTreeMap<String, String>, Definitions), CliError> {
    for draft in &mut drafted.drafts {
        let origin = draft.origin.clone();
        draft
            .reset_invalid_fields(first_mistake)
            .map_err(|reason| CliError::usage(format!("{origin}: {reason}")))?;
    }
    let mut files = drafted.files().map_err(CliError::usage)?;
    for (path, text) in &mut files {
        add_schema_line(path, text);
    }
    let staged = tempfile::tempdir()?;
    write(staged.path(), &files)?;
    let definitions = definitions::load(Some(staged.path()))?;
    Ok((files, definitions))
}

/// Returns the first mistake in the text of a definition.
fn first_mistake(text: &str) -> Result<(), String> {
    let staged = tempfile::tempdir().map_err(|error| error.to_string())?;
    let files = BTreeMap::from([("images/draft.yaml".to_owned(), text.to_owned())]);
    write(staged.path(), &files).map_err(|error| error.error.to_string())?;
    let first =
        |DefinitionErrors(errors)| errors.into_iter().next().map_or_else(String::new, |error| error.message);
    definitions::load(Some(staged.path())).map(drop).map_err(first)
}

/// Returns the given value, or asks for it on the terminal until `check` accepts the answer.
async fn value_or_prompt<T>(
    given: Option<String>,
    option: &str,
    question: &str,
    check: impl AsyncFn(String) -> Result<T, CliError>,
) -> Result<T, CliError> {
    if let Some(given) = given {
        return check(given).await;
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let message = format!("{option} is missing, and there is no terminal to ask at: {question}");
        return Err(CliError::hinted(message, NONINTERACTIVE_USAGE));
    }
    loop {
        write!(io::stderr(), "{}? ", output::printable(question))?;
        let (sender, answer) = oneshot::channel();
        // A separate thread reads, so that an interrupted command does not wait for the input.
        std::thread::spawn(move || {
            let mut line = String::new();
            sender.send(io::stdin().read_line(&mut line).map(|read| (read > 0).then_some(line)))
        });
        let line = answer.await.ok().transpose()?.flatten();
        let line = line.ok_or_else(|| CliError::usage(format!("{option}: end of input")))?;
        if line.trim().is_empty() {
            output::message(&format!("{option} needs a value; Ctrl-C cancels"));
            continue;
        }
        match check(line.trim().to_owned()).await {
            Ok(answer) => return Ok(answer),
            Err(error) => output::message(&error.render()),
        }
    }
}

/// Adds the drivers that a file describes.
fn read(drafted: &mut Drafted, path: &Path, context: &Context) -> Result<(), CliError> {
    let known = "a Module of KMM, a configuration of driverkit, a dkms.conf, or a resource from which an operator installs a driver";
    let hint = format!("--from names {known}; --source names the directory of a driver's Makefile or Kbuild");
    let invalid =
        |reason: String| CliError::hinted(format!("--from {}: {reason}", path.display()), hint.clone());
    let text = read_text(path).map_err(|error| invalid(error.to_string()))?;
    if !drafted.read(&text, &fs::canonicalize(path)?, context).map_err(invalid)? {
        return Err(invalid("unknown content".to_owned()));
    }
    Ok(())
}

/// Reads a file of at most [`MAX_FORM`] bytes.
fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    if open_regular(path)?.take(MAX_FORM + 1).read_to_string(&mut text)? as u64 > MAX_FORM {
        return Err(io::Error::other(format!("more than {MAX_FORM} bytes")));
    }
    Ok(text)
}

/// Returns the shipped drivers to use. Asks for them if no driver was given or found.
async fn drivers(given: Vec<String>, has_driver: bool, nodes: &[NodeFacts]) -> Result<Vec<String>, CliError> {
    let shipped = definitions::load(None)?;
    // The hint of this error is about --definitions.
    let without_hint = |error| CliError { hint: None, ..error };
    let check_names = |names: &[String]| settings::images(names, &shipped).map(drop).map_err(without_hint);
    if !has_driver && given.is_empty() {
        let names = |is_one: &dyn Fn(&DriverImage) -> bool| {
            let images = shipped.images.values().filter(|image| is_one(image));
            images.map(|image| image.metadata.name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let matching = names(&|image| nodes.iter().any(|node| image.spec.nodes.matches(&node.labels)));
        let matching =
            if matching.is_empty() { matching } else { format!(" (nodes have the labels of: {matching})") };
        let question = format!(
            "which drivers of {}, with commas between them{matching}; for another driver, end this and pass --source DIR or --from FILE",
            names(&|_| true),
        );
        let check = async |answer: String| -> Result<_, CliError> {
            let names: Vec<String> = answer.split(',').map(|name| name.trim().to_owned()).collect();
            check_names(&names)?;
            Ok(names)
        };
        return value_or_prompt(None, "--driver", &question, check).await;
    }
    check_names(&given)?;
    Ok(given)
}

/// Sets the sources of each driver that has none, from `--source` or by asking.
async fn find_sources(drafts: &mut [Draft], given: &[String]) -> Result<(), CliError> {
    let missing = drafts.iter().filter(|draft| draft.from.is_none()).count();
    if given.len() > missing {
        let message = format!("--source: got {} sources for {missing} drivers that need one", given.len());
        return Err(CliError::usage(message));
    }
    for draft in drafts.iter_mut().filter(|draft| draft.from.is_none()) {
        let Draft { name, hint, .. } = &*draft;
        let by_name = given.iter().find_map(|text| text.strip_prefix(name.as_str())?.strip_prefix('='));
        let only = given.first().filter(|_| missing == 1).map(String::as_str);
        let question = format!(
            "where are the sources of {name} ({hint}): a directory, an archive, URL#sha256=HEX or apt:PACKAGE@SUITE"
        );
        let inspect = async |answer: String| -> Result<_, CliError> {
            let invalid = |reason: String| CliError::usage(format!("--source {answer}: {reason}"));
            let from = source(&answer).map_err(invalid)?;
            if from.get("path").is_none() {
                return Ok((from, answer.starts_with("apt:").then(|| ("dkms", ".".to_owned()))));
            }
            let tree = canonical(&answer).map_err(invalid)?;
            Ok((source(&tree.display().to_string()).map_err(invalid)?, detect_build(&tree)))
        };
        let given = by_name.or(only).map(str::to_owned);
        let (from, build) = value_or_prompt(given, "--source", &question, inspect).await?;
        draft.from = Some(from);
        if let Some((template, directory)) = build.filter(|_| draft.template == "kbuild") {
            draft.template = template;
            draft.vars.insert("directory", directory);
        }
    }
    Ok(())
}

/// Returns the absolute path of a source on this machine.
fn canonical(path: &str) -> Result<PathBuf, String> {
    std::fs::canonicalize(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "there is no such file or directory".to_owned(),
        _ => error.to_string(),
    })
}

/// Drafts a driver from each source directory.
fn draft_trees(drafted: &mut Drafted, sources: &[String], context: &Context) -> Result<(), CliError> {
    for text in sources {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) if !Path::new(text).exists() => (Some(name), path),
            _ => (None, text.as_str()),
        };
        let invalid = |reason: String| {
            let hint = "name a directory with a Makefile, Kbuild or dkms.conf; for other sources, also name the driver with --driver \
                        or --from";
            CliError::hinted(format!("--source {text}: {reason}"), hint)
        };
        if source(path).map_err(invalid)?.get("path").is_none() || Path::new(path).is_file() {
            return Err(invalid("it is not a directory".to_owned()));
        }
        let tree = canonical(path).map_err(|reason| CliError::usage(format!("--source {text}: {reason}")))?;
        let (template, directory) = detect_build(&tree)
            .ok_or_else(|| invalid("found no Makefile or Kbuild with obj-m, and no dkms.conf".to_owned()))?;
        // `components` drops the `.` of a build file at the top.
        let build_dir: PathBuf = tree.join(&directory).components().collect();
        if template == "dkms" {
            let conf = read_text(&build_dir.join("dkms.conf"));
            let conf = conf.map_err(|error| invalid(format!("dkms.conf: {error}")))?;
            drafted.add_dkms(name, &conf, &build_dir, context);
            continue;
        }
        let files = ["Kbuild", "Makefile"].map(|name| read_text(&build_dir.join(name)).unwrap_or_default());
        drafted.add_kbuild(name, &tree, directory, &files.join("\n"), context).map_err(invalid)?;
        if let Some(draft) = drafted.drafts.last()
            && build_dir.join("dkms.conf").is_file()
        {
            let says = "the dkms.conf is not used; --from DIR/dkms.conf makes a definition of it".to_owned();
            drafted.remarks.push(Remark::of_image(&draft.name, "template", "kbuild", says));
        }
    }
    Ok(())
}

/// Makes paths of sources relative to the definitions directory, if they are beside or below it, so that both
/// can be moved and checked in together.
fn make_sources_relative(drafts: &mut [Draft], directory: &Path) -> Result<(), CliError> {
    let absolute = std::path::absolute(directory)?;
    let real = absolute.ancestors().find_map(|part| Some((part, fs::canonicalize(part).ok()?)));
    let Some((part, real)) = real else { return Ok(()) };
    let real = real.join(absolute.strip_prefix(part).unwrap_or(Path::new("")));
    for path in drafts.iter_mut().filter_map(|draft| draft.from.as_mut()?.pointer_mut("/path/path")) {
        let source = PathBuf::from(path.as_str().unwrap_or_default());
        let below = source.strip_prefix(&real).map(Path::to_owned);
        let beside = real.parent().and_then(|parent| source.strip_prefix(parent).ok());
        if let Some(relative) = below.ok().or_else(|| Some(Path::new("..").join(beside?))) {
            *path = relative.display().to_string().into();
        }
    }
    Ok(())
}

/// Directory of the JSON Schemas for editors, below the definitions directory.
const SCHEMAS: &str = ".schema";

/// Adds the line by which YAML language servers find the schema of a definition.
fn add_schema_line(path: &str, text: &mut String) {
    let (up, kind) = match path.split_once('/') {
        None if path == "site.yaml" => ("", "site"),
        Some(("images", _)) => ("../", "driver-image"),
        Some(("kernels", _)) => ("../", "kernel-family"),
        _ => return,
    };
    text.insert_str(0, &format!("# yaml-language-server: $schema={up}{SCHEMAS}/{kind}.json\n"));
}

/// Returns the schemas that [`add_schema_line`] names.
fn schemas() -> Result<BTreeMap<String, String>, CliError> {
    use super::schema::{SchemaKind, schema_of};
    let kinds = [
        ("site", SchemaKind::Site),
        ("driver-image", SchemaKind::DriverImage),
        ("kernel-family", SchemaKind::KernelFamily),
    ];
    let file = |(name, kind)| -> Result<(String, String), CliError> {
        let text = serde_json::to_string_pretty(&schema_of(kind)).map_err(io::Error::other)?;
        Ok((format!("{SCHEMAS}/{name}.json"), text + "\n"))
    };
    kinds.into_iter().map(file).collect()
}

/// Returns the template that fits a source tree and the directory of its build file, if both can be found.
fn detect_build(tree: &Path) -> Option<(&'static str, String)> {
    let files = WalkDir::new(tree).max_depth(MAX_DEPTH).sort_by_file_name().into_iter().take(MAX_FILES);
    let files: Vec<PathBuf> = files.flatten().map(DirEntry::into_path).collect();
    let find = |template: &'static str, names: [&str; 2], word: &str| {
        let is_one = |path: &&PathBuf| {
            names.iter().any(|name| path.ends_with(name))
                && read_text(path).is_ok_and(|text| text.contains(word))
        };
        let directory = files.iter().find(is_one)?.parent()?.strip_prefix(tree).ok()?.to_str()?;
        Some((template, if directory.is_empty() { "." } else { directory }.to_owned()))
    };
    // Of a tree with both, the Makefile is used: other tools run make even if there is a dkms.conf.
    let kbuild = find("kbuild", ["Kbuild", "Makefile"], "obj-m");
    kbuild.or_else(|| find("dkms", ["dkms.conf"; 2], "PACKAGE_NAME"))
}

/// Writes the files that do not exist. Returns the written and the existing files.
fn write(
    directory: &Path,
    files: &BTreeMap<String, String>,
) -> Result<(Vec<PathBuf>, Vec<PathBuf>), CliError> {
    let (mut written, mut kept) = (Vec::new(), Vec::new());
    for (path, text) in files {
        let path = directory.join(path);
        fs::create_dir_all(path.parent().unwrap_or(directory))?;
        match fs::File::create_new(&path) {
            Ok(mut file) => {
                file.write_all(text.as_bytes())?;
                written.push(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => kept.push(path),
            Err(error) => return Err(error.into()),
        }
    }
    Ok((written, kept))
}

/// Returns the commands to continue with.
fn next_commands(directory: &Path, cluster: &str, registry: &str, definitions: &Definitions) -> Vec<String> {
    let options = format!(
        "--cluster {} --definitions {} --registry {}",
        shell_word(cluster),
        shell_word(&directory.to_string_lossy()),
        shell_word(registry)
    );
    let mut run = format!("farrier run --once {options}");
    if kube_options(cluster).is_some() {
        let rollouts = definitions.images.values().flat_map(|image| &image.spec.rollout);
        let namespaces: BTreeSet<&str> =
            rollouts.filter_map(|rollout| Some(rollout.namespace()?.as_str())).collect();
        let namespaces = Vec::from_iter(namespaces).join(",");
        let namespaces = if namespaces.is_empty() { "drivers" } else { &namespaces };
        let _ = write!(run, " --write-namespaces {namespaces}");
    }
    vec![format!("farrier doctor {options}"), format!("farrier plan {options}"), run]
}

fn text(report: &Report) -> String {
    let Report { written, kept, remarks, by_hand, next } = report;
    let mut text = String::new();
    for (action, paths) in [("wrote", written), ("kept", kept)] {
        for path in paths {
            let _ = writeln!(text, "{action}  {}", output::printable(&path.display().to_string()));
        }
    }
    for origin in remarks.iter().map(|remark| &remark.origin).collect::<BTreeSet<_>>() {
        let of_origin = remarks.iter().filter(|remark| remark.origin == *origin);
        let rows = of_origin.map(|Remark { origin: _, field, becomes, says }| {
            [output::printable(field), becomes.unwrap_or("-").to_owned(), says.to_string()]
        });
        let heading = format!("FIELD OF {}", output::printable(origin));
        let _ = write!(text, "\n{}", output::table([heading.as_str(), "BECOMES", "BECAUSE"], rows));
    }
    text.push_str("\nnext:\n");
    for line in next.iter().chain(by_hand) {
        let _ = writeln!(text, "  {}", output::printable(line));
    }
    text
}
