//! Pure: from a DaemonSet or an operator's resource, as the API server gives it, to facts.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec, DaemonSetUpdateStrategy},
        core::v1::{NodeSelectorRequirement, PodSpec},
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use serde_json::{Value, json};

use super::objects::{PREFIX, WholeObject};
use crate::{
    image::OperatorResource,
    plan::{
        Container, DaemonSetFacts, LiveDaemonSet, NodeAffinity, Operator, Owner, PodCount, Requirement,
        ResourceFacts, SelectorTerm, UpdateStrategy,
    },
};

/// A DaemonSet's facts; `Err` where it is not the API's form.
pub(super) fn daemon_set(object: WholeObject) -> Result<DaemonSetFacts, String> {
    let WholeObject { version, mut value, .. } = object;
    // The items of a list do not say what they are.
    value["apiVersion"] = json!("apps/v1");
    value["kind"] = json!("DaemonSet");
    let manifest = Arc::new(value.clone());
    let DaemonSet { metadata, spec, status: _ } =
        serde_json::from_value(value).map_err(|error| error.to_string())?;
    let DaemonSetSpec { selector, template, update_strategy, .. } = spec;
    let pod = template.spec.unwrap_or_default();
    let owner = owner(&metadata);
    let ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, .. } = metadata;
    let (update, max_unavailable) = update(update_strategy);
    Ok(DaemonSetFacts {
        namespace: namespace.unwrap_or_default(),
        name: name.unwrap_or_default(),
        containers: containers(&pod),
        affinity: affinity(&pod),
        node_selector: pod.node_selector.unwrap_or_default(),
        owner,
        live: Some(LiveDaemonSet {
            version,
            annotations: own(annotations.unwrap_or_default()),
            labels: labels.unwrap_or_default(),
            match_labels: selector.match_labels.unwrap_or_default(),
            update,
            max_unavailable,
            deleting: deletion_timestamp.is_some(),
            manifest,
        }),
    })
}

/// A resource's facts.
pub(super) fn resource(kind: OperatorResource, object: WholeObject) -> ResourceFacts {
    let name = object.name().to_owned();
    let WholeObject { version, mut value, .. } = object;
    let annotations = value.pointer("/metadata/annotations").and_then(Value::as_object);
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let annotations = annotations.into_iter().flatten().filter_map(text).collect();
    ResourceFacts {
        kind,
        name,
        version,
        annotations: own(annotations),
        spec: Arc::new(value.get_mut("spec").map(Value::take).unwrap_or_default()),
    }
}

/// The selector of a DaemonSet's pods, in the form of a list's query; `None` where it has none.
pub(super) fn pod_selector(manifest: &Value) -> Option<String> {
    let selector: LabelSelector = serde_json::from_value(manifest.pointer("/spec/selector")?.clone()).ok()?;
    let labels = selector.match_labels.unwrap_or_default();
    let mut parts: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    for expression in selector.match_expressions.unwrap_or_default() {
        let key = expression.key;
        let values = expression.values.unwrap_or_default().join(",");
        parts.push(match expression.operator.as_str() {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "Exists" => key,
            "DoesNotExist" => format!("!{key}"),
            _ => return None,
        });
    }
    (!parts.is_empty()).then(|| parts.join(","))
}

/// The API's form of a required node affinity; `None` where there is none to write.
pub(super) fn affinity_json(affinity: &NodeAffinity) -> Option<Value> {
    let NodeAffinity::Terms(terms) = affinity else { return None };
    let requirements = |list: &[Requirement]| -> Vec<Value> {
        let one = |Requirement { key, operator, values }: &Requirement| {
            let mut one = json!({"key": key, "operator": operator_text(*operator)});
            if !values.is_empty() {
                one["values"] = json!(values);
            }
            one
        };
        list.iter().map(one).collect()
    };
    let term = |SelectorTerm { expressions, fields }: &SelectorTerm| {
        let mut term = json!({});
        for (key, list) in [("matchExpressions", expressions), ("matchFields", fields)] {
            if !list.is_empty() {
                term[key] = json!(requirements(list));
            }
        }
        term
    };
    Some(json!({"nodeSelectorTerms": terms.iter().map(term).collect::<Vec<_>>()}))
}

