//! Shell completion: the shell's script calls this program for candidates. Names of images, kernels and nodes
//! come from the definitions and the cluster of the command line. A source that fails or takes too long is
//! silently skipped.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fmt::Write as _,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use clap::Command;
use clap_complete::{
    ArgValueCandidates, CompleteEnv, CompletionCandidate, Shell,
    engine::complete,
    env::{Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh},
};
use farrier_cluster::{ClusterError, ClusterNames, Directory, cluster_names};
use farrier_definitions as definitions;

use super::{env_vars as vars, plugin, session::kube_options};

/// Timeout for reading names from the cluster. After a longer delay, users would think that completion does not work.
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(2);

const PROGRAM: &str = "farrier";
const SHELLS: Shells<'_> = Shells(&[&Bash, &Elvish, &Fish, &Powershell, &Zsh]);

/// Returns the script that a shell reads at its start.
pub fn script(shell: Shell) -> io::Result<String> {
    let mut script = Vec::new();
    if let Some(shell) = SHELLS.completer(&shell.to_string()) {
        shell.write_registration(vars::FARRIER_COMPLETE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    }
    if shell == Shell::Zsh {
        // As a file in `fpath`, the script is the body of `_farrier`, and its first call must complete, too.
        script.extend(b"[[ ${funcstack[1]-} != _farrier ]] || _clap_dynamic_completer_farrier \"$@\"\n");
    }
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// Answers a completion request of a shell or of kubectl. Returns `false` for any other call.
pub fn answer() -> io::Result<bool> {
    let mut words: Vec<OsString> = env::args_os().collect();
    let cwd = env::current_dir().ok();
    if plugin::is_completer() {
        io::stdout().write_all(for_kubectl(words, cwd.as_deref())?.as_bytes())?;
        return Ok(true);
    }
    if env::var_os(vars::FARRIER_COMPLETE).is_some_and(|shell| shell == Bash.name()) {
        words = Bash::joined(words);
    }
    let completer = CompleteEnv::with_factory(|| commands(&words)).var(vars::FARRIER_COMPLETE).shells(SHELLS);
    completer.try_complete(words.clone(), cwd.as_deref()).map_err(|error| io::Error::other(error.to_string()))
}

/// Returns the candidates for kubectl, one per line, with a description after a tab. The last line holds the
/// directive for Cobra's completion: 4 adds no file names, 2 adds no space (github.com/spf13/cobra,
/// `ShellCompDirective`).
fn for_kubectl(words: Vec<OsString>, cwd: Option<&Path>) -> io::Result<String> {
    let (mut commands, last) = (commands(&words), words.len().saturating_sub(1));
    let mut lines = String::new();
    for candidate in complete(&mut commands, words, last, cwd)? {
        lines += &candidate.get_value().to_string_lossy();
        if let Some(help) = candidate.get_help() {
            let _ = write!(lines, "\t{}", help.to_string().lines().next().unwrap_or_default());
        }
        lines.push('\n');
    }
    let is_directory = lines.contains("/\n");
    Ok(lines + if is_directory { ":6\n" } else { ":4\n" })
}

/// Completion for Bash, which splits words at `:`, `=` and `@` and replaces only the part after the last
/// separator. The script of clap's engine passes the parts as separate words, so `--cluster dir:manifests`
/// would arrive as three words.
struct Bash;

impl Bash {
    const BREAKS: [char; 3] = [':', '=', '@'];

    /// Joins the arguments of the script, `-- INDEX CURRENT WORD...`, to the words as typed up to the cursor.
    /// The first of the joined words is the part of the last word that Bash keeps.
    fn joined(mut words: Vec<OsString>) -> Vec<OsString> {
        let [index, current, parts @ ..] = words.get(2..).unwrap_or_default() else { return words };
        let index = index.to_str().and_then(|index| index.parse().ok()).unwrap_or(parts.len());
        let current = current.to_string_lossy();
        let is_break = |part: &str| !part.is_empty() && part.chars().all(|c| Self::BREAKS.contains(&c));
        let (mut joined, mut continues_word) = (Vec::<String>::new(), false);
        for (position, part) in
            parts.iter().map(|part| part.to_string_lossy()).enumerate().take(index.saturating_add(1))
        {
            // After a separator the current word is empty, and the index is the separator's.
            if position == index && !(current.is_empty() && is_break(&part)) {
                break;
            }
            match joined.last_mut() {
                Some(last) if continues_word || is_break(&part) => last.push_str(&part),
                _ => joined.push(part.to_string()),
            }
            continues_word = is_break(&part);
        }
        let kept_prefix = if continues_word { joined.pop().unwrap_or_default() } else { String::new() };
        joined.push(format!("{kept_prefix}{current}"));
        words.truncate(2);
        words.push(kept_prefix.into());
        words.extend(joined.into_iter().map(OsString::from));
        words
    }
}

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == self.name()
    }

    fn write_registration(
        &self,
        var: &str,
        name: &str,
        bin: &str,
        completer: &str,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        writeln!(
            out,
            r#"_{name}() {{
    mapfile -t COMPREPLY < <({var}=bash {completer} -- "$COMP_CWORD" "$2" "${{COMP_WORDS[@]}}" 2> /dev/null)
    if [[ "${{COMPREPLY[*]}}" == *[/:=] ]]; then compopt -o nospace; fi
}}
complete -o bashdefault -o nosort -F _{name} {bin}"#
        )
    }

    fn write_complete(
        &self,
        commands: &mut Command,
        mut words: Vec<OsString>,
        cwd: Option<&Path>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let kept_prefix = words.remove(0);
        let last = words.len().saturating_sub(1);
        for candidate in complete(commands, words, last, cwd)? {
            let value = candidate.get_value().to_string_lossy();
            writeln!(out, "{}", value.strip_prefix(&*kept_prefix.to_string_lossy()).unwrap_or(&value))?;
        }
        Ok(())
    }
}

