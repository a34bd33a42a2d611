//! Tests of directories as people keep them: charts, overlays and patches beside manifests.

use farrier_core::image::{DaemonSetContainer, OperatorResource};
use serde_json::json;

use super::*;

const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const BASE: &str = "apiVersion: apps/v1
kind: DaemonSet
metadata: {name: mofed}
spec:
  template:
    spec:
      nodeSelector: {pool: a}
      containers:
      - {name: driver, image: 'vendor/mofed:1'}
";

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

/// Opens the overlay of a base, as a Git repository.
fn overlay(kustomization: &str, more: &[(&str, &str)]) -> (tempfile::TempDir, Directory) {
    let files = [
        (".git/HEAD", ""),
        ("base/kustomization.yaml", "resources: [ds.yaml]\n"),
        ("base/ds.yaml", BASE),
        ("overlays/a/kustomization.yaml", kustomization),
    ];
    let root = tree(&[&files[..], more].concat());
    let directory = Directory::open(&root.path().join("overlays/a")).unwrap();
    (root, directory)
}

fn only(directory: &Directory) -> DaemonSetFacts {
    let mut found = directory.read().unwrap().daemon_sets;
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn set(directory: &Directory, to: &str) -> Result<(), String> {
    let facts = only(directory);
    let change = ImageChange {
        namespace: facts.namespace,
        daemon_set: facts.name,
        container: facts.containers[0].name.clone(),
        expected: facts.containers[0].image.clone(),
        to: to.to_owned(),
    };
    directory.set_image(&change).map_err(|error| error.to_string())
}

/// Files of this kind are in the public repositories of Argo CD's examples (`helm-guestbook`, `plugins`) and mkdocs-material.
#[test]
fn files_that_are_no_manifests_are_skipped_with_a_reason() {
    let root = tree(&[
        ("ds.yaml", BASE),
        (
            "chart/templates/ds.yaml",
            "kind: DaemonSet\n{{- if .Values.on }}\nspec: {{ .Values.spec }}\n{{- end }}\n",
        ),
        ("chart/values.yaml", "image: {repository: a, tag: b}\n"),
        ("mkdocs.yml", "format: !!python/name:x.y\n"),
        ("twice.yaml", "a: 1\na: 2\n"),
        (
            "patch.yaml",
            "kind: DaemonSet\napiVersion: apps/v1\nmetadata: {name: mofed}\nspec: {minReadySeconds: 5}\n",
        ),
    ]);
    fs::write(root.path().join("latin.yaml"), b"a: 1\nb: \xe9\n").unwrap();
    let snapshot = Directory::open(root.path()).unwrap().read().unwrap();
    assert_eq!(snapshot.daemon_sets.len(), 1);
    let skipped = snapshot.skipped.join("\n");
    for reason in ["chart/templates/ds.yaml:2: ", "latin.yaml:2: ", "twice.yaml:2: ", "patch.yaml:4: "] {
        assert!(skipped.contains(reason), "{reason} in {skipped}");
    }
    assert_eq!(snapshot.skipped.len(), 4, "{skipped}");
    // Without such a file a rewrite could break its nodes.
    fs::write(root.path().join("nodes.yaml"), "kind: Node\n{{- if .Values.on }}\nmetadata: {name: n}\n")
        .unwrap();
    assert!(matches!(Directory::open(root.path()).unwrap().read(), Err(ClusterError::Manifest { .. })));
}

/// The reader follows each alias: the first file would need terabytes of memory, and the second one years.
#[test]
fn manifests_with_too_many_aliases_are_skipped() {
    let bomb = |first: &str, repeat: fn(&str) -> String| {
        (1..20).fold(format!("x0: &a0 {first}\n"), |text, n| {
            format!("{text}x{n}: &a{n} {}\n", repeat(&format!("*a{m}, *a{m}, *a{m}, *a{m}", m = n - 1)))
        })
    };
    let tolerations = bomb("[x]", |items| format!("[{items}]"));
    let lists = bomb("{kind: List, items: []}", |items| format!("{{kind: List, items: [{items}]}}"));
    let daemon_set = BASE.replace("nodeSelector: {pool: a}", "tolerations: *a19");
    let root = tree(&[
        ("ds.yaml", BASE),
        ("bomb.yaml", &format!("{tolerations}{daemon_set}")),
        ("lists.yaml", &format!("kind: List\n{lists}items: [*a19]\n")),
    ]);
    let snapshot = Directory::open(root.path()).unwrap().read().unwrap();
    assert_eq!(snapshot.daemon_sets.len(), 1);
    let has_reason = |reason: &String| reason.ends_with("aliases repeat more than 20000 values");
    assert!(snapshot.skipped.len() == 2 && snapshot.skipped.iter().all(has_reason), "{:?}", snapshot.skipped);
}

/// Each reference copies the file's objects.
#[test]
fn a_kustomization_with_too_many_objects_is_cut() {
    let objects: Vec<String> = (0..10).map(|n| BASE.replace("mofed}", &format!("d{n}}}"))).collect();
    let objects = objects.join("---\n");
    let more = [("overlays/a/many.yaml", &*objects)];
    let (_root, directory) = overlay(&format!("resources:\n{}", "- many.yaml\n".repeat(2_000)), &more);
    let count = directory.read().unwrap().daemon_sets.len();
    assert!(count > MAX_REFERENCES / 2 && count <= MAX_REFERENCES, "{count}");
}

/// A link into a submodule leads nowhere, because farrier checks out no submodules.
#[test]
fn a_link_that_leads_nowhere_is_skipped() {
    let root = tree(&[("ds.yaml", BASE)]);
    for (link, target) in [("values.yaml", "../vendor/values.yaml"), ("loop.yaml", "loop.yaml")] {
        std::os::unix::fs::symlink(target, root.path().join(link)).unwrap();
    }
    assert_eq!(only(&Directory::open(root.path()).unwrap()).name, "mofed");
}

/// <https://github.com/fluxcd/image-automation-controller/issues/566>: an edit of a template broke it.
#[test]
fn a_value_that_a_template_fills_in_is_not_edited() {
    for value in ["{{ .Values.image }}", "${IMAGE}"] {
        let root = tree(&[("ds.yaml", &BASE.replace("vendor/mofed:1", value))]);
        let facts = only(&Directory::open(root.path()).unwrap());
        assert!(
            facts.containers[0].why_not_editable.as_ref().unwrap().contains("filled in by another tool"),
            "{facts:?}"
        );
    }
    for (from, to) in [
        ("pool: a", "pool: '${POOL}'"),
        ("nodeSelector:", "tolerations: [{key: $(KEY)}]\n      nodeSelector:"),
    ] {
        let root = tree(&[("ds.yaml", &BASE.replace(from, to))]);
        let facts = only(&Directory::open(root.path()).unwrap());
        assert!(matches!(facts.placement.affinity, NodeAffinity::Unsupported(_)), "{facts:?}");
    }
}

/// <https://github.com/fluxcd/flagger/issues/769>: `images` of a kustomization decide, and only where the name is the same.
#[test]
fn images_of_a_kustomization_decide_and_are_edited() {
    let text = |images: &str| {
        format!("resources: [../../base]\nnamespace: drivers\nnamePrefix: a-\nimages: # ours\n{images}")
    };
    let to = format!("reg.test/mofed@{DIGEST}");
    for (images, image, after) in [
        (
            "- name: vendor/mofed\n  newName: reg.test/mofed\n  newTag: \"1.0\" # now\n",
            "reg.test/mofed:1.0",
            format!("- name: vendor/mofed\n  newName: reg.test/mofed\n  digest: \"{DIGEST}\" # now\n"),
        ),
        (
            "- {name: vendor/mofed, digest: 'sha256:00', newName: old.test/mofed}\n",
            "old.test/mofed@sha256:00",
            format!("- {{name: vendor/mofed, digest: '{DIGEST}', newName: reg.test/mofed}}\n"),
        ),
    ] {
        let (root, directory) = overlay(&text(images), &[]);
        let facts = only(&directory);
        assert_eq!((facts.namespace.as_str(), facts.name.as_str()), ("drivers", "a-mofed"));
        assert_eq!(
            (facts.containers[0].image.as_str(), &facts.containers[0].why_not_editable),
            (image, &None)
        );
        set(&directory, &to).unwrap();
        let file = fs::read_to_string(root.path().join("overlays/a/kustomization.yaml")).unwrap();
        assert_eq!(file, text(&after));
        assert_eq!(only(&directory).containers[0].image, to);
        assert_eq!(fs::read_to_string(root.path().join("base/ds.yaml")).unwrap(), BASE);
    }
    // Kustomize writes both, so both are the new image's.
    let (root, directory) = overlay(
        &text("- {name: vendor/mofed, newName: reg.test/mofed, newTag: '1', digest: 'sha256:00'}\n"),
        &[],
    );
    assert_eq!(only(&directory).containers[0].image, "reg.test/mofed:1@sha256:00");
    set(&directory, &format!("reg.test/mofed:2@{DIGEST}")).unwrap();
    assert_eq!(only(&directory).containers[0].image, format!("reg.test/mofed:2@{DIGEST}"));
    let file = fs::read_to_string(root.path().join("overlays/a/kustomization.yaml")).unwrap();
    assert!(file.contains("newTag: '2', digest: 'sha256:e3b0"), "{file}");
    let (_root, directory) = overlay(&text("- {name: vendor/mofed, newTag: v1}\n"), &[]);
    assert!(set(&directory, &to).unwrap_err().contains("add `newName: reg.test/mofed`"));
    let (_root, directory) = overlay(&text("- {name: other/mofed, newTag: v1}\n"), &[]);
    assert_eq!(only(&directory).containers[0].image, "vendor/mofed:1");
}

#[test]
fn a_base_that_other_overlays_share_is_not_edited() {
    let (root, directory) = overlay("resources: [../../base]\n", &[]);
    let why = only(&directory).containers[0].why_not_editable.clone().unwrap();
    assert!(why.contains("is outside of the rollout's path; add vendor/mofed to `images`"), "{why}");
    assert!(set(&directory, &format!("vendor/mofed@{DIGEST}")).is_err());
    // The whole tree has one overlay, so the base is edited.
    let directory = Directory::open(root.path()).unwrap();
    assert_eq!(only(&directory).containers[0].why_not_editable, None);
    // The base of another repository is not read.
    let directory =
        Directory::within(&root.path().join("overlays"), &root.path().join("overlays/a")).unwrap();
    assert!(directory.read().unwrap().daemon_sets.is_empty());
}

/// The other DaemonSet may reach nodes that need another image.
#[test]
fn a_value_that_sets_several_daemon_sets_is_not_edited() {
    let second = BASE.replace("mofed}", "mofed-56}").replace("pool: a", "pool: b");
    let text = |images: &str| format!("resources: [../../base, ds2.yaml]\nimages: [{images}]\n");
    let entry = "{name: vendor/mofed, newTag: '1'}";
    let base = "resources: [../base]\nnamePrefix: ";
    let overlays = [
        ("base/kustomization.yaml", "resources: [ds.yaml]\n".to_owned()),
        ("base/ds.yaml", BASE.to_owned()),
        ("prod/kustomization.yaml", format!("{base}prod-\n")),
        ("staging/kustomization.yaml", format!("{base}staging-\n")),
    ];
    let overlays: Vec<_> = overlays.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let overlays = tree(&overlays);
    let (_root, shared) = overlay(&text(entry), &[("overlays/a/ds2.yaml", &second)]);
    for (directory, name, other) in [
        (shared, "mofed", "DaemonSet default/mofed-56"),
        (Directory::open(overlays.path()).unwrap(), "prod-mofed", "DaemonSet default/staging-mofed"),
    ] {
        let read = directory.read().unwrap();
        assert!(
            read.daemon_sets.iter().all(|facts| facts.containers[0].why_not_editable.is_some()),
            "{read:?}"
        );
        let facts = read.daemon_sets.iter().find(|facts| facts.name == name).unwrap();
        let change = ImageChange {
            namespace: facts.namespace.clone(),
            daemon_set: name.to_owned(),
            container: "driver".to_owned(),
            expected: facts.containers[0].image.clone(),
            to: format!("vendor/mofed@{DIGEST}"),
        };
        let error = directory.set_image(&change).unwrap_err().to_string();
        assert!(error.contains(&format!("its value also sets {other}")), "{error}");
        assert_eq!(directory.read().unwrap(), read, "nothing is written");
    }
    // Each image has its own entry.
    let second = second.replace("vendor/mofed", "vendor/mofed-56");
    let entries = format!("{entry}, {}", entry.replace("mofed", "mofed-56"));
    let (_root, directory) = overlay(&text(&entries), &[("overlays/a/ds2.yaml", &second)]);
    let read = directory.read().unwrap().daemon_sets;
    assert!(read.len() == 2 && read.iter().all(|facts| facts.containers[0].why_not_editable.is_none()));
}

#[test]
fn a_resource_of_several_overlays_is_not_edited() {
    let overlay = "resources: [../base/policy.yaml]\nnamePrefix: ";
    let [prod, staging] = ["prod-", "staging-"].map(|prefix| format!("{overlay}{prefix}\n"));
    let root = tree(&[
        ("base/policy.yaml", POLICY),
        ("prod/kustomization.yaml", &prod),
        ("staging/kustomization.yaml", &staging),
    ]);
    let resources = Directory::open(root.path()).unwrap().read().unwrap().resources;
    let why = &resources[0].why_not_editable[""];
    assert!(why.contains("also sets NicClusterPolicy staging-policy"), "{why}");
    assert!(resources[1].why_not_editable[""].contains("also sets NicClusterPolicy prod-policy"));
}

#[test]
fn a_patch_of_the_nodes_or_the_image_is_named() {
    let unsupported =
        |facts: &DaemonSetFacts| matches!(facts.placement.affinity, NodeAffinity::Unsupported(_));
    let patched = |patches: &str, patch: &str| {
        let text =
            format!("resources: [../../base]\nimages: [{{name: vendor/mofed, newTag: '1'}}]\n{patches}");
        let (_root, directory) = overlay(&text, &[("overlays/a/patch.yaml", patch)]);
        let facts = only(&directory);
        (unsupported(&facts), facts.containers[0].why_not_editable.is_some())
    };
    let ours = |spec: &str| {
        format!("kind: DaemonSet\nmetadata: {{name: mofed}}\nspec: {{template: {{spec: {spec}}}}}\n")
    };
    let file = "patches: [{path: patch.yaml}]\n";
    assert_eq!(patched(file, &ours("{nodeSelector: {pool: b}}")), (true, false));
    assert_eq!(patched(file, &ours("{imagePullSecrets: []}")), (false, false));
    assert_eq!(patched("patchesStrategicMerge: [patch.yaml]\n", &ours("{tolerations: []}")), (true, false));
    let other = ours("{nodeSelector: {pool: b}}").replace("DaemonSet", "Deployment");
    assert_eq!(patched(file, &other), (false, false), "it is for another kind");
    let json = "- {op: replace, path: /spec/template/spec/nodeSelector/pool, value: b}\n";
    let target = |kind: &str| format!("patches: [{{path: patch.yaml, target: {{kind: {kind}}}}}]\n");
    assert_eq!(patched(&target("DaemonSet"), json), (true, false));
    assert_eq!(patched(&target("Deployment"), json), (false, false));
    // A kind is a regular expression.
    assert_eq!(patched(&target("'Deployment|DaemonSet'"), json), (true, false));
    assert_eq!(patched(&target("'(Deployment|StatefulSet)'"), json), (false, false));
    assert_eq!(patched(&target("'.*Set'"), json), (true, false));
    let by_name = "patches: [{path: patch.yaml, target: {name: mofed}}]\n";
    assert_eq!(patched(by_name, &other), (true, false), "the kind of the patch does not matter");
    let named = |name: &str| by_name.replace("mofed", name);
    assert_eq!(patched(&named("node-exporter"), json), (false, false));
    assert_eq!(patched(&named("'web|mofed'"), json), (true, false));
    assert_eq!(patched(&named("'mo.*'"), json), (true, false));
    assert_eq!(patched("patches: [{path: missing.yaml}]\n", ""), (true, true), "an unreadable patch");
    // Replacements and transformers come after `images`.
    let replacement = |kind: &str, path: &str| {
        format!(
            "replacements:\n- source: {{kind: ConfigMap, name: v, fieldPath: data.image}}\n  \
             targets: [{{select: {{kind: {kind}}}, fieldPaths: [{path}]}}]\n"
        )
    };
    let field = "spec.template.spec.containers.0.image";
    assert_eq!(patched(&replacement("DaemonSet", field), ""), (false, true));
    assert_eq!(patched(&replacement("Deployment", field), ""), (false, false));
    let pool = replacement("DaemonSet", "spec.template.spec.nodeSelector.pool");
    assert_eq!(patched(&pool, ""), (true, false), "the source's field is not changed");
    let file = "targets: [{select: {kind: DaemonSet}, fieldPaths: [spec.template.spec.nodeSelector.pool]}]\n";
    for file in [file, &format!("- {file}")] {
        assert_eq!(patched("replacements: [{path: patch.yaml}]\n", file), (true, false));
        let other = file.replace("DaemonSet", "Deployment");
        assert_eq!(patched("replacements: [{path: patch.yaml}]\n", &other), (false, false));
    }
    let transformed = |text: &str| patched("transformers: [patch.yaml]\n", text);
    assert_eq!(transformed("apiVersion: example.org/v1\nkind: LabelTransformer\n"), (true, true));
    let labels = "apiVersion: builtin\nkind: LabelTransformer\nfieldSpecs: [{path: metadata/labels}]\n";
    assert_eq!(transformed(labels), (false, false));
    assert_eq!(
        transformed(&labels.replace("metadata/labels", "spec/template/spec/nodeSelector")),
        (true, false)
    );
    let file = "patches: [{path: patch.yaml}]\n";
    // The patch comes first, so an entry of `images` for the base's image may not apply.
    let image = ours("{containers: [{name: driver, image: x}]}");
    assert_eq!(patched(file, &image), (false, true));
    let (_root, directory) =
        overlay(&format!("resources: [../../base]\n{file}"), &[("overlays/a/patch.yaml", &image)]);
    let why = only(&directory).containers[0].why_not_editable.clone().unwrap();
    assert!(why.contains("the patch patch.yaml may set the image"), "{why}");
}

#[test]
fn components_and_loops_end() {
    let component = "kind: Component\nimages: [{name: vendor/mofed, newTag: '2'}]\n";
    let text = "resources: [../../base, 'https://example.test/x?ref=1']\ncomponents: [c]\n";
    let (_root, directory) = overlay(text, &[("overlays/a/c/kustomization.yaml", component)]);
    assert_eq!(only(&directory).containers[0].image, "vendor/mofed:2");
    let other = ("overlays/b/kustomization.yaml", "resources: [../a, ../a, ../../base]\n");
    let (_root, directory) = overlay("resources: [../b, ../b]\n", &[other]);
    assert!(directory.read().unwrap().daemon_sets.is_empty(), "Kustomize also refuses a loop");
}

fn chart(file: &str, path: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Directory) {
    let root = tree(files);
    let target = DaemonSetContainer {
        namespace: "drivers".parse().unwrap(),
        daemon_set: "mofed".parse().unwrap(),
        container: "driver".parse().unwrap(),
    };
    let value = ChartValue { file: file.parse().unwrap(), path: path.parse().unwrap() };
    let directory = Directory::open(root.path()).unwrap().with_chart(Some(&ChartImage { value, target }));
    (root, directory)
}

#[test]
fn the_values_of_a_chart_are_edited() {
    let to = format!("reg.test/mofed@{DIGEST}");
    let application = "kind: Application\nspec:\n  source:\n    helm:\n      parameters:\n      - {name: a, value: b}\n      - name: driver.image\n        value: OLD # x\n";
    for (path, before, after) in [
        ("driver.image", "driver: {image: OLD}\n", format!("driver: {{image: {to}}}\n")),
        (
            "spec.source.helm.parameters[name=driver.image].value",
            application,
            application.replace("OLD", &to),
        ),
    ] {
        let (root, directory) =
            chart("values.yaml", path, &[("values.yaml", before), ("templates/ds.yaml", "{{")]);
        let facts = only(&directory);
        assert_eq!((facts.namespace.as_str(), facts.name.as_str()), ("drivers", "mofed"));
        assert!(matches!(facts.placement.affinity, NodeAffinity::Unsupported(_)));
        set(&directory, &to).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("values.yaml")).unwrap(), after);
        assert_eq!(only(&directory).containers[0].image, to);
    }
    let error = |path: &str, text: &str| {
        let (_root, directory) = chart("values.yaml", path, &[("values.yaml", text)]);
        let read = directory.read().map_err(|error| error.to_string());
        read.and_then(|_| set(&directory, &to)).unwrap_err()
    };
    assert!(error("a.b", "a: {c: 1}\n").contains("values.yaml has no image at a.b"));
    assert!(error("a", "a: {name: x, tag: '1'}\n").contains("nor a mapping with `repository`"));
    // Which of them is meant, for example of the Applications of two clusters?
    assert!(error("a.b", "a: {b: x}\n---\na: {b: y}\n").contains("values.yaml has 2 values at a.b"));
    let twice = "a: [{name: n, value: x}, {name: n, value: y}]\n";
    assert!(error("a[name=n].value", twice).contains("has 2 values at a[name=n].value"));
}

