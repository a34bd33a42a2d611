use std::{fmt::Write as _, fs};

use farrier_core::{
    image::{ImageName, RolloutSpec, SourceOrigin, VersionSpec},
    kernel::{Architecture, KernelTarget, missing_headers_message},
};

use super::*;

const IMAGE: &str = r#"apiVersion: farrier.dev/v1alpha1
kind: DriverImage
metadata: {name: mstflint}
spec:
  version: {source: mstflint}
  template: kbuild
  sources:
    - name: mstflint
      from: {apt: {package: mstflint-dkms, suites: [sid]}}
      subdir: usr/src/mstflint-*
  nodes: {matchLabels: {feature.node.kubernetes.io/pci-15b3.present: "true"}}
  kernels: ">=4.18"
  modules: [mstflint_access]
  runtime: {entrypoint: [sleep, infinity], base: {bootstrap: {suite: bookworm, include: [kmod]}}}
  rollout:
    - {strategy: image, namespace: drivers, daemonSet: mstflint, container: driver}
    - {strategy: file, path: deploy/, namespace: drivers, daemonSet: mstflint, container: driver}
  vars: {directory: ., makeArgs: ""}
"#;

const FAMILY: &str = r#"apiVersion: farrier.dev/v1alpha1
kind: KernelFamily
metadata: {name: acme}
spec:
  match: {os: acme, osVersion: "12", release: '\d+\.\d+\.\d+-acme', arch: amd64}
  headers: {apt: {packages: ["linux-headers-{{release}}"], suites: [bookworm, bookworm-security]}}
  toolchain: {bootstrap: {suite: bookworm, include: [gcc-12, make, kmod, libelf1, xz-utils, patch]}}
"#;

