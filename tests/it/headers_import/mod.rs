//! Header sets that users import: every supported form, every kind of defect, and the lookup afterwards.
mod bench;
pub mod published;
mod sent;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::UNIX_EPOCH,
};

use bench::{AARCH64, Bench, RELEASE, family, request, target};
use farrier_core::{image::Digest, kernel::Architecture};
use farrier_inputs::{FetchError, HeaderImport, HeaderLookup, ImportSource, Outcome, TreeError};
use farrier_store::{
    InputKind, NewInput, Store, header_tag,
    registry::{self, RegistryLocation, RegistryOptions},
};
use oci::Descriptor;

use crate::support::rpm_repository::pack;

#[tokio::test]
async fn the_same_content_is_the_same_set_whatever_it_came_in() {
    let bench = Bench::new();
    bench.tree("linux");
    let directory = bench.import(&[&bench.path("linux")]).await.unwrap();
    assert_eq!(directory.outcome, Outcome::New);
    assert_eq!(directory.headers.facts.symbols.as_ref().unwrap().len(), 1);
    assert_eq!(directory.headers.compiler.unwrap().to_string(), "gcc 12");
    let root = &directory.headers.root;
    assert_eq!(
        fs::read_link(root.join(format!("usr/lib/modules/{RELEASE}/build"))).unwrap(),
        Path::new(&format!("../../../src/linux-headers-{RELEASE}"))
    );
    let build = root.join(format!("usr/src/linux-headers-{RELEASE}"));
    assert_eq!(fs::metadata(build.join("Makefile")).unwrap().modified().unwrap(), UNIX_EPOCH);
    assert!(bench.path("linux/Makefile").is_file(), "the user's tree is unchanged");

    // The package that `make bindeb-pkg` builds.
    bench.tree(&format!("package/usr/src/linux-headers-{RELEASE}"));
    bench.link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("package/lib/modules/{RELEASE}/build"));
    bench.write("package/usr/share/doc/x/copyright", "");
    bench.write(
        "package/DEBIAN/control",
        "Package: x\nVersion: 1\nArchitecture: amd64\nMaintainer: x <x@example.com>\nDescription: x\n",
    );
    let deb = bench.path("x.deb");
    let made = Command::new("dpkg-deb").arg("-b").arg(bench.path("package")).arg(&deb).output().unwrap();
    assert!(made.status.success(), "{made:?}");

    let archives = [
        bench.tar(&["--mtime=@5", "--owner=7", "--sort=name"], "a.tar", "linux"),
        bench.tar(&["--gzip", "--mode=g+w"], "b.tar.gz", "linux"),
        bench.tar(&["--xz"], "c.tar.xz", "linux"),
        bench.tar(&["--zstd"], "d.tar.zst", "linux"),
        deb,
    ];
    for archive in archives {
        let imported = bench.import(&[&archive]).await.unwrap();
        assert_eq!(imported.outcome, Outcome::Known, "{}", archive.display());
        assert_eq!(imported.content, directory.content);
        assert_eq!(imported.headers.root, directory.headers.root);
    }
    bench.write("linux/include/linux/module.h", "struct other;\n");
    let error = bench.import(&[&bench.path("linux")]).await.unwrap_err();
    assert!(error.to_string().contains(" has other headers, with content sha256:"), "{error}");
    assert!(error.hint().unwrap().contains("--replace"));
    let request = HeaderImport { replace: true, ..request(&[&bench.path("linux")]) };
    let replaced = bench.fetcher("cache").headers().import(request).await.unwrap();
    assert_eq!(replaced.outcome, Outcome::Replaced);
    assert_ne!(replaced.content, directory.content);
}

