//! systemd-boot, with its boot counting. The name of an entry's file says how often the entry may still be booted:
//!
//! | name                | entry                                                                    |
//! |---------------------|--------------------------------------------------------------------------|
//! | `NAME.conf`         | good: the newest good entry is the default                               |
//! | `NAME+0.conf`       | held: it sorts behind the good ones                                      |
//! | `NAME+1.conf`       | boots next, once: systemd-boot renames it before it boots it             |
//! | `NAME+0-1.conf`     | has booted once: sorts behind the good ones until it is marked as good            |
//!
//! See `systemd.io/AUTOMATIC_BOOT_ASSESSMENT`. EFI variables are not written, because some firmware does not keep them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde::Deserialize;

use super::BootLoader;
use crate::{
    Error, Result,
    commands::output_of,
    kernels,
    state::{read_if_exists, write_durably},
};

/// GUID of the EFI variables of boot loaders (`systemd.io/BOOT_LOADER_INTERFACE`).
const VENDOR: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
/// Number of boots of new entries, which `kernel-install` reads.
const TRIES_FILE: &str = "etc/kernel/tries";
/// Copy of the administrator's own [`TRIES_FILE`]; empty if there was none.
const SAVED_TRIES: &str = "var/lib/farrier-host/tries";
/// Content of [`TRIES_FILE`] with which `kernel-install` holds new kernels.
const HOLD: &[u8] = b"0\n";
/// Options of a kernel on trial: reboot after a panic, and where the initramfs finds no root disk. `panic` is for
/// initramfs-tools, `rd` for dracut.
const TRIAL_OPTIONS: [&str; 3] = ["panic=30", "rd.shell=0", "rd.emergency=reboot"];

/// The installed systemd-boot.
pub(super) struct SystemdBoot {
    root: PathBuf,
}

/// An entry of `bootctl list`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    path: PathBuf,
    /// Kernel release.
    #[serde(default)]
    version: String,
    tries_left: Option<u32>,
    tries_done: Option<u32>,
}

impl SystemdBoot {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }
}

impl BootLoader for SystemdBoot {
    fn default_kernel(&self) -> Result<Option<String>> {
        let entries = restored_entries()?;
        ensure_no_fixed_default(&self.root, &entries)?;
        Ok(entries.into_iter().find(Entry::is_good).map(|entry| entry.version))
    }

    fn set_default(&self, release: &str) -> Result<()> {
        make_default(&restored_entries()?, release)
    }

    fn kernels(&self) -> Result<Vec<String>> {
        Ok(restored_entries()?.into_iter().map(|entry| entry.version).collect())
    }

    fn next_kernel(&self) -> Result<Option<String>> {
        let next = restored_entries()?.into_iter().find(|entry| entry.tries_left > Some(0));
        Ok(next.map(|entry| entry.version))
    }

    fn boot_once(&self, release: &str) -> Result<()> {
        self.clear_next()?;
        make_next(&restored_entries()?, release)
    }

    fn clear_next(&self) -> Result<()> {
        for armed in restored_entries()?.iter().filter(|entry| entry.tries_left > Some(0)) {
            armed.set_counter("+0")?;
        }
        Ok(())
    }

    /// Makes `kernel-install` hold new kernels. Marks the entry of the default as good again, because
    /// the replacement of a kernel's package removes that mark.
    fn keep_default(&self, default: Option<&str>) -> Result<()> {
        let (tries, saved) = (self.root.join(TRIES_FILE), self.root.join(SAVED_TRIES));
        let earlier = read_if_exists(&tries)?.unwrap_or_default();
        if earlier != HOLD {
            // farrier-host's package restores the saved file when the package is removed.
            write_durably(&saved, &earlier)?;
            write_durably(&tries, HOLD)?;
        }
        let entries = restored_entries()?;
        let is_default = |entry: &&Entry| default == Some(entry.version.as_str()) && entry.is_new();
        entries.iter().find(is_default).map_or(Ok(()), |replaced| replaced.set_counter(""))
    }
}

impl Entry {
    /// Whether the entry has no counter.
    fn is_good(&self) -> bool {
        self.tries_left.is_none()
    }

    /// Whether the entry has the counter `+0`, as `kernel-install` writes it.
    fn is_new(&self) -> bool {
        self.tries_left == Some(0) && self.tries_done.is_none()
    }

