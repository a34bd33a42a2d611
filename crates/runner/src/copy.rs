//! `COPY`: from the build context into the root that this process sees, as Docker copies.

use std::{
    ffi::OsStr,
    fs::{self, File, FileTimes, Permissions},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::{PermissionsExt as _, symlink},
    },
    path::{Component, Path, PathBuf},
};

use runner::plan::Source;
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2},
    io::Errno,
};
use walkdir::WalkDir;

use crate::glob;

/// Copies. `context` is where the build context lies; nothing outside of it is read.
pub fn copy(context: &Path, sources: &[Source], dest: &str, mode: Option<u32>) -> io::Result<()> {
    let mut found = Vec::new();
    let mut documents = Vec::new();
    for source in sources {
        match source {
            Source::Context(pattern) => found.extend(expand(context, pattern)?),
            Source::Document { name, content } => documents.push((name, content)),
        }
    }
    let is_directory = dest.ends_with('/') || found.len() + documents.len() > 1;
    let dest = Path::new(dest);
    for source in found {
        // A source that is a link means what it leads to; links below it stay links.
        let opened = inside(context, &source)?;
        let from = Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string());
        if from.is_dir() {
            copy_tree(&from, dest, mode)?;
        } else {
            let name = source.file_name().unwrap_or(OsStr::new("file"));
            let to = if is_directory || dest.is_dir() { dest.join(name) } else { dest.to_owned() };
            make_parents(&to)?;
            copy_file(&from, &to, mode)?;
        }
    }
    for (name, content) in documents {
        let to = if is_directory || dest.is_dir() { dest.join(name) } else { dest.to_owned() };
        make_parents(&to)?;
        fs::write(&to, content)?;
        fs::set_permissions(&to, Permissions::from_mode(mode.unwrap_or(0o644)))?;
    }
    Ok(())
}

/// The places of the context that a pattern names, in order. There must be one.
fn expand(context: &Path, pattern: &str) -> io::Result<Vec<PathBuf>> {
    let mut places = vec![PathBuf::new()];
    for part in Path::new(pattern).components() {
        let part = match part {
            Component::Normal(part) => part.to_string_lossy(),
            Component::CurDir | Component::RootDir => continue,
            Component::ParentDir | Component::Prefix(_) => return Err(absent(pattern)),
        };
        let mut next = Vec::new();
        for place in &places {
            if part.contains(['*', '?', '[', '\\']) {
                let mut names: Vec<_> = fs::read_dir(context.join(place))
                    .map_err(|_| absent(pattern))?
                    .map(|entry| entry.map(|entry| entry.file_name()))
                    .collect::<io::Result<_>>()?;
                names.sort();
                next.extend(
                    names
                        .into_iter()
                        .filter(|name| glob::matches(&part, &name.to_string_lossy()))
                        .map(|name| place.join(name)),
                );
            } else if context.join(place).join(&*part).symlink_metadata().is_ok() {
                next.push(place.join(&*part));
            }
        }
        places = next;
    }
    if places.is_empty() { Err(absent(pattern)) } else { Ok(places) }
}

fn absent(pattern: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("the build context has no {pattern}"))
}