#[tokio::test]
async fn a_separate_build_directory_and_its_sources_become_one_tree() {
    let bench = Bench::new();
    bench.write("src/Makefile", "VERSION = 6\n");
    bench.write("src/init/main.c", "");
    bench.write("src/drivers/net/dummy.c", "");
    bench.write("src/include/linux/module.h", "struct module;\n");
    bench.write("src/arch/x86/Makefile", "");
    bench.write("src/scripts/Makefile.build", "");
    bench.write("src/scripts/gdb/vmlinux-gdb.py", "");
    bench.configured("obj");
    bench.write("obj/.config", "");
    bench.write("obj/vmlinux", "much");
    bench.write("obj/certs/signing_key.pem", "PRIVATE KEY");
    bench.write("obj/scripts/basic/fixdep.o", "");
    let src = bench.path("src").canonicalize().unwrap();
    bench.write("obj/Makefile", format!("# Automatically generated\ninclude {}/Makefile\n", src.display()));
    bench.link(src.to_str().unwrap(), "obj/source");
    bench.link(&format!("{}/scripts/gdb/vmlinux-gdb.py", src.display()), "obj/scripts/gdb/vmlinux-gdb.py");
    bench.link(&format!("{}/scripts/gdb/vmlinux-gdb.py", src.display()), "obj/scripts/gdb/again.py");
    let (obj_tar, src_tar) = (bench.tar(&[], "obj.tar", "obj"), bench.tar(&[], "src.tar", "src"));

    // Import only the build directory, whose source tree is on this machine.
    let together = bench.import(&[&bench.path("obj")]).await.unwrap();
    let build = together.headers.root.join(format!("usr/src/linux-headers-{RELEASE}"));
    assert_eq!(fs::read_to_string(build.join("Makefile")).unwrap(), "VERSION = 6\n");
    for file in
        [".config", "Module.symvers", "include/linux/module.h", "scripts/Makefile.build", "arch/x86/Makefile"]
    {
        assert!(build.join(file).is_file(), "{file}");
    }
    for file in ["vmlinux", "certs", "drivers", "init", "source", "scripts/basic/fixdep.o"] {
        assert!(fs::symlink_metadata(build.join(file)).is_err(), "{file}");
    }
    assert_eq!(fs::read_link(build.join("scripts/gdb/again.py")).unwrap(), Path::new("vmlinux-gdb.py"));

    // The source tree is no longer at its original path.
    fs::rename(bench.path("src"), bench.path("moved")).unwrap();
    let error = bench.refused(&obj_tar).await;
    assert!(error.to_string().ends_with("/src is not among the sources"), "{error}");
    for sources in [[&*obj_tar, &*src_tar], [&*src_tar, &*obj_tar]] {
        let apart = bench.fetcher("other").headers().import(request(&sources)).await.unwrap();
        assert_eq!(apart.content, together.content);
    }
}

#[tokio::test]
async fn modules_without_headers_are_told_apart() {
    let bench = Bench::new();
    bench.link("/home/me/linux", &format!("packed/lib/modules/{RELEASE}/build"));
    bench.write(&format!("packed/lib/modules/{RELEASE}/kernel/x.ko"), "");
    let packed = bench.tar(&[], "linux-6.1.192-x86.tar", "packed");
    let error = bench.refused(&packed).await;
    assert!(error.to_string().ends_with("build points to /home/me/linux, which does not exist"), "{error}");
    assert!(error.hint().unwrap().contains("make tar-pkg"));
    bench.tree("linux");
    bench.import(&[&packed, &bench.path("linux")]).await.unwrap();
}

/// Writes headers below `host` as Debian's packages install them on a node, and returns the build directory.
fn debian_node(bench: &Bench) -> String {
    let (build, common) =
        (format!("host/usr/src/linux-headers-{RELEASE}"), "host/usr/src/linux-headers-common");
    bench.configured(&build);
    bench.write(&format!("{build}/Makefile"), "include /usr/src/linux-headers-common/Makefile\n");
    bench.write(&format!("{common}/Makefile"), "VERSION = 6\n");
    fs::create_dir_all(bench.path("host/usr/lib/linux-kbuild-6.1")).unwrap();
    fs::rename(bench.path(&format!("{build}/scripts")), bench.path("host/usr/lib/linux-kbuild-6.1/scripts"))
        .unwrap();
    bench.link("../../lib/linux-kbuild-6.1/scripts", &format!("{build}/scripts"));
    bench.link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("host/lib/modules/{RELEASE}/build"));
    bench.link("/usr/src/linux-headers-common", &format!("host/lib/modules/{RELEASE}/source"));
    build
}