    /// Gives the entry another counter.
    fn set_counter(&self, counter: &str) -> Result<()> {
        fs_err::rename(&self.path, self.path_with_counter(counter))?;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        Ok(fs_err::File::open(directory)?.sync_all()?)
    }

    /// Returns the path of the entry with another counter, such as `+1`; without a counter if it is empty.
    fn path_with_counter(&self, counter: &str) -> PathBuf {
        self.path.with_file_name(format!("{}{counter}.conf", self.name()))
    }

    /// Returns the name of the file without counter and extension.
    fn name(&self) -> &str {
        let stem = self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        // A kernel release may contain a `+`.
        let name = self.tries_left.and_then(|_| stem.rsplit_once('+')).map(|(name, _)| name);
        name.unwrap_or(stem)
    }
}

/// Whether systemd-boot started the host.
pub(super) fn started(root: &Path) -> Result<bool> {
    Ok(variable(root, "LoaderInfo")?.is_some_and(|name| name.starts_with("systemd-boot")))
}

/// Returns the text of an EFI variable of the boot loader.
fn variable(root: &Path, name: &str) -> Result<Option<String>> {
    let path = root.join("sys/firmware/efi/efivars").join(format!("{name}-{VENDOR}"));
    let Some(bytes) = read_if_exists(&path)? else { return Ok(None) };
    // Four bytes of attributes, then UTF-16.
    let (units, _) = bytes.get(4..).unwrap_or_default().as_chunks::<2>();
    let text =
        String::from_utf16_lossy(&units.iter().map(|unit| u16::from_le_bytes(*unit)).collect::<Vec<_>>());
    Ok(Some(text.trim_end_matches('\0').to_owned()))
}

/// Fails if a default entry is configured: systemd-boot boots such an entry even with no tries left. A pattern that matches every
/// entry, as `bootctl install` writes it, is accepted.
fn ensure_no_fixed_default(root: &Path, entries: &[Entry]) -> Result<()> {
    if variable(root, "LoaderEntryDefault")?.is_some() {
        let place = "the EFI variable LoaderEntryDefault".to_owned();
        return Err(Error::FixedDefault { place, command: Some("bootctl set-default ''") });
    }
    let esp = output_of(Command::new("bootctl").arg("--print-esp-path"))?;
    let config = Path::new(esp.trim()).join("loader/loader.conf");
    let text = read_if_exists(&config)?.unwrap_or_default();
    if default_for_all(&String::from_utf8_lossy(&text), entries) {
        Ok(())
    } else {
        Err(Error::FixedDefault { place: config.display().to_string(), command: None })
    }
}

/// Whether the default of a `loader.conf` is absent or a pattern for all entries.
fn default_for_all(config: &str, entries: &[Entry]) -> bool {
    config.lines().filter_map(|line| line.trim().strip_prefix("default")?.strip_prefix([' ', '\t'])).all(
        |default| {
            let start =
                default.trim().strip_suffix('*').filter(|start| !start.contains(['*', '?', '[', '@']));
            start.is_some_and(|start| entries.iter().all(|entry| entry.name().starts_with(start)))
        },
    )
}

/// Returns the entries, newest good one first. If `kernel-install` rewrote an entry, restores its earlier counter first.
fn restored_entries() -> Result<Vec<Entry>> {
    let entries = list_entries()?;
    let renames = counter_renames(&entries);
    for (new, earlier) in &renames {
        if earlier.tries_left > Some(0) {
            write_durably(&new.path, for_trial(&fs_err::read_to_string(&new.path)?).as_bytes())?;
        }
        fs_err::rename(&new.path, &earlier.path)?;
    }
    if renames.is_empty() { Ok(entries) } else { list_entries() }
}

fn list_entries() -> Result<Vec<Entry>> {
    entries_of(&output_of(Command::new("bootctl").args(["list", "--json=short", "--no-pager"]))?)
}

/// Reads what `bootctl list` printed: a value for each entry, or an array of all since systemd 253. Skips entries of other types,
/// such as unified kernel images.
fn entries_of(printed: &str) -> Result<Vec<Entry>> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Printed {
        All(Vec<Entry>),
        One(Entry),
    }
    let mut entries = Vec::new();
    for value in serde_json::Deserializer::from_str(printed).into_iter() {
        match value? {
            Printed::All(all) => entries.extend(all),
            Printed::One(one) => entries.push(one),
        }
    }
    entries.retain(|entry| entry.path.extension().is_some_and(|extension| extension == "conf"));
    Ok(entries)
}

