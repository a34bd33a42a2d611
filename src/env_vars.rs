//! Every environment variable that farrier reads, with its meaning. No other module reads the environment.

use std::{env, path::PathBuf};

use farrier_core::site::{Proxy, ProxyUrl};
use farrier_engines::EngineEnv;
use farrier_local::cache::Cache;

/// Commit of the sources, set when farrier is compiled.
pub const FARRIER_COMMIT: Option<&str> = option_env!("FARRIER_COMMIT");

/// `--definitions`: directory with `images/`, `kernels/` and `templates/`.
pub const FARRIER_DEFINITIONS: &str = "FARRIER_DEFINITIONS";
/// `--registry`: registry of the published images, `host[:port]/path` or `oci:PATH`.
pub const FARRIER_REGISTRY: &str = "FARRIER_REGISTRY";
/// `--engine`: `auto`, `sandbox`, `docker`, `podman` or `kubernetes`.
pub const FARRIER_ENGINE: &str = "FARRIER_ENGINE";
/// `--cluster`: `kube`, `kube:CONTEXT` or `dir:PATH`. For a live cluster, kube's client also reads
/// `KUBECONFIG` (files, separated by colons; else `~/.kube/config`), and in a pod `KUBERNETES_SERVICE_HOST`
/// and `KUBERNETES_SERVICE_PORT`. Exec plug-ins of a kubeconfig inherit the whole environment.
pub const FARRIER_CLUSTER: &str = "FARRIER_CLUSTER";
/// `--write-namespaces`: comma-separated namespaces in which DaemonSets and pods may be written, or `*`.
pub const FARRIER_WRITE_NAMESPACES: &str = "FARRIER_WRITE_NAMESPACES";
/// `--ca-file`: additional root certificates, PEM.
pub const FARRIER_CA_FILE: &str = "FARRIER_CA_FILE";
/// `--offline`: contact only named hosts. Every value except the empty one, `0`, `false`, `no` and `off`
/// means yes.
pub const FARRIER_OFFLINE: &str = "FARRIER_OFFLINE";
/// `--cache-dir`: cache of header sets, sources and logs, which can be deleted at any time.
pub const FARRIER_CACHE_DIR: &str = "FARRIER_CACHE_DIR";
/// `--entrypoint`: the static `driver-entrypoint`, for images that start with it and as init of boot checks.
pub const FARRIER_ENTRYPOINT: &str = "FARRIER_ENTRYPOINT";
/// The static `farrier-runner`, which runs the steps of builds in a sandbox. Default: the one next to
/// farrier.
pub const FARRIER_RUNNER: &str = "FARRIER_RUNNER";
/// `--listen`: address of `/metrics`, `/healthz` and `/readyz`, or `off`.
pub const FARRIER_LISTEN: &str = "FARRIER_LISTEN";
/// `--collect-keys`: directory with a key for each kernel whose headers nodes may send.
#[cfg(feature = "header-collection")]
pub const FARRIER_COLLECT_KEYS: &str = "FARRIER_COLLECT_KEYS";
/// `--page-actions`: allow actions on the page. Every value except the empty one, `0`, `false`, `no` and
/// `off` means yes.
#[cfg(feature = "dashboard")]
pub const FARRIER_PAGE_ACTIONS: &str = "FARRIER_PAGE_ACTIONS";
/// `--instance`: name of this farrier, if a cluster has several.
pub const FARRIER_INSTANCE: &str = "FARRIER_INSTANCE";
/// Filter for log lines, in tracing-subscriber's form (`farrier=debug`).
pub const FARRIER_LOG: &str = "FARRIER_LOG";

/// Name of the shell, set by the script of `farrier completions`. If it is set, farrier prints completion
/// candidates.
pub const FARRIER_COMPLETE: &str = "FARRIER_COMPLETE";

/// Returns the default cache directory: `$XDG_CACHE_HOME/farrier`, else `$HOME/.cache/farrier`, else a
/// directory below the system's temporary directory. clap reads `$FARRIER_CACHE_DIR`.
pub fn default_cache_dir() -> PathBuf {
    Cache::default_root(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"))
        .unwrap_or_else(|| env::temp_dir().join("farrier"))
}

/// Returns the first existing file with credentials in Docker's format: `$REGISTRY_AUTH_FILE`,
/// `$DOCKER_CONFIG/config.json`, `~/.docker/config.json`, `$XDG_RUNTIME_DIR/containers/auth.json`.
pub fn registry_auth_file() -> Option<PathBuf> {
    let candidates = [
        absolute("REGISTRY_AUTH_FILE"),
        absolute("DOCKER_CONFIG").map(|dir| dir.join("config.json")),
        absolute("HOME").map(|home| home.join(".docker/config.json")),
        absolute("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json")),
    ];
    candidates.into_iter().flatten().find(|path| path.is_file())
}

