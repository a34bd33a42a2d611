//! The complete pipeline: the real binary with the Docker engine, a registry, package mirrors and compilers.
use std::fs;

use crate::support::{
    docker::docker,
    kernels,
    site::{FIRST_IMAGE, Site, image_of, read_all, skopeo},
};

/// Two nodes run the older kernel, and a third lacks the labels of its operating system. Then the canary gets the newer kernel.
#[test]
fn a_kernel_change_leads_to_a_rewritten_image() {
    let kernels = kernels::newest();
    let site = Site::in_docker();
    for node in ["edge-1.yaml", "edge-2.yaml", "cp-1.yaml", "daemonset.yaml"] {
        site.manifest(node, &kernels.older);
    }

    let before = site.manifests();
    let first = site.run_once().exits(0);
    first.line("built     hello for");
    first.line("check: loads");
    first.line("rewrote   DaemonSet drivers/hello, container driver");
    first.line("cp-1");
    let on_older = site.image();
    let prefix = format!("{}/hello@sha256:", site.location);
    assert!(on_older.starts_with(&prefix), "{on_older}");
    // Only the value has changed; comments and spacing are preserved.
    let after = site.manifests();
    for (path, text) in &before {
        assert_eq!(text.replace(FIRST_IMAGE, &on_older), after[path]);
    }
    let tag = format!("1.0-{}-debian12-amd64", kernels.older);
    assert_eq!(site.tags("hello"), [tag.as_str()]);
    assert!(on_older.ends_with(site.inspect(&format!("hello:{tag}"))["Digest"].as_str().unwrap()));

    let again = site.run_once().exits(0);
    again.line("nothing to do");
    assert_eq!(site.manifests(), after);

    // The canary's kernel changes. The dry run prints the planned changes and writes nothing.
    site.manifest("edge-2.yaml", &kernels.newer);
    let changed = site.manifests();
    let dry = site.farrier(&["run", "--once", "--dry-run"]).exits(0);
    dry.line("1 to build");
    assert_eq!(dry.stdout, site.farrier(&["plan"]).exits(0).stdout, "a dry run prints the plan");
    assert_eq!((site.manifests(), site.tags("hello").len()), (changed, 1));

    site.run_once().exits(0).line("rewrote");
    let on_newer = site.image();
    assert!(on_newer.starts_with(&prefix) && on_newer != on_older, "{on_newer}");
    assert_eq!(site.tags("hello").len(), 2);

    // The registry and the cluster are the only state: without the cache there is still nothing to do.
    fs::remove_dir_all(site.cache()).unwrap();
    site.run_once().exits(0).line("nothing to do");
    assert_eq!(site.image(), on_newer);
}

#[test]
fn results_as_json() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    site.manifest("cp-1.yaml", &kernel);

    let plan = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    assert_eq!(plan["builds"][0]["cell"]["target"]["release"], kernel.as_str());
    assert_eq!(plan["builds"][0]["why"]["reason"], "not-published");
    assert_eq!(plan["skippedNodes"][0]["node"], "cp-1");
    assert_eq!(plan["skippedNodes"][0]["why"]["reason"], "missing-label");
    assert_eq!(plan["rollouts"][0]["decision"], "pending");

    let run = site.farrier(&["run", "--once", "-o", "json"]).exits(0).json();
    assert_eq!(run["targets"][0]["outcome"], "built");
    assert_eq!(run["targets"][0]["verdict"], "loads");
    assert_eq!(run["targets"][0]["image"], site.image());
    assert!(run["targets"][0]["pushedBytes"].as_u64().unwrap() > 0);
    assert_eq!(run["unreachable"], false);

    let status = site.farrier(&["status", "-o", "json"]).exits(0).json();
    assert_eq!(status[0]["phase"], "published");
    let digest = status[0]["digest"].as_str().unwrap();
    assert!(site.image().ends_with(digest), "{digest}");

    let build = site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    assert_eq!((&build["outcome"], &build["digest"]), (&"up-to-date".into(), &status[0]["digest"]));
}

/// Builds from equal inputs have equal digests: built again, for another registry, and with an empty cache.
#[test]
fn builds_are_reproducible() {
    let kernel = kernels::newest().newer;
    let (site, other) = (Site::in_docker(), Site::in_docker());
    let build = |site: &Site, args: &[&str]| {
        let result =
            site.build("hello", &kernel, &[args, &["--push", "-o", "json"]].concat()).exits(0).json();
        assert_eq!(result["outcome"], "built");
        result["digest"].as_str().unwrap().to_owned()
    };
    let first = build(&site, &[]);
    assert_eq!(build(&site, &["--force"]), first);
    assert_eq!(build(&other, &[]), first);
    let without = site.build("hello", &kernel, &["--force", "-o", "json"]).exits(0).json();
    assert_eq!(without["digest"], first.as_str(), "--push does not affect the digest");
}

