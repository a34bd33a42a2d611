//! Routing of requests by the API's paths and verbs.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    Shared,
    answer::{Answer, Asked, Failure},
    exec::Exec,
    faults::{ApiFailure, Record},
    http::{Reply, Request},
    kinds::{self, Kind},
    managed::Author,
    protobuf,
    selectors::Selector,
    store::{Key, Object, State},
    watch::{Terms, Watch},
    write::Target,
};

/// The object or resource that a path names.
struct Place {
    kind: Arc<Kind>,
    namespace: String,
    name: String,
    subresource: Option<String>,
}

fn place(state: &State, path: &[&str]) -> Option<Place> {
    let (group, version, rest) = match path {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..]
            if !rest.is_empty() && !matches!(rest, ["status" | "finalize"]) =>
        {
            (*namespace, rest)
        }
        _ => ("", rest),
    };
    let [plural, rest @ ..] = rest else { return None };
    let kind = state.kind(group, version, plural)?;
    let (name, subresource) = match rest {
        [] => ("", None),
        [name] => (*name, None),
        [name, subresource] => (*name, Some((*subresource).to_owned())),
        _ => return None,
    };
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let at_home = kind.namespaced || namespace.is_empty();
    at_home.then_some(Place { kind, namespace, name, subresource })
}

fn verb(request: &Request, parameters: &BTreeMap<String, String>, named: bool) -> &'static str {
    let watch = parameters.get("watch").is_some_and(|given| given == "true" || given == "1");
    match (request.method.as_str(), named) {
        ("GET", _) if watch => "watch",
        ("GET", false) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "delete",
        ("DELETE", false) => "deletecollection",
        _ => "get",
    }
}

fn record(request: &Request, verb: &'static str, place: Option<&Place>) -> Record {
    let body = serde_json::from_slice(&request.body).unwrap_or_else(|_| {
        if let Some(object) = protobuf::object(&request.body) {
            return object;
        }
        let text = String::from_utf8_lossy(&request.body);
        // Some clients apply YAML.
        serde_saphyr::from_str(&text).unwrap_or(Value::Null)
    });
    Record {
        method: request.method.clone(),
        path: request.path.clone(),
        query: request.query.clone(),
        body: if request.body.is_empty() { Value::Null } else { body },
        content_type: request.header("content-type").split(';').next().unwrap_or_default().to_owned(),
        user_agent: request.header("user-agent").to_owned(),
        authorization: request.header("authorization").to_owned(),
        verb,
        resource: place.map(|place| place.kind.resource()).unwrap_or_default(),
        subresource: place.and_then(|place| place.subresource.clone()),
        namespace: place.map(|place| place.namespace.clone()).unwrap_or_default(),
        name: place.map(|place| place.name.clone()).unwrap_or_default(),
        status: 0,
    }
}

/// Answers a request, after applying faults and permissions.
pub async fn reply(shared: &Arc<Shared>, request: &Request) -> Reply {
    let path: Vec<&str> = request.path.split('/').filter(|part| !part.is_empty()).collect();
    let parameters = request.parameters();
    let (record, number, fault) = {
        let mut state = shared.state.lock().unwrap();
        let place = place(&state, &path);
        let named = place.as_ref().is_none_or(|place| !place.name.is_empty());
        let verb = if place.is_some() { verb(request, &parameters, named) } else { "get" };
        let record = record(request, verb, place.as_ref());
        state.faults.log.push(record.clone());
        let number = state.faults.log.len() - 1;
        let fault = state.faults.next_for(&record);
        (record, number, fault)
    };
    shared.announce();
    if let Some((id, ApiFailure::Hang)) = fault {
        let mut changed = shared.changed.subscribe();
        while shared.state.lock().unwrap().faults.is_planned(id) {
            let _ = changed.changed().await;
        }
    }
    let reply = {
        let mut state = shared.state.lock().unwrap();
        let place = place(&state, &path);
        let kind = place.as_ref().map(|place| &place.kind);
        let ordered = fault.and_then(|(_, fault)| fault.answer(state.faults.user(), kind, &record));
        let reply = if let Some(answer) = ordered {
            Reply::Answer(answer)
        } else if matches!(fault, Some((_, ApiFailure::Drop))) {
            Reply::Drop
        } else {
            answer(shared, &mut state, (request, &path), place.as_ref(), &record, &parameters)
        };
        if record.is_write() && state.kubelets.as_ref().is_some_and(|kubelets| kubelets.automatic) {
            state.settle();
        }
        let reply = if matches!(fault, Some((_, ApiFailure::LoseAnswer))) { Reply::Drop } else { reply };
        let status = match &reply {
            Reply::Answer(answer) => answer.status,
            Reply::Watch(_) => 200,
            Reply::Exec(_) => 101,
            Reply::Drop => 0,
        };
        if let Some(record) = state.faults.log.get_mut(number) {
            record.status = status;
        }
        reply
    };
    shared.announce();
    reply
}