fn operator_text(operator: Operator) -> &'static str {
    match operator {
        Operator::In => "In",
        Operator::NotIn => "NotIn",
        Operator::Exists => "Exists",
        Operator::DoesNotExist => "DoesNotExist",
        Operator::Gt => "Gt",
        Operator::Lt => "Lt",
    }
}

fn own(mut annotations: BTreeMap<String, String>) -> BTreeMap<String, String> {
    annotations.retain(|key, _| key.starts_with(PREFIX));
    annotations
}

fn owner(metadata: &ObjectMeta) -> Option<Owner> {
    let owners = metadata.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.controller == Some(true));
    owners.next().map(|owner| Owner { kind: owner.kind.clone(), name: owner.name.clone() })
}

fn containers(pod: &PodSpec) -> Vec<Container> {
    let all = pod.init_containers.iter().flatten().chain(&pod.containers);
    let container = |container: &k8s_openapi::api::core::v1::Container| {
        let image = container.image.clone().unwrap_or_default();
        let fixed = image.is_empty().then(|| "the container has no image field".to_owned());
        Container { name: container.name.clone(), image, fixed }
    };
    all.map(container).collect()
}

fn affinity(pod: &PodSpec) -> NodeAffinity {
    if pod.node_name.as_ref().is_some_and(|name| !name.is_empty()) {
        return NodeAffinity::Unsupported("the pod template has a nodeName".to_owned());
    }
    let node = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = node.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let Some(required) = required else { return NodeAffinity::Any };
    let requirements = |list: &Option<Vec<NodeSelectorRequirement>>| {
        list.iter().flatten().map(requirement).collect::<Result<Vec<_>, _>>()
    };
    let terms = required.node_selector_terms.iter().map(|term| {
        Ok(SelectorTerm {
            expressions: requirements(&term.match_expressions)?,
            fields: requirements(&term.match_fields)?,
        })
    });
    match terms.collect::<Result<Vec<_>, String>>() {
        Ok(terms) if terms.is_empty() => NodeAffinity::Unsupported("no nodeSelectorTerms".to_owned()),
        Ok(terms) => NodeAffinity::Terms(terms),
        Err(operator) => NodeAffinity::Unsupported(format!("operator {operator:?}")),
    }
}

fn requirement(requirement: &NodeSelectorRequirement) -> Result<Requirement, String> {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    Ok(Requirement {
        key: key.clone(),
        operator: Operator::parse(operator).ok_or_else(|| operator.clone())?,
        values: values.clone().unwrap_or_default(),
    })
}

