//! Tests of image eviction, against a fake Docker daemon.

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode},
    response::{IntoResponse as _, Response},
};
use farrier_core::image::Memory;
use farrier_engines::{EngineChoice, EngineEnv, connect_docker};
use farrier_local::cache::Cache;
use serde_json::{Value, json};

use super::*;
use crate::testing::Bench;

/// Names of the images. Each has ten bytes of unshared data and an old creation time.
type Images = Arc<Mutex<Vec<String>>>;

async fn answer(State(images): State<Images>, request: Request) -> Response {
    let path = request.uri().path().replace("%2F", "/").replace("%3A", ":");
    let mut images = images.lock().unwrap();
    if request.method() == Method::DELETE && path.ends_with("/base:container") {
        return (StatusCode::CONFLICT, r#"{"message":"a container is using it"}"#).into_response();
    }
    if request.method() == Method::DELETE {
        images.retain(|name| !path.ends_with(&format!("/images/{name}")));
        return "[]".into_response();
    }
    if path.ends_with("/version") {
        return r#"{"ApiVersion":"1.44","Version":"0"}"#.into_response();
    }
    let summary = |name: &String| {
        json!({"Id": name, "ParentId": "", "RepoTags": [name], "RepoDigests": [], "Created": 1_600_000_000, "Size": 110,
               "SharedSize": 100, "Labels": {}, "Containers": -1})
    };
    images.iter().map(summary).collect::<Value>().to_string().into_response()
}

#[tokio::test]
async fn the_least_recently_used_images_go_and_none_that_is_in_use() {
    let names = ["base:old", "base:used", "base:stamped", "toolchain:elsewhere", "toolchain:new"];
    let images: Images = Arc::new(Mutex::new(names.map(|name| format!("{LOCAL_PREFIX}{name}")).to_vec()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let router = Router::new().fallback(answer).with_state(Arc::clone(&images));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let env = EngineEnv { docker_host: Some(address), ..EngineEnv::default() };
    let engine = connect_docker(EngineChoice::Docker, &env).await.unwrap();
    let mut bench = Bench::new(&json!({}));
    let left = || {
        let names = images.lock().unwrap().clone();
        names.iter().map(|name| name.replace(LOCAL_PREFIX, "")).collect::<Vec<_>>().join(" ")
    };

    // Another process builds on one image. Two were used recently, and the lock of another is held.
    let other = Cache::open(bench.services.cache.root().to_owned()).unwrap();
    other.stamp("base", "used").unwrap();
    for (kind, key) in [("base", "stamped"), ("toolchain", "new")] {
        Cache::open(other.root().to_owned()).unwrap().stamp(kind, key).unwrap();
    }
    let _locked = other.lock("base", "old", LockMode::Exclusive).await.unwrap();
    make_room(&bench.services, &engine).await;
    assert_eq!(left(), names.join(" "), "below the quota");

    bench.services.definitions.site.storage.engine_images = Memory::from_bytes(30);
    make_room(&bench.services, &engine).await;
    assert_eq!(left(), "base:old base:used base:stamped toolchain:new");
    bench.services.definitions.site.storage.engine_images = Memory::from_bytes(1);
    make_room(&bench.services, &engine).await;
    assert_eq!(left(), "base:old base:used");
    assert_eq!(bench.services.cache.last_use("base", "stamped").unwrap(), None);

    images.lock().unwrap().push(format!("{LOCAL_PREFIX}base:container"));
    Cache::open(other.root().to_owned()).unwrap().stamp("base", "container").unwrap();
    make_room(&bench.services, &engine).await;
    assert_eq!(left(), "base:old base:used base:container");
    assert!(bench.services.cache.last_use("base", "container").unwrap().is_some(), "it was not removed");
}
