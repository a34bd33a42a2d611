//! OpenShift stand-ins: the labels of RHEL CoreOS, the driver toolkit's ImageStream in the tests' API server, and a toolkit in
//! a real registry. Definition and objects follow OpenShift's documentation.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::{
    image::Digest,
    kernel::{Architecture, Toolchain},
};
use farrier_inputs::{FetchOptions, Fetcher, PackageRoot};
use farrier_local::cache::Cache;
use oci::compress;
use serde_json::json;

use crate::{
    headers_import::published::push_layers,
    support::{
        kernels::{self, shared_cache},
        kube_api::{FakeApi, objects},
        packages::{header_tree, run},
        site::{FIRST_IMAGE, Run, Site},
    },
};

const FIRST: &str = "416.94.202410151600-0";
const NEXT: &str = "416.94.202412170927-0";
const BROKEN: &str = "416.94.202501100000-0";
const OSTREE_VERSION: &str = "feature.node.kubernetes.io/system-os_release.OSTREE_VERSION";

/// A site, and a cluster with the OpenShift kinds that farrier reads.
struct Bench {
    site: Site,
    api: FakeApi,
    repository: String,
}

impl Bench {
    fn new() -> Self {
        let (site, api) = (Site::new(), FakeApi::start());
        let repository = format!("{}/ocp/toolkit", site.registry.host);
        site.define(
            "kernels/05-coreos.yaml",
            &format!(
                "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {{name: coreos}}\nspec:\n  \
                 match: {{os: rhcos}}\n  \
                 headers: {{oci: {{image: \"{repository}@{{{{digest}}}}\", path: \"/usr/src/kernels/{{{{release}}}}\"}}}}\n  \
                 toolchain: {{image: \"{repository}@{{{{digest}}}}\"}}\n  \
                 imageStream: openshift/driver-toolkit\n"
            ),
        );
        site.edit(
            "images/hello.yaml",
            "  rollout:\n    - {strategy: image, namespace: drivers, daemonSet: hello, container: driver}\n",
            &format!(
                "  tags: [\"{{{{version}}}}-{{{{kernel_label}}}}-{{{{arch}}}}\", \"{{{{version}}}}-{{{{ostree_version}}}}-{{{{arch}}}}\"]\n  rollout:\n    \
                 - {{strategy: image, namespace: drivers, daemonSet: hello-{FIRST}, container: driver}}\n    \
                 - {{strategy: image, namespace: drivers, daemonSet: hello-{NEXT}, container: driver}}\n"
            ),
        );
        api.create(json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "imagestreams.image.openshift.io"},
            "spec": {
                "group": "image.openshift.io", "scope": "Namespaced",
                "names": {"plural": "imagestreams", "singular": "imagestream", "kind": "ImageStream", "shortNames": ["is"]},
                "versions": [{
                    "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
                }],
            },
        }));
        api.create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "farrier"}}));
        // Each DaemonSet selects all nodes that booted one image, like SRO and the GPU Operator.
        for version in [FIRST, NEXT] {
            let mut object = objects::daemon_set("drivers", &format!("hello-{version}"), FIRST_IMAGE);
            object["spec"]["template"]["spec"]["nodeSelector"] = json!({OSTREE_VERSION: version});
            api.create(object);
        }
        api.kubeconfig(&site.path(""));
        Self { site, api, repository }
    }

    /// Creates a node of RHEL CoreOS.
    fn node(&self, name: &str, kernel: &str, ostree_version: Option<&str>) {
        let mut node = objects::node(name, kernel);
        let labels = &mut node["metadata"]["labels"];
        labels["feature.node.kubernetes.io/system-os_release.ID"] = "rhcos".into();
        labels["feature.node.kubernetes.io/system-os_release.VERSION_ID"] = "4.16".into();
        labels["feature.node.kubernetes.io/system-os_release.RHEL_VERSION"] = "9.4".into();
        labels["test.farrier.dev/hello"] = "true".into();
        if let Some(version) = ostree_version {
            labels[OSTREE_VERSION] = version.into();
        }
        self.api.create(node);
    }

    /// Creates or replaces the ImageStream.
    fn stream(&self, tags: &[(&str, &Digest)]) {
        let resource = "imagestreams.image.openshift.io";
        if self.api.get(resource, "openshift", "driver-toolkit").is_some() {
            self.api.delete(resource, "openshift", "driver-toolkit");
        }
        let from = |digest: &Digest| json!({"kind": "DockerImage", "name": format!("quay.io/openshift-release-dev/ocp-v4.0-art-dev@{digest}")});
        let tags = tags.iter().map(|(name, digest)| {
            json!({
                "name": name, "from": from(digest), "generation": 2, "importPolicy": {"scheduled": true},
                "referencePolicy": {"type": "Source"},
            })
        });
        self.api.create(json!({
            "apiVersion": "image.openshift.io/v1", "kind": "ImageStream",
            "metadata": {"name": "driver-toolkit", "namespace": "openshift"},
            "spec": {"lookupPolicy": {"local": false}, "tags": tags.collect::<Vec<_>>()},
        }));
    }

    fn farrier(&self, args: &[&str]) -> Run {
        let mut command = self.site.command(args);
        command.env("FARRIER_CLUSTER", "kube").env("KUBECONFIG", self.site.path("kubeconfig"));
        command.env("FARRIER_WRITE_NAMESPACES", "drivers");
        Run::of(command.spawn().unwrap())
    }

    /// Returns the plan's reason for skipping the only cell.
    fn skipped(&self) -> String {
        let plan = self.farrier(&["plan", "-o", "json"]).json();
        plan["skipped"][0]["why"]["message"].as_str().unwrap_or_else(|| panic!("{plan:#}")).to_owned()
    }

    fn image(&self, version: &str) -> String {
        let object = self.api.get("daemonsets.apps", "drivers", &format!("hello-{version}")).unwrap();
        object["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()
    }
}

