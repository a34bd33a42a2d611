use serde_json::json;

use super::*;
use crate::plan::{CowArc, fixtures};

const PCI: &str = "feature.node.kubernetes.io/pci-15b3.present";
const K47: &str = fixtures::K47;

fn node(taints: &[(&str, &str, &str)]) -> NodeFacts {
    let node: CowArc<NodeFacts> = fixtures::node("n1", K47);
    let taint = |(key, value, effect): &(&str, &str, &str)| Taint {
        key: (*key).to_owned(),
        value: (*value).to_owned(),
        effect: (*effect).to_owned(),
    };
    NodeFacts { taints: taints.iter().map(taint).collect(), ..NodeFacts::clone(&node) }
}

/// Returns the node as it is while NFD restarts.
fn unlabeled() -> NodeFacts {
    let mut node = node(&[]);
    node.labels.retain(|key, _| !is_nfd_label(key));
    node
}

/// Says whether pods with this template reach the node, in a word; `has_pod` as in [`Placement::reach`].
fn said(pod: &Value, node: &NodeFacts, has_pod: bool) -> String {
    match Placement::of_pod(pod).reach(node, has_pod) {
        NodeReach::Reached => "reached".to_owned(),
        NodeReach::Undetermined => "undetermined".to_owned(),
        NodeReach::Excluded(why) => why.to_string(),
    }
}

fn required(term: &Value) -> Value {
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}})
}

#[test]
fn a_taint_keeps_pods_away_unless_they_tolerate_it() {
    let control_plane = ("node-role.kubernetes.io/control-plane", "", "NoSchedule");
    let tainted = node(&[control_plane]);
    let refused = "its taint node-role.kubernetes.io/control-plane:NoSchedule is not tolerated";
    assert_eq!(said(&json!({}), &tainted, false), refused);
    assert_eq!(said(&json!({}), &tainted, true), "reached", "NoSchedule evicts no pod");
    assert_eq!(
        said(&json!({}), &node(&[("a", "b", "NoExecute")]), true),
        "its taint a=b:NoExecute is not tolerated"
    );
    assert_eq!(said(&json!({}), &node(&[("a", "b", "PreferNoSchedule")]), false), "reached");
    for (toleration, expected) in [
        (json!({"operator": "Exists"}), true),
        (json!({"operator": "Exists", "effect": "NoExecute"}), false),
        (json!({"key": control_plane.0, "operator": "Exists", "effect": "NoSchedule"}), true),
        (json!({"key": control_plane.0}), true),
        (json!({"key": control_plane.0, "operator": "Equal", "value": "x"}), false),
        (json!({"key": "other", "operator": "Exists"}), false),
        (json!({"key": control_plane.0, "operator": "Near"}), false),
        (json!({"key": control_plane.0, "operator": "Exists", "tolerationSeconds": 5}), true),
    ] {
        let pod = json!({"tolerations": [toleration]});
        assert_eq!(said(&pod, &tainted, false) == "reached", expected, "{toleration}");
    }
    let numbered = node(&[("sla", "95", "NoSchedule")]);
    for (operator, bound, expected) in
        [("Gt", "90", true), ("Lt", "90", false), ("Lt", "99", true), ("Gt", "x", false)]
    {
        let pod = json!({"tolerations": [{"key": "sla", "operator": operator, "value": bound}]});
        assert_eq!(said(&pod, &numbered, false) == "reached", expected, "{operator} {bound}");
    }
}

#[test]
fn taints_of_a_nodes_state_do_not_keep_a_daemon_set_away() {
    for (key, effect) in ALWAYS_TOLERATED {
        assert_eq!(said(&json!({}), &node(&[(key, "", effect)]), false), "reached", "{key}");
    }
    let cordoned = NodeFacts { unschedulable: true, ..node(&[]) };
    assert_eq!(said(&json!({}), &cordoned, false), "reached");
    let not_ready = node(&[("node.kubernetes.io/not-ready", "", "NoSchedule")]);
    assert_ne!(said(&json!({}), &not_ready, false), "reached", "only NoExecute is tolerated by itself");
    let (key, effect) = TOLERATED_ON_HOST_NETWORK;
    let no_network = node(&[(key, "", effect)]);
    assert_ne!(said(&json!({}), &no_network, false), "reached");
    assert_eq!(said(&json!({"hostNetwork": true}), &no_network, false), "reached");
}

