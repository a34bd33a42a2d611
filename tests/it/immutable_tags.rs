//! A registry that refuses to move tags and has no referrers API: nothing works there until `immutableTags` is set, and then
//! everything does.
use tokio::runtime::Runtime;

use crate::{
    signatures::{P256, key, pinned, rows},
    support::{
        kernels,
        scripted_registry::{Script, ScriptedRegistry},
        site::{Site, with_immutable_tags},
    },
};

const SIGNED: &str = "  imageSigning: {key: {file: keys/images.key}, publicKey: keys/images.pem}\n  \
                      policy: {requireSigned: [keys/images.pem]}\n";
const SIGNED_ANEW: &str = "  imageSigning: {key: {file: keys/new.key}, publicKey: keys/new.pem}\n  \
                           policy: {requireSigned: [keys/new.pem, keys/images.pem]}\n";

#[test]
fn a_site_works_where_no_tag_may_move() {
    let kernel = kernels::newest().newer;
    let runtime = Runtime::new().unwrap();
    let mut site = Site::new();
    let script = Script { movable: &[], lists_referrers: false };
    let scripted = runtime.block_on(ScriptedRegistry::start(&site.registry.host, script));
    site.location = format!("{}/drivers", scripted.host);
    site.define("keys/README", "");
    key(&site, "keys/images", P256);
    key(&site, "keys/new", P256);
    let setting =
        format!("add `{{host: \"{}\", immutableTags: true}}` to `hosts` in site.yaml", scripted.host);
    let failed = site.build("hello", &kernel, &["--push"]);
    assert_ne!(failed.code, Some(0), "{failed}");
    failed.line(&setting);

    site.define("site.yaml", &with_immutable_tags(&scripted.host, SIGNED));
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    rows(&site, &[&image], 0);
    site.build("hello", &kernel, &["--push"]).exits(0).line("up to date");
    // The definitions and the record of kernels change.
    site.canary(&kernel);
    let target = ["--kernel", &kernel, "--os", "debian", "--os-version", "12", "--image", "hello"];
    let mirror = || site.farrier(&[&["mirror"][..], &target].concat()).exits(0);
    mirror();
    let before = site.all_tags("definitions");
    assert!(before.contains(&"latest".to_owned()), "{before:?}");
    site.define("site.yaml", &with_immutable_tags(&scripted.host, SIGNED_ANEW));
    let said = site.farrier(&["rotate"]).exits(0);
    assert!(said.line(&format!("{}/hello@", site.location)).starts_with("signed "), "{said}");
    mirror();
    mirror();
    let after = site.all_tags("definitions");
    let versions: Vec<&String> = after.iter().filter(|tag| tag.starts_with("latest")).collect();
    assert_eq!(versions, ["latest", "latest.0000000001"], "{after:?}");
    // The new key alone suffices, offline and for the next build.
    let new = site.definitions().join("keys/new.pem").display().to_string();
    for check in rows(&site, &["--key", &new, &image], 0) {
        assert_eq!(check.1, "ok", "{check:?}");
    }
    site.run_once().exits(0);
    assert_eq!(site.image(), image);
    // Without the setting, the first try listed one referrer. The list stays as it was.
    let list = format!("sha256-{}", image.split_once("@sha256:").unwrap().1);
    assert!(site.all_tags("hello").contains(&list));
    // Where the setting is in place, no message asks for it.
    site.edit("images/hello.yaml", "makeArgs: \"\"", "makeArgs: V=1");
    site.edit("images/hello.yaml", "  version:", "  onConflict: overwrite\n  version:");
    let refused = site.build("hello", &kernel, &["--push"]).exits(1);
    refused.line("the tag exists, and no tag moves there");
    assert!(!refused.to_string().contains("immutableTags"), "{refused}");
    let gc = site.farrier(&["gc", "-o", "json"]).exits(0).json();
    assert!(!gc.to_string().contains(".0000000001"), "versions are no images: {gc:#}");
}