fn update(strategy: Option<DaemonSetUpdateStrategy>) -> (UpdateStrategy, PodCount) {
    let DaemonSetUpdateStrategy { rolling_update, type_ } = strategy.unwrap_or_default();
    let update = match type_.as_deref() {
        Some("OnDelete") => UpdateStrategy::OnDelete,
        _ => UpdateStrategy::RollingUpdate,
    };
    let one = PodCount::Number(1);
    let max_unavailable = match rolling_update.and_then(|rolling| rolling.max_unavailable) {
        Some(IntOrString::Int(number)) => usize::try_from(number).map_or(one, PodCount::Number),
        Some(IntOrString::String(text)) => {
            text.strip_suffix('%').and_then(|share| share.parse().ok()).map_or(one, PodCount::Percent)
        }
        None => one,
    };
    (update, max_unavailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn manifest() -> Value {
        json!({
            "metadata": {
                "name": "driver", "namespace": "gpu", "uid": "u1", "resourceVersion": "5",
                "labels": {"app": "driver"},
                "annotations": {"farrier.dev/record": "{}", "deprecated.daemonset.template.generation": "1"},
                "ownerReferences": [{"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "name": "p",
                                     "uid": "x", "controller": true}],
            },
            "spec": {
                "selector": {"matchLabels": {"app": "driver"}, "matchExpressions": [
                    {"key": "tier", "operator": "NotIn", "values": ["a", "b"]}, {"key": "x", "operator": "Exists"}]},
                "updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxUnavailable": "10%"}},
                "template": {"metadata": {"labels": {"app": "driver"}}, "spec": {
                    "nodeSelector": {"pci": "yes"},
                    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [
                            {"key": "zone", "operator": "In", "values": ["z"]},
                            {"key": "gone", "operator": "DoesNotExist"}]}]}}},
                    "initContainers": [{"name": "prepare", "image": "p:1"}],
                    "containers": [{"name": "driver", "image": "d:1"}, {"name": "none"}],
                }},
            },
            "status": {"numberReady": 1},
        })
    }

    #[test]
    fn a_daemon_set_is_its_facts() {
        let facts = daemon_set(WholeObject::new(manifest())).unwrap();
        assert_eq!((facts.namespace.as_str(), facts.name.as_str()), ("gpu", "driver"));
        let containers: Vec<_> =
            facts.containers.iter().map(|c| (c.name.as_str(), c.image.as_str())).collect();
        assert_eq!(containers, [("prepare", "p:1"), ("driver", "d:1"), ("none", "")]);
        assert!(facts.containers[2].fixed.is_some());
        assert_eq!(facts.label_keys().collect::<Vec<_>>(), ["pci", "zone", "gone"]);
        assert_eq!(facts.owner.unwrap().kind, "ClusterPolicy");
        let live = facts.live.unwrap();
        assert_eq!((live.version.uid.as_str(), live.version.resource_version.as_str()), ("u1", "5"));
        assert_eq!(live.annotations.keys().collect::<Vec<_>>(), ["farrier.dev/record"]);
        assert_eq!((live.update, live.max_unavailable), (UpdateStrategy::OnDelete, PodCount::Percent(10)));
        assert!(live.manifest.get("status").is_none() && live.manifest["kind"] == "DaemonSet");
        assert_eq!(pod_selector(&live.manifest).unwrap(), "app=driver,tier notin (a,b),x");
        let required =
            "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        assert_eq!(affinity_json(&facts.affinity).as_ref(), live.manifest.pointer(required));
    }

    #[test]
    fn what_the_defaults_are() {
        let facts = daemon_set(WholeObject::new(json!({
            "metadata": {"name": "d"}, "spec": {"selector": {}, "template": {}},
        })))
        .unwrap();
        let live = facts.live.unwrap();
        assert_eq!(
            (facts.affinity, live.update, live.max_unavailable),
            (NodeAffinity::Any, UpdateStrategy::RollingUpdate, PodCount::Number(1))
        );
        assert_eq!(pod_selector(&live.manifest), None);
    }

    #[test]
    fn an_operator_that_is_not_known_is_not_guessed_at() {
        let mut value = manifest();
        let path = "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        value.pointer_mut(path).unwrap()["nodeSelectorTerms"][0]["matchExpressions"][0]["operator"] =
            json!("Near");
        let facts = daemon_set(WholeObject::new(value)).unwrap();
        assert_eq!(facts.affinity, NodeAffinity::Unsupported("operator \"Near\"".to_owned()));
    }

    #[test]
    fn a_resource_is_its_spec_and_our_annotations() {
        let object = WholeObject::new(json!({
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "3",
                         "annotations": {"farrier.dev/record": "r", "x": "y"}},
            "spec": {"driver": {"version": "1"}}, "status": {"state": "ready"},
        }));
        let facts = resource(OperatorResource::ClusterPolicy, object);
        assert_eq!((facts.name.as_str(), facts.version.resource_version.as_str()), ("p", "3"));
        assert_eq!(facts.annotations, [("farrier.dev/record".to_owned(), "r".to_owned())].into());
        assert_eq!(*facts.spec, json!({"driver": {"version": "1"}}));
    }
}
