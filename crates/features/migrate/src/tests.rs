use farrier_core::plan::{Container, Placement};
use farrier_definitions as definitions;
use serde_json::json;

use super::*;

const MODULE: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: acme-dockerfile, namespace: kmm}
data:
  dockerfile: |
    FROM ubuntu:24.04 as builder
    RUN ["git", "clone", "https://git.example/acme.git"]
    RUN make KERNEL_SRC_DIR=/lib/modules/${KERNEL_VERSION}/build all
---
apiVersion: kmm.sigs.x-k8s.io/v1beta1
kind: Module
metadata: {name: acme, namespace: kmm, resourceVersion: "5"}
spec:
  selector: {node-role.kubernetes.io/worker: "", pool: canary}
  imageRepoSecret: {name: pull}
  moduleLoader:
    serviceAccountName: kmm
    container:
      version: "1.4.2"
      imagePullPolicy: Always
      inTreeModulesToRemove: [dummy]
      modprobe:
        moduleName: acme
        modulesLoadingOrder: [acme, acme_core]
        parameters: [debug=1]
        firmwarePath: /firmware
      kernelMappings:
        - regexp: '^.*\.el9.*$'
          containerImage: "registry.example/$MOD_NAMESPACE/${MOD_NAME}-kmod:v1-${KERNEL_FULL_VERSION}"
          build:
            dockerfileConfigMap: {name: acme-dockerfile}
            buildArgs: [{name: A, value: b}]
            secrets: [{name: s}]
          sign: {keySecret: {name: k}, certSecret: {name: c}, filesToSign: [/opt/x.ko]}
        - literal: 6.1.0-1-amd64+x
          containerImage: "registry.example/$MOD_NAMESPACE/${MOD_NAME}-kmod:v1-${KERNEL_FULL_VERSION}"
          registryTLS: {insecure: true}
  devicePlugin: {container: {image: plugin:1}}
  brandNew: {field: 1}
status: {moduleLoader: {desiredNumber: 3}}
"#;

/// The Module of KMM's own CI, shortened: one mapping for all kernels.
const PLAIN: &str = "apiVersion: kmm.sigs.x-k8s.io/v1beta1\nkind: Module\nmetadata: {name: kmm-ci}\nspec:\n  selector: {}\n  \
    moduleLoader:\n    container:\n      modprobe: {moduleName: kmm_ci_a}\n      kernelMappings:\n        \
    - {regexp: '^.+$', containerImage: 'host.example:5000/$MOD_NAME:$KERNEL_FULL_VERSION'}\n";

const DRIVERKIT: &str = "kernelrelease: 5.10.84-10.4.al8.x86_64\nkernelversion: 1\ntarget: alinux\noutput:\n  module: /tmp/falco.ko\n\
    driverversion: 7.3.0+driver\nmoduledrivername: acme_probe\nkernelconfigdata: Q09O\nbuilderimage: builder:1\nrepo: {org: acme}\n\
    registry: {name: r.example, password: hush}\n";

const CONF: &str = r#"PACKAGE_NAME="strange_driver"
PACKAGE_VERSION=1.0   # the newest
MAKE[0]="make -C $kernel_source_dir M=$dkms_tree modules"
BUILT_MODULE_NAME[0]="${PACKAGE_NAME}_second"
BUILT_MODULE_NAME[1]="$PACKAGE_NAME"
DEST_MODULE_NAME[1]='strange-first'
BUILD_EXCLUSIVE_KERNEL_MIN="4.18"
BUILD_EXCLUSIVE_KERNEL_MAX=6.18
BUILD_EXCLUSIVE_ARCH="x86_64"
POST_INSTALL="touch /etc/passwd"
AUTOINSTALL="yes"
if [ "$arch" = x ]; then MADE_UP=1; fi
  MADE_UP_TOO=$(uname -r)
"#;

const NIC: &str = "apiVersion: mellanox.com/v1alpha1\nkind: NicClusterPolicy\nmetadata: {name: nic-cluster-policy}\nspec:\n  ofedDriver:\n    \
    image: doca-driver\n    repository: registry.example/drivers\n    version: doca3.2.0-25.07-0.9.7.0-2\n    \
    env: [{name: UNLOAD_STORAGE_MODULES, value: 'true'}]\n    certConfig: {name: c}\n  nvIpam: {image: i}\n";

