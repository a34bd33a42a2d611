//! Merges system extensions into `/usr`, and loads their modules.

use std::{
    collections::BTreeMap,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    commands::output_of,
    log::print_error,
    state::{Artifacts, lock, read_json, remove_if_exists, write_durably, write_json},
};

/// Directory in which systemd-sysext finds extensions until the next boot.
const EXTENSIONS: &str = "/run/extensions";
/// Where [`Loaded`] is stored until the next boot.
const LOADED: &str = "/run/farrier-host/loaded.json";
/// Extension with the indexes of all modules, which this program writes.
const INDEXES: &str = "farrier-host-indexes";
/// Below `/`: the process of the dpkg that runs without extensions. The file is removed when they are merged again.
const DPKG: &str = "run/farrier-host/dpkg";
/// Lock of the commands that dpkg and `reconcile` run.
const LOCK: &str = "extensions.lock";

/// Merges the extensions, and indexes the modules of the kernel and of the extensions together. Extensions contain
/// no indexes: an overlay replaces whole files, so the kernel's indexes would be hidden. Returns an error for each extension that
/// systemd-sysext rejects.
pub(crate) fn merge(images: &[PathBuf], release: &str) -> Result<Vec<Error>> {
    let link_of = |image: &Path| Path::new(EXTENSIONS).join(image.file_name().unwrap_or_default());
    fs_err::create_dir_all(EXTENSIONS)?;
    clear_extensions()?;
    for image in images {
        symlink(image, link_of(image))?;
    }
    let mut rejected = Vec::new();
    if refresh().is_err() {
        // systemd-sysext merges none of them if it rejects one.
        clear_extensions()?;
        hide_rejected(Path::new("/var/lib/extensions"), Path::new(EXTENSIONS), refresh)?;
        for image in images {
            symlink(image, link_of(image))?;
            if let Err(error) = refresh() {
                fs_err::remove_file(link_of(image))?;
                rejected.push(error);
            }
        }
    }
    write_indexes(release)?;
    refresh()?;
    Ok(rejected)
}

/// Hides each extension of others that systemd-sysext rejects until the next boot. systemd-sysext takes an empty directory in
/// `/run/extensions` for the extension of that name.
fn hide_rejected(others: &Path, hidden: &Path, refresh: impl Fn() -> Result<()>) -> Result<()> {
    if refresh().is_ok() {
        return Ok(());
    }
    let mut hiding = Vec::new();
    for other in fs_err::read_dir(others).into_iter().flatten().flatten() {
        let name = other.file_name().to_string_lossy().into_owned();
        let directory = hidden.join(name.strip_suffix(".raw").unwrap_or(&name));
        if !directory.exists() {
            fs_err::create_dir(&directory)?;
            hiding.push(directory);
        }
    }
    refresh()?;
    for directory in hiding {
        fs_err::remove_dir(&directory)?;
        if let Err(error) = refresh() {
            fs_err::create_dir(&directory)?;
            print_error(format!("warning: {error}: hidden until the next boot by {}", directory.display()));
        }
    }
    Ok(())
}

/// Unmerges the extensions, because `/usr` is read-only while they are merged, and packages must write there. `dpkg` is the process
/// that merges them again at its end.
pub(crate) fn unmerge(dpkg: Option<u32>) -> Result<()> {
    let _lock = lock(LOCK)?;
    if farrier_extensions(Path::new(EXTENSIONS))?.is_empty() {
        return Ok(());
    }
    let root = Path::new("/");
    // A second dpkg fails while the first one runs.
    if let Some(dpkg) = dpkg
        && dpkg_runs(root) != Some(true)
    {
        write_durably(&root.join(DPKG), dpkg.to_string().as_bytes())?;
    }
    output_of(Command::new("systemd-sysext").arg("unmerge")).map(drop)
}

