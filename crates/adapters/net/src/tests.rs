//! Tests of the site's network settings, without a network.

use super::*;

fn net(site: &str, offline: bool) -> Net {
    let site: SiteSpec = serde_json::from_str(site).unwrap();
    Net::new(NetOptions { site, offline, root: "/definitions".into(), ..NetOptions::default() }).unwrap()
}

const SITE: &str = r#"{
    "mirrors": [{"from": "docker.io", "to": ["r.example/hub"]},
                {"from": "https://github.com/", "to": ["https://files.example/github/"]}],
    "hosts": [{"host": "apt.example"}, {"host": "plain.example:5000", "plainHttp": true}],
    "proxy": {"http": "http://proxy.example:3128", "noProxy": ["near.example"]}
}"#;

#[test]
fn what_the_site_names_may_be_asked() {
    let net = net(SITE, true);
    for host in ["r.example:443", "files.example:443", "apt.example:80", "proxy.example:3128"] {
        assert!(net.is_allowed(&host.parse().unwrap()), "{host}");
    }
    let purpose = AccessPurpose { action: "fetch blob x of y", redirected_by: Some("r.example:443") };
    let error = net.check_allowed(&"cdn.example:443".parse().unwrap(), &purpose).unwrap_err();
    insta::assert_snapshot!(
        error,
        @"fetch blob x of y (redirected by r.example:443) needs cdn.example:443, which --offline forbids: no configuration names it"
    );
    insta::assert_snapshot!(
        error.hint().unwrap(),
        @"if farrier may use it, add `- host: cdn.example:443` to `hosts` in site.yaml; otherwise map it to a host of the site with `mirrors`"
    );
    assert!(!error.is_transient());
    net.add_named_host("cdn.example".parse().unwrap());
    assert!(net.check_allowed(&"cdn.example:443".parse().unwrap(), &purpose).is_ok());
    assert!(net.allows_plain(&"plain.example:5000".parse().unwrap()));
    assert!(!net.allows_plain(&"plain.example".parse().unwrap()));
}

#[test]
fn offline_the_place_itself_is_asked_only_where_it_is_named() {
    let repository: Repository = "debian".parse().unwrap();
    let images = |net: &Net| -> Vec<String> {
        net.image_candidates(&repository).iter().map(ToString::to_string).collect()
    };
    assert_eq!(images(&net(SITE, false)), ["r.example/hub/library/debian", "debian"]);
    let offline = net(SITE, true);
    assert_eq!(images(&offline), ["r.example/hub/library/debian"]);
    offline.add_named_host("docker.io".parse().unwrap());
    assert_eq!(images(&offline), ["r.example/hub/library/debian", "debian"]);
    // Without a mirror, the original address stays, so that the error names it.
    let url: Url = "https://other.example/x.tgz".parse().unwrap();
    assert_eq!(offline.url_candidates(&url), [url]);
}

#[tokio::test]
async fn apt_is_told_of_proxies_and_certificates() {
    let archives = ["http://apt.example/debian", "http://near.example/debian", "file:///srv/debian"];
    assert_eq!(net("{}", false).apt_options(archives).await.unwrap(), AptOptions::default());
    let found = net(SITE, false).apt_options(archives).await.unwrap();
    assert!(found.ignores_environment);
    assert_eq!(
        found.options,
        [
            r#"Acquire::http::Proxy::apt.example "http://proxy.example:3128/";"#,
            r#"Acquire::http::Proxy::near.example "DIRECT";"#
        ]
    );
    let error = net(SITE, true).check_archives_allowed(archives, "suite x").unwrap_err();
    insta::assert_snapshot!(
        error,
        @"apt for suite x needs near.example:80, which --offline forbids: no configuration names it"
    );
    let offline = net(SITE, true).apt_options([archives[0]]).await.unwrap();
    assert!(net(SITE, true).check_archives_allowed([archives[0], archives[2]], "suite x").is_ok());
    assert!(offline.options.contains(&r#"Acquire::http::AllowRedirect "false";"#.to_owned()));
    assert!(net("{}", true).check_archives_allowed(["tor+http://x.example/debian"], "suite x").is_err());

    let dir = tempfile::tempdir().unwrap();
    let site = r#"{"hosts": [{"host": "apt.example", "clientKey": {"file": "key.pem"}}]}"#;
    let options = NetOptions {
        site: serde_json::from_str(site).unwrap(),
        root: dir.path().to_owned(),
        ..NetOptions::default()
    };
    let found = Net::new(options).unwrap().apt_options(["https://apt.example/debian"]).await.unwrap();
    let wanted = format!("Acquire::https::apt.example::SslKey \"{}/key.pem\";", dir.path().display());
    assert_eq!(found.options, [wanted]);
}

#[tokio::test]
async fn offline_the_environments_proxy_counts_as_a_host() {
    let environment = Proxy { https: Some("http://env.example:3128".parse().unwrap()), ..Proxy::default() };
    let options = NetOptions { environment, offline: true, ..NetOptions::default() };
    let net = Net::new(options).unwrap();
    assert!(!net.is_allowed(&"env.example:3128".parse().unwrap()));
    let apt = net.apt_options([]).await.unwrap();
    assert!(apt.ignores_environment);
}

#[tokio::test]
async fn git_is_told_how_its_host_is_reached() {
    let told = async |site: &str, offline: bool, address: &str| {
        let access = git_access(&net(site, offline), &address.parse().unwrap()).await;
        access.map(|GitAccess { settings, ssh_key, known_hosts }| {
            assert!(ssh_key.is_none());
            let settings: Vec<String> =
                settings.iter().map(|(name, value)| format!("{name}={}", value.as_str())).collect();
            (settings.join(" "), known_hosts)
        })
    };
    let reached = async |site, address| told(site, false, address).await.unwrap();
    let directly = "http.followRedirects=false http.proxy=";
    assert_eq!(reached(SITE, "file:///srv/clusters.git").await, (String::new(), None));
    assert_eq!(reached(SITE, "https://git.example/x").await, (directly.to_owned(), None));
    let through = format!("{directly}http://proxy.example:3128/");
    assert_eq!(reached(SITE, "http://git.example/x").await, (through, None));

    // Certificate files are not tested: they would have to exist.
    let site =
        r#"{"hosts": [{"host": "git.example", "knownHosts": "known", "clientKey": {"file": "/k.pem"}}]}"#;
    let settings = format!("{directly} http.sslKey=/k.pem");
    assert_eq!(reached(site, "https://git.example/x").await, (settings, None));
    let known = Some("/definitions/known".into());
    assert_eq!(reached(site, "ssh://git@git.example/x").await, (String::new(), known));
    assert_eq!(reached("{}", "ssh://git@git.example/x").await, (String::new(), None));

    for (address, host) in
        [("https://git.example/x", "git.example:443"), ("ssh://git.example/x", "git.example:22")]
    {
        let error = told("{}", true, address).await.unwrap_err().to_string();
        assert_eq!(
            error,
            format!("git for {host} needs {host}, which --offline forbids: no configuration names it")
        );
    }
    let login =
        r#"{"hosts": [{"host": "git.example", "login": {"user": "me", "password": {"file": "/none"}}}]}"#;
    let error = told(login, false, "http://git.example/x").await.unwrap_err().to_string();
    assert!(error.contains("plain http would expose the password"), "{error}");
}