const GPU: &str = "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: cluster-policy}\nspec:\n  driver:\n    enabled: true\n    \
    repository: nvcr.io/nvidia\n    version: 580.95.05\n    rdma: {enabled: true}\n    startupProbe: {periodSeconds: 10}\n  toolkit: {enabled: true}\n";

/// Returns whether the text describes a driver.
fn read(text: &str) -> Result<bool, String> {
    Drafted::default().read(text, Path::new("x"), &Context::default())
}

/// Drafts definitions from the forms in a text, for a cluster of these manifests.
fn drafted(text: &str, cluster: &str) -> Result<Drafted, String> {
    let (nodes, daemon_sets) = farrier_cluster::nodes_and_daemon_sets(cluster).unwrap();
    let context =
        Context { registry: "registry.example/kmm".to_owned(), nodes, daemon_sets, in_cluster: true };
    let mut drafted = Drafted::default();
    drafted.read(text, Path::new("/src/strange/dkms.conf"), &context)?;
    for draft in drafted.drafts.iter_mut().filter(|draft| draft.from.is_none()) {
        draft.from = Some(source(&format!("/src/{} 1", draft.name)).unwrap());
    }
    Ok(drafted)
}

/// Loads the drafted files as `--definitions` would.
fn load(drafted: &Drafted) -> Result<farrier_core::image::Definitions, String> {
    let directory = tempfile::tempdir().unwrap();
    for (path, text) in drafted.files().unwrap() {
        let path = directory.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    definitions::load(Some(directory.path())).map_err(|errors| errors.render())
}

/// Returns the path and the text of the first image.
fn image(drafted: &Drafted) -> (String, String) {
    drafted.files().unwrap().into_iter().find(|(path, _)| path.starts_with("images/")).unwrap()
}

/// Shows the first image without comments, and the counterparts of the fields.
fn shown(drafted: &Drafted) -> String {
    let definitions = load(drafted).unwrap_or_else(|errors| panic!("{errors}"));
    assert!(!definitions.images.is_empty());
    let (_, text) = image(drafted);
    let fields = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let remarks = drafted
        .remarks
        .iter()
        .map(|remark| format!("{} -> {}; {}", remark.field, remark.becomes.unwrap_or("-"), remark.says));
    let after = drafted.by_hand.iter().cloned();
    fields.map(str::to_owned).chain(remarks).chain(after).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_module_of_kmm() {
    insta::assert_snapshot!(shown(&drafted(MODULE, "").unwrap()));
    insta::assert_snapshot!("text", image(&drafted(MODULE, "").unwrap()).1);
}

#[test]
fn a_module_for_every_kernel() {
    insta::assert_snapshot!(shown(&drafted(PLAIN, "").unwrap()));
}

#[test]
fn a_configuration_of_driverkit() {
    let drafted = drafted(DRIVERKIT, "").unwrap();
    let shown = shown(&drafted);
    assert!(!shown.contains("hush"));
    insta::assert_snapshot!(shown);
    let known = "driverkit fetches https://github.com/acme/libs/archive/7.3.0+driver.tar.gz";
    assert_eq!(drafted.drafts[0].hint, known);
}

#[test]
fn a_dkms_conf() {
    insta::assert_snapshot!(shown(&drafted(CONF, "").unwrap()));
}

#[test]
fn an_expansion_that_only_bash_evaluates_is_named() {
    for word in [
        "${BUILT_MODULE_NAME[0]}",
        "${PACKAGE_NAME%-dkms}",
        "${PACKAGE_NAME:-x}",
        "$PACKAGE_NAME2",
        "${PACKAGE_NAME/a/b}",
    ] {
        let conf =
            format!("PACKAGE_NAME=foo-dkms\nBUILT_MODULE_NAME[0]=foo\nDEST_MODULE_NAME[0]=\"{word}\"\n");
        let drafted = drafted(&conf, "").unwrap();
        let files = &drafted.drafts[0].files;
        assert!(files.is_empty(), "{word}: {files:?}");
        let remark = drafted.remarks.iter().find(|remark| remark.field == "DEST_MODULE_NAME").unwrap();
        assert!(remark.says.starts_with("it cannot be converted automatically"), "{word}: {remark:?}");
    }
}

/// Two source trees may have the same package name.
#[test]
fn a_given_name_is_the_image_of_a_dkms_conf() {
    let mut drafted = Drafted::default();
    for name in ["first", "second"] {
        drafted.add_dkms(Some(name), CONF, Path::new("/src/strange"), &Context::default());
    }
    let definitions = load(&drafted).unwrap();
    assert!(definitions.images.contains_key("first") && definitions.images.contains_key("second"));
}

/// Returns the message of the first mistake in a definition.
fn mistake(text: &str) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("images")).unwrap();
    std::fs::write(directory.path().join("images/x.yaml"), text).unwrap();
    definitions::load(Some(directory.path())).map(drop).map_err(|errors| errors.0[0].message.clone())
}

