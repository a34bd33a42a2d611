//! Uploads over unreliable connections: the real docker-registry behind a proxy that cuts connections, and scripted answers of
//! registries that do or do not resume. One test covers an endless download.
use std::{
    fs,
    path::{Path, PathBuf},
};

use farrier_core::image::{Digest, Repository};
use farrier_store::registry::{Registry, RegistryError, RegistryOptions, RemoteRegistry, Upload};

use crate::support::{
    cutting_proxy::{Cut, CuttingProxy},
    fake_http::{Answer, FakeHttp, Request, answer, breaks_after},
    registry_process::{RegistryProcess, Wants},
};

const MIB: usize = 1 << 20;

fn registry() -> RemoteRegistry {
    RemoteRegistry::new("test".to_owned(), &RegistryOptions::default())
}

fn repository(host: &str) -> Repository {
    format!("{host}/drivers/x").parse().unwrap()
}

/// Writes a file of `size` bytes without repeated content.
fn blob(directory: &Path, size: usize) -> (PathBuf, Digest) {
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..size)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .collect();
    let path = directory.join("blob");
    fs::write(&path, &bytes).unwrap();
    (path, Digest::of(&bytes))
}

/// docker-registry forgets an upload whose request was cut, and resumes only after complete parts.
#[tokio::test]
async fn an_upload_over_a_bad_line_gets_through() {
    let server = RegistryProcess::start(Wants::default());
    let directory = tempfile::tempdir().unwrap();
    let size = 40 * MIB;
    let (file, digest) = blob(directory.path(), size);
    // The first request is cut in the middle, and later the connection is dead between two parts.
    let cuts = [Cut::After(10 << 20), Cut::Request("PATCH", 1)];
    let proxy = CuttingProxy::before(&server.host, &cuts).await;
    let repository = repository(&proxy.host);
    let sent = registry().push_blob(&repository, &digest, &file).await.unwrap();
    assert_eq!(sent, Upload::Sent(size as u64));
    assert!(proxy.has_cut_all());
    let again = proxy.sent() - size as u64;
    assert!(again < 11 * MIB as u64, "{again} bytes were sent again");
    assert_eq!(server.requests("POST"), 2);

    let back = directory.path().join("back");
    registry().fetch_blob(&repository, &digest, u64::MAX, &back).await.unwrap();
    assert_eq!(fs::read(back).unwrap(), fs::read(file).unwrap());
}

#[tokio::test]
async fn what_works_at_once_costs_one_post_and_one_put() {
    let server = RegistryProcess::start(Wants::default());
    let directory = tempfile::tempdir().unwrap();
    let (file, digest) = blob(directory.path(), 8 * MIB);
    registry().push_blob(&repository(&server.host), &digest, &file).await.unwrap();
    let requests = ["POST", "PUT", "PATCH", "GET"].map(|method| server.requests(method));
    assert_eq!(requests, [1, 1, 0, 0]);
}

/// Pushes eight mebibytes to a scripted registry.
async fn push_to(script: Vec<Answer>) -> (Result<Upload, RegistryError>, Vec<Request>) {
    let directory = tempfile::tempdir().unwrap();
    let (file, digest) = blob(directory.path(), 8 * MIB);
    let fake = FakeHttp::start(script).await;
    let outcome = registry().push_blob(&repository(&fake.host), &digest, &file).await;
    (outcome, fake.requests())
}

fn session(number: u32) -> Answer {
    answer(202, "").header("Location", format!("/upload/{number}?_state=s"))
}

fn told(requests: &[Request]) -> Vec<String> {
    let line = |request: &Request| {
        let range = request.header("content-range").map(|range| format!(" [{range}]")).unwrap_or_default();
        let target = request.target.split(['?', '@']).next().unwrap_or_default();
        let target = target.split("/sha256:").next().unwrap_or_default();
        format!("{} {target}{range} {}", request.method, request.body.len())
    };
    requests.iter().map(line).collect()
}

#[tokio::test]
async fn the_session_is_asked_and_gets_the_rest() {
    let there = |last: usize| {
        answer(204, "").header("Range", format!("0-{last}")).header("Location", "/upload/1?_state=t")
    };
    let (outcome, requests) = push_to(vec![
        answer(404, ""),
        session(1),
        breaks_after(3 * MIB),
        answer(404, ""),
        // More bytes arrived than the registry first reports.
        there(MIB - 1),
        answer(416, ""),
        there(3 * MIB - 1),
        session(1),
        answer(201, ""),
    ])
    .await;
    assert_eq!(outcome.unwrap(), Upload::Sent(8 * MIB as u64));
    assert_eq!(
        told(&requests),
        [
            "HEAD /v2/drivers/x/blobs 0",
            "POST /v2/drivers/x/blobs/uploads/ 0",
            "PUT /upload/1 3145728",
            "HEAD /v2/drivers/x/blobs 0",
            "GET /upload/1 0",
            "PATCH /upload/1 [1048576-8388607] 7340032",
            "GET /upload/1 0",
            "PATCH /upload/1 [3145728-8388607] 5242880",
            "PUT /upload/1 0",
        ]
    );
    assert!(requests[8].target.contains("_state=s&digest=sha256"), "{}", requests[8].target);
}