/// The form that most charts have: <https://helm.sh/docs/chart_template_guide/values_files/>, Bitnami's with `registry`.
#[test]
fn an_image_in_several_values_is_edited() {
    let to = format!("reg.test:5000/a/mofed:2.0@{DIGEST}");
    for (before, image, after) in [
        (
            "image: # ours\n  repository: vendor/mofed\n  tag: 1.0 # v\n  digest: \"\"\n",
            "vendor/mofed:1.0",
            format!(
                "image: # ours\n  repository: reg.test:5000/a/mofed\n  tag: \"2.0\" # v\n  digest: \"{DIGEST}\"\n"
            ),
        ),
        (
            "image: {registry: docker.io, repository: vendor/mofed, tag: 'v1', digest: 'sha256:00'}\n",
            "docker.io/vendor/mofed:v1@sha256:00",
            format!(
                "image: {{registry: reg.test:5000, repository: a/mofed, tag: '2.0', digest: '{DIGEST}'}}\n"
            ),
        ),
        (
            "image: {repository: vendor/mofed, tag: 'v1@sha256:00'}\n",
            "vendor/mofed:v1@sha256:00",
            format!("image: {{repository: reg.test:5000/a/mofed, tag: '2.0@{DIGEST}'}}\n"),
        ),
        (
            "image:\n  repository: vendor/mofed\n  digest: sha256:00\n",
            "vendor/mofed@sha256:00",
            format!("image:\n  repository: reg.test:5000/a/mofed\n  digest: {DIGEST}\n"),
        ),
    ] {
        let (root, directory) = chart("values.yaml", "image", &[("values.yaml", before)]);
        let container = &only(&directory).containers[0];
        assert_eq!((container.image.as_str(), &container.why_not_editable), (image, &None));
        assert_eq!(container.tagged, before.contains("tag"));
        set(&directory, &to).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("values.yaml")).unwrap(), after);
        let expected = if after.contains("tag") { to.clone() } else { to.replace(":2.0@", "@") };
        assert_eq!(only(&directory).containers[0].image, expected);
    }
    for (values, reason) in [
        ("image: {repository: a, tag: v1}\n", "its mapping has no field for a digest: add `digest: \"\"`"),
        ("image: {repository: a, tag: &t v1, digest: ''}\nx: *t\n", "the value is an anchor"),
        ("image: {repository: '{{ .Values.r }}', digest: ''}\n", "filled in by another tool"),
    ] {
        let (_root, directory) = chart("values.yaml", "image", &[("values.yaml", values)]);
        let why = only(&directory).containers[0].why_not_editable.clone().unwrap();
        assert!(why.starts_with(reason) || why.contains(reason), "{why}");
        assert!(set(&directory, &to).is_err());
    }
}