/// Merges the extensions of this boot again, with new indexes: a package may have changed the kernel's modules. With
/// `only_after_failure`, does so only if dpkg ended without its post-invoke hook, as after an error or a signal.
pub(crate) fn merge_again(release: &str, only_after_failure: bool) -> Result<()> {
    let _lock = lock(LOCK)?;
    let root = Path::new("/");
    let is_due = !only_after_failure || dpkg_runs(root) == Some(false);
    if !is_due || farrier_extensions(Path::new(EXTENSIONS))?.is_empty() {
        return Ok(());
    }
    let _ = fs_err::remove_dir_all(Path::new(EXTENSIONS).join(INDEXES));
    refresh()?;
    write_indexes(release)?;
    refresh()?;
    Ok(remove_if_exists(&root.join(DPKG))?)
}

/// Whether the dpkg that unmerged the extensions still runs; `None` if they were merged since.
fn dpkg_runs(root: &Path) -> Option<bool> {
    let process = fs_err::read_to_string(root.join(DPKG)).ok()?;
    let name = fs_err::read_to_string(root.join("proc").join(process).join("comm"));
    Some(name.is_ok_and(|name| name.trim() == "dpkg"))
}

/// Returns farrier's extensions in a directory.
fn farrier_extensions(directory: &Path) -> Result<Vec<PathBuf>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let mut extensions = Vec::new();
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("farrier-") {
            extensions.push(entry.path());
        }
    }
    Ok(extensions)
}

/// Removes the extensions that an earlier run in this boot left.
fn clear_extensions() -> Result<()> {
    for extension in farrier_extensions(Path::new(EXTENSIONS))? {
        fs_err::remove_file(&extension).or_else(|_| fs_err::remove_dir_all(&extension))?;
    }
    Ok(())
}

fn refresh() -> Result<()> {
    output_of(Command::new("systemd-sysext").arg("refresh")).map(drop)
}

/// Runs depmod on the merged modules, and writes its files as an extension.
fn write_indexes(release: &str) -> Result<()> {
    let merged = Path::new("/usr/lib/modules").join(release);
    let base = Path::new("/run/farrier-host/modules");
    let _ = fs_err::remove_dir_all(base);
    let work = base.join("lib/modules").join(release);
    fs_err::create_dir_all(&work)?;
    for entry in fs_err::read_dir(&merged)? {
        let entry = entry?;
        if !is_index(&entry.file_name().to_string_lossy()) {
            symlink(entry.path(), work.join(entry.file_name()))?;
        }
    }
    output_of(Command::new("depmod").arg("--basedir").args([base, Path::new(release)]))?;
    let extension = Path::new(EXTENSIONS).join(INDEXES);
    let (indexes, release_dir) =
        (extension.join("usr/lib/modules").join(release), extension.join("usr/lib/extension-release.d"));
    fs_err::create_dir_all(&indexes)?;
    fs_err::create_dir_all(&release_dir)?;
    for entry in fs_err::read_dir(&work)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs_err::copy(entry.path(), indexes.join(entry.file_name()))?;
        }
    }
    Ok(fs_err::write(release_dir.join(format!("extension-release.{INDEXES}")), "ID=_any\n")?)
}

/// Whether depmod writes a file of this name. The kernel's package brings `modules.order` and `modules.builtin*`.
fn is_index(name: &str) -> bool {
    let packaged = ["modules.order", "modules.builtin", "modules.builtin.modinfo", "modules.builtin.ranges"];
    name.starts_with("modules.") && !packaged.contains(&name)
}

/// Drivers that were merged in this boot.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// Modules that must be loaded.
    pub(crate) modules: Vec<String>,
    pub(crate) artifacts: Artifacts,
}

impl Loaded {
    /// Reads the record of this boot; `None` unless all drivers were merged.
    pub(crate) fn read() -> Option<Self> {
        read_json(Path::new(LOADED)).ok().flatten()
    }