fn node_of(root: PathBuf) -> HeaderImport {
    HeaderImport { sources: vec![ImportSource::Node(root)], ..request(&[]) }
}

/// Returns the node directories that a manifest mounts: `hostPath: {path: X,`, or the chart's `hostPaths: [X, Y]`.
fn mounted(manifest: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest)).unwrap();
    let list = text.split("hostPaths: [").skip(1).filter_map(|rest| rest.split(']').next());
    let single = text.split("hostPath: {path: ").skip(1).filter_map(|rest| rest.split([',', '}']).next());
    list.flat_map(|paths| paths.split(", ")).chain(single).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_job_that_collects_headers_sees_what_debians_packages_link_to() {
    let bench = Bench::new();
    debian_node(&bench);
    for manifest in
        ["deploy/kustomize/components/collect-headers/job.yaml", "deploy/chart/farrier/values.yaml"]
    {
        let pod = tempfile::tempdir().unwrap();
        for path in mounted(manifest) {
            let (from, to) = (bench.path(&format!("host{path}")), pod.path().join(&path[1..]));
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success(), "{path}");
        }
        let collected = bench.fetcher("cache").headers().import(node_of(pod.path().to_owned())).await;
        let tools = collected.unwrap_or_else(|error| panic!("{manifest}: {error}")).headers.root;
        assert!(tools.join("usr/lib/linux-kbuild-6.1/scripts/mod/modpost").is_file(), "{manifest}");
    }
}