const POLICY: &str = "# The NICs.
apiVersion: mellanox.com/v1alpha1
kind: NicClusterPolicy
metadata:
  name: policy
spec:
  ofedDriver:
    image: doca-driver   # theirs
    repository: nvcr.test/x
    version: 25.10
  nodeAffinity: {}
";
const MODULE: &str = "apiVersion: kmm.sigs.x-k8s.io/v1beta1
kind: Module
metadata: {name: acme, namespace: kmm}
spec:
  moduleLoader:
    container:
      containerImage: 'old.test/acme:${KERNEL_FULL_VERSION}'
      kernelMappings:
      - {literal: 6.1.0, containerImage: 'old.test/acme:6.1.0', sign: {keySecret: {name: k}}}
      - regexp: '^.+$'   # the others
      modprobe: {moduleName: acme}
  selector: {pci: 'yes'}
";

/// Returns a change with the values that a plan would have.
fn resource_change(
    kind: OperatorResource,
    name: &str,
    spec: serde_json::Value,
    expected: serde_json::Value,
) -> Change {
    Change::Resource(ResourceChange {
        kind,
        name: name.to_owned(),
        version: None,
        expected: Some(expected),
        spec,
        annotations: BTreeMap::new(),
        required_images: Vec::new(),
    })
}