#[test]
fn the_plan_says_what_is_not_known_of_a_toolkit() {
    const KERNEL: &str = "5.14.0-427.50.1.el9_4.x86_64";
    let bench = Bench::new();
    bench.node("a", KERNEL, None);
    assert!(bench.skipped().contains(&format!("no node that runs {KERNEL} has the label {OSTREE_VERSION}")));
    bench.api.delete("nodes", "", "a");
    bench.node("a", KERNEL, Some(FIRST));
    let doctor = bench.farrier(&["doctor"]);
    for said in [bench.skipped(), doctor.line("image stream").to_owned()] {
        assert!(said.contains("the cluster has no ImageStream openshift/driver-toolkit"), "{said}");
    }
    bench.api.deny("get", "imagestreams.image.openshift.io");
    let said = bench.skipped();
    assert!(
        said.contains("farrier may not get imagestreams.image.openshift.io in namespace openshift"),
        "{said}"
    );
    assert!(said.contains("--verb get --resource imagestreams.image.openshift.io "), "{said}");
    bench.api.allow("get", "imagestreams.image.openshift.io");

    bench.stream(&[(NEXT, &Digest::of(b"next"))]);
    assert!(bench.skipped().contains(&format!("ImageStream openshift/driver-toolkit has no tag {FIRST}")));
    let doctor = bench.farrier(&["doctor"]);
    assert!(doctor.line("image stream").contains("openshift/driver-toolkit: 1 tags"), "{doctor}");
    // The ImageStream names a digest that the registry lacks.
    let digest = Digest::of(b"first");
    bench.stream(&[(FIRST, &digest)]);
    assert!(bench.farrier(&["plan"]).exits(0).stdout.contains("1 to build"));
    // Without a cluster, the kernel family supplies the digest.
    let args = ["headers", "fetch", "--kernel", KERNEL, "--os", "rhcos", "--os-version", "4.16"];
    bench.farrier(&args).line(&format!("value of {{{{digest}}}} for {KERNEL}"));
    bench.site.edit(
        "kernels/05-coreos.yaml",
        "  imageStream: openshift/driver-toolkit\n",
        &format!("  digests: {{{KERNEL}: \"{digest}\"}}\n"),
    );
    bench.farrier(&args).line(&format!("{}@{digest}", bench.repository));
}

