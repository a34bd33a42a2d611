//! Failures that occur in practice, with real components. Each failure gives one clear message and the right exit code, and
//! leaves nothing half done.
use std::{fs, path::Path, process::Command};

use crate::support::{
    as_root,
    fake_http::{Answer, FakeHttp, answer},
    kernels,
    registry_process::{PASSWORD, USER, Wants},
    site::{FIRST_IMAGE, Run, Site},
};

/// Runs a failing reconcile and asserts that the cluster and the registry are unchanged.
#[track_caller]
fn fails(site: &Site, image: &str, code: i32) -> Run {
    let (manifests, tags) = (site.manifests(), site.tags(image));
    let run = site.run_once().exits(code);
    assert_eq!(site.manifests(), manifests, "{run}");
    assert_eq!(site.tags(image), tags, "{run}");
    run
}

/// Returns the line that contains `words` and its indented continuation, for snapshots.
fn failure(site: &Site, run: &Run, words: &str) -> String {
    let lines = run.stdout.lines().skip_while(|line| !line.contains(words));
    let mut lines = lines.enumerate().take_while(|(at, line)| *at == 0 || line.starts_with("  "));
    let lines: Vec<&str> = lines.by_ref().map(|(_, line)| line).collect();
    site.neutral(&lines.join("\n"))
}

/// Starts a server that gives every client the same answer, and the runtime that drives the server.
fn server(script: Answer) -> (tokio::runtime::Runtime, FakeHttp) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(FakeHttp::start(vec![script; 100]));
    (runtime, server)
}

/// The driver compiles for the older kernel but not for the newer one.
#[test]
fn a_compile_error_on_one_kernel() {
    let kernels = kernels::newest();
    let site = Site::new();
    let newer = &kernels.newer;
    site.define(
        "sources/hello/Kbuild",
        &format!(
            "obj-m := farrier_hello.o\nifeq ($(KERNELRELEASE),{newer})\nccflags-y += -DCHANGED\nendif\n"
        ),
    );
    site.edit(
        "sources/hello/farrier_hello.c",
        "\tpr_info",
        "#ifdef CHANGED\n\tkfree_changed(1);\n#endif\n\tpr_info",
    );
    site.manifest("edge-1.yaml", &kernels.older);
    site.canary(newer);

    let run = site.run_once().exits(1);
    run.line(&format!("built     hello for {}", kernels.older));
    let error = failure(&site, &run, "failed    hello for").replace(newer, "KERNEL");
    insta::assert_snapshot!(error, @r"
    failed    hello for KERNEL: compile failed: SITE/definitions/sources/hello/farrier_hello.c:8:9: implicit declaration of function 'kfree_changed'; did you mean 'free_pages'? [-Werror=implicit-function-declaration]
              hint: the full log is SITE/cache/logs/hello-KERNEL-HASH-debian-12-amd64.log; correct the source or the definition and run again; to compile the same inputs again, first run `farrier retry hello KERNEL`
    ");
    // Neither the progress nor a table repeats the reason.
    assert_eq!(run.to_string().matches("kfree_changed'").count(), 1, "{run}");
    assert!(run.line("failed at 20").ends_with(", for the reason above"), "{run}");
    assert_eq!(site.tags("hello"), [format!("1.0-{}-debian12-amd64", kernels.older)]);
    assert_eq!(site.image(), FIRST_IMAGE);

    // The complete log is where the hint says. The next reconcile does not recompile and leaves the log unchanged.
    let hint = run.line("the full log is");
    let log = hint.split_once("log is ").unwrap().1.split_once(';').unwrap().0;
    assert!(fs::read_to_string(log).unwrap().contains("make"));
    let written = fs::metadata(log).unwrap().modified().unwrap();
    let again = fails(&site, "hello", 1);
    again.line("failed");
    again.line("farrier_hello.c:");
    assert_eq!(fs::metadata(log).unwrap().modified().unwrap(), written);
    site.build("hello", newer, &["--push"]).exits(1).line("the same inputs failed");

    // A changed input triggers a new build.
    site.edit("images/hello.yaml", "makeArgs: \"\"", "makeArgs: V=1");
    site.build("hello", newer, &[]).exits(1).line("compile failed");
    site.edit("images/hello.yaml", "version: \"1.0\"", "version: \"1.1\"");
    site.edit("sources/hello/farrier_hello.c", "#ifdef CHANGED", "#if 0");
    site.run_once().exits(0).line("rewrote");
}

#[test]
fn headers_that_no_suite_has() {
    let site = Site::new();
    site.canary("6.1.0-999-amd64");
    let run = fails(&site, "hello", 1);
    let why = "skip no headers for 6.1.0-999-amd64: there is no package linux-headers-6.1.0-999-amd64 (amd64) in bookworm, \
               bookworm-security; import or collect them (`farrier headers import`, `farrier headers collect`), or name a mirror";
    let said: Vec<&str> = run.line("no headers for 6.1.0-999-amd64").split_whitespace().collect();
    assert!(said.join(" ").contains(why), "{run}");
    // The build fails before it uses an engine.
    assert!(!run.to_string().contains("preparing the toolchain"), "{run}");
    let preflight = site.farrier(&["preflight", "--kernel", "6.1.0-998-amd64"]).exits(1);
    preflight.line("no headers for 6.1.0-998-amd64: there is no package linux-headers-6.1.0-998-amd64");
}

#[test]
fn a_toolchain_without_the_compiler() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    // A copy of the built-in family under the same file name overrides it.
    site.define(
        "kernels/10-debian-12.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: debian-12}\nspec:\n  \
         match: {os: [debian], osVersion: '12'}\n  headers: {apt: {packages: [\"linux-headers-{{release}}\"], \
         suites: [bookworm, bookworm-security]}}\n  builtWith: [gcc-12]\n  toolchain: {bootstrap: {suite: bookworm, include: [gcc-11, make]}}\n",
    );
    site.canary(&kernel);
    let run = fails(&site, "hello", 1);
    let why = "the kernel was built with gcc 12, which the toolchain of family debian-12 lacks; the toolchain offers gcc 11";
    run.line(why);
    assert!(!run.to_string().contains("preparing the toolchain"), "{run}");
    // The headers name the compiler when the family does not. With cached headers the plan detects the mismatch; otherwise the
    // build detects it before it uses its engine.
    site.edit("kernels/10-debian-12.yaml", "  builtWith: [gcc-12]\n", "");
    fails(&site, "hello", 1).line(why);
    fails(&site, "hello", 1).line(why);
}

