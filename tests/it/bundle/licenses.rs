//! Exports of images and sources whose licenses restrict redistribution.

use std::{fs, path::Path};

use farrier_core::{facts::media_type, image::Digest};
use oci::Artifact;
use serde_json::{Value, json};

use super::{Site, farrier, text};

fn define(directory: &Path, name: &str, of_image: &str, of_source: &str) {
    let text = format!(
        "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: {name}}}\nspec:\n  version: '1'\n  \
         template: kbuild\n  vars: {{directory: s, makeArgs: ''}}\n  license: LicenseRef-Acme\n  redistribute: {of_image}\n  modules: [m]\n  \
         sources: [{{name: s, from: {{path: {{path: s}}}}, redistribute: {of_source}}}]\n  nodes: {{matchLabels: {{a: b}}}}\n  rollout: []\n"
    );
    fs::create_dir_all(directory.join("images")).unwrap();
    fs::write(directory.join(format!("images/{name}.yaml")), text).unwrap();
}

fn accept_terms(directory: &Path, names: &str) {
    let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: s}\nspec:\n";
    fs::write(directory.join("site.yaml"), format!("{head}  policy: {{acceptTerms: [{names}]}}\n")).unwrap();
}

/// Attaches a bill of materials that restricts a component.
async fn attach_bill(site: &Site, name: &str, subject: &Digest, component: &str) {
    let repository = site.location.repository(name).unwrap();
    let manifest = site.manifest(name, subject.as_str()).await.unwrap();
    let properties = json!([{"name": "farrier:redistribute", "value": "terms"}]);
    let bill = json!({"components": [{"name": component, "properties": properties}]}).to_string();
    let artifact = Artifact::about(&manifest, media_type::CYCLONEDX, bill.into_bytes(), &[]).unwrap();
    for bytes in [&artifact.content[..], oci::EMPTY] {
        site.registry.push_bytes(&repository, bytes).await.unwrap();
    }
    site.registry.push_referrer(&repository, &artifact.manifest).await.unwrap();
}

#[tokio::test]
async fn what_a_license_forbids_is_not_exported() {
    let site = Site::start();
    for name in ["one", "two", "three", "four"] {
        let image = site.publish(name, "1", &[name.as_bytes()]).await;
        if name == "four" {
            attach_bill(&site, name, &image, "libacme").await;
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let definitions = directory.path().join("definitions");
    define(&definitions, "one", "terms", "allowed");
    define(&definitions, "two", "allowed", "forbidden");
    define(&definitions, "three", "allowed", "allowed");
    let (file, registry) = (directory.path().join("site.bundle"), site.location.to_string());
    let file = file.to_str().unwrap();
    let export = |references: &[&str]| {
        let _ = fs::remove_file(file);
        let words =
            ["--definitions", definitions.to_str().unwrap(), "bundle", "export", "--registry", &registry];
        let references: Vec<&str> = references.iter().flat_map(|one| ["--reference", one]).collect();
        let output = farrier(&[&words[..], &references, &["--to", file]].concat());
        (output.status.code(), text(&output.stderr))
    };
    let all = ["one:1", "two:1", "three:1", "four:1"];
    let (code, said) = export(&all);
    let refused = "licenses forbid the bundle: image four, source libacme (redistribute: terms); image one (redistribute: terms); \
                   image two, source s (redistribute: forbidden)";
    assert!(code == Some(1) && said.contains(refused), "{said}");
    assert!(said.contains("omit these images (--image)") && said.contains("policy.acceptTerms"), "{said}");
    assert!(!Path::new(file).exists());

    accept_terms(&definitions, "one, two, four");
    let (code, said) = export(&all);
    let refused = "licenses forbid the bundle: image two, source s (redistribute: forbidden)\n";
    assert!(code == Some(1) && said.contains(refused), "{said}");
    let (code, said) = export(&["one:1", "three:1", "four:1"]);
    assert_eq!(code, Some(0), "{said}");
    let shown = text(&farrier(&["bundle", "inspect", file]).stdout);
    let row = |name: &str| {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let mut rows = shown.lines().map(words).filter(|row| row.len() == 4 && row[0] == name);
        rows.next().unwrap_or_else(|| panic!("{shown}"))
    };
    assert_eq!(row("one"), ["one", "-", "LicenseRef-Acme", "terms"]);
    assert_eq!(row("four"), ["four", "libacme", "-", "terms"]);
    let printed: Value =
        serde_json::from_slice(&farrier(&["bundle", "inspect", file, "-o", "json"]).stdout).unwrap();
    let licenses = printed["licenses"].as_array().unwrap();
    let of_source = json!({"image": "three", "source": "s", "redistribute": "allowed"});
    assert!(licenses.len() == 5 && licenses.contains(&of_source), "{licenses:?}");
}
