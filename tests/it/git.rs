//! Rollouts in Git repositories: the real git, its HTTP server behind busybox, an SSH server, and a program that follows a
//! branch like Argo CD.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{
    git_server::{SshServer, git},
    kube_api::objects::node,
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
    site::{Run, Site, image_of, wait_until},
};

const KERNEL: &str = "6.1.0-901-amd64";
const MANIFEST: &str = "prod/drivers/driver.yaml";

/// A Git server's repository with a cluster's manifests.
struct Forge {
    directory: TempDir,
}

impl Forge {
    fn new() -> Self {
        let forge = Self { directory: tempfile::tempdir().unwrap() };
        fs::create_dir(forge.path("")).unwrap();
        forge.git(&["init", "--quiet", "--bare", "--initial-branch", "main", "."]);
        let daemon_set = format!(
            "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: {DRIVER}, namespace: {NAMESPACE}}}\nspec:\n  \
             selector: {{matchLabels: {{app: driver}}}}\n  template:\n    metadata: {{labels: {{app: driver}}}}\n    spec:\n      \
             containers:\n        - name: driver\n          image: {OLD_IMAGE}   # by farrier\n"
        );
        // Files outside of the path are neither read nor changed.
        let others =
            [("README", "clusters\n"), ("lab/broken.yaml", "{no: manifest"), (MANIFEST, &daemon_set)];
        forge.commit(&others, "first");
        forge
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.directory.path().join("clusters.git").join(inside)
    }

    fn url(&self) -> String {
        format!("file://{}", self.directory.path().join("clusters.git").display())
    }

    fn git(&self, arguments: &[&str]) -> String {
        git(&self.path(""), arguments)
    }