fn written(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

fn load_files(files: &[(&str, &str)]) -> Result<Definitions, DefinitionErrors> {
    load(Some(written(files).path()))
}

/// Returns the messages about an image that is made from [`IMAGE`] by replacing parts of it.
fn image_mistakes(replacements: &[(&str, &str)]) -> String {
    mistakes(&[("images/m.yaml", &replaced(IMAGE, replacements))])
}

fn family_mistakes(replacements: &[(&str, &str)]) -> String {
    mistakes(&[("kernels/a.yaml", &replaced(FAMILY, replacements))])
}

fn replaced(text: &str, replacements: &[(&str, &str)]) -> String {
    let mut text = text.to_owned();
    for (from, to) in replacements {
        assert!(text.contains(from), "{from}");
        text = text.replacen(from, to, 1);
    }
    text
}

fn mistakes(files: &[(&str, &str)]) -> String {
    load_files(files).unwrap_err().render()
}

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

#[test]
fn the_shipped_definitions_load() {
    let definitions = load(None).unwrap();
    assert!(definitions.images.contains_key(&name("mstflint")));
    assert!(definitions.images.contains_key(&name("nvidia-gpu")));
    assert!(definitions.templates.contains_key("kbuild"));
    assert!(definitions.families.iter().any(|family| family.metadata.name == name("debian-12")));
}

#[test]
fn the_documented_forms_load() {
    let definitions = load_files(&[("images/m.yaml", IMAGE), ("kernels/a.yaml", FAMILY)]).unwrap();
    assert_eq!(definitions.images.len(), 1, "only the directory's images are used");
    let spec = &definitions.images[&name("mstflint")].spec;
    assert!(matches!(&spec.sources[0].from, SourceOrigin::Apt(apt) if **apt.suites == ["sid"]));
    assert!(matches!(spec.rollout[..], [RolloutSpec::Image { .. }, RolloutSpec::File { .. }]));
    assert_eq!(definitions.families[0].metadata.name, name("acme"), "the directory's families come first");
    assert_eq!(definitions.families[0].spec.matches.os, ["acme"]);
    assert!(definitions.families.len() > 1, "the shipped families follow");
}

/// Regression: `farrier lint` accepted an image whose container could only print its usage.
#[test]
fn an_unknown_argument_of_the_entrypoint_is_a_mistake() {
    let with = |entrypoint: &str| replaced(IMAGE, &[("entrypoint: [sleep, infinity]", entrypoint)]);
    for good in ["entrypoint: [driver-entrypoint, generic, a]", "entrypoint: [nvidia-driver, init]"] {
        load_files(&[("images/m.yaml", &with(good))]).unwrap();
    }
    let told = |entrypoint: &str| mistakes(&[("images/m.yaml", &with(entrypoint))]);
    let misspelled = told("entrypoint: [/usr/bin/driver-entrypoint, genric]");
    assert!(
        misspelled.contains(r#"driver-entrypoint has no argument "genric"; did you mean "generic"?"#),
        "{misspelled}"
    );
    assert!(told("entrypoint: [driver-entrypoint]").contains("known: mofed, nvidia-driver,"));
}

/// The container would end with an error on every node, after a build and a check without one.
#[test]
fn a_mistyped_module_of_the_entrypoint_is_a_mistake() {
    let with = |arguments: &str| {
        let entrypoint = format!("entrypoint: [driver-entrypoint, generic, {arguments}]");
        let modules = "[mstflint_access, rdma_cm]";
        replaced(IMAGE, &[("entrypoint: [sleep, infinity]", &entrypoint), ("[mstflint_access]", modules)])
    };
    for good in [
        "mstflint-access, rdma_cm",
        // Also a module of the host, or another one of the payload.
        "rdma_cm, rdma_ucm, mstflint_access",
        "dummy",
        // The value of an option is a module of the host.
        "--replace, mstflint_acces, rdma_cm",
    ] {
        load_files(&[("images/m.yaml", &with(good))]).unwrap();
    }
    insta::assert_snapshot!(mistakes(&[("images/m.yaml", &with("--keep, mstflint_acess"))]), @r#"
    error: images/m.yaml:14:62: `modules` does not name "mstflint_acess"; did you mean "mstflint_access"?
      14 |   runtime: {entrypoint: [driver-entrypoint, generic, --keep, mstflint_acess], base: {bootstrap: {suite: bookworm, include: [kmod]}}}
         |                                                              ^
    1 mistake in the definitions
    "#);
}

#[test]
fn the_installer_of_a_base_is_one_of_the_sources() {
    let base = "base: {bootstrap: {suite: bookworm, include: [kmod]}}";
    let with = |runfile: &str| replaced(IMAGE, &[(base, &format!("base: {{runfile: {runfile}}}"))]);
    for good in ["mstflint", "{source: mstflint, graphics: true, archives: [mstflint]}"] {
        load_files(&[("images/m.yaml", &with(good))]).unwrap();
    }
    let told = |runfile: &str| mistakes(&[("images/m.yaml", &with(runfile))]);
    for wrong in ["nvidia", "{source: mstflint, archives: [nvidia]}"] {
        assert!(told(wrong).contains(r#""nvidia" is not among `sources`"#), "{}", told(wrong));
    }
}

#[test]
fn a_file_may_hold_several_documents_and_a_template_of_the_directory_wins() {
    let two = format!("{IMAGE}---\n{}", IMAGE.replace("{name: mstflint}", "{name: other}"));
    let files =
        [("images/m.yaml", two.as_str()), ("templates/kbuild.Dockerfile.hbs", "FROM {{toolchain}}\n")];
    let definitions = load_files(&files).unwrap();
    assert_eq!(definitions.images.len(), 2);
    assert_eq!(definitions.templates["kbuild"], "FROM {{toolchain}}\n");
}

#[test]
fn a_version_is_kept_as_it_is_written() {
    for version in ["1.10", "2024", "0x10", "1e3", "25.10-1.2.8.0-0", "no", "\"1.10\"", "007"] {
        let text = IMAGE.replace("{source: mstflint}", version);
        let definitions = load_files(&[("images/m.yaml", &text)]).unwrap();
        let expected = VersionSpec::Literal(version.trim_matches('"').parse().unwrap());
        assert_eq!(definitions.images[&name("mstflint")].spec.version, expected);
    }
}

#[test]
fn an_alias_is_followed() {
    let text = replaced(IMAGE, &[("suites: [sid]", "suites: &s [sid]"), ("[mstflint_access]", "*s")]);
    let definitions = load_files(&[("images/m.yaml", &text)]).unwrap();
    assert_eq!(definitions.images[&name("mstflint")].spec.modules, ["sid"]);
}

#[test]
fn unknown_fields_are_refused_everywhere() {
    let text = replaced(
        IMAGE,
        &[
            ("metadata: {name: mstflint}", "metadata: {name: mstflint, labels: {}}"),
            ("version: {source: mstflint}", "version: {source: mstflint, or: 1}"),
            ("suites: [sid]}", "suites: [sid], suit: x}"),
            ("  kernels:", "  kernel: x\n  kernels:"),
            ("matchLabels:", "matchExpressions: [], matchLabels:"),
            ("include: [kmod]", "include: [kmod], includes: []"),
            ("container: driver}", "container: driver, initContainer: x}"),
        ],
    );
    insta::assert_snapshot!(mistakes(&[("images/m.yaml", &text)]));
}

#[test]
fn unknown_fields_of_families_are_refused_everywhere() {
    insta::assert_snapshot!(family_mistakes(&[
        ("arch: amd64", "arch: amd64, flavor: x"),
        ("packages:", "package: x, packages:"),
        ("suite: bookworm", "suite: bookworm, suites: []"),
    ]));
}

#[test]
fn names_of_the_stores_repositories_are_taken() {
    for name in ["sources", "mirror", "builds"] {
        let message = image_mistakes(&[("{name: mstflint}\nspec", &format!("{{name: {name}}}\nspec"))]);
        let expected = format!("{name:?} is reserved for one of farrier's repositories");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn every_mistaken_value_is_reported_at_its_place() {
    let text = replaced(
        IMAGE,
        &[
            ("{name: mstflint}", "{name: Mst_Flint}"),
            ("template: kbuild", "template: ../kbuild"),
            ("{directory: ., makeArgs: \"\"}", "{\"a b\": x, c: \"x\\nRUN id\"}"),
            ("mstflint-dkms, suites: [sid]", "-oAPT::X, suites: [\"sid main\"]"),
            ("\"true\"", "\"a b\""),
            ("\">=4.18\"", "\">=four\""),
            ("[mstflint_access]", "[mstflint_access, mst.ko]"),
            ("[sleep, infinity]", "sleep infinity"),
            ("include: [kmod]", "include: [\"kmod;id\"]"),
            ("namespace: drivers", "namespace: Drivers"),
            ("strategy: file, path: deploy/", "strategy: file"),
            ("  rollout:", "  tags: [\"{{version}}-{{kernel}}\", \"-{{arch}}\"]\n  rollout:"),
        ],
    );
    insta::assert_snapshot!(mistakes(&[("images/m.yaml", &text)]));
}

#[test]
fn every_mistaken_value_of_a_family_is_reported_at_its_place() {
    insta::assert_snapshot!(family_mistakes(&[
        ("os: acme", "os: [acme, \"a b\"]"),
        (r"'\d+\.\d+\.\d+-acme'", r"'(\d+'"),
        ("arch: amd64", "arch: riscv64"),
        ("linux-headers-{{release}}", "linux-headers-{{relase}}"),
        ("bookworm-security]", "bookworm-security], mirror: \"http://a/ [trusted=yes]\""),
        ("include: [gcc-12,", "include: [gcc-12, --all,"),
    ]));
}

#[test]
fn missing_fields_are_named() {
    insta::assert_snapshot!(image_mistakes(&[("  template: kbuild\n", "")]), @r#"
    error: images/m.yaml:5:3: field "template" is missing
      5 |   version: {source: mstflint}
        |   ^
    1 mistake in the definitions
    "#);
    insta::assert_snapshot!(image_mistakes(&[("package: mstflint-dkms, ", ""), ("container: driver", "container: ''")]), @r#"
    error: images/m.yaml:9:19: field "package" is missing
      9 |       from: {apt: {suites: [sid]}}
        |                   ^
    error: images/m.yaml:16:77: "" is not a DNS label: up to 63 of `a-z`, `0-9` and `-`, a letter or digit at both ends
      16 |     - {strategy: image, namespace: drivers, daemonSet: mstflint, container: ''}
         |                                                                             ^
    2 mistakes in the definitions
    "#);
}

#[test]
fn what_the_check_does_and_what_may_be_reused() {
    let policy = "  template: kbuild\n  check: {unknown: maybe}\n";
    insta::assert_snapshot!(image_mistakes(&[("  template: kbuild\n", policy)]), @r#"
    error: images/m.yaml:7:20: unknown value "maybe"; known: allow, deny
      7 |   check: {unknown: maybe}
        |                    ^
    1 mistake in the definitions
    "#);
    let made = "  template: kbuild\n  output: image\n  reuse: compatible\n";
    insta::assert_snapshot!(image_mistakes(&[("  template: kbuild\n", made)]), @r#"
    error: images/m.yaml:8:10: an image that the engine makes (output: image) has its kernel's name in its layers; only a payload can be reused
      8 |   reuse: compatible
        |          ^
    1 mistake in the definitions
    "#);
}

#[test]
fn what_is_published_beside_the_image() {
    let known = "  template: kbuild\n  outputs: [deb, rpm]\n";
    insta::assert_snapshot!(image_mistakes(&[("  template: kbuild\n", known)]), @r#"
    error: images/m.yaml:7:18: unknown value "rpm"; known: deb, deb-meta, initramfs, sysext
      7 |   outputs: [deb, rpm]
        |                  ^
    1 mistake in the definitions
    "#);
    let made = "  template: kbuild\n  output: image\n  outputs: [deb]\n";
    insta::assert_snapshot!(image_mistakes(&[("  template: kbuild\n", made)]), @"
    error: images/m.yaml:8:12: an image that the engine makes (output: image) has no payload to make outputs from
      8 |   outputs: [deb]
        |            ^
    1 mistake in the definitions
    ");
}

#[test]
fn values_of_another_kind_are_told_apart() {
    insta::assert_snapshot!(image_mistakes(&[
        ("{name: mstflint}", ""),
        ("{source: mstflint}", "[1, 2]"),
        ("[mstflint_access]", "mstflint_access"),
        (
            "{apt: {package: mstflint-dkms, suites: [sid]}}",
            "{path: {path: a}, apt: {package: b, suites: [c]}}"
        ),
        ("{bootstrap: {suite: bookworm, include: [kmod]}}", "debian"),
        ("strategy: image", "strategy: images"),
    ]));
}

/// A text with an invalid form is reported while the file is read, before names are looked up.
#[test]
fn texts_must_have_their_form() {
    insta::assert_snapshot!(image_mistakes(&[
        (
            "      subdir:",
            "    - {name: second, from: {path: {path: x, sha256: abc}}}\n    - name: third\n      from: {path: {path: y}}\n      subdir:"
        ),
        ("usr/src/mstflint-*", "../*"),
        ("{bootstrap: {suite: bookworm, include: [kmod]}}", "{image: debian}"),
    ]));
}

#[test]
fn names_must_exist_and_be_unique() {
    insta::assert_snapshot!(image_mistakes(&[
        ("template: kbuild", "template: kbuidl"),
        ("{source: mstflint}", "{source: mstfilnt}"),
        (
            "      subdir:",
            "    - {name: mstflint, from: {path: {path: x}}}\n    - name: third\n      from: {path: {path: y}}\n      subdir:"
        ),
        ("[mstflint_access]", "[mstflint_access, mstflint_access]"),
    ]));
    insta::assert_snapshot!(family_mistakes(&[(
        "{bootstrap: {suite: bookworm, include: [gcc-12, make, kmod, libelf1, xz-utils, patch]}}",
        "{image: \"a b:1\"}"
    ),]));
    insta::assert_snapshot!(mistakes(&[("images/a.yaml", IMAGE), ("images/b.yaml", IMAGE)]), @r#"
    error: images/b.yaml:3:18: driver image "mstflint" is already defined in images/a.yaml
      3 | metadata: {name: mstflint}
        |                  ^
    1 mistake in the definitions
    "#);
    insta::assert_snapshot!(family_mistakes(&[("{name: acme}", "{name: debian-12}")]), @r#"
    error: kernels/10-debian-12.yaml:4:18: kernel family "debian-12" is already defined in kernels/a.yaml
      4 | metadata: {name: debian-12}
        |                  ^
    1 mistake in the definitions
    "#);
}

#[test]
fn a_definition_in_the_wrong_directory_is_told() {
    insta::assert_snapshot!(mistakes(&[(
        "images/a.yaml",
        "apiVersion: farrier.dev/v1\nkind: KernelFamily\n"
    )]));
}

/// Otherwise the file would be ignored, and the built-in images would be built instead.
#[test]
fn a_definition_beside_the_directories_is_told() {
    let site = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: site}\nspec: {}\n";
    let said = mistakes(&[("m.yaml", IMAGE), ("site.yml", site), ("kustomization.yaml", "resources: []\n")]);
    for file in ["m.yaml", "site.yml"] {
        assert!(
            said.contains(&format!("{file}: is not read here: driver images belong in images/")),
            "{said}"
        );
    }
    assert!(!said.contains("kustomization"), "{said}");
    assert!(load_files(&[("site.yaml", site)]).is_ok());
}

#[test]
fn text_that_is_no_yaml_is_refused_at_its_place() {
    insta::assert_snapshot!(mistakes(&[("images/a.yaml", "kind: DriverImage\nmetadata: {name: [x}\n")]));
    insta::assert_snapshot!(mistakes(&[("images/a.yaml", "kind: DriverImage\nkind: DriverImage\n")]));
}

#[test]
fn a_yaml_bomb_is_refused() {
    let mut bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (name, earlier) in ('b'..='j').zip('a'..) {
        let list = vec![format!("*{earlier}"); 10].join(", ");
        writeln!(bomb, "{name}: &{name} [{list}]").unwrap();
    }
    let errors = load_files(&[("images/bomb.yaml", &bomb)]).unwrap_err();
    assert_eq!(errors.0.len(), 1, "{}", errors.render());
    let deep = format!("a: {}", "[".repeat(100_000));
    assert_eq!(load_files(&[("images/deep.yaml", &deep)]).unwrap_err().0.len(), 1);
}

#[test]
fn mistakes_of_all_files_are_reported_together() {
    let errors = load_files(&[
        ("images/a.yaml", "x"),
        ("images/b.yaml", &IMAGE.replace("kbuild", "nonesuch")),
        ("kernels/c.yaml", "spec: ["),
        ("templates/d.Dockerfile.hbs", "FROM x\n{{#if arch}}\n"),
        ("templates/e.hbs", "FROM x\n"),
    ])
    .unwrap_err();
    let files: Vec<&str> = errors.0.iter().map(|error| error.file.as_str()).collect();
    let expected =
        ["templates/d.Dockerfile.hbs", "templates/e.hbs", "kernels/c.yaml", "images/a.yaml", "images/b.yaml"];
    assert_eq!(files, expected, "{}", errors.render());
}

#[test]
fn a_directory_that_is_not_there_is_a_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let errors = load(Some(&dir.path().join("nonesuch"))).unwrap_err();
    assert_eq!(errors.0[0].message, "there is no such directory");
}

#[test]
fn a_file_that_is_too_large_or_no_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("images")).unwrap();
    fs::write(dir.path().join("images/large.yaml"), vec![b' '; (1 << 20) + 1]).unwrap();
    fs::write(dir.path().join("images/binary.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    assert_eq!(load(Some(dir.path())).unwrap_err().0.len(), 2);
}

proptest::proptest! {
    /// Any value at any place gives mistakes, and never a panic or an endless loop.
    #[test]
    fn no_document_panics(line in 0usize..17, text in "[\\[\\]{}:,*&!|>'\"#%@a-z0-9 .~-]{0,24}") {
        let mut lines: Vec<&str> = IMAGE.lines().collect();
        lines[line] = &text;
        let file = File { name: "images/a.yaml".to_owned(), text: lines.join("\n") };
        let mut errors = Vec::new();
        let _ = parse::<DriverImage>(&file, &mut errors);
        let rendered = DefinitionErrors(errors).render();
        proptest::prop_assert!(!rendered.is_empty());
    }
}

#[test]
fn a_template_is_tried_with_the_variables_of_its_image() {
    let misspelt = "FROM {{toolchain}}\n{{#each patches}}x{{/each}}\nRUN {{kernel.relase}}\n";
    insta::assert_snapshot!(mistakes(&[("images/m.yaml", IMAGE), ("templates/kbuild.Dockerfile.hbs", misspelt)]), @r#"
    error: templates/kbuild.Dockerfile.hbs:3:1: there is no variable kernel.relase for driver image "mstflint"
      3 | RUN {{kernel.relase}}
        | ^
    1 mistake in the definitions
    "#);
    insta::assert_snapshot!(image_mistakes(&[("directory: ., ", "")]), @r#"
    error: images/m.yaml:18:9: template kbuild needs directory; add `directory: ""`, or its value
      18 |   vars: {makeArgs: ""}
         |         ^
    1 mistake in the definitions
    "#);
}

/// Returns the messages about images in one file, each with its needs and additional specification.
fn chain_mistakes(images: &[(&str, &str, &str)]) -> String {
    let image = |(name, needs, more): &(&str, &str, &str)| {
        format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: {name}}}\nspec:\n  version: \"1\"\n  \
             template: kbuild\n  vars: {{directory: ., makeArgs: \"\"}}\n  sources:\n    \
             - {{name: src, from: {{path: {{path: src}}}}}}\n  needs: {needs}\n  {more}\n"
        )
    };
    let text: Vec<String> = images.iter().map(image).collect();
    mistakes(&[("images/chain.yaml", &text.join("---\n"))])
}

#[test]
fn a_circle_of_needs_is_spelt_out_once() {
    let exposes = "exposes: [/usr/src/x]";
    let text = chain_mistakes(&[
        ("nvidia-gpu", "[mofed]", exposes),
        ("mofed", "[nvidia-gpu]", exposes),
        ("peer", "[mofed]", ""),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn a_need_must_be_covered_by_an_image_that_exposes_something() {
    let exposes = "exposes: [/usr/src/x, /usr/src/x]";
    let text = chain_mistakes(&[
        ("mofed", "[]", exposes),
        ("silent", "[]", ""),
        ("engine", "[mofed]", "output: image"),
        ("peer", "[mofed, silent, mofed, nobody, peer, engine, {name: silent, tree: host}]", ""),
        ("booted", "[{name: mofed, tree: host}, nvidia-gpu]", "check: {boot: true}"),
        ("loud", "[]", "output: image\n  exposes: [/usr/src/y]"),
        ("lent", "[mofed]", "reuse: compatible\n  exposes: [/usr/src/y]"),
        (
            "high",
            "[mofed]",
            "runtime: {base: {need: silent}}\n  tags: [\"{{needs.mofed}}-{{needs.silent}}\"]",
        ),
    ]);
    insta::assert_snapshot!(text);
}

#[test]
fn a_tree_of_the_user_needs_no_image_and_a_build_says_what_it_takes() {
    let text = IMAGE.replace(
        "  vars:",
        "  needs: [{name: mofed, tree: \"host/{{release}}\"}]\n  reuse: compatible\n  build: {cpus: 2, memory: 1.5Gi}\n  vars:",
    );
    let definitions = load_files(&[("images/m.yaml", &text)]).unwrap();
    let spec = &definitions.images[&name("mstflint")].spec;
    assert_eq!(spec.build.cpus.thousandths(), 2000);
    assert_eq!(spec.build.memory.bytes(), 3 << 29);
    let told = image_mistakes(&[("  vars:", "  build: {cpus: 0, memory: 2 GB}\n  vars:")]);
    insta::assert_snapshot!(told);
}

#[test]
fn mistakes_of_a_site_are_reported_at_their_places() {
    let site = r#"apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: here}
spec:
  mirrors:
    - {from: debian, to: [r.example]}
    - {from: docker.io, to: []}
    - {from: quay.io, to: [r.example]}
  proxy: {http: "proxy.example:3128", noProxy: [10.0.0.0/99]}
  hosts:
    - {host: "https://r.example"}
  credentials:
    - {basic: {registry: "https://r.example", user: x, password: {file: p}}}
"#;
    insta::assert_snapshot!(mistakes(&[("site.yaml", site)]));
    let together = r#"apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: here}
spec:
  mirrors:
    - {from: quay.io/a, to: ["https://r.example/a"]}
    - {from: quay.io/a/, to: [r.example]}
    - {from: "https://quay.io/", to: [r.example]}
  hosts:
    - {host: r.example, clientCertificate: c.pem}
    - {host: R.example}
    - {host: s.example, clientKey: {file: k.pem}}
    - {host: t.example, plainHttp: true, caFile: ca.pem}
  moduleSigning: {key: {file: modules.pem}, certificate: modules.crt}
"#;
    insta::assert_snapshot!(mistakes(&[("site.yaml", together)]));
}

mod reading;
mod site;

#[test]
fn a_built_in_family_names_the_rest_of_a_release() {
    let families = load(None).unwrap().families;
    for (os, os_version, release, ending) in [
        ("debian", "12", "6.1.0-57", "-amd64"),
        ("ubuntu", "24.04", "6.8.0-45", "-generic"),
        ("rhel", "9.5", "5.14.0-503.11.1.el9_5", ".x86_64"),
        ("ol", "9.6", "6.12.0-100.28.2.el9uek", ".x86_64"),
        ("fedora", "42", "6.14.0-63.fc42", ".x86_64"),
        ("amzn", "2023", "6.1.112-122.189.amzn2023", ".x86_64"),
        ("openEuler", "24.03", "6.6.0-72.0.0.76.oe2403sp1", ".x86_64"),
        ("sles", "15.6", "6.4.0-150600.23.60", "-default"),
        ("opensuse-leap", "16.0", "6.12.0-160000.5", "-default"),
        // These releases are whole.
        ("azurelinux", "3.0", "6.6.57.1-2.azl3", ""),
        ("rhel", "9.5", "5.14.0-503.11.1.el9_5.x86_64+rt", ""),
    ] {
        let target = KernelTarget {
            os: os.parse().unwrap(),
            os_version: os_version.parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let message = missing_headers_message(&families, &target, "x");
        let suggestion = message.split("(did you mean ").nth(1).map(|rest| rest.split("?)").next().unwrap());
        let expected = Some(format!("{release}{ending}")).filter(|_| !ending.is_empty());
        assert_eq!(suggestion, expected.as_deref(), "{os}: {message}");
    }
}