#[test]
fn modules_that_the_kernel_would_refuse() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    // The second module is required but missing.
    site.edit("images/hello.yaml", "[farrier_hello]", "[farrier_hello, farrier_other]");
    site.canary(&kernel);
    let run = fails(&site, "hello", 1);
    insta::assert_snapshot!(failure(&site, &run, "failed    hello").replace(&kernel, "KERNEL"), @r"
    failed    hello for KERNEL: check refused the modules: module farrier_other is required, and the payload does not contain it: found farrier_hello
              | payload on KERNEL (amd64): refused
              | refused[required-module]: module farrier_other is required, and the payload does not contain it: found farrier_hello
              |   help: correct the required name, or see the build log for why the module was not compiled or not installed under /out
              | MODULE         VERDICT  REASON
              | farrier_hello  loads    warning[signature]: the module is not signed: the kernel loads it and taints itself, but under Secure Boot it locks itself down and refuses the module
              |                           help: sign it with a key that the kernel trusts, after everything that changes the file
              hint: `modules` of driver image hello has farrier_other, which was not built: correct it, or let the template install the module under /out
    ");
}

#[test]
fn an_engine_that_is_not_running() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    let socket = site.path("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let before = site.manifests();
    let address = format!("unix://{}", socket.display());
    let run =
        site.finish(site.command(&["run", "--once"]).env("DOCKER_HOST", &address).spawn().unwrap()).exits(3);
    insta::assert_snapshot!(failure(&site, &run, "failed    hello").replace(&kernel, "KERNEL"), @r"
    failed    hello for KERNEL: no build engine: docker at unix://SITE/dead.sock: Connection refused (os error 111)
              hint: enable what the sandbox lacks, or start the Docker daemon (`systemctl start docker`) or Podman's socket; --engine chooses one of them
    ");
    assert_eq!((site.manifests(), site.tags("hello").len()), (before, 0));
}

#[test]
fn a_registry_that_refuses_connections() {
    let kernel = kernels::newest().newer;
    let mut site = Site::new();
    site.canary(&kernel);
    site.registry.stop();
    let run = fails(&site, "hello", 3);
    insta::assert_snapshot!(site.neutral(run.line("skip")).replace(&kernel, "KERNEL"), @"hello  KERNEL (debian 12, amd64)  1      skip    registry REGISTRY: connection refused (check that the registry is running and that REGISTRY is its address)");
    // An unreachable registry does not mean that the request is invalid.
    let run = site.build("hello", &kernel, &["--push"]).exits(3);
    assert_eq!(run.stderr.matches("refused").count(), 1, "no retries, and no further line: {run}");
}

#[test]
fn a_registry_that_answers_500() {
    let kernel = kernels::newest().newer;
    let mut site = Site::new();
    site.canary(&kernel);
    let (_runtime, server) = server(answer(500, "out of order"));
    site.location = format!("{}/drivers", server.host);
    let before = site.manifests();
    let run = site.run_once().exits(3);
    insta::assert_snapshot!(run.line("skip").replace(&server.host, "REGISTRY").replace(&kernel, "KERNEL"), @"hello  KERNEL (debian 12, amd64)  1      skip    REGISTRY answered 500 to fetch manifest of drivers/headers:KERNEL-amd64 (check the log of the registry at REGISTRY; several retries failed)");
    assert_eq!(site.manifests(), before);
    assert!((2..=20).contains(&server.requests().len()), "{:?}", server.requests());
    // One warning for all retried requests.
    let fault = format!("transient fault, retrying at=\"{}\" cause=\"status 500\"", server.host);
    assert_eq!((run.stderr.matches(&fault).count(), run.stderr.matches("retrying").count()), (1, 1), "{run}");
}

#[test]
fn a_registry_whose_name_is_unknown() {
    let kernel = kernels::newest().newer;
    let mut site = Site::new();
    site.canary(&kernel);
    site.location = "registry.invalid/drivers".to_owned();
    let run = site.run_once().exits(3);
    // Without a network, no DNS server answers. That is another fault, which may pass: it is retried, with one line.
    let answer = std::net::ToSocketAddrs::to_socket_addrs(&("registry.invalid", 443)).unwrap_err();
    let is_unknown = answer.to_string().ends_with("Name or service not known");
    assert_eq!(run.stderr.matches("retrying").count(), usize::from(!is_unknown), "{run}");
    let reason =
        if is_unknown { "registry registry.invalid: its name is not known to the DNS (" } else { "reach" };
    assert!(run.line("skip").contains(&format!("skip    {reason}")), "{run}");
}

#[test]
fn a_registry_that_wants_credentials() {
    let kernel = kernels::newest().newer;
    let site = Site::with_registry(Wants { password: true, ..Wants::default() });
    site.canary(&kernel);
    let run = fails(&site, "hello", 3);
    insta::assert_snapshot!(site.neutral(run.line("docker login")).replace(&kernel, "KERNEL"), @"hello  KERNEL (debian 12, amd64)  1      skip    REGISTRY refused to fetch manifest of drivers/headers:KERNEL-amd64: the registry requires credentials, and there is no entry for REGISTRY in any credentials file (run `docker login REGISTRY` as a user with this permission, or check the name of the repository)");

    let login = Command::new("skopeo")
        .args(["login", "--tls-verify=false", "--username", USER, "--password", PASSWORD, "--authfile"])
        .arg(site.path("docker/config.json"))
        .arg(&site.registry.host)
        .output()
        .unwrap();
    assert!(login.status.success(), "{}", String::from_utf8_lossy(&login.stderr));
    site.run_once().exits(0).line("rewrote");
}

/// A file system of a few megabytes, unmounted on drop. Mounting requires root or sudo.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a Path, size: &str) -> Self {
        let mounted =
            as_root("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "farrier"]).arg(at).output();
        let mounted = mounted.expect("run mount");
        assert!(mounted.status.success(), "as root: {}", String::from_utf8_lossy(&mounted.stderr));
        Self(at)
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = as_root("umount").arg(self.0).status();
    }
}