#[test]
fn values_that_no_definition_can_have_become_comments() {
    let module = PLAIN.replace("kmm_ci_a", "'$(reboot)'");
    let mut drafted = drafted(&module, "").unwrap();
    let draft = &mut drafted.drafts[0];
    draft.reset_invalid_fields(mistake).unwrap();
    assert!(draft.modules.is_empty() && !draft.tags.is_empty());
    let text = image(&drafted).1;
    let comments: Vec<&str> = text.lines().filter(|line| line.starts_with("# Not taken over: ")).collect();
    let [comment] = comments[..] else { panic!("{text}") };
    assert!(comment.contains("modules: ") && comment.contains("$(reboot)"), "{text}");
    assert_eq!(load(&drafted).unwrap().images.len(), 1);
    // Without its node selector the image would be for every node.
    let unselectable = PLAIN.replace("selector: {}", "selector: {'a b': c, pool: x}");
    assert!(self::drafted(&unselectable, "").unwrap().drafts[0].reset_invalid_fields(mistake).is_err());
    // A draft that is valid stays as it is, and one that no reset makes valid is an error with its reason.
    drafted = self::drafted(CONF, "").unwrap();
    let before = image(&drafted).1;
    drafted.drafts[0].reset_invalid_fields(mistake).unwrap();
    assert_eq!(image(&drafted).1, before);
    drafted.drafts[0].template = "gone";
    assert!(drafted.drafts[0].reset_invalid_fields(mistake).unwrap_err().contains("gone"));
}

#[test]
fn the_operators_resources() {
    insta::assert_snapshot!(shown(&drafted(NIC, "").unwrap()));
    let gpu = drafted(GPU, "").unwrap();
    let files: Vec<String> = gpu.files().unwrap().into_keys().take(3).collect();
    assert_eq!(files, ["images/mofed.yaml", "images/nvidia-gpu.yaml", "images/nvidia-peermem.yaml"]);
    let definitions = load(&gpu).unwrap();
    let rollout = |name: &str| format!("{:?}", definitions.images[name].spec.rollout);
    assert!(
        rollout("nvidia-peermem").contains("ClusterPolicy, namespace: None, name: \"cluster-policy\""),
        "{}",
        rollout("nvidia-peermem")
    );
    assert!(rollout("nvidia-gpu").contains("PublishOnly { resource: None }"), "{}", rollout("nvidia-gpu"));
    let remark = gpu.remarks.iter().find(|remark| remark.field == "spec.driver.version").unwrap();
    assert!(remark.says.starts_with("Debian's package is used"), "{remark:?}");
    for both in [[NIC, GPU], [GPU, NIC]] {
        let both = load(&drafted(&both.join("---\n"), "").unwrap()).unwrap();
        let version = format!("{:?}", both.images["mofed"].spec.version);
        assert!(version.contains("25.07-0.9.7.0"), "the version of the policy: {version}");
    }
    let twice = drafted(&[PLAIN, PLAIN].join("---\n"), "").unwrap().files();
    assert_eq!(
        twice.unwrap_err(),
        "two drivers would be the image kmm-ci: pass them with --from, each to a separate directory"
    );
    let off = GPU.replace("enabled: true\n    repo", "enabled: false\n    repo");
    assert_eq!(read(&off), Ok(false));
}

