//! Writes archives that a boot loader passes to the kernel after an initramfs of initramfs-tools or dracut. The kernel unpacks
//! all archives into one tree (`Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use farrier_local::cpio::CpioWriter;
use farrier_payload::Result;
use fs_err as fs;
use kmod::Module;

use super::{
    deb::Names,
    entries::{Entry, with_directories},
    payload::HostPayload,
};

/// Returns the compressed archive and its file name. Blocks.
pub(super) fn write(payload: &HostPayload) -> Result<(String, Vec<u8>)> {
    let mut entries = payload.entries();
    let script = script_of(payload)?.into_bytes();
    let name = &payload.name;
    // initramfs-tools and dracut source these files before udev loads the first module.
    for path in [
        format!("conf/conf.d/farrier-{name}"),
        format!("lib/dracut/hooks/pre-udev/50-farrier-{name}.sh"),
        // dracut 103 and later; to 109, the other directory of hooks is a link to this one.
        format!("var/lib/dracut/hooks/pre-udev/50-farrier-{name}.sh"),
    ] {
        entries.insert(path.into(), Entry::Text(script.clone()));
    }
    let mut bytes = Vec::new();
    let mut archive = CpioWriter::new(&mut bytes);
    for (path, entry) in with_directories(entries) {
        match entry {
            // In the initramfs, /lib may be a link into /usr, and the hooks a link into /var. A directory would replace the link.
            Entry::Directory if path == Path::new("lib") || path.starts_with("lib/dracut") => {}
            Entry::Directory => archive.directory(&path)?,
            Entry::Text(text) => archive.bytes(&path, 0o644, &text)?,
            Entry::Payload(file) if fs::symlink_metadata(&file)?.is_symlink() => {
                archive.symlink(&path, &fs::read_link(&file)?)?;
            }
            Entry::Payload(file) => archive.bytes(&path, 0o644, &fs::read(&file)?)?,
        }
    }
    archive.finish()?;
    // Compressed archives need no alignment.
    let mut compressed = Vec::new();
    oci::compress(&bytes[..], &mut compressed)?;
    let Names { package, version, .. } = Names::of(payload);
    Ok((format!("{package}_{version}_{}.cpio.gz", payload.arch), compressed))
}

/// Module of the payload.
struct HostModule {
    path: PathBuf,
    name: String,
    depends: Vec<String>,
}

/// Returns commands that load the modules. The initramfs has its own indexes of modules, which do not list
/// the payload's modules: insmod loads these by path, and modprobe loads the kernel's modules that they need.
fn script_of(payload: &HostPayload) -> Result<String> {
    let modules = in_load_order(modules(payload)?);
    let in_payload: BTreeSet<&str> = modules.iter().map(|module| module.name.as_str()).collect();
    let needed = modules.iter().flat_map(|module| &module.depends).map(String::as_str);
    let needed: BTreeSet<&str> = needed.filter(|name| !in_payload.contains(name)).collect();
    // An initramfs of dracut has no uname, and without systemd no insmod.
    let mut script = format!(
        "read -r farrier_release < /proc/sys/kernel/osrelease\n\
         if [ \"$farrier_release\" = {} ]; then\n    \
             command -v insmod >/dev/null || insmod() {{ kmod insmod \"$1\"; }}\n",
        payload.release
    );
    for name in needed {
        script.extend(["    modprobe -q ", name, "\n"]);
    }
    for module in &modules {
        script.extend(["    insmod /", &module.path.to_string_lossy(), "\n"]);
    }
    Ok(script + "fi\n")
}

fn modules(payload: &HostPayload) -> Result<Vec<HostModule>> {
    let host_module = |(path, _, module): (&Path, &Path, Module)| {
        let depends = module.field("depends").unwrap_or_default().split(',');
        let depends = depends.filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect();
        HostModule { path: path.to_owned(), name: module.name.replace('-', "_"), depends }
    };
    Ok(payload.modules()?.into_iter().map(host_module).collect())
}

/// Sorts modules in load order: each module follows its dependencies.
fn in_load_order(mut modules: Vec<HostModule>) -> Vec<HostModule> {
    let mut sorted = Vec::new();
    while !modules.is_empty() {
        let is_pending = |name: &String| modules.iter().any(|module| module.name == *name);
        let ready = modules.iter().position(|module| !module.depends.iter().any(is_pending));
        // The check has refused modules that depend on each other in a cycle.
        sorted.push(modules.remove(ready.unwrap_or_default()));
    }
    sorted
}

#[cfg(test)]
#[path = "initramfs_tests.rs"]
mod tests;