#[tokio::test]
async fn registries_that_do_not_go_on_get_all_of_it_again() {
    let range = |text: &str| answer(204, "").header("Range", text);
    for refusal in [
        vec![answer(404, "")],
        vec![answer(405, "")],
        vec![answer(204, "")],
        vec![range("0-0")],
        vec![range("0-99999999")],
        vec![range("3-9")],
        vec![range("0-9"), answer(405, ""), answer(404, "")],
        vec![range("0-9"), answer(416, ""), range("0-9"), answer(416, "")],
        vec![range("0-9"), session(1), answer(400, "DIGEST_INVALID"), answer(404, "")],
    ] {
        let broken = vec![answer(404, ""), session(1), breaks_after(MIB), answer(404, "")];
        let in_parts = vec![session(2), session(2), answer(201, "")];
        let asked = refusal.len();
        let (outcome, requests) = push_to([broken, refusal, in_parts].concat()).await;
        assert_eq!(outcome.unwrap(), Upload::Sent(8 * MIB as u64), "{:#?}", told(&requests));
        assert_eq!(
            told(&requests)[4 + asked..],
            ["POST /v2/drivers/x/blobs/uploads/ 0", "PATCH /upload/2 [0-8388607] 8388608", "PUT /upload/2 0"]
        );
    }
}

#[tokio::test]
async fn a_registry_that_takes_no_parts_gets_it_whole() {
    let broken = vec![answer(404, ""), session(1), breaks_after(MIB), answer(404, ""), answer(404, "")];
    let whole = vec![session(2), answer(405, ""), session(3), answer(201, "")];
    let (outcome, requests) = push_to([broken, whole].concat()).await;
    assert_eq!(outcome.unwrap(), Upload::Sent(8 * MIB as u64), "{:#?}", told(&requests));
    assert_eq!(told(&requests).last().unwrap(), "PUT /upload/3 8388608");
}

#[tokio::test]
async fn a_lost_answer_is_no_reason_to_send_anything_again() {
    let script = vec![answer(404, ""), session(1), breaks_after(8 * MIB), answer(200, "")];
    let (outcome, requests) = push_to(script).await;
    assert_eq!(outcome.unwrap(), Upload::Sent(8 * MIB as u64));
    assert_eq!(requests.len(), 4);
}

#[tokio::test]
async fn refusals_and_lines_that_always_break_are_given_up() {
    let (outcome, requests) = push_to(vec![answer(404, ""), session(1), answer(403, "no")]).await;
    assert!(matches!(outcome, Err(RegistryError::Denied { .. })), "{outcome:?}");
    assert_eq!(requests.len(), 3);

    let begun = [answer(404, ""), session(0), breaks_after(9)];
    let again =
        (1..5).flat_map(|number| [answer(404, ""), answer(404, ""), session(number), breaks_after(9)]);
    let (outcome, requests) = push_to(begun.into_iter().chain(again).collect()).await;
    assert!(matches!(outcome, Err(RegistryError::Unreachable { .. })), "{outcome:?}");
    assert_eq!(requests.len(), 3 + 4 * 4);
}

/// Content beyond the descriptor's size is not written to disk.
#[tokio::test]
async fn a_blob_is_cut_off_at_its_stated_size() {
    let fake = FakeHttp::start_with(|_| {
        vec![answer(200, "x".repeat(1 << 20)), answer(200, "four"), answer(200, "four")]
    })
    .await;
    let repository = repository(&fake.host);
    let directory = tempfile::tempdir().unwrap();
    let blob = directory.path().join("blob");
    let (registry, digest) = (registry(), Digest::of(b"four"));
    let error = registry.fetch_blob(&repository, &digest, 4, &blob).await.unwrap_err();
    let RegistryError::Io(source) = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), std::io::ErrorKind::FileTooLarge);
    assert!(source.to_string().ends_with("the download is larger than 4 bytes"), "{source}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "a partial blob was left");
    registry.fetch_blob(&repository, &digest, 4, &blob).await.unwrap();
    // A download with a size beyond every disk does not start.
    let error = registry.fetch_blob(&repository, &digest, u64::MAX - 1, &blob).await.unwrap_err();
    assert!(
        matches!(&error, RegistryError::Io(source) if source.kind() == std::io::ErrorKind::StorageFull),
        "{error:?}"
    );
}

#[tokio::test]
async fn upload_locations_of_every_form() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("blob");
    fs::write(&file, "content").unwrap();
    let digest = Digest::of(b"content");
    let encoded = digest.to_string().replace(':', "%3A");
    for (location, target) in [
        ("/v2/x/up/1", format!("/v2/x/up/1?digest={encoded}")),
        ("/v2/x/up/1?state=a%2Fb", format!("/v2/x/up/1?state=a%2Fb&digest={encoded}")),
        ("http://HOST/v2/x/up/1?_state=z", format!("/v2/x/up/1?_state=z&digest={encoded}")),
        ("up/1", format!("/v2/x/blobs/uploads/up/1?digest={encoded}")),
    ] {
        let fake = FakeHttp::start_with(|host| {
            let location = location.replace("HOST", host);
            vec![answer(404, ""), answer(202, "").header("Location", location), answer(201, "")]
        })
        .await;
        let place = format!("{}/x", fake.host).parse().unwrap();
        let sent = registry().push_blob(&place, &digest, &file).await.unwrap();
        assert_eq!(sent, Upload::Sent(7));
        let put = &fake.requests()[2];
        assert_eq!((put.method.as_str(), &put.target), ("PUT", &target));
        assert_eq!(put.body, b"content");
        assert_eq!(put.header("content-length"), Some("7"));
    }
}