/// NFD never labels a Windows node.
#[test]
fn a_windows_node_is_not_awaited() {
    let windows = NodeFacts { operating_system: "windows".to_owned(), ..unlabeled() };
    let pod = json!({"nodeSelector": {PCI: "true"}});
    assert_eq!(said(&pod, &unlabeled(), false), "undetermined");
    assert_eq!(
        said(&pod, &windows, false),
        format!("it does not have the label {PCI}=true of the node selector")
    );
}

#[test]
fn the_template_selects_by_label_affinity_and_name() {
    let node = node(&[]);
    for (pod, expected) in [
        (json!({}), "reached"),
        (json!({"nodeSelector": {"pci": "yes"}}), "reached"),
        (json!({"nodeSelector": {"pci": "no"}}), "it does not have the label pci=no of the node selector"),
        (json!({"nodeName": "n1"}), "reached"),
        (json!({"nodeName": "n2"}), "the pod template is for node n2"),
        (
            json!({"affinity": required(&json!({"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["n1"]}]}))}),
            "reached",
        ),
        (
            json!({"affinity": required(&json!({"matchFields": [
            {"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}))}),
            "the node affinity does not match it",
        ),
        (json!({"affinity": required(&json!({}))}), "the node affinity does not match it"),
    ] {
        assert_eq!(said(&pod, &node, false), expected, "{pod}");
    }
}

/// NFD removes its labels when it restarts, and adds them again.
#[test]
fn a_label_of_nfd_that_is_missing_from_an_unlabeled_node_decides_nothing() {
    let selected = |key: &str| json!({"nodeSelector": {key: "true"}});
    let expression = |operator: &str| {
        let values = if operator == "Exists" { json!(null) } else { json!(["true"]) };
        json!({"affinity": required(&json!({"matchExpressions": [
            {"key": PCI, "operator": operator, "values": values}]}))})
    };
    for pod in
        [selected(PCI), selected("nvidia.com/gpu.deploy.driver"), expression("In"), expression("Exists")]
    {
        assert_eq!(said(&pod, &unlabeled(), false), "undetermined", "{pod}");
        assert_ne!(said(&pod, &node(&[]), false), "undetermined", "{pod}: the node has its kernel label");
    }
    assert_eq!(said(&expression("NotIn"), &unlabeled(), false), "reached", "as the cluster decides now");
    for key in ["pool", "kubernetes.io/os", "cloud.example/pool"] {
        assert!(said(&selected(key), &unlabeled(), false).starts_with("it does not have"), "{key}");
    }
    let tainted = NodeFacts { taints: node(&[("a", "", "NoSchedule")]).taints, ..unlabeled() };
    assert_eq!(said(&selected(PCI), &tainted, false), "its taint a:NoSchedule is not tolerated");
}

/// The GPU Operator writes `false` while NFD's labels are missing, and `true` some time after they are back.
#[test]
fn a_label_of_the_gpu_operator_that_contradicts_nfd_decides_nothing() {
    let selected = |key: &str| json!({"nodeSelector": {key: "true"}});
    let mut node = node(&[]);
    node.labels.insert(GPU_PRESENT.to_owned(), "false".to_owned());
    assert!(said(&selected(GPU_PRESENT), &node, false).starts_with("it does not have"), "it has no GPU");
    for pci in &GPU_LABELS[1..] {
        let mut lagging = node.clone();
        lagging.labels.insert((*pci).to_owned(), "true".to_owned());
        for key in [GPU_PRESENT, "nvidia.com/gpu.deploy.driver"] {
            assert_eq!(said(&selected(key), &lagging, false), "undetermined", "{pci} {key}");
        }
        let deploy = "nvidia.com/gpu.deploy.driver";
        lagging.labels.insert(deploy.to_owned(), "false".to_owned());
        assert!(said(&selected(deploy), &lagging, false).starts_with("it does not have"), "a person set it");
        assert!(said(&selected(PCI), &lagging, false).starts_with("it does not have"), "NFD is back");
    }
    let unlabeled = NodeFacts { labels: [(GPU_PRESENT.to_owned(), "false".to_owned())].into(), ..node };
    assert_eq!(said(&selected(GPU_PRESENT), &unlabeled, false), "undetermined");
}

#[test]
fn an_ignored_node_is_not_reached() {
    let node = NodeFacts { ignored_by: Some(2), ..node(&[]) };
    assert_eq!(said(&json!({}), &node, true), "ignoreNodes[2] in site.yaml ignores it");
}

#[test]
fn an_operators_daemon_set_has_its_resources_rules() {
    let reach = |kind, spec: &Value, node: &NodeFacts| {
        operator_placement(kind, "driver", spec).reach(node, false) == NodeReach::Reached
    };
    let gpu = node(&[("nvidia.com/gpu", "present", "NoSchedule")]);
    for kind in OperatorResource::TARGETS {
        let is_tolerated = kind != OperatorResource::Module;
        assert_eq!(reach(kind, &json!({}), &gpu), is_tolerated, "{kind}: tolerated by default");
    }
    let tainted = node(&[("dedicated", "gpu", "NoSchedule")]);
    let own = json!([{"key": "dedicated", "operator": "Exists"}]);
    for kind in OperatorResource::TARGETS {
        let spec = match kind {
            OperatorResource::ClusterPolicy => json!({"daemonsets": {"tolerations": own}}),
            _ => json!({"tolerations": own}),
        };
        assert!(!reach(kind, &json!({}), &tainted) && reach(kind, &spec, &tainted), "{kind}");
        let replaced = [OperatorResource::ClusterPolicy, OperatorResource::Module].contains(&kind);
        assert_eq!(reach(kind, &spec, &gpu), !replaced, "{kind}");
    }
    let affinity =
        required(&json!({"matchExpressions": [{"key": "pci", "operator": "In", "values": ["no"]}]}));
    assert!(!reach(OperatorResource::NicClusterPolicy, &affinity, &node(&[])));
    assert!(reach(OperatorResource::NvidiaDriver, &affinity, &node(&[])), "it has no node affinity");
    let selector = json!({"nodeSelector": {"pci": "no"}});
    assert!(!reach(OperatorResource::NvidiaDriver, &selector, &node(&[])));
    assert!(!reach(OperatorResource::Module, &json!({"selector": {"pci": "no"}}), &node(&[])));
}

/// GPU Operator 26.7: a node belongs to one NVIDIADriver, and `default` takes the rest.
#[test]
fn an_nvidia_driver_reaches_the_nodes_that_it_owns() {
    let gpu = |name: &str, labels: &[(&str, &str)]| {
        let labels = [&[("nvidia.com/gpu.present", "true")], labels].concat();
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let mut node = NodeFacts { name: name.to_owned(), ..node(&[]) };
        node.labels.extend(labels);
        node
    };
    let mut without_gpu = gpu("without-gpu", &[]);
    without_gpu.labels.remove("nvidia.com/gpu.present");
    let nodes = [
        gpu("owned", &[(DRIVER_OWNER, "rest")]),
        gpu("new", &[]),
        gpu("moving", &[(DRIVER_OWNER, "rest"), ("pool", "a")]),
        gpu("contested", &[(DRIVER_OWNER, "a"), ("pool", "a"), ("also", "b")]),
        without_gpu,
    ];
    let resource = |name: &str, spec: Value| fixtures::resource(OperatorResource::NvidiaDriver, name, spec);
    let mut snapshot = ClusterSnapshot {
        nodes: nodes.into_iter().map(Into::into).collect(),
        resources: vec![
            resource("rest", json!({"default": true})),
            resource("a", json!({"nodeSelector": {"pool": "a"}})),
            resource("b", json!({"nodeSelector": {"also": "b"}})),
        ],
        ..ClusterSnapshot::default()
    };
    let reached = |snapshot: &ClusterSnapshot, name: &str| {
        let resource = snapshot.resources.iter().find(|found| found.name == name).unwrap();
        let placement = resource.placement_in(snapshot);
        let nodes = snapshot.nodes.iter();
        let reached = nodes.filter(|node| placement.reach(node, false) == NodeReach::Reached);
        reached.map(|node| node.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        reached(&snapshot, "rest"),
        ["owned", "new", "moving"],
        "until the operator changes the owner"
    );
    assert_eq!(reached(&snapshot, "a"), ["moving", "contested"]);
    assert!(reached(&snapshot, "b").is_empty(), "the operator leaves a contested node to its owner");

    // An older operator only follows the node selector.
    snapshot.nodes.iter_mut().for_each(|node| drop(node.labels.remove(DRIVER_OWNER)));
    assert_eq!(reached(&snapshot, "a"), ["moving", "contested"]);
    assert_eq!(reached(&snapshot, "b"), ["contested"]);
}
