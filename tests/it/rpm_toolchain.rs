//! Toolchains from RPM packages: libsolv's choices from repositories behind a client certificate, compared with dnf's choices,
//! and the resulting layer. `rpm.rs` compiles with such a toolchain.
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::{Architecture, Toolchain};
use farrier_inputs::{FetchError, PackageRoot};
use oci::error_chain;
use serde_json::json;

use crate::{
    rpm::{ROCKY, World, archive, target},
    support::{
        packages::run,
        rpm_repository::{SigningKey, StandIn, index},
    },
    toolchain::in_layer,
};

/// The packages of Debian's compiler that a build calls, as RPM packages. Their dependencies pull in the rest.
pub const COMPILER: [&str; 20] = [
    "bash",
    "binutils",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "gcc",
    "gcc-12",
    "grep",
    "gzip",
    "kmod",
    "libc6-dev",
    "libelf1",
    "make",
    "mawk",
    "patch",
    "perl-base",
    "sed",
    "tar",
    "xz-utils",
];

/// Enabled module streams, by module.
type Streams<'a> = &'a [(&'a str, &'a str)];

fn root(packages: &[&str], repositories: &[&str], streams: Streams<'_>) -> PackageRoot {
    let from = archive(repositories, "packages");
    let streams: BTreeMap<&str, &str> = streams.iter().copied().collect();
    let spec = json!({"rpm": {"packages": packages, "from": from, "moduleStreams": streams}});
    let toolchain: Toolchain = serde_json::from_value(spec).unwrap();
    PackageRoot::of_toolchain(&toolchain, &target(ROCKY)).unwrap()
}

/// Builds the toolchain's layer without a cache.
async fn layer(world: &World, packages: &[&str], repositories: &[&str]) -> Result<PathBuf, FetchError> {
    layer_with(world, packages, repositories, &[]).await
}

async fn layer_with(
    world: &World,
    packages: &[&str],
    repositories: &[&str],
    streams: Streams<'_>,
) -> Result<PathBuf, FetchError> {
    let root = root(packages, repositories, streams);
    Ok(world.fetcher().root_fs().bootstrap(&root, Architecture::Amd64).await?.file)
}

/// Returns the packages in a layer as `name-version.arch`.
fn packages(layer: &Path) -> BTreeSet<String> {
    let list = in_layer(layer, "var/lib/rpmmanifest/container-manifest-2");
    let line = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        format!("{}-{}.{}", fields[0], fields[1], fields[7])
    };
    String::from_utf8(list).unwrap().lines().map(line).collect()
}

async fn chosen(world: &World, names: &[&str], repositories: &[&str]) -> BTreeSet<String> {
    match layer(world, names, repositories).await {
        Ok(layer) => packages(&layer),
        Err(error) => panic!("{}", error_chain(&error)),
    }
}

/// Returns the packages that dnf would install from these repositories into an empty root.
fn dnf(world: &World, names: &[&str], repositories: &[&str]) -> BTreeSet<String> {
    dnf_with(world, names, repositories, &[])
}

/// Returns the packages that dnf would install with these streams enabled.
fn dnf_with(world: &World, names: &[&str], repositories: &[&str], streams: Streams<'_>) -> BTreeSet<String> {
    let work = tempfile::tempdir().unwrap();
    let modules = work.path().join("root/etc/dnf/modules.d");
    std::fs::create_dir_all(&modules).unwrap();
    for (module, stream) in streams {
        let text = format!("[{module}]\nname={module}\nstream={stream}\nprofiles=\nstate=enabled\n");
        std::fs::write(modules.join(format!("{module}.module")), text).unwrap();
    }
    let mut dnf = Command::new("dnf");
    dnf.args(["--quiet", "--assumeyes", "--nogpgcheck", "--releasever=9", "--setopt=reposdir=/var/empty"])
        .args([
            "--setopt=install_weak_deps=False",
            "--setopt=keepcache=True",
            "--setopt=module_platform_id=platform:el8",
        ])
        .arg(format!("--setopt=cachedir={}", work.path().join("cache").display()))
        .arg(format!("--installroot={}", work.path().join("root").display()));
    for repository in repositories {
        let place = world.served(repository.trim_end_matches('/'));
        dnf.arg(format!("--repofrompath={},file://{}", repository.replace('/', "_"), place.display()));
    }
    let downloads = work.path().join("downloads");
    dnf.args(["install", "--downloadonly", "--downloaddir"]).arg(&downloads).args(names);
    run(&mut dnf);
    let files =
        std::fs::read_dir(downloads).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    files.map(|name| name.strip_suffix(".rpm").unwrap().to_owned()).collect()
}