    /// Pushes a commit by another writer.
    fn commit(&self, files: &[(&str, &str)], message: &str) {
        self.commit_with(message, |clone| {
            for (file, text) in files {
                let path = clone.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        });
    }

    /// Changes a clone with `change`, and pushes a commit.
    fn commit_with(&self, message: &str, change: impl FnOnce(&Path)) {
        let clone = tempfile::tempdir().unwrap();
        let inside = |arguments: &[&str]| git(clone.path(), arguments);
        inside(&["clone", "--quiet", &self.url(), "."]);
        change(clone.path());
        inside(&["add", "--all"]);
        inside(&["commit", "--quiet", "--message", message]);
        inside(&["push", "--quiet", "origin", "HEAD:main"]);
    }

    fn commits(&self, branch: &str) -> usize {
        self.git(&["rev-list", "--count", branch]).trim().parse().unwrap()
    }

    fn file(&self, branch: &str, file: &str) -> String {
        self.git(&["show", &format!("{branch}:{file}")])
    }

    fn image(&self, branch: &str) -> String {
        image_of(&self.file(branch, MANIFEST))
    }

    /// Installs a script that the server runs before it accepts a push.
    fn before_push(&self, script: &str) {
        let hook = self.path("hooks/pre-receive");
        fs::create_dir_all(hook.parent().unwrap()).unwrap();
        fs::write(&hook, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// Creates a cluster whose DaemonSet is defined in a repository, with the DaemonSet's image published.
fn cluster(repository: &str, further: &str) -> (Live, String) {
    let rollout = format!("git, repository: \"{repository}\", branch: main, path: prod/drivers{further}");
    let live = Live::at(Site::new(), [node("n0", KERNEL)], &rollout);
    let image = live.publish().remove(KERNEL).expect("the plan builds an image");
    (live, image)
}

fn run_once(live: &Live) -> Run {
    Run::of(live.command(&["run", "--once"]).spawn().unwrap())
}

/// Returns the plan's only rollout.
fn rollout(live: &Live) -> Value {
    live.plan()["rollouts"][0].clone()
}

fn site_yaml(live: &Live, spec: &str) {
    let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: test}\nspec:\n";
    live.site.define("site.yaml", &format!("{head}{spec}"));
}

/// A server process, stopped on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn wait_for_port(port: u16) {
    wait_until("the server", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
}

#[test]
fn a_commit_sets_the_image_and_the_cluster_is_waited_for() {
    let forge = Forge::new();
    let before = forge.file("main", MANIFEST);
    let (live, image) = cluster(&forge.url(), "");
    run_once(&live).exits(0).line("rewrote");

    assert_eq!(
        forge.file("main", MANIFEST),
        before.replace(OLD_IMAGE, &image),
        "all other bytes are unchanged"
    );
    assert_eq!(forge.git(&["diff", "--name-only", "main~1", "main"]), format!("{MANIFEST}\n"));
    let told = forge.git(&["log", "-1", "--format=%an <%ae>%n%B", "main"]);
    let subject = "DaemonSet drivers/driver: driver for container driver";
    assert_eq!(
        told.trim(),
        format!("farrier <farrier@localhost>\n{subject}\n\nfrom {OLD_IMAGE}\nto {image}")
    );
    assert_eq!(live.writes_to("daemonsets.apps"), 0, "farrier leaves the write to the GitOps controller");

    // Another run creates no further commit and reports why the rollout is held.
    let held = rollout(&live);
    assert_eq!((&held["decision"], &held["reason"]), (&json!("hold"), &json!("not-synced")), "{held}");
    run_once(&live).exits(0).line(&format!("has not applied it yet: it has {OLD_IMAGE}"));
    assert_eq!(forge.commits("main"), 2);

    let containers = json!([{"name": "driver", "image": image}]);
    let synced = json!({"spec": {"template": {"spec": {"containers": containers}}}});
    live.api.patch_as("argocd", "daemonsets.apps", NAMESPACE, DRIVER, &synced);
    assert_eq!(rollout(&live)["decision"], "already-set");
    run_once(&live).exits(0).line("nothing to do");
}

#[test]
fn the_file_behind_a_symbolic_link_is_committed() {
    let forge = Forge::new();
    forge.commit_with("links", |clone| {
        std::os::unix::fs::symlink("prod/drivers", clone.join("live")).unwrap();
    });
    // The path is a link, or leads through one.
    for path in ["live", "live/driver.yaml"] {
        let rollout = format!("git, repository: \"{}\", branch: main, path: {path}", forge.url());
        let live = Live::at(Site::new(), [node("n0", KERNEL)], &rollout);
        let image = live.publish().remove(KERNEL).expect("the plan builds an image");
        run_once(&live).exits(0).line("rewrote");
        assert_eq!(forge.image("main"), image, "{path}");
        assert_eq!(forge.git(&["diff", "--name-only", "main~1", "main"]), format!("{MANIFEST}\n"));
        forge.commit(&[(MANIFEST, &forge.file("main~1", MANIFEST))], "revert");
    }
}

/// The base of an overlay serves other clusters, too: only the overlay is changed.
#[test]
fn the_images_of_an_overlay_are_committed() {
    let forge = Forge::new();
    let base = forge.file("main", MANIFEST).replace(&format!(", namespace: {NAMESPACE}"), "");
    let overlay = |image: &str| {
        format!(
            "resources: [../base]\nnamespace: {NAMESPACE}\nimages:\n- name: registry.example/old # ours\n  {image}\n"
        )
    };
    let kustomization = "overlay/kustomization.yaml";
    let old = overlay("newName: registry.example/old\n  newTag: \"1\"");
    let files = [
        ("base/driver.yaml", base.as_str()),
        ("base/kustomization.yaml", "resources: [driver.yaml]\n"),
        (kustomization, &old),
        ("overlay/chart/templates/x.yaml", "{{- if .Values.x }}\n"),
    ];
    forge.commit(&files, "overlay");
    let rollout = format!("git, repository: \"{}\", branch: main, path: overlay", forge.url());
    let live = Live::at(Site::new(), [node("n0", KERNEL)], &rollout);
    let image = live.publish().remove(KERNEL).expect("the plan builds an image");
    run_once(&live).exits(0).line("rewrote");
    let (name, digest) = image.split_once('@').unwrap();
    assert_eq!(
        forge.file("main", kustomization),
        overlay(&format!("newName: {name}\n  digest: \"{digest}\""))
    );
    assert_eq!(forge.git(&["diff", "--name-only", "main~1", "main"]), format!("{kustomization}\n"));
    run_once(&live).exits(0).line(&format!("has not applied it yet: it has {OLD_IMAGE}"));
}

#[test]
fn a_branch_that_moves_meanwhile_gets_the_commit_on_top() {
    let forge = Forge::new();
    // Another writer pushes first, twice: the branch has advanced since the client fetched it.
    forge.before_push(
        "count=$(ls -d moved-* 2>/dev/null | wc -l); [ \"$count\" -lt 2 ] || exit 0\nmkdir moved-$count\n\
         env -i PATH=\"$PATH\" sh -c ' \
         new=$(git -c user.name=b -c user.email=b@example.org commit-tree -p main -m other main^{tree}); \
         git update-ref refs/heads/main \"$new\"'",
    );
    let (live, image) = cluster(&forge.url(), "");
    run_once(&live).exits(0).line("rewrote");
    assert_eq!(forge.git(&["log", "--format=%s", "main~1"]), "other\nother\nfirst\n", "no commit is lost");
    assert_eq!(forge.image("main"), image);
}

/// A power failure or a kill can leave empty files, or a repository without its objects.
#[test]
fn a_damaged_repository_in_the_cache_is_replaced() {
    let forge = Forge::new();
    let (live, image) = cluster(&forge.url(), "");
    let cached = || {
        let mut entries = fs::read_dir(live.site.cache().join("git")).unwrap();
        let entry = entries.next().expect("a repository is cached").unwrap().path();
        assert!(entries.next().is_none(), "one repository");
        entry
    };
    let empty_files: &dyn Fn(&Path) = &|repository| {
        let entries: Vec<_> = walkdir::WalkDir::new(repository).into_iter().map(Result::unwrap).collect();
        for file in entries.iter().filter(|entry| entry.file_type().is_file()) {
            fs::remove_file(file.path()).unwrap();
            fs::write(file.path(), "").unwrap();
        }
    };
    let no_objects: &dyn Fn(&Path) = &|repository| fs::remove_dir_all(repository.join("objects")).unwrap();
    let stale_lock: &dyn Fn(&Path) = &|repository| fs::write(repository.join("shallow.lock"), "").unwrap();
    run_once(&live).exits(0).line("rewrote");
    for damage in [empty_files, no_objects, stale_lock] {
        damage(&cached());
        forge.commit(&[(MANIFEST, &forge.file("main~1", MANIFEST))], "revert");
        run_once(&live).exits(0).line("rewrote");
        assert_eq!(forge.image("main"), image);
    }
}

#[test]
fn a_push_that_the_server_refuses_is_told_in_its_words() {
    let forge = Forge::new();
    forge.before_push("echo 'main is protected: propose your change' >&2; exit 1");
    let (live, _) = cluster(&forge.url(), "");
    let run = run_once(&live).exits(1);
    run.line("main is protected: propose your change");
    assert_eq!((forge.commits("main"), forge.image("main")), (1, OLD_IMAGE.to_owned()));
}

#[test]
fn a_path_that_is_not_there_and_a_branch_that_is_not_are_told() {
    let forge = Forge::new();
    let (live, _) = cluster(&forge.url(), "");
    live.site.edit("images/driver.yaml", "path: prod/drivers", "path: prod/other");
    assert!(rollout(&live)["detail"].as_str().unwrap().contains("prod/other"));
    live.site.edit("images/driver.yaml", "branch: main", "branch: release");
    assert!(rollout(&live)["detail"].as_str().unwrap().contains("release"));
}

#[test]
fn a_signed_proposal_waits_to_be_merged() {
    let forge = Forge::new();
    let (live, image) = cluster(&forge.url(), ", proposals: farrier/, message: \"drivers: {to}\"");
    let key = live.site.definitions().join("signing");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key).status();
    assert!(made.expect("run ssh-keygen (Debian package openssh-client)").success());
    site_yaml(&live, "  git: {name: Driver Bot, email: bot@example.org, signingKey: {file: signing}}\n");
    run_once(&live).exits(0).line("rewrote");
    assert_eq!((forge.commits("main"), forge.image("main")), (1, OLD_IMAGE.to_owned()));

    let branch = forge.git(&["for-each-ref", "--format=%(refname:short)", "refs/heads/farrier"]);
    let branch = branch.trim();
    let digest = image.split_once("sha256:").unwrap().1;
    assert_eq!(branch, format!("farrier/drivers-driver-driver-{}", &digest[..12]));
    assert_eq!(forge.image(branch), image);
    let told = forge.git(&["log", "-1", "--format=%an <%ae>: %s", branch]);
    assert_eq!(told.trim(), format!("Driver Bot <bot@example.org>: drivers: {image}"));
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    let signers = live.site.path("signers");
    fs::write(&signers, format!("bot@example.org {public}")).unwrap();
    let setting = format!("gpg.ssh.allowedSignersFile={}", signers.display());
    forge.git(&["-c", &setting, "verify-commit", branch]);

    run_once(&live).exits(0).line(&format!("branch {branch} has the change and waits to be merged"));
    forge.git(&["update-ref", "refs/heads/main", branch]);
    assert_eq!(rollout(&live)["reason"], "not-synced");
}

#[test]
fn the_loop_commits_and_notices_what_others_do() {
    let forge = Forge::new();
    let (mut live, image) = cluster(&forge.url(), "");
    live.start(&[]);
    live.until("the commit", |_| forge.image("main") == image);
    live.until("the next reconcile", |live| live.log().matches("reconcile finished").count() > 1);
    // A revert conflicts with farrier's target state. As in the cluster, farrier sets the image again, and the history names
    // both authors.
    forge.commit(&[(MANIFEST, &forge.file("main~1", MANIFEST))], "revert");
    live.until("another commit", |_| forge.commits("main") == 4);
    assert_eq!(forge.image("main"), image);
    // Another program that reverts each commit would do so for ever.
    forge.commit(&[(MANIFEST, &forge.file("main~1", MANIFEST))], "revert again");
    live.until("the hold", |live| live.log().contains("another writer reverted the field 2 times"));
    assert_eq!(forge.commits("main"), 5);
}

/// A large repository takes many seconds to check out.
#[test]
fn an_unchanged_branch_is_not_checked_out_again() {
    let forge = Forge::new();
    let (live, _) = cluster(&forge.url(), ", proposals: farrier/");
    let paused = forge.file("main", MANIFEST).replace(
        &format!("namespace: {NAMESPACE}}}"),
        &format!("namespace: {NAMESPACE}, annotations: {{farrier.dev/paused: \"true\"}}}}"),
    );
    forge.commit(&[(MANIFEST, &paused)], "pause");
    let trace = live.site.path("git-trace");
    let mut command = live.command(&["run"]);
    command.env("FARRIER_LISTEN", "off").env("GIT_TRACE", &trace);
    let _farrier = Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let calls = |name: &str| {
        let trace = fs::read_to_string(&trace).unwrap_or_default();
        trace.matches(&format!("built-in: git {name} ")).count()
    };
    live.until("the second read", |_| calls("ls-remote") > 1);
    assert_eq!((calls("fetch") > 1, calls("checkout")), (true, 1));
}

#[test]
fn over_http_with_a_password() {
    let forge = Forge::new();
    let served = live_http(&forge);
    let (live, image) = cluster(&served.url, "");
    // The server requires a password from everyone.
    let refused = rollout(&live);
    assert_eq!(refused["reason"], "unreadable", "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("`login` of the host"), "{refused}");

    site_yaml(
        &live,
        &format!(
            "  hosts: [{{host: \"{}\", login: {{user: farrier, password: {{file: token}}}}}}]\n",
            served.host
        ),
    );
    live.site.define("token", "s3cret\n");
    let run = run_once(&live).exits(0);
    run.line("rewrote");
    assert!(!run.stdout.contains("s3cret") && !run.stderr.contains("s3cret"), "{run}");
    assert_eq!(forge.image("main"), image);

    // With --offline, farrier contacts only hosts that the site allows.
    site_yaml(&live, "  policy: {}\n");
    let run = Run::of(live.command(&["plan", "--offline"]).spawn().unwrap());
    run.line("which --offline forbids");
}

struct HttpServer {
    _server: Server,
    host: String,
    url: String,
}

fn live_http(forge: &Forge) -> HttpServer {
    let root = forge.directory.path().join("www");
    fs::create_dir_all(root.join("cgi-bin")).unwrap();
    let script = root.join("cgi-bin/git");
    let project = forge.directory.path().display();
    let backend = git(forge.directory.path(), &["--exec-path"]).trim().to_owned();
    let environment = format!(
        "GIT_PROJECT_ROOT={project} GIT_HTTP_EXPORT_ALL=1 GIT_CONFIG_COUNT=1 \
                               GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
    );
    fs::write(&script, format!("#!/bin/sh\n{environment} exec '{backend}/git-http-backend'\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let settings = root.join("httpd.conf");
    fs::write(&settings, "/cgi-bin:farrier:s3cret\n").unwrap();
    let port = free_port();
    let host = format!("127.0.0.1:{port}");
    let server = Command::new("busybox")
        .args(["httpd", "-f", "-p", &host, "-h"])
        .arg(&root)
        .arg("-c")
        .arg(&settings)
        .stderr(Stdio::null())
        .spawn()
        .expect("run busybox (Debian package busybox-static)");
    let server = Server(server);
    wait_for_port(port);
    HttpServer { _server: server, url: format!("http://{host}/cgi-bin/git/clusters.git"), host }
}

/// An SSH server for this machine's users. A mount namespace gives only the server a home directory for root with the test's
/// keys.
#[test]
fn over_ssh_with_a_key() {
    let forge = Forge::new();
    let server = SshServer::start();
    let (port, host_key) = (server.port, &server.host_key);

    let url = format!("ssh://root@127.0.0.1:{port}{}", forge.path("").display());
    let (live, image) = cluster(url.trim_end_matches('/'), "");
    let refused = rollout(&live);
    assert_eq!(refused["reason"], "unreadable", "{refused}");

    fs::copy(server.client_key(), live.site.definitions().join("client")).unwrap();
    live.site.define("known_hosts", &format!("[127.0.0.1]:{port} {host_key}\n"));
    let host = format!("host: \"127.0.0.1:{port}\", sshKey: {{file: client}}, knownHosts: known_hosts");
    site_yaml(&live, &format!("  hosts: [{{{host}}}]\n"));
    let run = Run::of(live.command(&["run", "--once"]).spawn().unwrap());
    assert_eq!(run.code, Some(0), "{run}\n{}", server.log());
    assert_eq!(forge.image("main"), image);

    // farrier refuses a host with a different key.
    let other = fs::read_to_string(server.client_key().with_extension("pub")).unwrap();
    live.site.define("known_hosts", &format!("[127.0.0.1]:{port} {other}"));
    let refused = rollout(&live);
    assert!(refused["detail"].as_str().unwrap().contains("Host key verification failed"), "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("`knownHosts` of the host"), "{refused}");
}