/// Resources for separate pools of nodes share a definition if it is the same for all of them.
#[test]
fn several_resources_of_one_kind() {
    let gpu = |name: &str, driver: &str| {
        format!(
            "---\napiVersion: nvidia.com/v1alpha1\nkind: NVIDIADriver\nmetadata: {{name: {name}}}\nspec: {{nodeSelector: {{pool: {name}}}, {driver}}}\n"
        )
    };
    let open = "version: 580.95.05";
    let text = ["gold", "silver", "gold"].map(|name| gpu(name, open)).concat();
    let both = drafted(&text, "").unwrap();
    let rollout = format!("{:?}", load(&both).unwrap().images["nvidia-gpu"].spec.rollout);
    assert!(rollout.contains("\"gold\"") && rollout.contains("\"silver\""), "{rollout}");
    assert_eq!(rollout.matches("CustomResource").count(), 2, "{rollout}");
    // The definition that another one needs is replaced by a resource's version.
    let with_peermem = drafted(&[gpu("gold", "rdma: {enabled: true}"), gpu("silver", open)].concat(), "");
    let rollout = format!("{:?}", load(&with_peermem.unwrap()).unwrap().images["nvidia-gpu"].spec.rollout);
    assert!(rollout.contains("\"silver\"") && !rollout.contains("PublishOnly"), "{rollout}");

    let policy = |name: &str| {
        NIC.replace("NicClusterPolicy", "NicNodePolicy")
            .replace("name: nic-cluster-policy", &format!("name: {name}"))
    };
    let same = drafted(&[policy("a"), policy("b")].join("---\n"), "").unwrap();
    assert_eq!(same.by_hand.len(), 1, "{:?}", same.by_hand);
    let newer = policy("b").replace("25.07-0.9.7.0-2", "25.10-1.2.8.0-0");
    assert_eq!(
        drafted(&[policy("a"), newer].join("---\n"), "").unwrap_err(),
        "two drivers would be the image mofed: pass them with --from, each to a separate directory"
    );
}

/// The only DaemonSet that runs the image is rewritten, in one copy per kernel if its nodes run several
/// kernels. A DaemonSet with an owner is not rewritten.
#[test]
fn daemon_sets_of_the_cluster() {
    let node = |name: &str, kernel: &str| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nstatus: {{nodeInfo: {{kernelVersion: '{kernel}'}}}}\n"
        )
    };
    let owned = "ownerReferences: [{kind: X, name: x, controller: true}]";
    let daemon_set = |more: &str| {
        format!(
            "---\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: d, namespace: drivers, {more}}}\nspec: {{template: {{spec: \
             {{containers: [{{name: log, image: x}}, {{name: load, image: 'r.example/strange-driver@sha256:0'}}]}}}}}}\n"
        )
    };
    let rollout = |cluster: &str| {
        let drafted = drafted(CONF, cluster).unwrap();
        image(&drafted).1.lines().last().unwrap().trim().to_owned()
    };
    let one = [node("a", "6.1"), daemon_set("")].concat();
    assert_eq!(rollout(&one), "- {strategy: image, namespace: drivers, daemonSet: d, container: load}");
    let mixed = [one.clone(), node("b", "6.2")].concat();
    assert_eq!(
        rollout(&mixed),
        "- {strategy: per-kernel, namespace: drivers, daemonSet: d, container: load}"
    );
    let shared = one.replace("image: x}", "image: 'r.example/strange-driver@sha256:0'}");
    assert_eq!(
        rollout(&shared),
        "- {strategy: image, namespace: drivers, daemonSet: d, containers: [log, load]}"
    );
    assert_eq!(rollout(&[one.as_str(), &daemon_set("")].concat()), "- {strategy: publish-only}");
    assert_eq!(rollout(&daemon_set(owned)), "- {strategy: publish-only}");
    // The nodes are those that the DaemonSet selects.
    let selecting = one.replace("{containers:", "{nodeSelector: {pool: gpu}, containers:");
    let text = image(&drafted(CONF, &selecting).unwrap()).1;
    assert!(text.contains("  nodes: {matchLabels: {pool: gpu}}\n"), "{text}");
}

