"""Random DaemonSets and nodes for ci/e2e.d/86-reach.sh, and what runs on which node according to the cluster and to farrier."""

import json
import random
import sys

ZONES = ["a", "b", "c"]
TAINT_KEYS = ["example.com/reserved", "example.com/number", "node.kubernetes.io/out-of-service"]
TAINT_VALUES = ["", "x", "5"]
EFFECTS = ["NoSchedule", "NoExecute", "PreferNoSchedule"]
CONDITIONS = ["MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"]


def requirement(rng):
    key = rng.choice(["zone", "number", "flag", "type"])
    operator = rng.choice(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])
    if operator in ("Exists", "DoesNotExist"):
        return {"key": key, "operator": operator}
    if operator in ("Gt", "Lt"):
        return {"key": "number", "operator": operator, "values": [str(rng.randint(0, 9))]}
    return {"key": key, "operator": operator, "values": rng.sample(ZONES + ["1", "5", "9"], rng.randint(1, 3))}


def term(rng, nodes):
    found = {}
    if rng.random() < 0.8:
        found["matchExpressions"] = [requirement(rng) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.2:
        operator = rng.choice(["In", "NotIn"])
        found["matchFields"] = [{"key": "metadata.name", "operator": operator, "values": [rng.choice(nodes)]}]
    return found


def toleration(rng):
    if rng.random() < 0.15:
        return {"operator": "Exists"}
    found = {"key": rng.choice(TAINT_KEYS), "operator": rng.choice(["Exists", "Equal"])}
    if found["operator"] == "Equal":
        found["value"] = rng.choice(TAINT_VALUES)
    if rng.random() < 0.7:
        found["effect"] = rng.choice(EFFECTS)
    return found


def daemon_set(rng, name, namespace, mark, own, image, nodes):
    label, value = own.split("=")
    pod = {
        "nodeSelector": {mark: "true"},
        "tolerations": [{"key": label, "operator": "Equal", "value": value}] + [toleration(rng) for _ in range(rng.randint(0, 3))],
        "hostNetwork": rng.random() < 0.3,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "driver", "image": image}],
    }
    if rng.random() < 0.2:
        pod["nodeSelector"]["zone"] = rng.choice(ZONES)
    if rng.random() < 0.6:
        terms = [term(rng, nodes) for _ in range(rng.randint(1, 2))]
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    if rng.random() < 0.05:
        pod["nodeName"] = rng.choice(nodes)
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": namespace, "labels": {label: value}},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


def daemon_sets(seed, count, namespace, mark, own, image, *nodes):
    rng = random.Random(int(seed))
    items = [daemon_set(rng, f"d{index:02}", namespace, mark, own, image, nodes) for index in range(int(count))]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def maybe(rng, chance, value):
    return value if rng.random() < chance else None


def change_nodes(seed, turn, own, *nodes):
    """Prints a line for each node: its name, a merge patch, and a patch of its status, separated by tabs."""
    label, value = own.split("=")
    rng = random.Random(f"{seed}-{turn}")
    for node in nodes:
        pairs = rng.sample([(key, effect) for key in TAINT_KEYS for effect in EFFECTS], rng.choice([0, 0, 1, 2]))
        taints = [{"key": key, "value": rng.choice(TAINT_VALUES), "effect": effect} for key, effect in pairs]
        spec = {
            "metadata": {
                "labels": {
                    "zone": maybe(rng, 0.9, rng.choice(ZONES)),
                    "number": maybe(rng, 0.8, str(rng.randint(0, 9))),
                    "flag": maybe(rng, 0.5, rng.choice(["", "a"])),
                    "type": maybe(rng, 0.2, "virtual-kubelet"),
                }
            },
            "spec": {
                "taints": [{"key": label, "value": value, "effect": "NoSchedule"}] + taints,
                "unschedulable": rng.random() < 0.2,
            },
        }
        status = {"conditions": [{"type": kind, "status": str(rng.random() < 0.1), "reason": "Test", "message": ""} for kind in CONDITIONS]}
        print(node, json.dumps(spec), json.dumps({"status": status}), sep="\t")


def target(pod):
    """Returns the node that the DaemonSet controller made the pod for, whether or not a scheduler has bound it."""
    if pod["spec"].get("nodeName"):
        return pod["spec"]["nodeName"]
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]


def pods():
    for pod in json.load(sys.stdin)["items"]:
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Failed", "Succeeded"):
            print(pod["metadata"]["labels"]["app"], target(pod))


def explained(sets, *explanations):
    names = [item["metadata"]["name"] for item in json.load(open(sets, encoding="utf-8"))["items"]]
    for file in explanations:
        found = json.load(open(file, encoding="utf-8"))
        found = found[0] if isinstance(found, list) else found
        chain = {step["about"]: step["says"] for step in found["chain"] if "reach" in step["says"]}
        node = found["subject"].removeprefix("node ")
        for name in names:
            says = [text for about, text in chain.items() if f"/{name}," in about]
            if not says:
                print(name, node)
            elif not says[0].startswith("does not reach the node"):
                print(name, node, says[0])


commands = {"daemonsets": daemon_sets, "nodes": change_nodes, "pods": pods, "explained": explained}
commands[sys.argv[1]](*sys.argv[2:])