fn answer(
    shared: &Arc<Shared>,
    state: &mut State,
    (request, path): (&Request, &[&str]),
    place: Option<&Place>,
    record: &Record,
    parameters: &BTreeMap<String, String>,
) -> Reply {
    let Some(place) = place else { return Reply::Answer(outside(state, path, record)) };
    if state.faults.is_denied(record) {
        let asked = Asked {
            namespace: &place.namespace,
            name: &place.name,
            subresource: place.subresource.as_deref(),
        };
        let failure = Failure::forbidden(state.faults.user(), record.verb, &place.kind, &asked);
        return Reply::Answer(failure.answer());
    }
    if (place.kind.resource().as_str(), place.subresource.as_deref()) == ("pods", Some("exec")) {
        let pod = (&*place.kind, place.namespace.as_str(), place.name.as_str());
        let exec = Exec::open(shared, state, pod, request);
        return exec.map_or_else(Reply::Answer, |exec| Reply::Exec(Box::new(exec)));
    }
    let done = match record.verb {
        "watch" => watch(shared, state, place, parameters),
        "list" if request.header("accept").contains("as=Table") => Ok(Reply::Answer(table(state, place))),
        "list" => list(state, place, parameters).map(Reply::Answer),
        _ => single(state, place, record, parameters).map(Reply::Answer),
    };
    done.unwrap_or_else(|failure| Reply::Answer(failure.answer()))
}

/// Answers discovery requests and unknown paths.
fn outside(state: &State, path: &[&str], record: &Record) -> Answer {
    let method = record.method.as_str();
    match path {
        ["healthz" | "livez" | "readyz", ..] => return Answer::bytes(200, Bytes::from_static(b"ok")),
        ["apis", "authentication.k8s.io", "v1", "selfsubjectreviews"] if method == "POST" => {
            return Answer::json(
                201,
                &json!({
                    "kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {},
                    "status": {"userInfo": {"username": state.faults.user(), "groups": ["system:authenticated"]}},
                }),
            );
        }
        ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"] if method == "POST" => {
            let asked = &record.body["spec"]["resourceAttributes"];
            let word = |key: &str| asked[key].as_str().unwrap_or_default();
            let resource = [word("resource"), word("subresource")].join("/");
            let resource = [resource.trim_end_matches('/'), word("group")].join(".");
            let allowed = !state.faults.denies(word("verb"), resource.trim_end_matches('.'));
            let review = json!({
                "kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "metadata": {},
                "spec": record.body["spec"], "status": {"allowed": allowed},
            });
            return Answer::json(201, &review);
        }
        [
            "apis",
            group @ ("authentication.k8s.io" | "authorization.k8s.io"),
            "v1",
            resource @ ("tokenreviews" | "subjectaccessreviews"),
        ] if method == "POST" => {
            if state.faults.denies("create", &format!("{resource}.{group}")) {
                let message = format!(
                    "{resource}.{group} is forbidden: User \"farrier\" cannot create resource \"{resource}\""
                );
                let status = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": message,
                });
                return Answer::json(403, &status);
            }
            let (spec, kind) = (&record.body["spec"], &record.body["kind"]);
            let status = state.faults.review(resource, spec);
            let review = json!({
                "kind": kind, "apiVersion": format!("{group}/v1"), "metadata": {}, "spec": spec, "status": status,
            });
            return Answer::json(201, &review);
        }
        ["openapi", "v3", group @ ..] if method == "GET" => {
            if let Some(found) = kinds::openapi(&state.kinds, group) {
                return Answer::json(200, &found);
            }
        }
        _ if method == "GET" => {
            if let Some(found) = kinds::discovery(&state.kinds, path) {
                return Answer::json(200, &found);
            }
        }
        _ => {}
    }
    let known = match path {
        ["api", "v1", ..] => true,
        ["apis", group, version, ..] => {
            state.kinds.iter().any(|kind| kind.group == *group && kind.version == *version)
        }
        _ => false,
    };
    if known { Failure::no_such_resource().answer() } else { Answer::no_such_path() }
}

