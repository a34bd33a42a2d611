//! Token servers that may receive a registry's credentials: not every server that the registry names.

use farrier_core::site::SiteSpec;

use super::*;

/// Starts a registry that names a token server, and the token server.
async fn pair() -> (FakeHttp, FakeHttp) {
    let tokens = FakeHttp::start(vec![answer(200, r#"{"token":"abc"}"#); 2]).await;
    let challenge = format!(r#"Bearer realm="http://{}/token""#, tokens.host);
    let refusal = || answer(401, "").header("WWW-Authenticate", &challenge);
    let fake = FakeHttp::start(vec![refusal(), answer(200, TAGS), refusal(), answer(200, TAGS)]).await;
    (fake, tokens)
}

fn identity(directory: &Path, host: &str) -> CredentialFile {
    let path = directory.join("identity.json");
    let entry = serde_json::json!({"auth": "", "identitytoken": "refresh"});
    fs::write(&path, serde_json::json!({"auths": {host: entry}}).to_string()).unwrap();
    CredentialFile::new(Some(path))
}

#[tokio::test]
async fn a_token_server_that_only_the_registry_names_gets_no_credentials() {
    let directory = tempfile::tempdir().unwrap();
    for with_password in [true, false] {
        let (fake, tokens) = pair().await;
        let file = if with_password {
            login(directory.path(), &fake.host, PASSWORD)
        } else {
            identity(directory.path(), &fake.host)
        };
        let options = RegistryOptions { credentials: file.into(), ..RegistryOptions::default() };
        let error = remote(&options).tags(&repository(&fake.host, "x")).await.unwrap_err();
        assert_eq!(tokens.requests().len(), 0, "{:?}", tokens.requests());
        assert!(!error.is_transient(), "{error:?}");
        let (registry, server) = (&fake.host, &tokens.host);
        assert_eq!(
            error.to_string(),
            format!(
                "{registry} refers to the token server http://{server} to list tags of x: the token server \
                 is not trusted with the credentials of {registry}"
            )
        );
        let todo =
            format!("add `{{host: \"{registry}\", tokenServers: [\"{server}\"]}}` to `hosts` in site.yaml");
        assert!(hint(&error).unwrap().contains(&todo), "{:?}", hint(&error));
    }
}

#[tokio::test]
async fn a_token_server_that_the_site_names_gets_them() {
    let directory = tempfile::tempdir().unwrap();
    let (fake, tokens) = pair().await;
    let (_, port) = fake.host.split_once(':').unwrap();
    for (host, servers, trusted) in [
        (fake.host.as_str(), tokens.host.as_str(), true),
        ("127.0.0.1", "127.0.0.1", true),
        (&fake.host, &fake.host, false),
        ("r.example", &tokens.host, false),
        (&format!("localhost:{port}"), &tokens.host, false),
    ] {
        let site: SiteSpec =
            serde_json::from_value(serde_json::json!({"hosts": [{"host": host, "tokenServers": [servers]}]}))
                .unwrap();
        let net = Net::new(NetOptions { site, ..NetOptions::default() }).unwrap();
        let url = format!("http://{}/token", tokens.host).parse().unwrap();
        let options =
            RegistryOptions { credentials: login(directory.path(), &fake.host, PASSWORD).into(), net };
        assert_eq!(
            farrier_store::registry::Access::trusts_token_server(&options, &fake.host, &url),
            trusted,
            "{host}"
        );
        if trusted {
            remote(&options).tags(&repository(&fake.host, "x")).await.unwrap();
        }
    }
    let asked = tokens.requests();
    assert_eq!(asked.len(), 2);
    assert!(asked.iter().all(|request| request.header("authorization").unwrap().starts_with("Basic ")));
}

/// Without credentials there is nothing to protect.
#[tokio::test]
async fn without_credentials_any_token_server_is_asked() {
    let (fake, tokens) = pair().await;
    assert_eq!(plain().tags(&repository(&fake.host, "x")).await.unwrap().len(), 2);
    assert_eq!(tokens.requests()[0].header("authorization"), None);
}

/// docker and Podman read `null` like a missing token.
#[tokio::test]
async fn a_token_may_have_either_name() {
    for token in [r#"{"token":null,"access_token":"a"}"#, r#"{"token":"a","access_token":null}"#] {
        let fake = FakeHttp::start_with(|host| {
            let challenge = format!(r#"Bearer realm="http://{host}/token""#);
            vec![answer(401, "").header("WWW-Authenticate", challenge), answer(200, token), answer(200, TAGS)]
        })
        .await;
        assert_eq!(plain().tags(&repository(&fake.host, "x")).await.unwrap().len(), 2);
        assert_eq!(fake.requests()[2].header("authorization"), Some("Bearer a"));
    }
}