/// Returns the environment's proxies: `$http_proxy` and `$https_proxy`, else `$all_proxy`, and the exceptions
/// of `$no_proxy`. Each name is read in lower and upper case. If the site names proxies, the environment's
/// proxies are ignored; in a CGI program (`$REQUEST_METHOD` is set), so is `$http_proxy`.
pub fn proxies() -> Proxy {
    let value = |name: &str| {
        let lower = env::var(name).ok().filter(|value| !value.trim().is_empty());
        let upper = || env::var(name.to_ascii_uppercase()).ok().filter(|value| !value.trim().is_empty());
        lower.or_else(upper)
    };
    // A web server passes the untrusted request header `Proxy` to the programs that it starts as HTTP_PROXY.
    let from_request = env::var_os("REQUEST_METHOD").is_some();
    let proxy = |name: &str| -> Option<ProxyUrl> {
        let text = value(name)?;
        let address = if text.contains("://") { text } else { format!("http://{text}") };
        match ProxyUrl::of_environment(&address) {
            Ok(proxy) => Some(proxy),
            Err(error) => {
                tracing::warn!(variable = name, %error, "ignoring a proxy of the environment");
                None
            }
        }
    };
    let all = proxy("all_proxy");
    let entries = value("no_proxy").unwrap_or_default();
    Proxy {
        http: proxy("http_proxy").filter(|_| !from_request).or_else(|| all.clone()),
        https: proxy("https_proxy").or(all),
        no_proxy: entries.split(',').filter_map(|entry| entry.trim().parse().ok()).collect(),
        login: None,
    }
}

/// Returns whether the user forces colors on (`$CLICOLOR_FORCE`) or off (`$NO_COLOR`, no-color.org, or a
/// `$TERM` of `dumb`). `None` leaves the choice to the terminal.
pub fn forced_colors() -> Option<bool> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if set("NO_COLOR").is_some() {
        return Some(false);
    }
    let forced = set("CLICOLOR_FORCE").filter(|value| value != "0").map(|_| true);
    forced.or_else(|| set("TERM").filter(|value| value == "dumb").map(|_| false))
}

/// Whether the terminal accepts UTF-8. The first of `$LC_ALL`, `$LC_CTYPE` and `$LANG` that is set decides,
/// as in setlocale(3).
pub fn is_utf8() -> bool {
    let set = |name| env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
    locale.is_some_and(|locale| locale.to_ascii_lowercase().replace('-', "").contains("utf8"))
}

/// Returns the locations of engines: `$DOCKER_HOST`, `$XDG_RUNTIME_DIR/podman/podman.sock`,
/// `$FARRIER_RUNNER`. A `tcp://` address is refused if `$DOCKER_TLS_VERIFY` is set, because farrier connects without TLS.
pub fn engine_env() -> EngineEnv {
    EngineEnv {
        docker_host: env::var("DOCKER_HOST").ok().filter(|value| !value.is_empty()),
        docker_tls: env::var_os("DOCKER_TLS_VERIFY").is_some_and(|value| !value.is_empty()),
        runtime_dir: absolute("XDG_RUNTIME_DIR"),
        runner: env::var_os(FARRIER_RUNNER).map(PathBuf::from),
        ..EngineEnv::default()
    }
}

/// Whether farrier runs in a pod. The kubelet sets `$KUBERNETES_SERVICE_HOST` in every container.
pub fn in_pod() -> bool {
    env::var_os("KUBERNETES_SERVICE_HOST").is_some_and(|value| !value.is_empty())
}

/// Whether a browser can be opened. Desktops set `$WAYLAND_DISPLAY` or `$DISPLAY`.
#[cfg(feature = "dashboard")]
pub fn has_display() -> bool {
    ["WAYLAND_DISPLAY", "DISPLAY"]
        .into_iter()
        .any(|name| env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Returns this machine's name: `$HOSTNAME`, which in a pod is the pod's name, else the kernel's host name.
pub fn host_name() -> String {
    let host_name = env::var("HOSTNAME").ok();
    let host_name = host_name.or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok());
    host_name
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "farrier".to_owned())
}

/// Returns the value of a variable that holds an absolute path. A relative path is ignored, as the XDG
/// specification requires.
fn absolute(name: &str) -> Option<PathBuf> {
    env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}