fn selector(place: &Place, parameters: &BTreeMap<String, String>) -> Result<Selector, Failure> {
    let of = |name: &str| parameters.get(name).map_or("", String::as_str);
    let mut fields = of("fieldSelector").to_owned();
    if !place.name.is_empty() {
        fields = format!("metadata.name={}", place.name);
    }
    Selector::parse(&place.kind, of("labelSelector"), &fields).map_err(Failure::bad_request)
}

fn list(state: &State, place: &Place, parameters: &BTreeMap<String, String>) -> Result<Answer, Failure> {
    let selector = selector(place, parameters)?;
    let limit = parameters.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
    let limit: usize = limit.unwrap_or(usize::MAX);
    let (revision, after) = match parameters.get("continue").filter(|token| !token.is_empty()) {
        Some(token) => read_token(state, token)?,
        None => (state.revision, Key::default()),
    };
    let kind = &place.kind;
    let beginning = kind.prefix();
    let mut matching =
        state.list_after(kind, &place.namespace, after).filter(|object| selector.matches(&***object));
    let page: Vec<_> = matching.by_ref().take(limit).collect();
    let remaining = matching.count();
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if let Some(last) = page.last().filter(|_| remaining > 0) {
        metadata["continue"] = json!(token(revision, &last.namespace, &last.name));
        metadata["remainingItemCount"] = json!(remaining);
    }
    let head = format!(
        r#"{{"kind":"{}List","apiVersion":"{}","metadata":{metadata},"items":["#,
        kind.kind,
        kind.api_version()
    );
    let mut body = vec![Bytes::from(head)];
    for (at, object) in page.iter().enumerate() {
        // Items of built-in kinds omit their kind. Some stored objects have fields that sort before it.
        let says_it = kind.custom || !object.bytes.starts_with(beginning.as_bytes());
        let prefix = if says_it { 0 } else { beginning.len() };
        let opening: &'static [u8] = match (at, prefix) {
            (0, 0) => b"",
            (0, _) => b"{",
            (_, 0) => b",",
            _ => b",{",
        };
        body.push(Bytes::from_static(opening));
        body.push(object.bytes.slice(prefix..));
    }
    body.push(Bytes::from_static(b"]}"));
    Ok(Answer { body, ..Answer::bytes(200, Bytes::new()) })
}

/// Returns all objects as a table.
fn table(state: &State, place: &Place) -> Answer {
    let kind = &place.kind;
    let name = ("Name".to_owned(), "/metadata/name".to_owned());
    let columns: Vec<_> = std::iter::once(&name).chain(&kind.columns).collect();
    let row = |object: &Arc<Object>| {
        let value = object.value();
        let cells = columns.iter().map(|(_, pointer)| value.pointer(pointer).cloned());
        json!({"cells": cells.collect::<Vec<_>>(), "object": null})
    };
    let rows = state.list_after(kind, &place.namespace, Key::default()).map(row);
    let heads = columns.iter().map(|(name, _)| json!({"name": name, "type": "string"}));
    let table = json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": state.revision.to_string()},
        "columnDefinitions": heads.collect::<Vec<_>>(), "rows": rows.collect::<Vec<_>>(),
    });
    Answer::json(200, &table)
}

fn token(revision: u64, namespace: &str, name: &str) -> String {
    hex::encode(format!("{revision}/{namespace}/{name}"))
}

fn read_token(state: &State, token: &str) -> Result<(u64, Key), Failure> {
    let unreadable = || Failure::bad_request("invalid continue token: continue key is not valid");
    let text = hex::decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let text = text.ok_or_else(unreadable)?;
    let mut parts = text.splitn(3, '/');
    let mut part = || parts.next().ok_or_else(unreadable);
    let revision: u64 = part()?.parse().map_err(|_| unreadable())?;
    let key = (part()?.to_owned(), part()?.to_owned());
    if revision < state.tokens_from { Err(Failure::expired_token()) } else { Ok((revision, key)) }
}

