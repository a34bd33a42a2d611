use std::{
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// An entry of a test archive.
pub(super) enum Item<'a> {
    File(&'a str, u32, &'a [u8]),
    Dir(&'a str, u32),
    Symlink(&'a str, &'a str),
    Hardlink(&'a str, &'a str),
    Special(&'a str, EntryType),
}

/// Builds a header with unchecked names: the crate's own setters refuse hostile ones.
fn header(kind: EntryType, name: &str, link: &str, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(1_700_000_000);
    header.set_cksum();
    header
}

pub(super) fn tarball(items: &[Item<'_>]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for item in items {
        let (header, data): (_, &[u8]) = match item {
            Item::File(name, mode, data) => {
                (header(EntryType::Regular, name, "", *mode, data.len() as u64), data)
            }
            Item::Dir(name, mode) => (header(EntryType::Directory, name, "", *mode, 0), b""),
            Item::Symlink(name, to) => (header(EntryType::Symlink, name, to, 0o777, 0), b""),
            Item::Hardlink(name, to) => (header(EntryType::Link, name, to, 0o644, 0), b""),
            Item::Special(name, kind) => (header(*kind, name, "", 0o644, 0), b""),
        };
        builder.append(&header, data).unwrap();
    }
    builder.into_inner().unwrap()
}

fn unpack(tar: &[u8]) -> (TempDir, Result<(), UnpackError>) {
    // A directory nested in another one, so that the test would notice an escape.
    let outer = tempfile::tempdir().unwrap();
    std::fs::create_dir(outer.path().join("dest")).unwrap();
    let result = unpack_tar(tar, &outer.path().join("dest"), &Limits::default());
    let names: Vec<_> = std::fs::read_dir(outer.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["dest"]);
    (outer, result)
}

/// Archives store holes as zeros; unpacking turns them back into holes.
#[test]
fn a_sparse_file_takes_what_it_holds() {
    use std::os::unix::fs::MetadataExt as _;
    let mut content = vec![0; 8 << 20];
    content[3 << 20] = 1;
    let (outer, result) = unpack(&tarball(&[Item::File("hole", 0o644, &content)]));
    result.unwrap();
    let place = outer.path().join("dest/hole");
    assert_eq!(std::fs::read(&place).unwrap(), content);
    assert!(std::fs::metadata(&place).unwrap().blocks() * 512 <= 1 << 20);
}

#[test]
fn files_directories_and_links() {
    let (outer, result) = unpack(&tarball(&[
        Item::Dir("./", 0o755),
        Item::Dir("./sub/", 0o500),
        Item::File("./sub/tool", 0o4755, b"tool"),
        Item::File("implied/parent/file", 0o640, b""),
        Item::Symlink("./abs", "/etc/passwd"),
        Item::Symlink("./sub/up", "../../../up"),
        Item::Hardlink("same", "./sub/tool"),
        Item::File("sub/tool2", 0o444, b"first"),
        Item::File("sub/tool2", 0o444, b"second"),
    ]));
    result.unwrap();
    let dest = outer.path().join("dest");
    let mode = |name: &str| std::fs::metadata(dest.join(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode("sub"), 0o700);
    assert_eq!(mode("sub/tool"), 0o755);
    assert_eq!(mode("implied/parent"), 0o755);
    assert_eq!(mode("implied/parent/file"), 0o640);
    assert_eq!(std::fs::read(dest.join("same")).unwrap(), b"tool");
    assert_eq!(std::fs::read(dest.join("sub/tool2")).unwrap(), b"second");
    assert_eq!(std::fs::read_link(dest.join("abs")).unwrap(), Path::new("/etc/passwd"));
    let modified = std::fs::metadata(dest.join("sub/tool")).unwrap().modified().unwrap();
    assert_eq!(modified.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs(), 1_700_000_000);
}

#[test]
fn nothing_is_written_outside() {
    for name in ["/etc/evil", "../evil", "a/../../evil", "..", "./"] {
        let (_outer, result) = unpack(&tarball(&[Item::File(name, 0o644, b"x")]));
        // A regular file named `./` is an old-style directory entry for the root.
        assert_eq!(matches!(result, Err(UnpackError::Outside(_))), name != "./", "{name}: {result:?}");
    }
}

#[test]
fn nothing_is_written_through_a_link() {
    let through: [&[Item<'_>]; 6] = [
        &[Item::Symlink("link", ".."), Item::File("link/evil", 0o644, b"x")],
        &[Item::Symlink("link", ".."), Item::Dir("link/evil", 0o755)],
        &[Item::Symlink("link", ".."), Item::Dir("link", 0o777)],
        &[Item::Symlink("a", ".."), Item::Symlink("b", "a"), Item::Symlink("b/c/evil", "x")],
        &[Item::Symlink("link", "/etc"), Item::Hardlink("stolen", "link/passwd")],
        &[Item::Symlink("link", "/etc/passwd"), Item::Hardlink("stolen", "link")],
    ];
    for items in through {
        let (_outer, result) = unpack(&tarball(items));
        assert!(matches!(result, Err(UnpackError::ThroughLink(_))), "{result:?}");
    }
    // A file replaces an earlier link of the same name.
    let (outer, result) =
        unpack(&tarball(&[Item::Symlink("name", "../evil"), Item::File("name", 0o644, b"x")]));
    result.unwrap();
    assert!(std::fs::symlink_metadata(outer.path().join("dest/name")).unwrap().is_file());
}

#[test]
fn hard_links_stay_inside() {
    for target in ["/etc/passwd", "../../etc/passwd", ""] {
        let (_outer, result) = unpack(&tarball(&[Item::Hardlink("stolen", target)]));
        assert!(matches!(result, Err(UnpackError::Outside(_))), "{target}: {result:?}");
    }
    let (_outer, result) = unpack(&tarball(&[Item::Hardlink("a", "absent")]));
    assert!(matches!(result, Err(UnpackError::Io(_))), "{result:?}");
}

/// Names are kept in memory, and have up to 4 KB each.
#[test]
fn long_names_count_as_several_entries() {
    let unpacked = |directory: &str, entries: u64| {
        let mut builder = tar::Builder::new(Vec::new());
        for number in 0..10 {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(0o644);
            builder.append_data(&mut header, format!("{directory}/{number}"), std::io::empty()).unwrap();
        }
        let tar = builder.into_inner().unwrap();
        unpack_tar(&tar[..], tempfile::tempdir().unwrap().path(), &Limits { entries, ..Limits::default() })
    };
    // Each file has an entry for its long name, and the directories count once.
    unpacked(&"d".repeat(200), 21).unwrap();
    let long = ["d", "e", "f"].map(|name| name.repeat(200)).join("/");
    assert!(matches!(unpacked(&long, 23), Err(UnpackError::Limit(_))));
    unpacked(&long, 43).unwrap();
}

#[test]
fn special_files_are_refused() {
    for (kind, name) in [(EntryType::Fifo, "FIFO"), (EntryType::Char, "device"), (EntryType::Block, "device")]
    {
        let (_outer, result) = unpack(&tarball(&[Item::Special("node", kind)]));
        assert!(matches!(result, Err(UnpackError::Kind(_, found)) if found == name), "{result:?}");
    }
}

#[test]
fn a_directory_is_never_replaced() {
    let (_outer, result) = unpack(&tarball(&[Item::File("d/file", 0o644, b"x"), Item::Symlink("d", "/etc")]));
    assert!(matches!(result, Err(UnpackError::Io(_))), "{result:?}");
}

#[test]
fn limits_hold() {
    let tar = tarball(&[Item::File("a/b/c", 0o644, &[0; 1000]), Item::Dir("d", 0o755)]);
    // The first name implies two directories.
    let limits = Limits { entries: 4, bytes: 11_000, depth: 3 };
    for mode in [UnpackMode::Standalone, UnpackMode::Package, UnpackMode::Layer] {
        let options = Options { limits, mode, ..Options::default() };
        unpack_stream(&tar[..], tempfile::tempdir().unwrap().path(), &options).unwrap();
        for limits in
            [Limits { entries: 3, ..limits }, Limits { bytes: 999, ..limits }, Limits { depth: 2, ..limits }]
        {
            let options = Options { limits, ..options };
            let result = unpack_stream(&tar[..], tempfile::tempdir().unwrap().path(), &options);
            assert!(matches!(result, Err(UnpackError::Limit(_))), "{mode:?} {limits:?}: {result:?}");
        }
    }
    let directory = tempfile::tempdir().unwrap();
    // An endless stream of zeros after the archive.
    let endless = tar.chain(io::repeat(0));
    assert!(matches!(unpack_tar(endless, directory.path(), &limits), Err(UnpackError::Limit(_))));
}

#[test]
fn long_names_are_read_but_not_without_a_bound() {
    let long = format!("{}/file", "directory/".repeat(30));
    let directory = tempfile::tempdir().unwrap();
    let mut gnu = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o644);
    gnu.append_data(&mut header, &long, &b"x"[..]).unwrap();
    unpack_tar(&gnu.into_inner().unwrap()[..], directory.path(), &Limits::default()).unwrap();
    assert!(directory.path().join(&long).is_file());

    let mut posix = tar::Builder::new(Vec::new());
    let records = [("path", long.as_bytes()), ("SCHILY.xattr.x", b"two\nlines")];
    posix.append_pax_extensions(records).unwrap();
    posix.append(&self::header(EntryType::Regular, "short", "", 0o600, 1), &b"y"[..]).unwrap();
    unpack_tar(&posix.into_inner().unwrap()[..], directory.path(), &Limits::default()).unwrap();
    assert_eq!(std::fs::read(directory.path().join(&long)).unwrap(), b"y");

    let mut bomb = Vec::new();
    bomb.extend_from_slice(self::header(EntryType::GNULongName, "x", "", 0, 1 << 32).as_bytes());
    let result = unpack_tar(bomb.chain(io::repeat(b'a')), directory.path(), &Limits::default());
    assert!(matches!(result, Err(UnpackError::Limit(_))), "{result:?}");
}

#[test]
fn a_file_counts_under_each_of_its_names() {
    let (content, limits) = ([0; 1000], Limits { bytes: 2500, ..Limits::default() });
    let mut items = vec![Item::File("a", 0o644, &content), Item::Hardlink("b", "a")];
    let directory = tempfile::tempdir().unwrap();
    unpack_tar(&tarball(&items)[..], directory.path(), &limits).unwrap();
    items.extend([Item::Hardlink("c", "a"), Item::Hardlink("d", "b")]);
    let directory = tempfile::tempdir().unwrap();
    let result = unpack_tar(&tarball(&items)[..], directory.path(), &limits);
    assert!(matches!(result, Err(UnpackError::Limit(_))), "{result:?}");
}

#[test]
fn every_truncation_is_seen() {
    let tar = tarball(&[Item::File("a", 0o644, &[0; 700]), Item::File("b", 0o644, &[0; 512])]);
    let contents = tar.len() - 1024;
    for length in (0..=contents).step_by(64) {
        let (_outer, result) = unpack(&tar[..length]);
        assert!(matches!(result, Err(UnpackError::Damaged(_))), "{length}: {result:?}");
    }
    // Some writers end the archive with one block of zeros instead of two.
    unpack(&tar[..contents + 512]).1.unwrap();
}

fn compress(format: Format, tar: &[u8]) -> Vec<u8> {
    match format {
        Format::Gzip => {
            // Two members, as parallel compressors write them.
            let mut all = Vec::new();
            for part in tar.chunks(tar.len() / 2) {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(part).unwrap();
                all.extend(encoder.finish().unwrap());
            }
            all
        }
        Format::Xz => {
            let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
            encoder.write_all(tar).unwrap();
            encoder.finish().unwrap()
        }
        Format::Zstd => zstd::encode_all(tar, 1).unwrap(),
        Format::Tar | Format::Deb | Format::Rpm | Format::Makeself | Format::Unsupported(_) => tar.to_vec(),
    }
}

#[test]
fn compressed_files_and_their_truncation() {
    let noise: Vec<u8> = (0..40_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let tar = tarball(&[Item::File("noise", 0o644, &noise)]);
    let directory = tempfile::tempdir().unwrap();
    for format in [Format::Tar, Format::Gzip, Format::Xz, Format::Zstd] {
        let bytes = compress(format, &tar);
        let path = directory.path().join(format!("{format:?}"));
        let dest = directory.path().join(format!("{format:?}.d"));
        std::fs::create_dir(&dest).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(Format::of(&path).unwrap(), Some(format));
        unpack_file(&path, &dest, &Options::default()).unwrap();
        assert_eq!(std::fs::read(dest.join("noise")).unwrap(), noise);
        for length in [bytes.len() / 2, 600] {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let result = unpack_file(&path, &dest, &Options::default());
            assert!(matches!(result, Err(UnpackError::Damaged(_))), "{format:?} {length}: {result:?}");
        }
    }
    std::fs::write(directory.path().join("text"), "no archive").unwrap();
    let result = unpack_file(&directory.path().join("text"), directory.path(), &Options::default());
    assert!(matches!(result, Err(UnpackError::Damaged(_))));
}

#[test]
fn a_full_disk_is_named() {
    let file = fs_err::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut sink = io::LineWriter::new(file);
    // The operating system's own error, so that the test covers the one that `hint` looks for.
    let error = UnpackError::from(sink.write_all(b"x\n").unwrap_err());
    assert!(matches!(&error, UnpackError::Io(source) if source.kind() == io::ErrorKind::StorageFull));
    assert!(error.to_string().contains("/dev/full"), "{error}");
}

#[test]
fn stopping_ends_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tar");
    std::fs::write(&path, tarball(&[Item::File("a", 0o644, b"x")])).unwrap();
    let options = Options { stop: &AtomicBool::new(true), ..Options::default() };
    let result = unpack_file(&path, directory.path(), &options);
    assert!(matches!(result, Err(UnpackError::Damaged(_))));
}

proptest! {
    #[test]
    fn any_bytes_do_no_harm(mut bytes in proptest::collection::vec(any::<u8>(), 0..3000), valid in any::<bool>()) {
        if valid {
            // Damage inside a valid archive reaches deeper code than noise does.
            let mut tar = tarball(&[Item::File("a/b", 0o644, b"data"), Item::Symlink("c", "a")]);
            for (place, byte) in bytes.iter().enumerate().take(40) {
                let index = (place * 37 + usize::from(*byte)) % tar.len();
                tar[index] ^= byte;
            }
            bytes = tar;
        }
        let _ = unpack(&bytes);
    }
}

/// Makes a self-extracting archive of a driver tree with the real makeself.
fn makeself(dir: &Path, options: &[&str]) -> PathBuf {
    let tree = dir.join("tree");
    std::fs::create_dir_all(tree.join("kernel-open/nvidia")).unwrap();
    std::fs::write(tree.join("kernel-open/nvidia/nv.c"), "int nv;\n").unwrap();
    // More than one buffer of incompressible data.
    let noise: Vec<u8> = (0..400_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
    std::fs::write(tree.join("blob.bin"), noise).unwrap();
    // Leaves a trace if anything runs it.
    std::fs::write(tree.join("install.sh"), format!("#!/bin/sh\ntouch {}\n", dir.join("ran").display()))
        .unwrap();
    let out = dir.join("driver.run");
    let mut command = Command::new("makeself");
    command.args(options).arg("--nox11").arg(&tree).arg(&out).args(["a driver", "./install.sh"]);
    let made = command.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    out
}

#[test]
fn self_extracting_archives_are_unpacked_and_not_run() {
    for options in
        [&["--gzip"][..], &["--xz"], &["--zstd", "--sha256"], &["--nocomp"], &["--nocrc", "--nomd5"]]
    {
        let dir = tempfile::tempdir().unwrap();
        let run = makeself(dir.path(), options);
        assert_eq!(Format::of(&run).unwrap(), Some(Format::Makeself));
        let dest = dir.path().join("dest");
        std::fs::create_dir(&dest).unwrap();
        unpack_file(&run, &dest, &Options::default())
            .unwrap_or_else(|error| panic!("{options:?}: {error:?}"));
        assert_eq!(std::fs::read(dest.join("kernel-open/nvidia/nv.c")).unwrap(), b"int nv;\n");
        assert_eq!(std::fs::metadata(dest.join("blob.bin")).unwrap().len(), 400_000);
        assert!(dest.join("install.sh").is_file() && !dir.path().join("ran").exists());
    }
}

#[test]
fn a_self_extracting_archive_that_is_cut_or_changed_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let run = makeself(dir.path(), &["--gzip"]);
    let whole = std::fs::read(&run).unwrap();
    let dest = dir.path().join("dest");
    std::fs::create_dir(&dest).unwrap();
    let said = |bytes: &[u8]| {
        let path = dir.path().join("other.run");
        std::fs::write(&path, bytes).unwrap();
        let error = unpack_file(&path, &dest, &Options::default()).unwrap_err();
        assert_eq!(std::fs::read_dir(&dest).unwrap().count(), 0);
        error.to_string()
    };
    let header = whole.windows(3).position(|bytes| bytes == b"\x1f\x8b\x08").unwrap();
    let archive = whole.len() - header;
    assert_eq!(
        said(&whole[..whole.len() - 1000]),
        format!("archive is truncated: the header states {archive} bytes, the file has {}", archive - 1000)
    );
    // Truncated inside the header.
    assert_eq!(said(&whole[..5000]), "archive is damaged or truncated");
    let mut damaged = whole.clone();
    damaged[header + 3000] ^= 1;
    let text = said(&damaged);
    assert!(text.starts_with("archive is damaged or truncated: its CRC is "), "{text}");
    let bzip2 = [&whole[..header], b"BZh91AY"].concat();
    let text = said(&bzip2);
    assert!(text.ends_with("is not a tar archive, plain or compressed with gzip, xz or zstd"), "{text}");
}

/// Two hard-linked files: RPM stores the content with the last one.
#[test]
fn rpm_packages_are_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let (root, dest, top) = (dir.path().join("root"), dir.path().join("dest"), dir.path().join("top"));
    for made in [&root, &dest] {
        std::fs::create_dir(made).unwrap();
    }
    std::fs::write(root.join("gcc"), "not really").unwrap();
    std::fs::hard_link(root.join("gcc"), root.join("x86_64-acme-gcc")).unwrap();
    std::os::unix::fs::symlink("gcc", root.join("cc")).unwrap();
    let spec = dir.path().join("x.spec");
    let text = format!(
        "Name: x\nVersion: 1\nRelease: 1\nSummary: s\nLicense: l\nAutoReqProv: no\nBuildArch: noarch\n%description\nd\n\
         %install\nmkdir -p %{{buildroot}}\ncp -a {}/. %{{buildroot}}\n%files\n/*\n",
        root.display()
    );
    std::fs::write(&spec, text).unwrap();
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.args(["--quiet", "-bb", "--define"]).arg(format!("_topdir {}", top.display())).arg(&spec);
    let built = rpmbuild.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let package = top.join("RPMS/noarch/x-1-1.noarch.rpm");
    assert_eq!(Format::of(&package).unwrap(), Some(Format::Rpm));
    unpack_file(&package, &dest, &Options::default()).unwrap();
    for name in ["gcc", "x86_64-acme-gcc", "cc"] {
        assert_eq!(std::fs::read_to_string(dest.join(name)).unwrap(), "not really", "{name}");
    }
    let whole = std::fs::read(&package).unwrap();
    std::fs::write(&package, &whole[..whole.len() - 20]).unwrap();
    assert!(unpack_file(&package, &dest, &Options::default()).is_err());
}

/// GNU tar and Python write the archives.
#[test]
fn old_tars_are_unpacked_and_other_formats_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("acme.c"), "int acme;\n").unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).current_dir(dir.path()).status().unwrap();
        assert!(status.success(), "{program} {arguments:?}");
    };
    run("tar", &["--format=v7", "-cf", "v7.tar", "acme.c"]);
    run("tar", &["-cf", "new.tar", "acme.c"]);
    run(
        "python3",
        &["-c", "import bz2; open('a.tar.bz2', 'wb').write(bz2.compress(open('new.tar', 'rb').read()))"],
    );
    run("python3", &["-m", "zipfile", "-c", "a.zip", "acme.c"]);
    let unpacked = |name: &str| {
        let dest = dir.path().join(format!("{name}.d"));
        std::fs::create_dir(&dest).unwrap();
        unpack_file(&dir.path().join(name), &dest, &Options::default()).map(|()| dest)
    };
    assert_eq!(std::fs::read_to_string(unpacked("v7.tar").unwrap().join("acme.c")).unwrap(), "int acme;\n");
    for (name, what) in [("a.tar.bz2", "compressed with bzip2"), ("a.zip", "a zip archive")] {
        let error = unpacked(name).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains(".tar.xz"), "{error}");
    }
    assert_eq!(Format::detect(&[0; 1024]), None);
    assert_eq!(Format::detect(&[b'x'; 1024]), None);
}
