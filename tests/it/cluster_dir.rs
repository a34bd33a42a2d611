//! A directory of manifests as users keep it, read as a cluster and rewritten in place.
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use farrier_cluster::{Cluster, ClusterError, Directory};
use farrier_core::plan::{ImageChange, NodeAffinity, NodeReach, ReachingObject, node_target};

const NODES: &str = r#"# exported with kubectl get nodes -o yaml
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata:
    name: worker-0
    labels:
      feature.node.kubernetes.io/kernel-version.full: 6.1.0-47-amd64
      feature.node.kubernetes.io/pci-15b3.present: "true"
      feature.node.kubernetes.io/system-os_release.ID: debian
      feature.node.kubernetes.io/system-os_release.VERSION_ID: "12"
      kubernetes.io/arch: amd64
  status:
    nodeInfo:
      architecture: amd64
      kernelVersion: 6.1.0-47-amd64
      osImage: Debian GNU/Linux 12 (bookworm)
- apiVersion: v1
  kind: Node
  metadata: {name: worker-1}
"#;

const DAEMON_SET: &str = r#"# The driver's DaemonSet; nobody owns it.
apiVersion: v1
kind: ServiceAccount
metadata:
  name: mft
  namespace: kube-system
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: mft
  namespace: kube-system
  labels: {app: mft}   # keep the spacing
spec:
  selector: {matchLabels: {app: mft}}
  updateStrategy: {type: OnDelete}
  template:
    metadata: {labels: {app: mft}}
    spec:
      nodeSelector:
        feature.node.kubernetes.io/pci-15b3.present: "true"
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions:
              - {key: kubernetes.io/arch, operator: In, values: [amd64]}
      initContainers:
      - name: wait
        image: "registry.test/tools/wait:1"    # not this one
      containers:
      - name: driver
        image:  'registry.test/drivers/mft:old'   # farrier sets this
        securityContext: {privileged: true}
      # é, and no newline at the end
      hostNetwork: true"#;

fn change(container: &str, expected: &str) -> ImageChange {
    ImageChange {
        namespace: "kube-system".to_owned(),
        daemon_set: "mft".to_owned(),
        container: container.to_owned(),
        expected: expected.to_owned(),
        to: format!("localhost:5000/drivers/mft@sha256:{}", "ab".repeat(32)),
    }
}

fn write(root: &Path, name: &str, text: &str) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn fleet() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "nodes.yaml", NODES);
    write(root.path(), "apps/mft.yml", DAEMON_SET);
    write(root.path(), "apps/values.yaml", "replicas: 3\n");
    write(root.path(), ".git/broken.yaml", "{{");
    write(root.path(), "README.md", "{{ not YAML");
    root
}

#[tokio::test]
async fn nodes_and_daemon_sets_are_read() {
    let root = fleet();
    let directory = Directory::open(root.path()).unwrap();
    let snapshot = directory.snapshot().await.unwrap();
    let names: Vec<_> = snapshot.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["worker-0", "worker-1"]);
    let target = node_target(&snapshot.nodes[0]).unwrap();
    assert_eq!(target.to_string(), "6.1.0-47-amd64 (debian 12, amd64)");
    assert!(node_target(&snapshot.nodes[1]).is_err());
    let hardware: Vec<_> = snapshot.nodes.iter().map(|node| node.has_hardware_labels).collect();
    assert_eq!(hardware, [true, false], "the second node has no hardware labels");

    let [daemon_set] = snapshot.daemon_sets.as_slice() else { panic!("{:?}", snapshot.daemon_sets) };
    assert_eq!((daemon_set.namespace.as_str(), daemon_set.name.as_str()), ("kube-system", "mft"));
    assert!(matches!(&daemon_set.placement.affinity, NodeAffinity::Terms(terms) if terms.len() == 1));
    let images: Vec<_> = daemon_set.containers.iter().map(|c| c.image.as_str()).collect();
    assert_eq!(images, ["registry.test/tools/wait:1", "registry.test/drivers/mft:old"]);
    assert!(daemon_set.placement.host_network);
    let object = ReachingObject::daemon_set(daemon_set, &snapshot);
    assert_eq!(object.reach(&snapshot.nodes[0]), NodeReach::Reached);
    assert!(matches!(object.reach(&snapshot.nodes[1]), NodeReach::Excluded(_)));
}

#[tokio::test]
async fn a_rewrite_changes_the_value_and_not_a_byte_more() {
    for (from, to) in [("\n", "\n"), ("\n", "\r\n")] {
        let root = fleet();
        let before = DAEMON_SET.replace(from, to);
        write(root.path(), "apps/mft.yml", &before);
        let path = root.path().join("apps/mft.yml");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();

        let directory = Directory::open(root.path()).unwrap();
        let change = change("driver", "registry.test/drivers/mft:old");
        directory.set_image(&change).unwrap();
        let image = change.to.clone();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            before.replace("registry.test/drivers/mft:old", &image)
        );
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        let snapshot = directory.snapshot().await.unwrap();
        assert_eq!(snapshot.daemon_sets[0].containers[1].image, image);

        // The image is already set, so a second call leaves the file untouched.
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        directory.set_image(&change).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), modified);
        let left: Vec<_> = fs::read_dir(root.path().join("apps")).unwrap().collect();
        assert_eq!(left.len(), 2, "no temporary file is left: {left:?}");
    }
}