/// The payload fits on the disk but its layer does not.
#[test]
fn a_disk_that_is_full_in_the_middle_of_a_layer() {
    let kernel = kernels::newest().newer;
    // With a warm toolchain in the engine, the layer is the first file that exceeds the disk.
    let warm = Site::in_docker();
    warm.canary(&kernel);
    warm.run_once().exits(0);
    let site = Site::in_docker();
    let template = fs::read_to_string("templates/kbuild.Dockerfile.hbs").unwrap();
    let grown = template.replace(
        "    find /build -mindepth 1 -delete\n",
        "    find /build -mindepth 1 -delete; head -c 3M /dev/urandom > /out/firmware\n",
    );
    assert_ne!(template, grown);
    site.define("templates/kbuild.Dockerfile.hbs", &grown);
    site.canary(&kernel);
    let cache = site.path("small");
    fs::create_dir(&cache).unwrap();
    let _disk = SmallDisk::mount(&cache, "5M");
    fs::remove_dir_all(site.cache()).unwrap();
    std::os::unix::fs::symlink(&cache, site.cache()).unwrap();
    site.link_shared();

    let run = fails(&site, "hello", 1);
    insta::assert_snapshot!(failure(&site, &run, "failed    hello").replace(&kernel, "KERNEL"), @r#"
    failed    hello for KERNEL: cannot write layer entry "firmware": No space left on device (os error 28) at path "SITE/cache/WORK"
              hint: the disk is full: free some space; no incomplete files were left
    "#);
}

#[test]
fn a_download_that_is_cut_short() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let (_runtime, server) = server(answer(200, "the first half").cut_short_by(1000));
    let sha256 = "0".repeat(64);
    let from = format!("{{url: {{url: \"http://{}/hello.tar.gz\", sha256: \"{sha256}\"}}}}", server.host);
    site.edit("images/hello.yaml", "{path: {path: sources/hello}}", &from);
    site.canary(&kernel);
    let run = fails(&site, "hello", 3);
    let text =
        failure(&site, &run, "failed    hello").replace(&kernel, "KERNEL").replace(&server.host, "SERVER");
    insta::assert_snapshot!(text, @r"
    failed    hello for KERNEL: cannot download http://SERVER/hello.tar.gz: 14 bytes arrived, 1014 were announced
              hint: the server, or a proxy in front of it, ended the transfer early: run farrier again, or provide the file as a `path` source
    ");
    assert!((2..=20).contains(&server.requests().len()));
}

/// Invalid kernel releases: farrier skips a node that reports one and refuses one on the command line.
#[test]
fn hostile_kernel_releases() {
    let site = Site::new();
    for release in ["6.1.0$(reboot)", "../../etc"] {
        let run = site.build("hello", release, &[]).exits(2);
        assert!(run.stderr.contains("--kernel: kernel release"), "{run}");
        site.canary(release);
        let node = site.cluster().join("edge-2.yaml");
        let text = fs::read_to_string(&node).unwrap();
        fs::write(&node, text.replace(&format!("full: {release}"), "full: 6.1.0")).unwrap();
        let run = fails(&site, "hello", 0);
        run.line("SKIPPED NODES");
        run.line("edge-2");
        run.line("nothing to do");
    }
    insta::assert_snapshot!(site.build("hello", "../../etc", &[]).stderr, @r#"error: --kernel: kernel release "../../etc" holds the character '/'; only letters, digits and `._+~-` are allowed"#);
}

#[test]
fn a_tag_that_holds_other_inputs() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    site.run_once().exits(0);
    let published = site.image();

    // Different inputs under the same tag are a conflict and change nothing.
    site.edit("images/hello.yaml", "makeArgs: \"\"", "makeArgs: V=1");
    let run = fails(&site, "hello", 1);
    insta::assert_snapshot!(site.neutral(run.line("conflict  ")).replace(&kernel, "KERNEL"), @"hello  KERNEL (debian 12, amd64)  1      conflict  REGISTRY/drivers/hello:1.0-KERNEL-debian12-amd64 holds an image built from other inputs: vars.makeArgs changed (empty -> V=1); a published tag never changes: raise `version` in the definition of hello (such as `git describe` prints), or set `onConflict: overwrite` there while you develop; `farrier build hello --kernel KERNEL` tries the change without publishing");
    let build = site.build("hello", &kernel, &["--push"]).exits(1);
    insta::assert_snapshot!(site.neutral(&build.stderr).replace(&kernel, "KERNEL"), @r"
    error: REGISTRY/drivers/hello:1.0-KERNEL-debian12-amd64 holds an image built from other inputs: vars.makeArgs changed (empty -> V=1)
    hint: a published tag never changes: raise `version` in the definition of hello (such as `git describe` prints), or set `onConflict: overwrite` there while you develop; `farrier build hello --kernel KERNEL` tries the change without publishing
    ");
    assert_eq!(site.image(), published);
    assert!(published.ends_with(tagged(&site, &kernel).as_str()));

    site.edit("images/hello.yaml", "  version:", "  onConflict: overwrite\n  version:");
    site.run_once().exits(0).line("rewrote");
    assert_ne!(site.image(), published);
    assert!(site.image().ends_with(tagged(&site, &kernel).as_str()));
    site.run_once().exits(0).line("nothing to do");
}

fn tagged(site: &Site, kernel: &str) -> String {
    site.inspect(&format!("hello:1.0-{kernel}-debian12-amd64"))["Digest"].as_str().unwrap().to_owned()
}

/// A tag pattern without the kernel: farrier builds neither image, so neither can overwrite the other.
#[test]
fn two_kernels_with_one_tag() {
    let kernels = kernels::newest();
    let site = Site::new();
    site.edit("images/hello.yaml", "  version:", "  tags: [\"{{version}}\"]\n  version:");
    site.manifest("edge-1.yaml", &kernels.older);
    site.canary(&kernels.newer);
    let run = fails(&site, "hello", 1);
    let line = site.neutral(run.line("tag collision"));
    insta::assert_snapshot!(line.replace(&kernels.older, "OLDER").replace(&kernels.newer, "NEWER"), @"hello  OLDER (debian 12, amd64)  1      skip    tag collision: REGISTRY/drivers/hello:1.0 is also the tag for NEWER (debian 12, amd64); add a variable that distinguishes the kernels to `tags`");
    assert_eq!(site.tags("hello"), [""; 0]);
}

#[test]
fn definitions_with_mistakes() {
    let site = Site::new();
    site.canary("6.1.0-1-amd64");
    site.edit("images/hello.yaml", "  template: kbuild", "  tempalte: kbuild");
    let run = fails(&site, "hello", 2);
    insta::assert_snapshot!(run.stderr, @r#"
    error: images/hello.yaml:6:3: unknown field "tempalte"; did you mean "template"?
      6 |   tempalte: kbuild
        |   ^
    error: images/hello.yaml:5:3: field "template" is missing
      5 |   version: "1.0"
        |   ^
    2 mistakes in the definitions
    "#);
}

/// A path may be right at another site, whose files the registry's store then has. So it is a reason in the plan and a warning of
/// lint, with the place in both.
#[test]
fn a_source_that_is_not_where_the_definition_says() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    site.edit("images/hello.yaml", "sources/hello", "sources/helo");
    let run = fails(&site, "hello", 1);
    insta::assert_snapshot!(site.neutral(run.line("skip")).replace(&kernel, "KERNEL"), @"hello  KERNEL (debian 12, amd64)  1      skip    images/hello.yaml:9:41: cannot find SITE/definitions/sources/helo: there is no such file or directory (create it, or name another path in the definition; relative paths are resolved against the definitions directory)");
    site.farrier(&["doctor"]).exits(1).line("images/hello.yaml:");
    let lint = site.farrier(&["lint"]).exits(0);
    lint.line("warning: images/hello.yaml:9:41: sources/helo does not exist; correct it, unless the registry has a copy for builds");
    lint.line("no mistakes, ");
}

#[test]
fn a_misspelt_variable_in_a_template() {
    let site = Site::new();
    site.canary("6.1.0-1-amd64");
    site.define(
        "templates/own.Dockerfile.hbs",
        "FROM {{toolchain}} AS modules\n\nRUN make K={{kernel.relase}}\n",
    );
    site.edit("images/hello.yaml", "template: kbuild", "template: own");
    let run = fails(&site, "hello", 2);
    insta::assert_snapshot!(run.stderr, @r#"
    error: templates/own.Dockerfile.hbs:3:1: there is no variable kernel.relase for driver image "hello"
      3 | RUN make K={{kernel.relase}}
        | ^
    1 mistake in the definitions
    "#);
}

#[test]
fn commands_that_are_wrong() {
    let site = Site::new();
    let wrong = |args: &[&str]| site.neutral(&site.farrier(args).exits(2).stderr);
    insta::assert_snapshot!(wrong(&["run", "--once", "--cluster", "kubernetes"]), @r#"error: --cluster: "kubernetes" is not kube, kube:CONTEXT or dir:PATH"#);
    insta::assert_snapshot!(wrong(&["run", "--once", "--cluster", "dir:/nonesuch"]), @"error: cannot read the manifests in /nonesuch: No such file or directory (os error 2)");
    insta::assert_snapshot!(wrong(&["run", "--once", "--cluster", "kube"]), @"error: --write-namespaces is missing: list the namespaces in which farrier may write DaemonSets and evict pods, such as drivers,gpu, or `*` for all (FARRIER_WRITE_NAMESPACES; with the chart, rbac.writeNamespaces)");
    insta::assert_snapshot!(wrong(&["plan", "--registry", "not a registry"]), @r#"error: --registry: "not a registry" is not a registry: the host must contain a dot or a port, or be localhost; write host[:port][/prefix] or oci:PATH"#);
    insta::assert_snapshot!(wrong(&["plan", "--definitions", "/nonesuch"]), @r"
    error: definitions /nonesuch: No such file or directory (os error 2)
    hint: create a definitions directory with `farrier init`
    ");
    insta::assert_snapshot!(wrong(&["render", "nonesuch", "--kernel", "6.1.0-1-amd64"]), @"error: no driver image is named nonesuch; known: broken, hello");
}

/// Truncated archives and archives with paths outside their root: farrier uses no part of them and publishes or rewrites
/// nothing.
#[test]
fn sources_that_are_no_whole_and_honest_archives() {
    let site = Site::new();
    site.canary(&kernels::newest().newer);
    site.edit("images/hello.yaml", "path: sources/hello}", "path: sources/hello.archive}");
    let archive = site.definitions().join("sources/hello.archive");
    for name in ["../escaped", "/escaped"] {
        let mut header = tar::Header::new_ustar();
        // Write the name directly, because the crate's setter refuses it.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(0);
        header.set_mode(0o644);
        header.set_cksum();
        let mut builder = tar::Builder::new(Vec::new());
        builder.append(&header, &[][..]).unwrap();
        fs::write(&archive, builder.into_inner().unwrap()).unwrap();
        let run = fails(&site, "hello", 1);
        run.line(&format!("entry {name:?} is outside the archive's root"));
        run.line("check the archive's origin");
    }

    let whole = site.path("hello.run");
    let made = Command::new("makeself")
        .args(["--nox11", "--gzip"])
        .arg(site.definitions().join("sources/hello"))
        .arg(&whole)
        .args(["hello", "true"])
        .output()
        .expect("run makeself (Debian package makeself)");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let bytes = fs::read(&whole).unwrap();
    fs::write(&archive, &bytes[..bytes.len() - 10]).unwrap();
    let run = fails(&site, "hello", 1);
    run.line("archive is truncated: the header states");
    run.line("fetch it again");

    // The complete archive is the same source as the directory.
    fs::write(&archive, bytes).unwrap();
    site.run_once().exits(0).line("built     hello for");
}
