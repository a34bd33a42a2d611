//! Sources from Git: over TLS with a password and over SSH with a key, a branch that moves, submodules, and a site behind the gap.

use std::fs;

use serde_json::Value;

use crate::support::{
    certificates::{Authority, LATER},
    git_server::{HttpsServer, Repositories, SshServer},
    kernels,
    netns::LoopbackOnly,
    site::{Run, Site, wait_until},
};

/// Returns the number of processes of git with this address on their command line.
fn git_processes(address: &str) -> usize {
    let command_lines = fs::read_dir("/proc").unwrap().flatten();
    let command_lines = command_lines.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let texts = command_lines.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    texts.filter(|text| text.starts_with("git\0") && text.contains(address)).count()
}

/// A server that never answers keeps git waiting. The kernel kills git together with farrier.
#[test]
fn a_killed_farrier_leaves_no_git() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/driver.git", silent.local_addr().unwrap());
    let site = Site::new();
    site.edit(
        "images/hello.yaml",
        "{path: {path: sources/hello}}}",
        &format!("{{git: {{url: \"{address}\", ref: refs/heads/main}}}}}}"),
    );
    let args = ["build", "hello", "--kernel", "6.1.0-901-amd64", "--os", "debian", "--os-version", "12"];
    site.edit("images/hello.yaml", "  version:", "  onConflict: overwrite\n  version:");
    let mut farrier = site.start(&args);
    wait_until("git runs", || git_processes(&address) > 0);
    farrier.kill().unwrap();
    farrier.wait().unwrap();
    wait_until("git has ended", || git_processes(&address) == 0);
}

const KBUILD: &str = "obj-m := farrier_hello.o\n";
const GREETING: &str = "#define GREETING \"hello from a submodule\\n\"\n";

/// A site whose driver image `hello` is compiled from a branch, with a header from a submodule.
struct Scene {
    repositories: Repositories,
    server: HttpsServer,
    authority: Authority,
    site: Site,
}

impl Scene {
    fn new() -> Self {
        let authority = Authority::new();
        authority.issue("server", "IP:127.0.0.1", LATER);
        let repositories = Repositories::new();
        let server = HttpsServer::start(&authority, &repositories);
        let site = Site::new();
        fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
        let scene = Self { repositories, server, authority, site };
        let driver =
            fs::read_to_string(scene.site.definitions().join("sources/hello/farrier_hello.c")).unwrap();
        fs::remove_dir_all(scene.site.definitions().join("sources")).unwrap();
        let driver = driver.replace("\"hello\\n\"", "GREETING");
        let driver =
            driver.replace("#include <linux/init.h>", "#include \"lib/greeting.h\"\n#include <linux/init.h>");
        let lib = scene.repositories.commit("lib.git", &[("greeting.h", GREETING)], &[]);
        let modules = "[submodule \"lib\"]\n\tpath = src/lib\n\turl = ../lib.git\n";
        let files =
            [(".gitmodules", modules), ("src/Kbuild", KBUILD), ("src/farrier_hello.c", driver.as_str())];
        scene.repositories.commit("driver.git", &files, &[("src/lib", &lib)]);
        scene.source(&format!("https://{}/driver.git", scene.server.host), "submodules: true");
        scene
    }

    fn source(&self, url: &str, further: &str) {
        self.site.edit(
            "images/hello.yaml",
            "{path: {path: sources/hello}}}",
            &format!("{{git: {{url: \"{url}\", ref: refs/heads/main, {further}}}}}, subdir: src}}"),
        );
        let tags = "  tags: [\"{{version}}-{{kernel_label}}-{{sources.hello.commit}}\"]\n  nodes:";
        self.site.edit("images/hello.yaml", "  nodes:", tags);
    }

    /// Gives the site the server's authority and password.
    fn trust(&self) {
        let host = &self.server.host;
        self.site_yaml(&format!(
            "{{host: \"{host}\", caFile: ca.pem, login: {{user: farrier, password: {{file: token}}}}}}"
        ));
        fs::copy(self.authority.ca_file(), self.site.definitions().join("ca.pem")).unwrap();
        self.site.define("token", "s3cret\n");
    }

    fn site_yaml(&self, host: &str) {
        let text = format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: test}}\nspec:\n  hosts: [{host}]\n"
        );
        self.site.define("site.yaml", &text);
    }

    fn plan(&self) -> Value {
        self.site.farrier(&["plan", "-o", "json"]).json()
    }

    /// Commits a new file to the driver's branch and returns the commit.
    fn move_branch(&self, name: &str) -> String {
        self.repositories.commit("driver.git", &[(name, "")], &[])
    }

    fn commit(&self) -> String {
        crate::support::git_server::git(&self.repositories.path("driver.git"), &["rev-parse", "main"])
            .trim()
            .to_owned()
    }
}

#[test]
fn over_https_a_branch_is_its_commit_and_an_unreachable_server_is_a_reason() {
    let scene = Scene::new();
    scene.site.stand_in_kernels();
    scene.site.canary("6.1.0-901-amd64");
    // Neither the authority nor the password is known.
    let plan = scene.plan();
    let reason = plan["skipped"].to_string();
    assert!(reason.contains("look up refs/heads/main of https://127.0.0.1"), "{plan:#}");

    scene.trust();
    let commit = scene.commit();
    let tag = |plan: &Value| plan["builds"].to_string();
    let plan = scene.plan();
    assert!(tag(&plan).contains(&format!("1.0-6.1.0-901-amd64-{commit}")), "{plan:#}");
    let why = scene.site.farrier(&["why", "hello", "6.1.0-901-amd64"]).exits(0);
    why.line(&format!("source hello: commit {commit}"));
    let moved = scene.move_branch("more");
    assert_ne!(moved, commit);
    let plan = scene.plan();
    assert!(tag(&plan).contains(&moved) && !tag(&plan).contains(&commit), "{plan:#}");
    assert!(!plan.to_string().contains("s3cret"));
}