#[tokio::test]
async fn a_node_has_what_its_packages_link_to() {
    let bench = Bench::new();
    let build = debian_node(&bench);
    bench.write("host/usr/src/other/secret", "");
    bench.write("host/etc/shadow", "secret");
    let node = node_of(bench.path("host"));
    let imported = bench.with_store("cache").headers().import(node.clone()).await.unwrap();
    let root = &imported.headers.root;
    assert!(root.join("usr/lib/linux-kbuild-6.1/scripts/mod/modpost").is_file());
    assert_eq!(
        fs::read_link(root.join(format!("usr/lib/modules/{RELEASE}/source"))).unwrap(),
        Path::new("../../../src/linux-headers-common")
    );
    assert!(!root.join("usr/src/other").exists() && !root.join("etc").exists());
    let known = bench.with_store("other").headers().import(node.clone()).await.unwrap();
    assert_eq!(known.outcome, Outcome::Known);

    bench.link("/etc/shadow", &format!("{build}/include/shadow"));
    let error = bench.fetcher("third").headers().import(node).await.unwrap_err();
    assert!(
        error.to_string().ends_with("it points to /etc/shadow, which is not part of the header set"),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_not_this_kernels_header_set_is_refused() {
    let bench = Bench::new();
    bench.tree("linux");
    let write = |path: &str, text: &str| bench.write(&format!("linux/{path}"), text);
    let linux = bench.path("linux");

    write("include/generated/utsrelease.h", "#define UTS_RELEASE \"6.1.192-acme+\"\n");
    let error = bench.refused(&linux).await;
    assert!(matches!(&error, FetchError::Tree(TreeError::Release { .. })), "{error}");
    bench.configured("linux");

    write("include/config/auto.conf", "CONFIG_CC_VERSION_TEXT=\"gcc (GCC) 12.2.0\"\nCONFIG_ARM64=y\n");
    assert!(matches!(bench.refused(&linux).await, FetchError::Tree(TreeError::Architecture(..))));
    write("include/config/auto.conf", "CONFIG_X86_64=y\n");
    let error = bench.refused(&linux).await;
    assert!(
        error.to_string().starts_with("cannot find CONFIG_CC_VERSION_TEXT in the configuration"),
        "{error}"
    );
    bench.configured("linux");

    bench.program("linux/scripts/mod/modpost", AARCH64);
    let error = bench.refused(&linux).await;
    assert_eq!(
        error.to_string(),
        "cannot run scripts/mod/modpost of the header set on amd64: it is a program for arm64"
    );
    assert!(error.hint().unwrap().contains("make modules_prepare"));
    fs::remove_file(linux.join("scripts/mod/modpost")).unwrap();
    let error = bench.refused(&linux).await;
    assert!(error.to_string().starts_with("cannot find scripts/mod/modpost in the header set"), "{error}");
    bench.configured("linux");

    fs::remove_file(linux.join("Module.symvers")).unwrap();
    let imported = bench.with_store("cache").headers().import(request(&[&linux])).await.unwrap();
    assert!(imported.headers.facts.symbols.is_none());
    let notes = imported.stored.unwrap().annotations;
    assert_eq!(notes["farrier.dev/exported-symbols"], "none");
}

#[tokio::test]
async fn links_that_lead_out_are_refused() {
    let bench = Bench::new();
    bench.tree("linux");
    for target in ["/etc/passwd", "../../../../../../../../../../../../etc/passwd", "../../../elsewhere"] {
        bench.link(target, "linux/include/linux/out.h");
        for source in [bench.tar(&[], "out.tar", "linux"), bench.path("linux")] {
            let error = bench.refused(&source).await;
            let said = format!(": it points to {target}, which is not part of the header set");
            assert!(error.to_string().ends_with(&said), "{error}");
        }
    }
}

/// Writes an archive of one entry.
fn archive(bench: &Bench, kind: tar::EntryType, name: &str, size: u64) -> PathBuf {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o644);
    let mut builder = tar::Builder::new(Vec::new());
    let path = bench.path("bad.tar.gz");
    if name.len() > 100 {
        builder.append_data(&mut header, name, std::io::empty()).unwrap();
    } else {
        header.set_path(name).unwrap();
        header.set_cksum();
        builder.append(&header, std::io::empty()).unwrap();
    }
    let mut gzip =
        flate2::write::GzEncoder::new(fs::File::create(&path).unwrap(), flate2::Compression::fast());
    gzip.write_all(&builder.into_inner().unwrap()).unwrap();
    gzip.finish().unwrap();
    path
}

#[tokio::test]
async fn hostile_and_damaged_archives_leave_nothing() {
    let bench = Bench::new();
    for kind in [tar::EntryType::Char, tar::EntryType::Block, tar::EntryType::Fifo] {
        let error = bench.refused(&archive(&bench, kind, "linux/dev", 0)).await;
        let text = error.hint().unwrap();
        assert!(text.starts_with("only files, directories and links"), "{text}");
    }
    let levels = format!("{}x", "d/".repeat(100_000));
    let bomb = archive(&bench, tar::EntryType::Regular, "linux/include/zeros", 5 << 30);
    let error = bench.refused(&bomb).await;
    assert_eq!(
        std::error::Error::source(&error).unwrap().to_string(),
        "archive contains more than 4294967296 bytes"
    );
    assert!(error.hint().unwrap().contains("tar --exclude"));
    // Entries that the import would skip count toward the limit, too.
    let error = bench.refused(&archive(&bench, tar::EntryType::Regular, "linux/zeros.o", 40 << 30)).await;
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("including skipped content"));
    let error = bench.refused(&archive(&bench, tar::EntryType::Regular, &levels, 0)).await;
    assert_eq!(
        std::error::Error::source(&error).unwrap().to_string(),
        "archive contains more than 64 nested directories"
    );

    bench.tree("linux");
    let whole = bench.tar(&["--gzip"], "whole.tar.gz", "linux");
    let bytes = fs::read(&whole).unwrap();
    for cut in [bytes.len() / 2, bytes.len() - 1] {
        fs::write(&whole, &bytes[..cut]).unwrap();
        let error = bench.refused(&whole).await;
        assert!(matches!(error, FetchError::Unpack(..)), "{error}");
    }
    let error = bench.refused(&bench.path("absent")).await;
    assert!(error.to_string().ends_with("absent: there is no such file or directory"), "{error}");
    // A path of 100,000 levels exceeds PATH_MAX, so this directory has only 70 levels.
    bench.write(&format!("linux/include/{}x", "d/".repeat(70)), "");
    let error = bench.refused(&bench.path("linux")).await;
    assert!(error.to_string().contains("64 nested directories"), "{error}");
}