/// Builds a kernel's headers in the layout of `kernel-devel`: one complete tree.
fn kernel_devel(kernel: &str, work: &Path) -> PathBuf {
    let root = work.join("root");
    let tree = header_tree(&kernel.parse().unwrap(), &root);
    let common = fs::read_to_string(tree.join("Makefile")).unwrap();
    let common = Path::new(common.trim().strip_prefix("include ").unwrap()).parent().unwrap().to_owned();
    let made = work.join("kernel-devel");
    run(Command::new("cp").arg("-a").args([&common, &made]));
    for name in ["scripts", "tools"] {
        fs::remove_file(made.join(name)).unwrap();
        run(Command::new("cp").arg("-aL").args([common.join(name), made.join(name)]));
    }
    for name in ["arch", "include", ".config", "Module.symvers"] {
        run(Command::new("cp").arg("-aL").args([tree.join(name), made.clone()]));
    }
    made
}

/// Pushes a toolkit with Debian 12's compiler and these kernels' headers.
async fn push_toolkit(repository: &str, tag: &str, trees: &[(&str, &Path)]) -> Digest {
    let definitions = farrier_definitions::load(None).unwrap();
    let family =
        definitions.families.iter().find(|family| family.metadata.name.as_str() == "debian-12").unwrap();
    let Toolchain::Bootstrap(spec) = &family.spec.toolchain else { panic!("no packages") };
    let fetcher = Fetcher::new(Cache::open(shared_cache()).unwrap(), FetchOptions::default());
    let root = PackageRoot::Toolchain(spec.clone());
    let toolchain = fetcher.root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap();
    let work = tempfile::tempdir().unwrap();
    let kernels = work.path().join("root/usr/src/kernels");
    fs::create_dir_all(&kernels).unwrap();
    for (release, tree) in trees {
        run(Command::new("cp").arg("-a").arg(tree).arg(kernels.join(release)));
    }
    let (headers, tar) = (work.path().join("headers"), work.path().join("headers.tar"));
    run(Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(work.path().join("root")).arg("usr"));
    let blob = fs::File::create(&headers).unwrap();
    let with_headers = compress(fs::File::open(tar).unwrap(), &blob).unwrap();
    push_layers(repository, tag, &[(toolchain.layer, toolchain.file), (with_headers, headers)]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_system_of_one_kernel_gets_the_image_under_its_name() {
    let (bench, work) = (Bench::new(), tempfile::tempdir().unwrap());
    let kernels::Kernels { older, newer } = kernels::newest();
    let tree = kernel_devel(&newer, work.path());
    let toolkit = push_toolkit(&bench.repository, "first", &[(&newer, &tree)]).await;
    bench.stream(&[(FIRST, &toolkit)]);
    bench.node("a", &newer, Some(FIRST));
    let run = bench.farrier(&["run", "--once"]).exits(0);
    run.line("built     hello for");
    run.line("check: loads");
    let names = |run: &Run, wanted: &[&str]| {
        let mut tags = bench.site.tags("hello");
        tags.sort();
        assert_eq!(tags, wanted.iter().map(|end| format!("1.0-{end}-amd64")).collect::<Vec<_>>(), "{run}");
    };
    names(&run, &[FIRST, &newer]);
    let image = bench.image(FIRST);
    assert!(image.contains("/hello@sha256:"), "{image}");

    // The next release has the same kernel and another toolkit, so nothing is compiled.
    let next = push_toolkit(&bench.repository, "next", &[(&newer, &tree), ("other", &tree)]).await;
    assert_ne!(next, toolkit);
    bench.stream(&[(FIRST, &toolkit), (NEXT, &next)]);
    bench.node("b", &newer, Some(NEXT));
    let run = bench.farrier(&["run", "--once"]).exits(0);
    run.line("tagged    hello for");
    assert!(!run.stdout.contains("built"), "{run}");
    names(&run, &[FIRST, NEXT, &newer]);
    assert_eq!(bench.image(NEXT), image);
    // A later change of the ImageStream does not affect the published image.
    bench.stream(&[]);
    bench.farrier(&["plan"]).exits(0).line("1 up to date");

    // A release whose toolkit is for another kernel.
    let compiled = || fs::read_dir(bench.site.cache().join("logs")).map_or(0, Iterator::count);
    let before = compiled();
    bench.api.delete("nodes", "", "b");
    bench.stream(&[(FIRST, &toolkit), (BROKEN, &next)]);
    bench.node("b", &older, Some(BROKEN));
    let run = bench.farrier(&["run", "--once"]).exits(1);
    let why = run.line("find /usr/src/kernels").to_owned();
    assert!(why.contains(&format!("/usr/src/kernels has {newer}, other")), "{run}");
    assert_eq!(compiled(), before, "nothing was compiled");
}
