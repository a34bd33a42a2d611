//! A registry that sends one byte every five seconds and never stops.

use futures::TryStreamExt as _;

use super::*;

fn is_given_up<T: std::fmt::Debug>(outcome: Result<T, RegistryError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }) && error.is_transient(), "{error:?}");
    let said = oci::error_chain(&error);
    assert!(said.ends_with("fewer than 262144 bytes moved in 60 seconds"), "{said}");
}

#[tokio::test(start_paused = true)]
async fn lists_manifests_and_blobs_that_crawl_are_given_up() {
    let padded = |json: &str| format!("{json}{}", " ".repeat(100));
    let script = vec![
        answer(200, padded(TAGS)).crawling(),
        answer(200, padded(r#"{"schemaVersion":2}"#)).crawling(),
        answer(200, "x".repeat(100)).crawling(),
    ];
    let fake = FakeHttp::start(script).await;
    let (registry, repository) = (plain(), repository(&fake.host, "drivers/x"));
    is_given_up(registry.tags(&repository).await);
    is_given_up(registry.manifest(&repository, &tag("1")).await);
    let blob = registry.open_blob(&repository, &Digest::of(b"x")).await.unwrap();
    is_given_up(blob.try_collect::<Vec<_>>().await);
}

#[tokio::test(start_paused = true)]
async fn a_token_servers_answer_that_crawls_is_given_up() {
    let padded = format!(r#"{{"token":"abc"}}{}"#, " ".repeat(100));
    let fake = FakeHttp::start_with(|host| {
        let challenge = format!(r#"Bearer realm="http://{host}/token""#);
        vec![
            answer(401, "").header("WWW-Authenticate", challenge),
            answer(200, padded).crawling(),
            answer(200, TAGS),
        ]
    })
    .await;
    is_given_up(plain().tags(&repository(&fake.host, "drivers/x")).await);
}