/// Without the one DaemonSet of a driver, the remarks and the draft name those that can be chosen.
#[test]
fn a_driver_without_a_daemon_set() {
    let daemon_set = |name: &str, more: &str, containers: &str| {
        format!(
            "---\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: {name}, namespace: drivers, {more}}}\nspec: \
             {{template: {{spec: {{containers: [{containers}]}}}}}}\n"
        )
    };
    let owned =
        daemon_set("owned", "ownerReferences: [{kind: X, name: x, controller: true}]", "{name: c, image: i}");
    let ticker = daemon_set("ticker", "", "{name: log, image: log}, {name: driver, image: tick}");
    let remarks = |cluster: &str| {
        let drafted = drafted(CONF, cluster).unwrap();
        assert_eq!(load(&drafted).unwrap().images.len(), 1);
        let own = drafted.remarks.iter().filter(|remark| remark.origin == "images/strange-driver.yaml");
        let own = own.map(|remark| format!("{} {}: {}", remark.field, remark.becomes.unwrap(), remark.says));
        (own.collect::<Vec<_>>(), image(&drafted).1)
    };
    let (said, text) = remarks(&[owned.as_str(), &ticker].concat());
    assert_eq!(
        said,
        [
            "rollout publish-only: no single DaemonSet is named strange-driver or runs an image of this name; choose one, such as drivers/ticker \
             (container driver)",
            "nodes every node: set the labels of the nodes that need the driver",
        ]
    );
    let choice = "    # - {strategy: image, namespace: drivers, daemonSet: ticker, container: driver}\n";
    assert!(text.contains(&format!("{choice}    - {{strategy: publish-only}}\n")), "{text}");
    assert!(!text.contains("owned"), "{text}");
    let chosen = text
        .replace("    # - {strategy: image", "    - {strategy: image")
        .replace("    - {strategy: publish-only}\n", "");
    assert_eq!(mistake(&chosen), Ok(()));
    // Of many DaemonSets those come first whose name resembles the driver's.
    let many = (0..9).map(|n| daemon_set(&format!("a{n}"), "", "{name: c, image: i}")).collect::<String>();
    let (said, text) = remarks(&[many, daemon_set("strange", "", "{name: c, image: i}")].concat());
    assert!(
        said[0].contains("such as drivers/strange (container c), drivers/a0 (container c), "),
        "{said:?}"
    );
    assert_eq!(text.matches("    # - {strategy: image").count(), 8, "{text}");
    let twice =
        ["one", "two"].map(|name| daemon_set(name, "", "{name: c, image: 'r.example/strange-driver:1'}"));
    let (said, _) = remarks(&[twice.concat(), ticker].concat());
    assert_eq!(
        said[0],
        "rollout publish-only: no single DaemonSet is named strange-driver or runs an image of this name; choose one, such as drivers/one \
         (container c), drivers/two (container c)"
    );
    // KMM loads the modules itself, and an image that farrier ships has its nodes.
    assert!(drafted(PLAIN, &owned).unwrap().remarks.iter().all(|remark| remark.field != "rollout"));
    let mut shipped = Drafted::default();
    shipped.add_shipped("nvidia-peermem", &Context::default()).unwrap();
    let said: Vec<&str> = shipped.remarks.iter().map(|remark| &*remark.says).collect();
    assert_eq!(said, ["no single DaemonSet is named nvidia-peermem or runs an image of this name"]);
}