#[test]
fn a_branch_that_moves_during_the_build_is_not_published() {
    let kernel = kernels::newest().newer;
    let scene = Scene::new();
    scene.trust();
    let planned = scene.commit();
    let tree = "tree=$(git -C driver.git rev-parse main^{tree})";
    fs::write(
        scene.repositories.path("after-fetch"),
        format!(
            "{tree}\nexport GIT_AUTHOR_NAME=x GIT_AUTHOR_EMAIL=x@example.org GIT_COMMITTER_NAME=x \
             GIT_COMMITTER_EMAIL=x@example.org\nnew=$(git -C driver.git commit-tree -m moved -p main $tree)\n\
             git -C driver.git update-ref refs/heads/main $new\n"
        ),
    )
    .unwrap();
    let run = scene.site.build("hello", &kernel, &["--push"]);
    assert_ne!(scene.commit(), planned, "the branch moved");
    assert_ne!(run.code, Some(0), "{run}");
    run.line("changed after the build was planned");
    assert_eq!(scene.site.tags("hello"), [""; 0], "{run}");
}

#[test]
fn a_commit_goes_through_mirror_bundle_and_a_build_behind_the_gap() {
    let kernel = kernels::newest().newer;
    let target = ["--kernel", kernel.as_str(), "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let scene = Scene::new();
    scene.trust();
    let commit = scene.commit();
    let mirrored = scene.site.farrier(&[&["mirror", "-o", "json"][..], &target].concat()).exits(0).json();
    let source = mirrored.as_array().unwrap().iter().find(|report| report["kind"] == "source").unwrap();
    assert!(source["what"].as_str().unwrap().contains(&format!("git:{commit} submodules")), "{source:#}");
    let published = scene.site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    assert!(published["reference"].as_str().unwrap().ends_with(&commit), "{published:#}");
    let bundle = scene.site.path("site.bundle").display().to_string();
    let export = ["bundle", "export", "--image", "hello", "--to", &bundle];
    scene.site.farrier(&[&export[..], &target].concat()).exits(0);

    // Behind the gap: another registry, an empty cache, and only loopback.
    let namespace = LoopbackOnly::new();
    let storage = scene.site.path("sealed-storage");
    fs::create_dir(&storage).unwrap();
    let registry = namespace.registry(&storage);
    let sealed = |args: &[&str]| {
        let mut command = scene.site.command(args);
        command
            .env("FARRIER_CACHE_DIR", scene.site.path("empty-cache"))
            .env("FARRIER_REGISTRY", format!("{}/drivers", registry.host))
            .env("FARRIER_ENGINE", "sandbox")
            .env("FARRIER_OFFLINE", "1");
        Run::of(namespace.moved(&command).spawn().unwrap())
    };
    let arguments = [&["build", "hello"][..], &target, &["--push", "-o", "json"]].concat();
    sealed(&arguments).line("the commit of https://");
    sealed(&["bundle", "import", "--insecure-no-signature", &bundle]).exits(0);
    let there = sealed(&arguments).exits(0).json();
    assert_eq!((&there["outcome"], &there["digest"]), (&"up-to-date".into(), &published["digest"]));

    // A new version is compiled from the store alone, by the branch and by the commit.
    for (old, new) in [("1.0", "1.1"), ("1.1", "1.2")] {
        scene.site.edit("images/hello.yaml", &format!("\"{old}\""), &format!("\"{new}\""));
        if new == "1.2" {
            scene.site.edit("images/hello.yaml", "ref: refs/heads/main", &format!("commit: {commit}"));
        }
        let built = sealed(&arguments).exits(0).json();
        assert_eq!((&built["outcome"], &built["check"]["verdict"]), (&"built".into(), &"loads".into()));
        assert!(built["reference"].as_str().unwrap().ends_with(&commit), "{built:#}");
    }
}

#[test]
fn over_ssh_with_a_key_and_the_servers_key() {
    let scene = Scene::new();
    let server = SshServer::start();
    let driver = scene.repositories.path("driver.git").display().to_string();
    let url = format!("ssh://root@127.0.0.1:{}{driver}", server.port);
    let https = format!("https://{}/driver.git", scene.server.host);
    scene.site.edit("images/hello.yaml", &https, &url);
    scene.site.stand_in_kernels();
    scene.site.canary("6.1.0-901-amd64");
    let plan = scene.plan();
    assert!(plan["skipped"].to_string().contains("Host key verification failed"), "{plan:#}");

    fs::copy(server.client_key(), scene.site.definitions().join("client")).unwrap();
    scene.site.define("known_hosts", &format!("[127.0.0.1]:{} {}\n", server.port, server.host_key));
    let port = server.port;
    scene.site_yaml(&format!(
        "{{host: \"127.0.0.1:{port}\", sshKey: {{file: client}}, knownHosts: known_hosts}}"
    ));
    let commit = scene.commit();
    let plan = scene.plan();
    assert!(plan["builds"].to_string().contains(&commit), "{plan:#}\n{}", server.log());
    // The submodule's address is relative, so it comes from the same server.
    let kernel = ["--kernel", "6.1.0-901-amd64", "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let run = scene.site.farrier(&[&["mirror", "-o", "json"][..], &kernel].concat());
    let kept = run.json();
    let names_commit = |report: &&Value| report["what"].as_str().is_some_and(|what| what.contains(&commit));
    let source = kept
        .as_array()
        .unwrap()
        .iter()
        .find(names_commit)
        .unwrap_or_else(|| panic!("{run}\n{}", server.log()));
    assert_eq!(source["outcome"], "kept", "{source:#}");
}