#[tokio::test]
async fn an_operators_resource_is_edited_in_place() {
    let root = tree(&[("policy.yaml", POLICY), ("module.yaml", MODULE)]);
    let directory = Directory::open(root.path()).unwrap();
    let resources = directory.read().unwrap().resources;
    let names: Vec<_> =
        resources.iter().map(|found| (found.kind, found.name.as_str(), &found.version)).collect();
    assert_eq!(
        names,
        [
            (OperatorResource::Module, "kmm/acme", &None),
            (OperatorResource::NicClusterPolicy, "policy", &None)
        ]
    );
    assert!(resources.iter().all(|found| found.why_not_editable.is_empty()), "{resources:?}");
    assert_eq!(resources[1].spec["ofedDriver"]["version"], "25.10");

    let wanted = json!({"ofedDriver": {
        "repository": "reg.test/d", "image": "mofed", "version": "570", "forcePrecompiled": true,
    }});
    let expected = json!({"version": "25.10", "forcePrecompiled": null});
    let change = resource_change(OperatorResource::NicClusterPolicy, "policy", wanted, expected);
    directory.apply(&change).await.unwrap();
    let after = fs::read_to_string(root.path().join("policy.yaml")).unwrap();
    let edited = POLICY
        .replace("    image: doca-driver ", "    forcePrecompiled: true\n    image: mofed ")
        .replace("nvcr.test/x", "reg.test/d")
        .replace("25.10", "\"570\"");
    assert_eq!(after, edited);
    // A commit on top of another one that has the change is no conflict.
    directory.apply(&change).await.unwrap();
    let wanted = json!({"ofedDriver": {"version": "580"}});
    let stale =
        resource_change(OperatorResource::NicClusterPolicy, "policy", wanted, json!({"version": "25.10"}));
    let conflict = directory.apply(&stale).await.unwrap_err();
    assert!(conflict.is_conflict() && conflict.to_string().contains("version: 570"), "{conflict}");

    let mut container = resources[0].spec["moduleLoader"]["container"].clone();
    container["kernelMappings"][0]["containerImage"] = "reg.test/acme:1-${KERNEL_FULL_VERSION}".into();
    let wanted = json!({"moduleLoader": {"container": {"kernelMappings": container["kernelMappings"]}}});
    directory.apply(&resource_change(OperatorResource::Module, "kmm/acme", wanted, json!({}))).await.unwrap();
    let after = fs::read_to_string(root.path().join("module.yaml")).unwrap();
    assert_eq!(after, MODULE.replace("'old.test/acme:6.1.0'", "'reg.test/acme:1-${KERNEL_FULL_VERSION}'"));
}