/// Any file yields a valid definition, or a definition that is refused when it is parsed.
#[test]
fn hostile_files() {
    let long = "x".repeat(5000);
    for name in [
        "'${jndi:x}'",
        "\"a\\nspec: {}\\n\"",
        "'../../etc/passwd'",
        "\"\\u001b[31m\"",
        "'{{version}}'",
        "null",
        "1e3",
        &long,
    ] {
        let module = PLAIN.replace("name: kmm-ci", &format!("name: {name}"));
        let drafted = drafted(&module, "").unwrap();
        let (path, text) = image(&drafted);
        assert!(path.len() < 80 && path.matches('/').count() == 1 && path.starts_with("images/"), "{path}");
        let definitions = load(&drafted).unwrap_or_else(|errors| panic!("{name}: {errors}"));
        assert_eq!(definitions.images.len(), 1, "{name}");
        assert!(!text.contains('\u{1b}'));
    }
    for value in ["\"x\\n  rollout: []\"", "'a]}, {b'", "'$(reboot)'"] {
        let module = PLAIN.replace("kmm_ci_a", value);
        let errors = load(&drafted(&module, "").unwrap()).unwrap_err();
        assert!(errors.contains("a module name"), "{errors}");
    }
    // Aliases make a small text expand to a huge document.
    let mut bomb = "a0: &a0 {x: y}\n".to_owned();
    for level in 1..40 {
        let before = level - 1;
        bomb.extend([format!("a{level}: &a{level} [*a{before}, *a{before}]\n")]);
    }
    let bomb = format!("apiVersion: kmm.sigs.x-k8s.io/v1beta1\nkind: Module\n{bomb}");
    let error = drafted(&bomb, "").unwrap_err();
    assert!(error.contains("aliases repeat more than 20000 values"), "{error}");
    let configuration =
        bomb.replace("apiVersion: kmm.sigs.x-k8s.io/v1beta1\nkind: Module", "kernelrelease: x\ntarget: y");
    assert!(drafted(&configuration, "").is_err());
    let anchored =
        PLAIN.replace("metadata: {name", "metadata: &m {name").replace("selector: {}", "selector: *m");
    assert_eq!(load(&drafted(&anchored, "").unwrap()).unwrap().images.len(), 1);
    for nothing in ["", "{", "kind: Module\n", "apiVersion: 1\nkind: [x]\n", "- a\n", "\u{0}"] {
        assert!(read(nothing).is_err() || read(nothing) == Ok(false), "{nothing:?}");
    }
    let many = (0..500).map(|number| format!("  f{number}: x\n")).collect::<Vec<_>>().concat();
    let module = PLAIN.replace("spec:\n", &format!("spec:\n{many}"));
    assert!(drafted(&module, "").unwrap().remarks.len() < 300);
}

#[test]
fn sources_by_their_form() {
    assert_eq!(source("apt:x-dkms@sid"), Ok(json!({"apt": {"package": "x-dkms", "suites": ["sid"]}})));
    let url = json!({"url": {"url": "https://h.example/x.tgz", "sha256": "ab"}});
    assert_eq!(source("https://h.example/x.tgz#sha256=ab"), Ok(url));
    assert_eq!(source("../x"), Ok(json!({"path": {"path": "../x"}})));
    assert!(source("apt:x").unwrap_err().contains("apt:PACKAGE@SUITE"));
    assert!(source("http://h.example/x").unwrap_err().contains("sha256=HEX"));
}

#[test]
fn a_kbuild_directory() {
    let mut drafted = Drafted::default();
    let mut draft = |kbuild: &str| {
        drafted.drafts.clear();
        let top = Path::new("/src/Acme Driver");
        let outcome =
            drafted.add_kbuild(Some("Acme Driver"), top, "kernel".to_owned(), kbuild, &Context::default());
        outcome.map(|()| drafted.drafts[0].modules.join(" "))
    };
    assert_eq!(draft("obj-m := hello.o\nhello-y := a.o b.o\n").as_deref(), Ok("hello"));
    assert_eq!(draft("ifneq ($(K),)\n  obj-m += b.o \\\n  a.o # both\nendif\n").as_deref(), Ok("a b"));
    assert_eq!(draft("obj-m=one.o $(MORE).o\n").as_deref(), Ok("one"));
    assert_eq!(draft("obj-m := $(NAME).o\n"), Err("obj-m names no module".to_owned()));
    assert!(draft("obj-m := hello.o\n").is_ok());
    let files = drafted.files().unwrap();
    let text = &files["images/acme-driver.yaml"];
    assert!(text.contains("modules: [hello]") && text.contains("directory: kernel"), "{text}");
    assert!(text.contains("from: {path: {path: \"/src/Acme Driver\"}}"), "{text}");
}