fn watch(
    shared: &Arc<Shared>,
    state: &State,
    place: &Place,
    parameters: &BTreeMap<String, String>,
) -> Result<Reply, Failure> {
    let is = |name: &str| parameters.get(name).is_some_and(|given| given == "true" || given == "1");
    let seconds = parameters.get("timeoutSeconds").and_then(|given| given.parse().ok()).unwrap_or(1800);
    let terms = Terms {
        kind: Arc::clone(&place.kind),
        namespace: place.namespace.clone(),
        selector: selector(place, parameters)?,
        bookmarks: is("allowWatchBookmarks"),
        timeout: Duration::from_secs(seconds),
    };
    let given = parameters.get("resourceVersion").map_or("", String::as_str);
    let from = match given {
        "" | "0" => None,
        _ => Some(given.parse().map_err(|_| Failure::bad_request("invalid resource version"))?),
    };
    let from = from.filter(|_| !is("sendInitialEvents"));
    let end = is("sendInitialEvents");
    Ok(Reply::Watch(Box::new(Watch::new(shared, state, terms, from, end))))
}

fn single(
    state: &mut State,
    place: &Place,
    record: &Record,
    parameters: &BTreeMap<String, String>,
) -> Result<Answer, Failure> {
    let Place { kind, namespace, name, subresource } = place;
    let target = Target { kind, namespace, name };
    let subresource = subresource.as_deref();
    if (kind.kind.as_str(), subresource, record.verb) == ("Pod", Some("eviction"), "create") {
        state.evict(target, &record.body)?;
        let done =
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
        return Ok(Answer::json(201, &done));
    }
    if subresource.is_some_and(|given| given != "status" || !kind.status) {
        return Err(Failure::no_such_resource());
    }
    // Without `fieldManager`, the user agent names the manager.
    let agent = record.user_agent.split('/').next().unwrap_or_default();
    let manager = parameters.get("fieldManager").map_or(agent, String::as_str);
    let author = Author { manager, subresource };
    let written = match (record.verb, name.is_empty()) {
        ("get", false) => {
            let found = state.get(kind, namespace, name);
            found.map(|object| (object, false)).ok_or_else(|| Failure::not_found(kind, name))
        }
        ("create", true) => state.create(target, record.body.clone(), author),
        ("update", false) => state.put_object(target, &record.body, author),
        ("patch", false) => patch(state, target, record, author, parameters),
        ("delete", false) => return delete(state, target, &record.body),
        ("deletecollection", true) => return delete_all(state, place, record, parameters),
        _ => Err(Failure::method_not_allowed()),
    }?;
    let (object, new) = written;
    Ok(Answer::bytes(if new { 201 } else { 200 }, object.bytes.clone()))
}

fn patch(
    state: &mut State,
    target: Target<'_>,
    record: &Record,
    author: Author<'_>,
    parameters: &BTreeMap<String, String>,
) -> super::write::Written {
    match record.content_type.as_str() {
        "application/apply-patch+yaml" => {
            if !parameters.contains_key("fieldManager") {
                let why = "fieldManager: Required value: is required for apply patch";
                let message = format!("PatchOptions.meta.k8s.io \"\" is invalid: {why}");
                let details = json!({"group": "meta.k8s.io", "kind": "PatchOptions"});
                return Err(Failure::new(422, "Invalid", message, details));
            }
            let force = parameters.get("force").is_some_and(|force| force == "true" || force == "1");
            state.apply(target, &record.body, author, force)
        }
        "application/merge-patch+json" => state.merge_patch(target, &record.body, author),
        other => Err(Failure::unsupported_media_type(other)),
    }
}

fn delete(state: &mut State, target: Target<'_>, options: &Value) -> Result<Answer, Failure> {
    let Target { kind, name, .. } = target;
    let gone = state.delete(target, options)?;
    let stays = state.get(kind, target.namespace, name).is_some_and(|object| object.uid == gone.uid);
    if kind.kind == "Pod" || (kind.kind == "Job" && stays) {
        return Ok(Answer::bytes(200, gone.bytes.clone()));
    }
    let mut details = json!({"name": name, "kind": kind.plural, "uid": gone.uid});
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    let done = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
    });
    Ok(Answer::json(200, &done))
}

fn delete_all(
    state: &mut State,
    place: &Place,
    record: &Record,
    parameters: &BTreeMap<String, String>,
) -> Result<Answer, Failure> {
    let selector = selector(place, parameters)?;
    let wanted = |object: &&Arc<super::store::Object>| selector.matches(&***object);
    let found: Vec<_> = state.list(&place.kind, &place.namespace).filter(wanted).cloned().collect();
    for object in found {
        let target = Target { kind: &place.kind, namespace: &object.namespace, name: &object.name };
        state.delete(target, &record.body)?;
    }
    let done = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
    Ok(Answer::json(200, &done))
}