/// Returns the commands with completers for their values.
fn commands(words: &[OsString]) -> Command {
    with_names(plugin::command(), &Arc::new(NameSources::of(words)))
}

fn with_names(command: Command, source: &Arc<NameSources>) -> Command {
    let command = command.mut_subcommands(|command| with_names(command, source));
    // The image of `verify` is a reference.
    if command.get_name() == "verify" {
        return command;
    }
    command.mut_args(|argument| {
        let names: fn(&NameSources) -> BTreeSet<String> = match argument.get_id().as_str() {
            "image" => NameSources::images,
            "kernel" | "release" => NameSources::kernels,
            "node" => NameSources::nodes,
            "subject" => NameSources::subjects,
            _ => return argument,
        };
        let source = Arc::clone(source);
        let candidates = move || names(&source).into_iter().map(CompletionCandidate::new).collect::<Vec<_>>();
        argument.add(ArgValueCandidates::new(candidates))
    })
}

/// Sources of names, from the command line and the environment.
struct NameSources {
    definitions: Option<PathBuf>,
    cluster: Option<String>,
    /// Names in the cluster, looked up once.
    in_cluster: OnceLock<ClusterNames>,
}

impl NameSources {
    fn of(words: &[OsString]) -> Self {
        let mut words = words.to_vec();
        let mut option_or_env = |option: &str, variable: &str| {
            let value = plugin::take_option(&mut words, option).or_else(|| env::var(variable).ok());
            value.filter(|value| !value.is_empty())
        };
        let definitions = option_or_env("--definitions", vars::FARRIER_DEFINITIONS).map(PathBuf::from);
        let cluster = option_or_env("--cluster", vars::FARRIER_CLUSTER);
        let cluster = cluster.or_else(|| plugin::is_called().then(|| "kube".to_owned()));
        Self { definitions, cluster, in_cluster: OnceLock::new() }
    }

    /// Returns the names in the cluster, or none if the cluster does not answer in time.
    fn names_in_cluster(&self) -> &ClusterNames {
        self.in_cluster.get_or_init(|| {
            let (send, receive) = mpsc::channel();
            let cluster = self.cluster.clone().unwrap_or_default();
            // A thread that hangs ends with the process.
            thread::spawn(move || send.send(read_cluster_names(&cluster)));
            receive.recv_timeout(CLUSTER_TIMEOUT).ok().and_then(Result::ok).unwrap_or_default()
        })
    }