#[tokio::test]
async fn everybody_finds_what_the_store_has() {
    let bench = Bench::new();
    bench.tree("linux");
    let first = bench.with_store("one");
    let missing = first.headers().find(&family(), &target()).await.unwrap();
    let HeaderLookup::Missing { hint, .. } = missing else { panic!("found") };
    assert!(hint.contains("farrier headers import") && hint.contains("farrier headers collect"), "{hint}");
    // A cached result on one machine must not change an input hash: all machines must use the same headers.
    let third = bench.with_store("three").with_definitions(PathBuf::from("/nowhere"));
    let identity_for_third =
        async || Ok::<_, FetchError>(third.headers().identity(&family(), &target()).await?.identity);
    let absent = third.headers().identity(&family(), &target()).await.unwrap();
    assert!(absent.missing.as_ref().is_some_and(|file| file.starts_with("/nowhere/")), "{absent:?}");

    let imported = first.headers().import(request(&[&bench.path("linux")])).await.unwrap();
    let stored = imported.stored.unwrap();
    // A second machine, whose family alone would not find the headers.
    let second = bench.with_store("two");
    let identity = second.headers().identity(&family(), &target()).await.unwrap().identity;
    assert_eq!(identity.as_deref(), Some(imported.content.hex()));
    let found = second.headers().find(&family(), &target()).await.unwrap();
    let HeaderLookup::Found(found) = found else { panic!("missing") };
    assert_eq!((&found.identity, identity_for_third().await.unwrap()), (&identity, identity.clone()));
    assert_eq!(found.origin, ["directory linux"]);
    let built =
        |root: &Path| fs::read(root.join(format!("usr/lib/modules/{RELEASE}/build/Module.symvers"))).unwrap();
    assert_eq!(built(&found.root), built(&imported.headers.root));

    let again = second.headers().import(request(&[&bench.tar(&[], "x.tar", "linux")])).await.unwrap();
    assert_eq!((again.outcome, again.stored.unwrap().digest), (Outcome::Known, stored.digest.clone()));

    bench.write("linux/include/linux/module.h", "struct other;\n");
    let error = second.headers().import(request(&[&bench.path("linux")])).await.unwrap_err();
    assert!(error.to_string().contains(" has other headers, with content sha256:"), "{error}");
    let replace = HeaderImport { replace: true, ..request(&[&bench.path("linux")]) };
    let replaced = second.headers().import(replace).await.unwrap();
    assert_eq!(replaced.outcome, Outcome::Replaced);
    let identity = first.headers().identity(&family(), &target()).await.unwrap().identity;
    assert_eq!(identity.as_deref(), Some(replaced.content.hex()));
    assert_eq!(identity_for_third().await.unwrap(), identity);
    let listed = first.headers().list_store().await.unwrap();
    assert_eq!((listed.len(), listed[0].exported_symbols), (1, Some(1)));
    assert_eq!(listed[0].release, RELEASE);
}

/// Pushes a layer under the tag where farrier looks for the release's header set.
async fn put(bench: &Bench, layer: &[u8], notes: &[(&str, &str)]) {
    bench.write("layer", layer);
    let location = RegistryLocation::Layout(bench.path("registry"));
    let registry = registry::connect(&location, &RegistryOptions::default());
    let tag = header_tag(&RELEASE.parse().unwrap(), Architecture::Amd64).unwrap();
    let digest = Digest::of(layer);
    let layer = Descriptor::new("x/y", digest, layer.len() as u64);
    let annotations = notes.iter().map(|(key, value)| (format!("farrier.dev/{key}"), (*value).to_owned()));
    let file = bench.path("layer");
    let item = NewInput {
        kind: InputKind::Headers,
        tag: &tag,
        file: &file,
        layer: &layer,
        annotations: annotations.collect(),
        replace: true,
    };
    Store::new(location, registry).put(&item).await.unwrap();
}