#[tokio::test]
async fn what_the_plan_did_not_see_is_not_overwritten() {
    let root = fleet();
    let directory = Directory::open(root.path()).unwrap();
    let conflict = directory.set_image(&change("driver", "registry.test/drivers/mft:older"));
    assert!(matches!(conflict, Err(ClusterError::Conflict { .. })), "{conflict:?}");
    let refused = directory.set_image(&change("main", "x"));
    assert!(matches!(refused, Err(ClusterError::Refused { .. })), "{refused:?}");
    write(root.path(), "copy.yaml", DAEMON_SET);
    let refused = directory.set_image(&change("driver", "registry.test/drivers/mft:old"));
    assert!(matches!(refused, Err(ClusterError::Refused { .. })), "{refused:?}");
    assert_eq!(fs::read_to_string(root.path().join("apps/mft.yml")).unwrap(), DAEMON_SET);
}

#[tokio::test]
async fn shared_values_are_reported_before_and_refused() {
    let root = fleet();
    let text = DAEMON_SET.replace("'registry.test/drivers/mft:old'", "&image registry.test/drivers/mft:old");
    write(root.path(), "apps/mft.yml", &text);
    let directory = Directory::open(root.path()).unwrap();
    let snapshot = directory.snapshot().await.unwrap();
    assert!(snapshot.daemon_sets[0].containers[1].why_not_editable.as_ref().unwrap().contains("an anchor"));
    let refused = directory.set_image(&change("driver", "registry.test/drivers/mft:old"));
    assert!(matches!(refused, Err(ClusterError::Refused { .. })), "{refused:?}");
    assert_eq!(fs::read_to_string(root.path().join("apps/mft.yml")).unwrap(), text);
}

#[tokio::test]
async fn nodes_that_cannot_be_read_are_errors_with_their_place() {
    let cases = [
        ("kind: Node\nimage: {{ .Values.image }}:x\n", 2),
        ("kind: Node\na: b: c\n", 2),
        ("kind: Node\napiVersion: v1\nmetadata: {name: n, labels: {version: 12}}\n", 3),
        ("kind: Node\napiVersion: v1\n", 1),
    ];
    for (text, wanted) in cases {
        let root = fleet();
        write(root.path(), "broken.yaml", text);
        let error = Directory::open(root.path()).unwrap().snapshot().await.unwrap_err();
        let ClusterError::Manifest { path, line, .. } = &error else { panic!("{error:?}") };
        assert!(path.ends_with("broken.yaml") && *line == wanted, "{error}");
    }
    let root = fleet();
    fs::write(root.path().join("latin.yaml"), b"kind: Node\nb: \xe9\n").unwrap();
    let error = Directory::open(root.path()).unwrap().snapshot().await.unwrap_err();
    assert!(error.to_string().ends_with("latin.yaml:2:4: the text is not UTF-8"), "{error}");
    let missing = Directory::open(&root.path().join("none")).unwrap_err();
    assert!(matches!(missing, ClusterError::Io(_)) && missing.to_string().contains("/none"), "{missing}");
}

#[tokio::test]
async fn json_typed_lists_and_links_are_read_once() {
    let root = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    write(outside.path(), "evil.yaml", "{{");
    let list = r#"{"kind": "NodeList", "apiVersion": "v1", "items": [{"metadata": {"name": "a"}}]}"#;
    // A mounted ConfigMap consists of links through a hidden directory.
    write(root.path(), "..2026/nodes.json", list);
    std::os::unix::fs::symlink("..2026", root.path().join("..data")).unwrap();
    std::os::unix::fs::symlink("..data/nodes.json", root.path().join("nodes.json")).unwrap();
    std::os::unix::fs::symlink("nodes.json", root.path().join("again.json")).unwrap();
    std::os::unix::fs::symlink(outside.path(), root.path().join("dir.yaml")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("evil.yaml"), root.path().join("evil.yaml")).unwrap();
    let snapshot = Directory::open(root.path()).unwrap().snapshot().await.unwrap();
    let names: Vec<_> = snapshot.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["a"]);
}

#[tokio::test]
async fn a_single_file_is_a_directory_of_one() {
    let root = fleet();
    let directory = Directory::open(&root.path().join("apps/mft.yml")).unwrap();
    let snapshot = directory.snapshot().await.unwrap();
    assert_eq!((snapshot.nodes.len(), snapshot.daemon_sets.len()), (0, 1));
}