    /// Returns the names of images. Without --definitions, the DriverBuilds of the cluster take precedence
    /// over the shipped definitions.
    fn images(&self) -> BTreeSet<String> {
        let in_cluster = self.names_in_cluster().images.clone();
        if self.definitions.is_none() && !in_cluster.is_empty() {
            return shell_safe(in_cluster);
        }
        let defined = definitions::load(self.definitions.as_deref()).unwrap_or_default();
        shell_safe(defined.images.into_keys().map(|name| name.to_string()).chain(in_cluster))
    }

    fn kernels(&self) -> BTreeSet<String> {
        let defined = definitions::load(self.definitions.as_deref()).unwrap_or_default();
        let announced = defined.announced.into_values().flat_map(|list| list.spec.kernels.to_vec());
        let announced = announced.map(|kernel| kernel.release.to_string());
        shell_safe(announced.chain(self.names_in_cluster().kernels.clone()))
    }

    fn nodes(&self) -> BTreeSet<String> {
        shell_safe(self.names_in_cluster().nodes.clone())
    }

    fn subjects(&self) -> BTreeSet<String> {
        let nodes = self.nodes().into_iter().map(|node| format!("node/{node}"));
        self.images().into_iter().chain(nodes).collect()
    }
}

/// Keeps names without special characters of shells. Names from manifests and nodes are untrusted, and users
/// run the completed command.
fn shell_safe(names: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    let is_safe = |name: &String| {
        name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "._+~-".contains(c))
    };
    names.into_iter().filter(is_safe).collect()
}

/// Reads the names in a cluster, and blocks until it has them.
fn read_cluster_names(cluster: &str) -> Result<ClusterNames, ClusterError> {
    if let Some(options) = kube_options(cluster) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(cluster_names(&options));
    }
    let Some(path) = cluster.strip_prefix("dir:") else { return Ok(ClusterNames::default()) };
    let nodes = Directory::open(Path::new(path))?.read()?.nodes;
    Ok(ClusterNames {
        kernels: nodes.iter().map(|node| node.kernel_version.clone()).collect(),
        nodes: nodes.iter().map(|node| node.name.clone()).collect(),
        images: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins the words of Bash's script. The first result is the prefix that Bash keeps.
    fn joined(index: usize, current: &str, parts: &[&str]) -> Vec<String> {
        let given = ["farrier", "--", &index.to_string(), current];
        let words = given.into_iter().chain(parts.iter().copied()).map(OsString::from).collect();
        let joined = Bash::joined(words).into_iter().skip(2);
        joined.map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn what_bash_takes_apart_is_joined() {
        assert_eq!(joined(2, "no", &["farrier", "why", "no"]), ["", "farrier", "why", "no"]);
        assert_eq!(joined(2, "", &["farrier", "why", ""]), ["", "farrier", "why", ""]);
        let cluster = ["farrier", "why", "--cluster", "dir", ":", "/m", "no", "more"];
        assert_eq!(joined(6, "no", &cluster), ["", "farrier", "why", "--cluster", "dir:/m", "no"]);
        assert_eq!(joined(5, "/m", &cluster), ["dir:", "farrier", "why", "--cluster", "dir:/m"]);
        assert_eq!(joined(4, "", &cluster), ["dir:", "farrier", "why", "--cluster", "dir:"]);
        let value = ["farrier", "build", "--kernel", "=", "6.1"];
        assert_eq!(joined(4, "6.1", &value), ["--kernel=", "farrier", "build", "--kernel=6.1"]);
        // The word after the last one does not exist yet.
        assert_eq!(joined(2, "", &["farrier", "why"]), ["", "farrier", "why", ""]);
        assert_eq!(Bash::joined(vec!["farrier".into()]), ["farrier"]);
    }

    #[test]
    fn no_name_is_more_than_a_name() {
        let names =
            ["6.1.192-acme+", "edge-2.example", "$(id)", "a b", "-rf", "x;y", "", "a\u{1b}[31m", "a/b"];
        let shell_safe = shell_safe(names.map(str::to_owned));
        assert_eq!(shell_safe.into_iter().collect::<Vec<_>>(), ["6.1.192-acme+", "edge-2.example"]);
    }
}