/// A place of the context, opened; a link is followed, but not out of the context. By a descriptor, because the context has no
/// path in the root of a build.
fn inside(context: &Path, place: &Path) -> io::Result<OwnedFd> {
    let context = open(context, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    // The context itself.
    let place = if place.as_os_str().is_empty() { Path::new(".") } else { place };
    openat2(context, place, flags, Mode::empty(), ResolveFlags::BENEATH).map_err(|error| match error {
        Errno::XDEV => io::Error::new(io::ErrorKind::InvalidInput, "a link leads out of the build context"),
        error => error.into(),
    })
}

/// What is in a directory, over what is in another.
fn copy_tree(from: &Path, dest: &Path, mode: Option<u32>) -> io::Result<()> {
    let is_new = !dest.exists();
    make_parents(&dest.join("x"))?;
    let mut directories = Vec::new();
    // The slash: the descriptor's link is followed.
    let from = &from.join("");
    if is_new || mode.is_some() {
        let bits = mode.unwrap_or(fs::metadata(from)?.permissions().mode() & 0o7777);
        fs::set_permissions(dest, Permissions::from_mode(bits))?;
    }
    for entry in WalkDir::new(from).min_depth(1).sort_by_file_name() {
        let entry = entry?;
        let to = dest.join(entry.path().strip_prefix(from).map_err(io::Error::other)?);
        if entry.file_type().is_dir() {
            if !to.is_dir() {
                fs::create_dir(&to)?;
            }
            directories.push((to, entry.metadata()?));
        } else {
            copy_one(entry.path(), &to, mode)?;
        }
    }
    // Once nothing is written below them any more.
    for (to, metadata) in directories.into_iter().rev() {
        let bits = mode.unwrap_or_else(|| metadata.permissions().mode() & 0o7777);
        fs::set_permissions(&to, Permissions::from_mode(bits))?;
        let times = FileTimes::new().set_modified(metadata.modified()?);
        File::open(&to)?.set_times(times)?;
    }
    Ok(())
}

/// A file or a link, in the place of what is there.
fn copy_one(from: &Path, to: &Path, mode: Option<u32>) -> io::Result<()> {
    if !from.is_symlink() {
        return copy_file(from, to, mode);
    }
    make_room(to)?;
    symlink(fs::read_link(from)?, to)
}

fn copy_file(from: &Path, to: &Path, mode: Option<u32>) -> io::Result<()> {
    make_room(to)?;
    let mut source = File::open(from)?;
    let metadata = source.metadata()?;
    let mut target = File::create_new(to)?;
    io::copy(&mut source, &mut target)?;
    let bits = mode.unwrap_or_else(|| metadata.permissions().mode() & 0o7777);
    target.set_permissions(Permissions::from_mode(bits))?;
    target.set_times(FileTimes::new().set_modified(metadata.modified()?))
}

fn make_room(to: &Path) -> io::Result<()> {
    let is_there = to.symlink_metadata().is_ok_and(|there| !there.is_dir());
    if is_there { fs::remove_file(to) } else { Ok(()) }
}

/// Makes the directories above a path.
fn make_parents(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

#[cfg(test)]
mod tests {
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
        dir
    }

    fn run(dir: &tempfile::TempDir, sources: &[&str], dest: &str) -> io::Result<PathBuf> {
        let root = dir.path().join("root");
        let sources: Vec<_> = sources.iter().map(|s| Source::Context((*s).to_owned())).collect();
        let dest = format!("{}/{dest}", root.display());
        copy(&dir.path().join("context"), &sources, &dest, None).map(|()| root)
    }

    #[test]
    fn a_directorys_content_is_copied_and_its_links_stay_links() {
        let dir = context();
        let root = run(&dir, &["sources/a/"], "build/").unwrap();
        assert_eq!(fs::read_to_string(root.join("build/sub/x.c")).unwrap(), "int x;");
        assert_eq!(fs::read_link(root.join("build/link")).unwrap(), Path::new("sub"));
        let time = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(time(&root.join("build/Makefile")), time(&dir.path().join("context/sources/a/Makefile")));
        // Over what is there.
        run(&dir, &["sources/b"], "build").unwrap();
        assert!(root.join("build/y.c").exists() && root.join("build/Makefile").exists());
    }

    #[test]
    fn patterns_and_single_files_go_where_docker_puts_them() {
        let dir = context();
        let root = run(&dir, &["patches/*.patch"], "p").unwrap();
        assert_eq!(fs::read_to_string(root.join("p/2.patch")).unwrap(), "2");
        run(&dir, &["patches/1.patch"], "one").unwrap();
        assert_eq!(fs::read_to_string(root.join("one")).unwrap(), "1");
        run(&dir, &["patches/1.patch"], "into/").unwrap();
        assert_eq!(fs::read_to_string(root.join("into/1.patch")).unwrap(), "1");
    }

    #[test]
    fn what_is_not_there_and_what_leads_out_is_refused() {
        let dir = context();
        let said = |source: &str| run(&dir, &[source], "x/").unwrap_err().to_string();
        assert_eq!(said("nothing/*"), "the build context has no nothing/*");
        assert_eq!(said("../root"), "the build context has no ../root");
        assert_eq!(said("out"), "a link leads out of the build context");
        assert!(!dir.path().join("root/x").exists());
    }

    #[test]
    fn documents_and_modes() {
        let dir = context();
        let dest = dir.path().join("root/run.sh");
        let document = Source::Document { name: "EOF".to_owned(), content: "#!/bin/sh\n".to_owned() };
        copy(dir.path(), &[document], dest.to_str().unwrap(), Some(0o755)).unwrap();
        assert_eq!(fs::metadata(&dest).unwrap().permissions().mode() & 0o7777, 0o755);
    }
}