/// Returns the entry of a kernel.
fn entry<'a>(entries: &'a [Entry], release: &str) -> Result<&'a Entry> {
    entries.iter().find(|entry| entry.version == release).ok_or_else(|| Error::NoEntry {
        release: release.to_owned(),
        command: format!("kernel-install add {release} /boot/vmlinuz-{release}"),
    })
}

/// Marks the entry of a kernel as good, and holds the good entries of newer kernels.
fn make_default(entries: &[Entry], release: &str) -> Result<()> {
    let entry = entry(entries, release)?;
    let good = entries.iter().filter(|entry| entry.is_good()).map(|entry| entry.version.clone());
    let ordered = kernels::in_version_order(&good.chain([release.to_owned()]).collect::<Vec<_>>())?;
    let newer: Vec<&String> = ordered.iter().rev().take_while(|newer| *newer != release).collect();
    for held in entries.iter().filter(|entry| entry.is_good() && newer.contains(&&entry.version)) {
        held.set_counter("+0")?;
    }
    entry.set_counter("")
}

/// Lets the entry of a kernel boot once.
fn make_next(entries: &[Entry], release: &str) -> Result<()> {
    let entry = entry(entries, release)?;
    // One rename, so that there are never two entries of one kernel.
    write_durably(&entry.path, for_trial(&fs_err::read_to_string(&entry.path)?).as_bytes())?;
    entry.set_counter("+1")
}

/// Returns the entries that `kernel-install` rewrote, as after `update-initramfs`, each with the earlier entry of its kernel.
fn counter_renames(entries: &[Entry]) -> Vec<(&Entry, &Entry)> {
    let pair = |new| {
        let earlier =
            entries.iter().find(|entry: &&Entry| !entry.is_new() && entry.name() == Entry::name(new))?;
        Some((new, earlier))
    };
    entries.iter().filter(|entry| entry.is_new()).filter_map(pair).collect()
}

/// Returns the content of an entry for a kernel on trial.
fn for_trial(entry: &str) -> String {
    TRIAL_OPTIONS.iter().fold(entry.to_owned(), |entry, option| with_option(&entry, option))
}