/// They decide about the NVIDIADriver resources of the same directory.
#[test]
fn a_cluster_policy_and_a_gpu_cluster_are_read() {
    let policy = "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\n\
        spec: {driver: {useNvidiaDriverCRD: true}}\n";
    let cluster = "apiVersion: nvidia.com/v1alpha1\nkind: GPUCluster\nmetadata: {name: gpu-cluster}\n\
        spec: {draDriver: {}}\n";
    let root = tree(&[("a.yaml", policy), ("b.yaml", cluster)]);
    let resources = Directory::open(root.path()).unwrap().read().unwrap().resources;
    assert_eq!(resources[0].spec["driver"]["useNvidiaDriverCRD"], true);
    assert_eq!((resources[1].kind, &*resources[1].name), (OperatorResource::GpuCluster, "gpu-cluster"));
}

#[test]
fn a_resource_that_is_not_what_its_manifest_says_is_named() {
    let text = "namePrefix: a-\nnamespace: other\nresources: [../../base/policy.yaml, module.yaml]\npatches: [{path: p.yaml}]\n";
    let patch = "kind: NicClusterPolicy\nmetadata: {name: policy}\nspec: {ofedDriver: {version: '2'}}\n";
    let more =
        [("base/policy.yaml", POLICY), ("overlays/a/module.yaml", MODULE), ("overlays/a/p.yaml", patch)];
    let (_root, directory) = overlay(text, &more);
    let resources = directory.read().unwrap().resources;
    let names: Vec<&str> = resources.iter().map(|found| found.name.as_str()).collect();
    assert_eq!(names, ["a-policy", "other/a-acme"]);
    assert!(resources[0].why_not_editable["version"].starts_with("the patch p.yaml may change the resource"));
    assert!(
        resources[0].why_not_editable[""].contains("is outside of the rollout's path"),
        "{:?}",
        resources[0].why_not_editable
    );
    assert!(resources[1].why_not_editable.is_empty(), "the patch is for another kind");
    let templated = POLICY.replace("nvcr.test/x", "'{{ .Values.repository }}'").replace("25.10", "&v '1'");
    let root = tree(&[("policy.yaml", &templated), ("not.yaml", "kind: Module\napiVersion: x/v1\n")]);
    let resources = Directory::open(root.path()).unwrap().read().unwrap().resources;
    assert_eq!(resources[0].why_not_editable.keys().collect::<Vec<_>>(), ["repository", "version"]);
}

/// The content of a repository is untrusted.
#[test]
fn a_link_that_leads_out_of_the_boundary_is_refused() {
    let (root, outside) = (tree(&[("README", "clusters")]), tree(&[("ds.yaml", BASE)]));
    let link = root.path().join("prod");
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    let error = Directory::within(root.path(), &link).unwrap_err().to_string();
    assert!(error.contains("a symbolic link leads outside"), "{error}");
}