    pub(crate) fn write(&self) -> Result<()> {
        write_json(Path::new(LOADED), self)
    }
}

/// Returns the drivers that are not merged: systemd-sysext skips an extension for another operating system without an error.
pub(crate) fn not_merged<'a>(root: &Path, release: &str, drivers: &'a [String]) -> Vec<&'a str> {
    let is_missing = |driver: &&String| !driver_directory(root, release, driver).exists();
    drivers.iter().filter(is_missing).map(String::as_str).collect()
}

fn driver_directory(root: &Path, release: &str, driver: &str) -> PathBuf {
    root.join("usr/lib/modules").join(release).join("updates").join(format!("farrier-{driver}"))
}

/// Returns the modules of the merged drivers for a kernel, each with its file.
pub(crate) fn modules(root: &Path, release: &str, drivers: &[String]) -> Result<BTreeMap<String, PathBuf>> {
    let mut modules = BTreeMap::new();
    for driver in drivers {
        let directory = driver_directory(root, release, driver);
        if directory.exists() {
            collect_modules(&directory, &mut modules)?;
        }
    }
    Ok(modules)
}

fn collect_modules(directory: &Path, modules: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            collect_modules(&entry.path(), modules)?;
        } else if let Some((stem, _)) = name.split_once(".ko") {
            modules.insert(stem.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

/// Loads modules with the modules that they depend on.
pub(crate) fn load(modules: &[String]) -> Result<()> {
    if modules.is_empty() {
        return Ok(());
    }
    output_of(Command::new("modprobe").arg("--all").args(modules)).map(drop)
}

/// Fails unless all modules are loaded. A module that is part of the kernel's image is not.
pub(crate) fn ensure_loaded(root: &Path, modules: &[String]) -> Result<()> {
    let is_missing = |module: &&String| !root.join("sys/module").join(module).join("initstate").exists();
    let missing: Vec<&str> = modules.iter().filter(is_missing).map(String::as_str).collect();
    if missing.is_empty() { Ok(()) } else { Err(Error::NotLoaded { modules: missing.join(", ") }) }
}

/// Fails if the kernel has loaded other files under the names of these modules: modprobe loads no module whose name is loaded. The
/// build ID in the kernel's memory and in a file shows whether they are the same. Skips compressed files and files without one.
pub(crate) fn ensure_own(root: &Path, modules: &BTreeMap<String, PathBuf>) -> Result<()> {
    let is_other = |(module, file): &(&String, &PathBuf)| {
        let note = root.join("sys/module").join(module).join("notes/.note.gnu.build-id");
        let (Ok(note), Ok(content)) = (fs_err::read(note), fs_err::read(file)) else { return false };
        file.extension().is_some_and(|extension| extension == "ko")
            && !note.is_empty()
            && !content.windows(note.len()).any(|window| window == note)
    };
    let others: Vec<&str> = modules.iter().filter(is_other).map(|(module, _)| module.as_str()).collect();
    if others.is_empty() { Ok(()) } else { Err(Error::OtherModule { modules: others.join(", ") }) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn modules_of_extensions_are_found_and_others_are_not() {
        let root = tempfile::tempdir().unwrap();
        let updates = root.path().join("usr/lib/modules/6.1/updates");
        // A package may have installed the modules of another driver.
        for file in ["farrier-a/extra/acme-nic.ko.xz", "farrier-b/b.ko", "farrier-b/readme", "farrier-d/d.ko"]
        {
            fs::create_dir_all(updates.join(file).parent().unwrap()).unwrap();
            fs::write(updates.join(file), "").unwrap();
        }
        let drivers = ["a", "b", "c"].map(str::to_owned);
        let modules = modules(root.path(), "6.1", &drivers).unwrap();
        let names: Vec<String> = modules.keys().cloned().collect();
        assert_eq!(names, ["acme_nic", "b"]);
        fs::create_dir_all(root.path().join("sys/module/b")).unwrap();
        let missing = || ensure_loaded(root.path(), &names).unwrap_err().to_string();
        assert_eq!(missing(), "not loaded: acme_nic, b", "b is part of the kernel");
        fs::write(root.path().join("sys/module/b/initstate"), "live\n").unwrap();
        assert_eq!(missing(), "not loaded: acme_nic");
        assert!(super::modules(root.path(), "6.2", &drivers).unwrap().is_empty());
        assert_eq!(not_merged(root.path(), "6.1", &drivers), ["c"]);
    }

    #[test]
    fn a_driver_of_the_kernel_is_not_taken_for_the_extensions() {
        let root = tempfile::tempdir().unwrap();
        let notes = root.path().join("sys/module/nic/notes");
        fs::create_dir_all(&notes).unwrap();
        let file = root.path().join("nic.ko");
        fs::write(&file, "ELF...GNU id 1...").unwrap();
        let modules = BTreeMap::from([("nic".to_owned(), file)]);
        ensure_own(root.path(), &modules).unwrap();
        for (loaded, expected) in [("GNU id 1", true), ("GNU id 2", false), ("", true)] {
            fs::write(notes.join(".note.gnu.build-id"), loaded).unwrap();
            assert_eq!(ensure_own(root.path(), &modules).is_ok(), expected, "{loaded}");
        }
    }

    #[test]
    fn only_the_extension_that_systemd_rejects_is_hidden() {
        let (others, hidden) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["a.raw", "b.raw", "c"] {
            fs::write(others.path().join(name), "").unwrap();
        }
        let hide = |rejected: &[&str]| {
            let refresh = || match rejected.iter().find(|name| !hidden.path().join(name).exists()) {
                Some(name) => Err(Error::NotLoaded { modules: (*name).to_owned() }),
                None => Ok(()),
            };
            let result = hide_rejected(others.path(), hidden.path(), refresh).is_ok();
            let names = fs::read_dir(hidden.path()).unwrap().map(|entry| entry.unwrap().file_name());
            (result, names.map(|name| name.into_string().unwrap()).collect::<Vec<_>>())
        };
        assert_eq!(hide(&[]), (true, vec![]));
        assert_eq!(hide(&["b"]), (true, vec!["b".to_owned()]));
        assert!(!hide(&["another place"]).0);
    }

    #[test]
    fn extensions_are_merged_again_after_a_dpkg_that_failed() {
        let root = tempfile::tempdir().unwrap();
        let (record, process) = (root.path().join(DPKG), root.path().join("proc/12"));
        assert_eq!(dpkg_runs(root.path()), None);
        fs::create_dir_all(record.parent().unwrap()).unwrap();
        fs::write(record, "12").unwrap();
        assert_eq!(dpkg_runs(root.path()), Some(false));
        fs::create_dir_all(&process).unwrap();
        for (name, expected) in [("dpkg\n", true), ("bash\n", false)] {
            fs::write(process.join("comm"), name).unwrap();
            assert_eq!(dpkg_runs(root.path()), Some(expected), "{name}");
        }
    }

    #[test]
    fn only_farriers_extensions_are_merged_again() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("extensions");
        assert_eq!(farrier_extensions(&directory).unwrap(), [""; 0].map(PathBuf::from));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("other.raw"), "").unwrap();
        assert_eq!(farrier_extensions(&directory).unwrap(), [""; 0].map(PathBuf::from));
        let hello = directory.join("farrier-hello-6.1.raw");
        symlink("/nowhere", &hello).unwrap();
        assert_eq!(farrier_extensions(&directory).unwrap(), [hello]);
    }

    #[test]
    fn depmod_writes_all_indexes_anew() {
        for (name, expected) in
            [("modules.dep.bin", true), ("modules.alias", true), ("modules.order", false), ("kernel", false)]
        {
            assert_eq!(is_index(name), expected, "{name}");
        }
    }
}