#[test]
fn other_tools_read_the_published_image() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.build("hello", &kernel, &["--push"]).exits(0);
    let tag = format!("hello:1.0-{kernel}-debian12-amd64");
    let image = site.inspect(&tag);
    assert_eq!((&image["Architecture"], &image["Os"]), (&"amd64".into(), &"linux".into()));
    assert_eq!(image["Layers"].as_array().unwrap().len(), 1);

    // The engine can pull the image, and the module is where depmod and modprobe expect it.
    let reference = format!("{}/{tag}", site.location);
    docker(&["pull", "--quiet", &reference]);
    let container = docker(&["create", &reference, "/none"]);
    let container = container.trim();
    let exported = site.path("hello.tar");
    let module = format!("lib/modules/{kernel}/extra/farrier_hello.ko");
    docker(&["export", "--output", &exported.display().to_string(), container]);
    docker(&["rm", container]);
    docker(&["rmi", &reference]);
    let mut archive = tar::Archive::new(fs::File::open(exported).unwrap());
    let paths = archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string());
    let paths: Vec<String> = paths.filter(|path| path.contains("lib/modules")).collect();
    assert!(paths.contains(&module), "{paths:?}");
    assert!(paths.contains(&format!("lib/modules/{kernel}/modules.dep")), "{paths:?}");
}

/// farrier publishes images to a layout directory and finds them again, but rewrites nothing: nodes cannot pull from it.
#[test]
fn a_layout_directory_as_the_registry() {
    let kernel = kernels::newest().newer;
    let mut site = Site::in_docker();
    site.registry.stop();
    site.location = format!("oci:{}", site.path("layout").display());
    site.canary(&kernel);
    let before = site.manifests();
    let run = site.run_once().exits(0);
    run.line("built     hello for");
    run.line("nodes cannot pull from a layout directory");
    assert_eq!(site.manifests(), before);
    site.run_once().exits(0).line("nothing to do");

    // The index lists the image by tag; its check report, both bills of materials and its provenance by digest; and the record of each
    // kernel's last sighting.
    let mut names = read_index(&site);
    assert!(names.iter().any(|name| name == "kernels:last-seen"), "{names:?}");
    names.retain(|name| name.starts_with("hello"));
    let tagged: Vec<_> = names.iter().filter(|name| !name.contains('@')).collect();
    assert_eq!((names.len(), tagged.len()), (5, 1), "{names:?}");
    let output = skopeo(&["inspect", &format!("oci:{}:{}", site.path("layout").display(), tagged[0])]);
    assert!(output.status.success(), "{names:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the names in a layout's index.
fn read_index(site: &Site) -> Vec<String> {
    let index = fs::read_to_string(site.path("layout/index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let name = |manifest: &serde_json::Value| {
        manifest["annotations"]["org.opencontainers.image.ref.name"].as_str().unwrap().to_owned()
    };
    index["manifests"].as_array().unwrap().iter().map(name).collect()
}

/// A user's complete Dockerfile (`output: image`), whose image farrier checks and publishes like its own.
#[test]
fn output_image_builds_the_users_own_dockerfile() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.edit("images/hello.yaml", "template: kbuild", "template: own\n  output: image");
    site.define(
        "templates/own.Dockerfile.hbs",
        "FROM {{toolchain}} AS build\n\
         COPY sources/hello/ /build/\n\
         RUN make -C /lib/modules/{{kernel.release}}/build M=/build modules\n\
         FROM scratch\n\
         COPY --from=build /build/farrier_hello.ko /opt/lib/modules/{{kernel.release}}/farrier_hello.ko\n\
         ENV MADE_BY=me\n\
         ENTRYPOINT [\"/own\"]\n",
    );
    site.canary(&kernel);
    let run = site.run_once().exits(0);
    run.line("check: loads");
    assert!(site.image().starts_with(&format!("{}/hello@sha256:", site.location)));
    let image = site.inspect(&format!("hello:1.0-{kernel}-debian12-amd64"));
    let env: Vec<_> = image["Env"].as_array().unwrap().iter().filter_map(|value| value.as_str()).collect();
    assert!(env.contains(&"MADE_BY=me"), "{env:?}");
    site.run_once().exits(0).line("nothing to do");
}

/// GitOps: farrier rewrites manifests in the definitions directory, and leaves the cluster's manifests unchanged.
#[test]
fn file_strategy_rewrites_manifests_outside_the_cluster() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    site.edit("images/hello.yaml", "strategy: image,", "strategy: file, path: gitops,");
    let manifest = fs::read_to_string(site.cluster().join("daemonset.yaml")).unwrap();
    site.define("gitops/hello.yaml", &manifest);
    let observed = site.manifests();

    site.run_once().exits(0).line("rewrote");
    let written = read_all(&site.definitions().join("gitops"));
    let image = image_of(written.values().next().unwrap());
    assert!(image.starts_with(&format!("{}/hello@sha256:", site.location)), "{image}");
    assert_eq!(*written.values().next().unwrap(), manifest.replace(FIRST_IMAGE, &image));
    assert_eq!(site.manifests(), observed, "the cluster's manifests are unchanged");
    site.run_once().exits(0).line("nothing to do");
}

/// A DaemonSet's nodes run two kernels: farrier publishes an image for each, and leaves the DaemonSet's image unchanged.
#[test]
fn mixed_kernels_block_the_rewrite() {
    let kernels = kernels::newest();
    let site = Site::in_docker();
    site.manifest("edge-1.yaml", &kernels.older);
    site.canary(&kernels.newer);
    let path = site.cluster().join("daemonset.yaml");
    let text = fs::read_to_string(&path).unwrap().replace("nodeSelector: {pool: canary}", "nodeSelector: {}");
    fs::write(path, text).unwrap();
    let before = site.manifests();
    let run = site.run_once().exits(0);
    run.line("its nodes run different kernels");
    assert_eq!(site.tags("hello").len(), 2);
    assert_eq!(site.manifests(), before);
}

/// An image with the minimal base and `driver-entrypoint`, which runs the commands of the operators' DaemonSets and probes.
#[test]
fn an_image_of_the_minimal_base_and_driver_entrypoint() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.edit(
        "images/hello.yaml",
        "  modules: [farrier_hello]\n",
        "  modules: [farrier_hello]\n  runtime:\n    base: {minimal: {suites: [bookworm]}}\n    \
         entrypoint: [driver-entrypoint, generic, farrier_hello]\n",
    );
    let entrypoint = crate::support::virtual_machine::entrypoint().display().to_string();
    let build =
        |args: &[&str]| site.build("hello", &kernel, &[args, &["--entrypoint", &entrypoint]].concat());
    build(&["--push"]).exits(0);
    build(&["--push"]).exits(0).line("up to date");
    let tag = format!("hello:1.0-{kernel}-debian12-amd64");
    assert_eq!(site.inspect(&tag)["Layers"].as_array().unwrap().len(), 3, "base, entrypoint, payload");

    let reference = format!("{}/{tag}", site.location);
    docker(&["pull", "--quiet", &reference]);
    let inside = |command: &[&str]| {
        let run = ["run", "--rm", "--network", "none", "--entrypoint", command[0], &reference];
        docker(&[&run, &command[1..]].concat())
    };
    let module = format!("/lib/modules/{kernel}/extra/farrier_hello.ko");
    assert_eq!(
        inside(&["sh", "-c", &format!("ls {module} && lsmod | grep -c Module")]),
        format!("{module}\n1\n")
    );
    assert_eq!(inside(&["readlink", "/usr/bin/nvidia-driver"]), "driver-entrypoint\n");
    let program = fs::read(&entrypoint).unwrap().len();
    assert_eq!(inside(&["stat", "-c", "%a %s", "/usr/bin/driver-entrypoint"]), format!("755 {program}\n"));
    docker(&["rmi", &reference]);
}

