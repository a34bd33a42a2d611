//! `COPY` instructions: copies from the build context into the root of this process, with Docker's semantics.

use std::{
    ffi::OsStr,
    fs::{self, File, FileTimes, Permissions},
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Component, Path, PathBuf},
};

use runner::plan::Source;
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2, symlinkat},
    io::Errno,
};
use walkdir::WalkDir;

use crate::{
    glob,
    rooted::{self, Root},
};

/// Copies `sources` to `dest`. Reads nothing outside of the build context (`context`), and writes nothing outside of `root`.
pub fn copy(
    root: &Root,
    context: &Path,
    sources: &[Source],
    dest: &str,
    mode: Option<u32>,
) -> io::Result<()> {
    let mut paths = Vec::new();
    let mut documents = Vec::new();
    for source in sources {
        match source {
            Source::Context(pattern) => paths.extend(expand(context, pattern)?),
            Source::Document { name, content } => documents.push((name, content)),
        }
    }
    let is_directory = dest.ends_with('/') || paths.len() + documents.len() > 1;
    let dest = Path::new(dest);
    let destination = |name: &OsStr| {
        if is_directory || root.is_directory(dest) { dest.join(name) } else { dest.to_owned() }
    };
    for source in paths {
        // Follow a source that is a link. Links below a source directory are copied as links.
        let source_file = open_in_context(context, &source)?;
        let from = rooted::path_of(&source_file);
        if from.is_dir() {
            copy_tree(root, &from, dest, mode)?;
        } else {
            let (directory, name) =
                open_parent(root, &destination(source.file_name().unwrap_or(OsStr::new("file"))))?;
            copy_file(&from, &directory, &name, mode)?;
        }
    }
    for (name, content) in documents {
        let (directory, name) = open_parent(root, &destination(OsStr::new(name)))?;
        let mut file = File::from(rooted::create(directory.as_fd(), &name)?);
        file.write_all(content.as_bytes())?;
        file.set_permissions(Permissions::from_mode(mode.unwrap_or(0o644)))?;
    }
    Ok(())
}

/// Opens the parent directory of a target, and creates missing directories. Returns the directory and the target's name.
fn open_parent(root: &Root, path: &Path) -> io::Result<(OwnedFd, std::ffi::OsString)> {
    let name = path.file_name().ok_or(Errno::ISDIR)?.to_owned();
    Ok((root.directory(path.parent().unwrap_or(Path::new("/")))?, name))
}

/// Returns the sorted paths of the context that match a pattern. No match is an error.
fn expand(context: &Path, pattern: &str) -> io::Result<Vec<PathBuf>> {
    let mut paths = vec![PathBuf::new()];
    for part in Path::new(pattern).components() {
        let part = match part {
            Component::Normal(part) => part.to_string_lossy(),
            Component::CurDir | Component::RootDir => continue,
            Component::ParentDir | Component::Prefix(_) => return Err(no_match(pattern)),
        };
        let mut matching = Vec::new();
        for path in &paths {
            if part.contains(['*', '?', '[', '\\']) {
                let entries = fs::read_dir(context.join(path)).map_err(|_| no_match(pattern))?;
                let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
                let mut names = names.collect::<io::Result<Vec<_>>>()?;
                names.retain(|name| glob::matches(&part, &name.to_string_lossy()));
                names.sort();
                matching.extend(names.iter().map(|name| path.join(name)));
            } else if context.join(path).join(&*part).symlink_metadata().is_ok() {
                matching.push(path.join(&*part));
            }
        }
        paths = matching;
    }
    if paths.is_empty() { Err(no_match(pattern)) } else { Ok(paths) }
}

fn no_match(pattern: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("the build context has no {pattern}"))
}

/// Opens a path of the context. Follows links, but not out of the context.
fn open_in_context(context: &Path, path: &Path) -> io::Result<OwnedFd> {
    let context = open(context, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    // An empty path is the context itself.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    openat2(context, path, flags, Mode::empty(), ResolveFlags::BENEATH).map_err(|error| match error {
        Errno::XDEV => io::Error::new(io::ErrorKind::InvalidInput, "a link leads out of the build context"),
        error => error.into(),
    })
}

/// Copies the content of one directory over another.
fn copy_tree(root: &Root, from: &Path, dest: &Path, mode: Option<u32>) -> io::Result<()> {
    let is_new = !root.is_directory(dest);
    let target = root.directory(dest)?;
    // With a trailing slash, the kernel follows the link of the descriptor.
    let from = &from.join("");
    if is_new || mode.is_some() {
        rooted::set_mode(&target, mode.unwrap_or(fs::metadata(from)?.permissions().mode() & 0o7777))?;
    }
    let mut directories = Vec::new();
    for entry in WalkDir::new(from).min_depth(1).sort_by_file_name() {
        let entry = entry?;
        let to = dest.join(entry.path().strip_prefix(from).map_err(io::Error::other)?);
        if entry.file_type().is_dir() {
            root.directory(&to)?;
            directories.push((to, entry.metadata()?));
            continue;
        }
        let (directory, name) = open_parent(root, &to)?;
        if entry.path_is_symlink() {
            rooted::remove_file(directory.as_fd(), &name)?;
            symlinkat(fs::read_link(entry.path())?, &directory, &name)?;
        } else {
            copy_file(entry.path(), &directory, &name, mode)?;
        }
    }
    // Set these last, because writes below a directory change its modification time, and need a writable directory.
    for (to, metadata) in directories.into_iter().rev() {
        let directory = root.directory(&to)?;
        rooted::set_modified(&directory, metadata.modified()?)?;
        rooted::set_mode(&directory, mode.unwrap_or_else(|| metadata.permissions().mode() & 0o7777))?;
    }
    Ok(())
}