/// Writes signed and indexed stand-ins, each given as `name version`, its provides, its requires, and one file.
fn stand_ins(world: &World, repository: &str, all: &[(&str, &str, &str, &str)]) {
    let packages: Vec<PathBuf> = all
        .iter()
        .map(|(package, provides, requires, file)| {
            let (name, version) = package.split_once(' ').unwrap();
            let files = vec![((*file).to_owned(), format!("{package}\n"))];
            let stand_in = StandIn { name, version, release: "1", provides, requires, files };
            stand_in.build(&world.served(repository).join("Packages"))
        })
        .collect();
    world.key.sign_packages(&packages);
    index(&world.served(repository), "xz", "sha256");
}

#[tokio::test]
async fn a_real_compiler_is_chosen_as_dnf_chooses_it() {
    let world = World::new();
    world.add_made("ci/toolchain-rpms", "toolchain-rpms", "toolchain");
    let made = layer(&world, &COMPILER, &["toolchain/"]).await.map_err(|error| error_chain(&error)).unwrap();
    let found = packages(&made);
    assert_eq!(found, dnf(&world, &COMPILER, &["toolchain/"]));
    assert!(found.iter().any(|package| package.starts_with("libmpfr6-")), "libraries of cc1: {found:?}");
    // Files that package scripts would create, and the links of `filesystem`.
    let list = run(Command::new("tar").arg("-tvf").arg(&made));
    for name in
        ["bin -> usr/bin", "usr/sbin -> bin", "usr/bin/ld -> ld.bfd", "usr/bin/cc -> gcc", "etc/passwd"]
    {
        assert!(list.lines().any(|line| line.ends_with(&format!(" {name}"))), "{name} is not in the layer");
    }
    for line in list.lines() {
        let (permissions, rest) = line.split_once(' ').unwrap();
        assert!(rest.starts_with("0/0 ") && !permissions.contains(['s', 'S', 'c', 'b']), "{line}");
    }
    let again = layer(&world, &COMPILER, &["toolchain/"]).await.unwrap();
    assert!(
        std::fs::read(&made).unwrap() == std::fs::read(again).unwrap(),
        "the same packages give a different layer"
    );
}