/// The engine pulls a toolchain image from the site's mirrors, skipping an unreachable mirror. The image's own registry does
/// not exist.
#[test]
fn a_toolchain_image_from_a_mirror() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    // The mirror serves the toolchain image of this build, which this run or an earlier one built.
    site.run_once().exits(0).line("built     hello for");
    let target = ["--kernel", &kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let dockerfile = site.farrier(&[["render", "hello"].as_slice(), &target].concat()).exits(0).stdout;
    let toolchain = dockerfile.lines().find_map(|line| line.strip_prefix("FROM ")).unwrap().trim();
    let toolchain = toolchain.split_whitespace().next().unwrap();
    let mirrored = format!("{}/hub/gcc:12", site.location);
    docker(&["tag", toolchain, &mirrored]);
    docker(&["push", &mirrored]);
    let digest = site.inspect("hub/gcc:12")["Digest"].as_str().unwrap().to_owned();
    docker(&["rmi", &mirrored]);
    let pulled = format!("{}/hub/gcc@{digest}", site.location);
    assert_eq!(docker(&["image", "inspect", "--format", "{{.Id}}", &pulled]).trim(), "");

    let family =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/10-debian-12.yaml")).unwrap();
    let (head, _) = family.split_once("  toolchain:").unwrap();
    let image = "  toolchain: {image: \"nowhere.invalid/library/gcc:12\"}\n";
    site.define("kernels/10-debian-12.yaml", &format!("{head}{image}"));
    site.define(
        "site.yaml",
        &format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: test}}\nspec:\n  mirrors:\n    \
             - {{from: nowhere.invalid/library, to: [\"127.0.0.1:9/hub\", \"{}/hub\"]}}\n",
            site.location
        ),
    );
    site.edit("images/hello.yaml", "version: \"1.0\"", "version: \"1.1\"");
    let run = site.run_once().exits(0);
    run.line("built     hello for");
    run.line("check: loads");
    assert_ne!(docker(&["image", "inspect", "--format", "{{.Id}}", &pulled]).trim(), "", "{run}");
    docker(&["rmi", &pulled]);
}