fn copy_file(from: &Path, directory: &OwnedFd, name: &OsStr, mode: Option<u32>) -> io::Result<()> {
    let mut source = File::open(from)?;
    let metadata = source.metadata()?;
    let mut target = File::from(rooted::create(directory.as_fd(), name)?);
    io::copy(&mut source, &mut target)?;
    let bits = mode.unwrap_or_else(|| metadata.permissions().mode() & 0o7777);
    target.set_permissions(Permissions::from_mode(bits))?;
    target.set_times(FileTimes::new().set_modified(metadata.modified()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn context() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let make = |path: &str, text: &str| {
            let path = dir.path().join("context").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        make("sources/a/Makefile", "all:");
        make("sources/a/sub/x.c", "int x;");
        make("sources/b/y.c", "int y;");
        make("patches/1.patch", "1");
        make("patches/2.patch", "2");
        symlink("sub", dir.path().join("context/sources/a/link")).unwrap();
        symlink("/etc", dir.path().join("context/out")).unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        dir
    }

    fn run(dir: &tempfile::TempDir, sources: &[&str], dest: &str) -> io::Result<PathBuf> {
        let path = dir.path().join("root");
        let sources: Vec<_> = sources.iter().map(|s| Source::Context((*s).to_owned())).collect();
        let (root, context) = (Root::open(&path)?, dir.path().join("context"));
        copy(&root, &context, &sources, &format!("/{dest}"), None).map(|()| path)
    }

    #[test]
    fn the_content_of_a_directory_is_copied_with_its_links() {
        let dir = context();
        let root = run(&dir, &["sources/a/"], "build/").unwrap();
        assert_eq!(fs::read_to_string(root.join("build/sub/x.c")).unwrap(), "int x;");
        assert_eq!(fs::read_link(root.join("build/link")).unwrap(), Path::new("sub"));
        let time = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(time(&root.join("build/Makefile")), time(&dir.path().join("context/sources/a/Makefile")));
        // Copies into an existing directory.
        run(&dir, &["sources/b"], "build").unwrap();
        assert!(root.join("build/y.c").exists() && root.join("build/Makefile").exists());
    }

    #[test]
    fn patterns_and_single_files_have_dockers_destinations() {
        let dir = context();
        let root = run(&dir, &["patches/*.patch"], "p").unwrap();
        assert_eq!(fs::read_to_string(root.join("p/2.patch")).unwrap(), "2");
        run(&dir, &["patches/1.patch"], "one").unwrap();
        assert_eq!(fs::read_to_string(root.join("one")).unwrap(), "1");
        run(&dir, &["patches/1.patch"], "into/").unwrap();
        assert_eq!(fs::read_to_string(root.join("into/1.patch")).unwrap(), "1");
    }

    #[test]
    fn missing_sources_and_links_out_of_the_context_are_errors() {
        let dir = context();
        let error = |source: &str| run(&dir, &[source], "x/").unwrap_err().to_string();
        assert_eq!(error("nothing/*"), "the build context has no nothing/*");
        assert_eq!(error("../root"), "the build context has no ../root");
        assert_eq!(error("out"), "a link leads out of the build context");
        assert!(!dir.path().join("root/x").exists());
    }

    #[test]
    fn documents_are_written_with_their_mode() {
        let dir = context();
        let root = Root::open(&dir.path().join("root")).unwrap();
        let document = Source::Document { name: "EOF".to_owned(), content: "#!/bin/sh\n".to_owned() };
        copy(&root, dir.path(), &[document], "/run.sh", Some(0o755)).unwrap();
        let made = fs::metadata(dir.path().join("root/run.sh")).unwrap();
        assert_eq!(made.permissions().mode() & 0o7777, 0o755);
    }

    /// A step may have placed links at the destination.
    #[test]
    fn nothing_is_written_outside_of_the_root() {
        let dir = context();
        for (link, target) in [("up", "../../.."), ("absolute", "/"), ("file", "../canary")] {
            symlink(target, dir.path().join("root").join(link)).unwrap();
        }
        fs::write(dir.path().join("canary"), "whole").unwrap();
        let before = fs::read_dir(dir.path()).unwrap().count();
        run(&dir, &["sources/a/"], "up/x/").unwrap();
        run(&dir, &["sources/b/"], "absolute/../..").unwrap();
        run(&dir, &["patches/1.patch"], "file").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("canary")).unwrap(), "whole");
        assert_eq!(fs::read_to_string(dir.path().join("root/file")).unwrap(), "1");
        assert!(dir.path().join("root/x/Makefile").exists() && dir.path().join("root/y.c").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before);
    }
}