/// Adds an option to the kernel's command line in an entry, unless the entry sets this option.
fn with_option(entry: &str, option: &str) -> String {
    let (key, _) = option.split_once('=').unwrap_or((option, ""));
    let sets = |word: &str| word.split_once('=').map_or(word, |(key, _)| key) == key;
    let is_options = |line: &&str| line.split_whitespace().next() == Some("options");
    let is_set = entry.lines().filter(is_options).any(|line| line.split_whitespace().skip(1).any(sets));
    if is_set { entry.to_owned() } else { format!("{}\noptions    {option}\n", entry.trim_end()) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Makes the files of entries: `m-` and a kernel release, with a counter.
    fn directory_with(names: &[&str]) -> (tempfile::TempDir, Vec<Entry>) {
        let directory = tempfile::tempdir().unwrap();
        let entries = names.iter().map(|name| {
            let path = directory.path().join(format!("m-{name}.conf"));
            let (version, counter) = name.split_once('+').map_or((*name, None), |(v, c)| (v, Some(c)));
            fs::write(&path, format!("version    {version}\noptions    root=x quiet\n")).unwrap();
            let (left, done) = counter.map_or((None, None), |counter| {
                counter.split_once('-').map_or((Some(counter), None), |(left, done)| (Some(left), Some(done)))
            });
            let number = |text: Option<&str>| text.map(|text| text.parse().unwrap());
            Entry { path, version: version.to_owned(), tries_left: number(left), tries_done: number(done) }
        });
        let entries = entries.collect();
        (directory, entries)
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let names =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_good_kernel_becomes_the_default_and_newer_ones_are_held() {
        let (directory, entries) = directory_with(&["6.1.0-10", "6.1.0-8", "6.1.0-9+0-1"]);
        make_default(&entries, "6.1.0-9").unwrap();
        assert_eq!(names_in(directory.path()), ["m-6.1.0-10+0.conf", "m-6.1.0-8.conf", "m-6.1.0-9.conf"]);
    }

    #[test]
    fn one_kernel_boots_next_and_once() {
        let (directory, entries) = directory_with(&["6.1.0-9+0", "6.1.0-8", "6.1.0-10+0-1"]);
        make_next(&entries, "6.1.0-10").unwrap();
        assert_eq!(names_in(directory.path()), ["m-6.1.0-10+1.conf", "m-6.1.0-8.conf", "m-6.1.0-9+0.conf"]);
        let written = fs::read_to_string(directory.path().join("m-6.1.0-10+1.conf")).unwrap();
        let options = "options    panic=30\noptions    rd.shell=0\noptions    rd.emergency=reboot\n";
        assert_eq!(written, format!("version    6.1.0-10\noptions    root=x quiet\n{options}"));
        assert_eq!(with_option("options root=x panic=5", "panic=30"), "options root=x panic=5");
        let error = make_next(&entries, "6.2").unwrap_err().to_string();
        assert!(error.contains("kernel-install add 6.2 /boot/vmlinuz-6.2"), "{error}");
    }

    #[test]
    fn an_entry_that_is_written_again_keeps_its_counter() {
        for earlier in ["6.1.0-9", "6.1.0-9+1", "6.1.0-9+0-1"] {
            let (_directory, entries) = directory_with(&[earlier, "6.1.0-9+0", "6.1.0-10+0"]);
            assert_eq!(counter_renames(&entries), [(&entries[1], &entries[0])]);
        }
        let (_directory, entries) = directory_with(&["6.1.0-9", "6.1.0-10+0"]);
        assert_eq!(counter_renames(&entries), []);
    }

    #[test]
    fn names_keep_a_plus_that_belongs_to_the_kernel() {
        let entry = |tries_left| Entry {
            path: "/boot/m-6.12.1+deb12.conf".into(),
            version: "6.12.1+deb12".to_owned(),
            tries_left,
            tries_done: None,
        };
        assert_eq!(entry(None).path_with_counter("+0"), Path::new("/boot/m-6.12.1+deb12+0.conf"));
        let held = Entry { path: "/boot/m-6.12.1+deb12+0.conf".into(), ..entry(Some(0)) };
        assert_eq!(held.path_with_counter(""), Path::new("/boot/m-6.12.1+deb12.conf"));
    }

    #[test]
    fn a_default_for_all_entries_counts_boots() {
        let (_directory, entries) = directory_with(&["6.1.0-9", "6.1.0-10+0"]);
        for (config, expected) in [
            ("timeout 3\n", true),
            ("#default m-6.1.0-9*\n", true),
            ("default m-*\n", true),
            ("default m-6.1.0-9*\n", false),
            ("default\tm-6.1.0-9.conf\n", false),
            ("default @saved\n", false),
        ] {
            assert_eq!(default_for_all(config, &entries), expected, "{config}");
        }
    }

    #[test]
    fn both_forms_of_bootctl_are_read() {
        let one = r#"{"id":"m-1.conf","path":"/efi/loader/entries/m-1+0-1.conf","version":"1","triesLeft":0,"triesDone":1}"#;
        let unified = r#"{"id":"x.efi","path":"/efi/EFI/Linux/x.efi","version":"12"}"#;
        let wanted = [Entry {
            path: "/efi/loader/entries/m-1+0-1.conf".into(),
            version: "1".to_owned(),
            tries_left: Some(0),
            tries_done: Some(1),
        }];
        assert_eq!(entries_of(&format!("{one}\n{unified}\n")).unwrap(), wanted);
        assert_eq!(entries_of(&format!("[{unified},{one}]")).unwrap(), wanted);
        assert!(entries_of("no JSON").is_err());
    }

    #[test]
    fn systemd_boot_names_itself_in_a_variable() {
        let root = tempfile::tempdir().unwrap();
        assert!(!started(root.path()).unwrap());
        let variables = root.path().join("sys/firmware/efi/efivars");
        fs::create_dir_all(&variables).unwrap();
        for (name, expected) in [("systemd-boot 252.39-1~deb12u1", true), ("GRUB 2.12", false)] {
            let text = name.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
            let content: Vec<u8> = [6, 0, 0, 0].into_iter().chain(text).collect();
            fs::write(variables.join(format!("LoaderInfo-{VENDOR}")), content).unwrap();
            assert_eq!(started(root.path()).unwrap(), expected, "{name}");
        }
    }
}