#[tokio::test]
async fn a_store_that_lies_is_not_believed() {
    let bench = Bench::new();
    put(&bench, b"x", &[("kernel-release", "6.1.0\u{1b}[2J")]).await;
    let fetcher = bench.with_store("cache");
    let error = fetcher.headers().identity(&family(), &target()).await.unwrap_err();
    assert!(matches!(&error, FetchError::StoredHeaders { .. }), "{error}");
    assert!(error.to_string().contains("its annotation farrier.dev/kernel-release holds"), "{error}");
    assert!(!error.to_string().contains('\u{1b}'));

    bench.tree("linux");
    let layer = fs::read(bench.tar(&[], "linux.tar", "linux")).unwrap();
    let stated = Digest::of(b"other");
    let notes =
        [("kernel-release", RELEASE), ("architecture", "amd64"), ("headers-content", stated.as_str())];
    put(&bench, &layer, &notes).await;
    let error = fetcher.headers().find(&family(), &target()).await.unwrap_err();
    assert!(matches!(&error, FetchError::StoredHeaders { .. }), "{error}");
    assert!(error.to_string().contains("their content is sha256:"), "{error}");
    assert_eq!(fs::read_dir(bench.path("cache/headers")).unwrap().count(), 0);
}

#[tokio::test]
async fn rpm_packages_are_imported() {
    let bench = Bench::new();
    let build = format!("usr/src/kernels/{RELEASE}");
    bench.tree(&format!("devel/{build}"));
    bench.link(&format!("/{build}"), &format!("devel/usr/lib/modules/{RELEASE}/build"));
    let package = bench.path("kernel-devel.rpm");
    pack(&bench.path("devel"), "Name: kernel-devel\nVersion: 1\nRelease: 1\n", &package);
    let imported = bench.with_store("cache").headers().import(request(&[&package])).await.unwrap();
    let root = &imported.headers.root;
    assert!(root.join(&build).join("include/linux/module.h").is_file());
    assert_eq!(
        fs::read_link(root.join(format!("usr/lib/modules/{RELEASE}/build"))).unwrap(),
        Path::new("../../../src/kernels").join(RELEASE)
    );
    assert_eq!(imported.headers.facts.symbols.as_ref().unwrap().len(), 1);
    // The payload's compression does not affect the content.
    let same = bench.fetcher("other").headers().import(request(&[&bench.path("devel")])).await.unwrap();
    assert_eq!(same.content, imported.content);
}

/// Runs `farrier headers import` and returns its exit code and error output.
fn import_ends_with(bench: &Bench, source: &Path, kernel: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(["headers", "import", "--kernel", kernel, "--arch", "amd64"])
        .arg(source)
        .arg("--cache-dir")
        .arg(bench.path("cache"))
        .env_remove("FARRIER_REGISTRY")
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Exit code 2: the command named a wrong source. Neither this machine nor an external system failed.
#[test]
fn a_source_that_is_not_the_kernels_headers_is_a_mistake_of_the_command() {
    let bench = Bench::new();
    bench.tree("linux");
    let linux = bench.path("linux");
    assert_eq!(import_ends_with(&bench, &linux, RELEASE).0, Some(0));
    for (source, kernel, words) in [
        (linux.clone(), "6.1.192-other", "6.1.192-ACME+"),
        (bench.path("absent"), RELEASE, "there is no such file or directory"),
    ] {
        let (code, said) = import_ends_with(&bench, &source, kernel);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(words), "{said}");
    }
    let whole = bench.tar(&["--gzip"], "whole.tar.gz", "linux");
    let bytes = fs::read(&whole).unwrap();
    fs::write(&whole, &bytes[..bytes.len() / 2]).unwrap();
    let (code, said) = import_ends_with(&bench, &whole, RELEASE);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("whole.tar.gz") && said.contains("hint:"), "{said}");
}