/// A rollout cannot write a Module that only a file outside of the cluster has.
#[test]
fn a_module_is_the_rollout_of_its_image() {
    let rollout = |in_cluster| {
        let context = Context { registry: "r.example".to_owned(), in_cluster, ..Context::default() };
        let mut drafted = Drafted::default();
        drafted.read(MODULE, Path::new("x"), &context).unwrap();
        drafted.drafts[0].from = Some(source("/src").unwrap());
        let definitions = load(&drafted).unwrap_or_else(|errors| panic!("{errors}"));
        let rollout = &definitions.images.values().next().unwrap().spec.rollout;
        (serde_json::to_value(rollout).unwrap(), drafted.by_hand.concat())
    };
    let (live, by_hand) = rollout(true);
    let expected =
        json!([{"strategy": "custom-resource", "resource": "Module", "namespace": "kmm", "name": "acme"}]);
    assert_eq!(live, expected);
    assert!(by_hand.ends_with("remove build and sign; farrier then sets its images"), "{by_hand}");
    let (published, by_hand) = rollout(false);
    assert_eq!(published, json!([{"strategy": "publish-only", "resource": "Module"}]));
    assert!(by_hand.contains("set containerImage to r.example/acme-kmod:v1-"), "{by_hand}");
}

/// Each mapping's name stays valid, because every image gets all tags. AMD's operator names its image `amdgpu_kmod`.
#[test]
fn a_module_keeps_the_tag_of_each_mapping() {
    let module = "apiVersion: kmm.sigs.x-k8s.io/v1beta1\nkind: Module\nmetadata: {name: amdgpu}\nspec:\n  selector: {}\n  \
        moduleLoader:\n    container:\n      containerImage: 'r.example/amdgpu_kmod:default-$KERNEL_FULL_VERSION'\n      \
        modprobe: {moduleName: amdgpu}\n      kernelMappings:\n        \
        - {regexp: '^5', containerImage: 'r.example/amdgpu_kmod:ubuntu-22.04-${KERNEL_FULL_VERSION}-6.1.3'}\n        \
        - {literal: 6.1.0-47-amd64, containerImage: 'r.example/amdgpu_kmod:6.1.0-47-amd64-6.1.3'}\n        \
        - {literal: 6.1.0-48-amd64, containerImage: 'r.example/amdgpu_kmod:fixed'}\n        \
        - {literal: 6.1.0-49-amd64, containerImage: 'r.example/other:${KERNEL_FULL_VERSION}'}\n        \
        - {regexp: '^6'}\n";
    let drafted = drafted(module, "").unwrap();
    let draft = &drafted.drafts[0];
    assert_eq!(draft.name, "amdgpu-kmod");
    let tags = ["ubuntu-22.04-{{kernel_label}}-6.1.3", "{{kernel_label}}-6.1.3", "default-{{kernel_label}}"];
    assert_eq!(draft.tags, tags);
    let said = drafted.remarks.iter().filter(|remark| remark.becomes.is_none()).map(|remark| &*remark.says);
    let said = said.collect::<Vec<_>>().join("; ");
    assert!(
        said.contains("another name than the first mapping's") && said.contains("for a literal kernel"),
        "{said}"
    );
    let definitions = load(&drafted).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(definitions.images.values().next().unwrap().spec.tags, tags);
}

#[test]
fn a_source_tree_is_named_after_its_only_module_if_a_daemon_set_is() {
    let daemon_set = |name: &str| DaemonSetFacts {
        namespace: "drivers".to_owned(),
        name: name.to_owned(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: format!("r.test/{name}:1"),
            why_not_editable: None,
            tagged: false,
        }],
        placement: Placement::default(),
        owner: None,
        paused: false,
        live: None,
    };
    let context = |name| Context { daemon_sets: vec![daemon_set(name)], ..Context::default() };
    let name = |context: Context, kbuild: &str, given| {
        let mut drafted = Drafted::default();
        drafted.add_kbuild(given, Path::new("/home/me/src"), ".".to_owned(), kbuild, &context).unwrap();
        drafted.drafts.remove(0).name
    };
    assert_eq!(name(context("ring-log"), "obj-m := ring_log.o\n", None), "ring-log");
    assert_eq!(name(context("src"), "obj-m := ring_log.o\n", None), "src");
    assert_eq!(name(context("ring-log"), "obj-m := ring_log.o other.o\n", None), "src");
    assert_eq!(name(context("other"), "obj-m := ring_log.o\n", None), "src");
    assert_eq!(name(context("ring-log"), "obj-m := ring_log.o\n", Some("mine")), "mine");
}