/// The toolset's compiler is in RHEL's path for later compilers and takes precedence over the system's.
#[tokio::test]
async fn the_compiler_of_a_toolset_is_the_one_that_is_found() {
    let world = World::new();
    world.add_made("ci/toolchain-rpms", "toolchain-rpms", "toolchain");
    let names: Vec<&str> = COMPILER.into_iter().filter(|name| !name.starts_with("gcc")).collect();
    let names = [&names[..], &["gcc-toolset-12-gcc"]].concat();
    let made = layer(&world, &names, &["toolchain/"]).await.map_err(|error| error_chain(&error)).unwrap();
    assert!(
        !packages(&made).iter().any(|package| package.starts_with("gcc-12-12")),
        "the layer contains the system compiler"
    );
    let tree = tempfile::tempdir().unwrap();
    run(Command::new("tar").arg("-C").arg(tree.path()).arg("-xf").arg(&made));
    let compile = "printf 'int main(void) { return 42; }' > /tmp/x.c && gcc-12 -o /tmp/x /tmp/x.c && command -v gcc; /tmp/x; echo $?";
    let said = run(Command::new("chroot")
        .arg(tree.path())
        .args(["/bin/sh", "-c", compile])
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"));
    assert_eq!(said, "/usr/local/bin/gcc\n42\n");
}

#[tokio::test]
async fn what_cannot_be_chosen_names_the_package_and_the_requirement() {
    let world = World::new();
    stand_ins(
        &world,
        "os",
        &[
            ("gcc 11.5.0", "", "cpp = 11.5.0", "usr/bin/gcc"),
            ("cpp 11.5.0", "", "libmpc.so.3()(64bit)", "usr/bin/cpp"),
            ("make 4.3", "", "", "usr/bin/make"),
        ],
    );
    let refused = async |names: &[&str]| {
        let error = layer(&world, names, &["os/", "gone/"]).await.unwrap_err();
        assert!(!error.is_transient() && error.hint().unwrap().contains("add the repository"), "{error}");
        error.to_string()
    };
    let said = refused(&["gcc", "make"]).await;
    assert!(said.contains("nothing provides libmpc.so.3()(64bit) needed by cpp-11.5.0-1.x86_64"), "{said}");
    assert!(
        said.starts_with("cannot choose the packages of a toolchain of https://acme.invalid/os/: "),
        "{said}"
    );
    assert!(said.contains("/gone/ (missing)"), "{said}");
    let said = refused(&["make", "gcc99"]).await;
    assert!(said.contains("package gcc99 does not exist"), "{said}");

    // With the missing dependency, the selection is complete.
    stand_ins(&world, "os", &[("libmpc 1.2", "libmpc.so.3()(64bit)", "", "usr/lib64/libmpc.so.3")]);
    let found = chosen(&world, &["gcc"], &["os/"]).await;
    assert_eq!(found.len(), 3, "{found:?}");
}

#[tokio::test]
async fn choices_are_those_of_dnf() {
    let world = World::new();
    stand_ins(
        &world,
        "old",
        &[
            ("app 1", "", "editor", "usr/bin/app"),
            ("nano 7", "editor", "", "usr/bin/nano"),
            ("vim 9", "editor", "", "usr/bin/vim"),
            ("reader 1", "", "/usr/share/words", "usr/bin/reader"),
            ("words 1", "", "", "usr/share/words"),
            ("plain 1", "", "(extra if make)", "usr/bin/plain"),
            ("extra 1", "", "", "usr/bin/extra"),
            ("make 4.3", "", "/usr/bin/plain", "usr/bin/make"),
        ],
    );
    stand_ins(&world, "new", &[("make 4.4", "", "", "usr/bin/make"), ("words 2", "", "", "usr/share/words")]);
    let both = ["old/", "new/"];
    for (names, wanted) in [
        // Of two providers, the choice is deterministic; an explicitly named one wins.
        (&["app"][..], None),
        (&["app", "vim"][..], Some(&["app-1-1", "vim-9-1"][..])),
        // The file is in no list of `primary`. The newest package of all repositories wins.
        (&["reader"][..], Some(&["reader-1-1", "words-2-1"][..])),
        (&["make"][..], Some(&["make-4.4-1"][..])),
        // A conditional dependency.
        (&["plain"][..], Some(&["plain-1-1"][..])),
        (&["plain", "make"][..], Some(&["extra-1-1", "make-4.4-1", "plain-1-1"][..])),
    ] {
        let found = chosen(&world, names, &both).await;
        assert_eq!(found, dnf(&world, names, &both), "{names:?}");
        if let Some(wanted) = wanted {
            let wanted: BTreeSet<String> = wanted.iter().map(|name| format!("{name}.x86_64")).collect();
            assert_eq!(found, wanted, "{names:?}");
        }
    }
}

/// Returns module metadata: two streams of perl, one of them the default, builds for either stream, and a module without a
/// default.
fn modules() -> String {
    let stream = |number: usize, (name, stream, requires, packages): (&str, &str, &str, &str)| {
        format!(
            "---\ndocument: modulemd\nversion: 2\ndata:\n  name: {name}\n  stream: '{stream}'\n  version: 1\n  \
             context: '{number:08}'\n  arch: x86_64\n  summary: s\n  description: d\n  license: {{module: [MIT]}}\n  \
             dependencies: [{{requires: {{platform: [el8]{requires}}}}}]\n  artifacts: {{rpms: [{packages}]}}\n...\n"
        )
    };
    let default = |name: &str, stream: &str| {
        format!(
            "---\ndocument: modulemd-defaults\nversion: 1\n\
             data: {{module: {name}, stream: '{stream}', profiles: {{'{stream}': []}}}}\n...\n"
        )
    };
    let streams = [
        ("perl", "5.26", "", "'perl-0:5.26-1.x86_64'"),
        ("perl", "5.32", "", "'perl-0:5.32-1.x86_64'"),
        ("perl-DBI", "1", ", perl: ['5.26']", "'perl-DBI-0:1.26-1.x86_64'"),
        ("perl-DBI", "1", ", perl: ['5.32']", "'perl-DBI-0:1.32-1.x86_64'"),
        ("tools", "rhel", "", "'make-0:9-1.x86_64', 'extra-0:1-1.x86_64'"),
    ];
    let streams = (1..).zip(streams).map(|(number, about)| stream(number, about));
    streams.chain([default("perl", "5.26"), default("perl-DBI", "1")]).collect()
}

#[tokio::test]
async fn of_a_module_the_default_stream_is_chosen_or_the_one_that_is_named() {
    let world = World::new();
    stand_ins(
        &world,
        "base",
        &[
            ("make 4.2", "", "", "usr/bin/make"),
            // A package outside any module that is newer than those in every stream.
            ("perl 5.36", "", "", "usr/bin/perl"),
        ],
    );
    stand_ins(
        &world,
        "app",
        &[
            ("perl 5.26", "", "", "usr/bin/perl"),
            ("perl 5.32", "", "", "usr/bin/perl"),
            ("perl-DBI 1.26", "", "perl = 5.26", "usr/share/dbi"),
            ("perl-DBI 1.32", "", "perl = 5.32", "usr/share/dbi"),
            ("make 9", "", "", "usr/bin/make"),
            ("extra 1", "", "", "usr/bin/extra"),
        ],
    );
    let file = world.definitions().join("modules.yaml");
    std::fs::write(&file, modules()).unwrap();
    let metadata = world.served("app/repodata");
    run(Command::new("modifyrepo_c").arg("--mdtype=modules").arg(&file).arg(&metadata));
    let both = ["base/", "app/"];
    for (names, streams, wanted) in [
        (&["perl", "make"][..], &[][..], &["make-4.2-1", "perl-5.26-1"][..]),
        (&["perl-DBI"], &[], &["perl-5.26-1", "perl-DBI-1.26-1"]),
        (&["perl-DBI"], &[("perl", "5.32")], &["perl-5.32-1", "perl-DBI-1.32-1"]),
        (&["make", "extra"], &[("tools", "rhel")], &["extra-1-1", "make-9-1"]),
    ] {
        let layer = layer_with(&world, names, &both, streams).await;
        let found = packages(&layer.map_err(|error| error_chain(&error)).unwrap());
        assert_eq!(found, dnf_with(&world, names, &both, streams), "{names:?} with {streams:?}");
        let wanted: BTreeSet<String> = wanted.iter().map(|name| format!("{name}.x86_64")).collect();
        assert_eq!(found, wanted, "{names:?} with {streams:?}");
    }
    let refused = async |names: &[&str], streams: Streams<'_>| {
        layer_with(&world, names, &both, streams).await.unwrap_err().to_string()
    };
    let said = refused(&["extra"], &[]).await;
    assert!(said.contains("extra"), "{said}");
    let said = refused(&["perl"], &[("perl", "5.99")]).await;
    assert!(said.contains("no repository has module stream perl:5.99"), "{said}");
}

#[tokio::test]
async fn a_package_that_is_not_signed_with_the_keys_is_in_no_toolchain() {
    let world = World::new();
    stand_ins(&world, "os", &[("gcc 11", "", "make", "usr/bin/gcc"), ("make 4.3", "", "", "usr/bin/make")]);
    SigningKey::new("stranger").sign_package(&world.served("os/Packages/make-4.3-1.x86_64.rpm"));
    index(&world.served("os"), "gz", "sha256");
    let error = layer(&world, &["gcc"], &["os/"]).await.unwrap_err();
    assert!(matches!(error, FetchError::Signature { .. }), "{}", error_chain(&error));
    assert!(error.to_string().contains("make-4.3-1.x86_64.rpm"), "{error}");
}
