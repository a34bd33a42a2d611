//! Unloads modules, and reports the users that prevent an unload.

use std::time::Duration;

use rustix::io::Errno;

use super::{loaded::Loaded, users};
use crate::{error::Error, module_file::kernel_name, node::Node};

/// Number of attempts while a module is in use. References of a device that is being removed, or of a work queue, are
/// dropped after a short time.
pub(super) const MAX_ATTEMPTS: u32 = 10;
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Unloads a module. Returns whether it was loaded.
pub(crate) fn unload(node: &Node<'_>, name: &str) -> Result<bool, Error> {
    let name = kernel_name(name);
    let mut attempts = 1;
    let mut progress = |time: Duration| {
        node.log.warn(format!(
            "still waiting for the kernel to unload module {name} ({} s): see dmesg on the node. The kernel cannot be \
             interrupted meanwhile",
            time.as_secs()
        ));
    };
    loop {
        let loaded = Loaded::read(&node.paths)?;
        if !loaded.contains(&name) {
            return Ok(false);
        }
        if attempts == 1 {
            node.log.step(format!("unloading module {name}"));
        }
        if let Some(error) = virtual_functions_in_use(node, &loaded, &name) {
            return Err(error);
        }
        match node.kernel.unload(&name, &mut progress) {
            Ok(()) => {
                node.log.step(format!("unloaded module {name}"));
                return Ok(true);
            }
            Err(Errno::NOENT) => return Ok(false),
            Err(Errno::AGAIN | Errno::BUSY) if attempts < MAX_ATTEMPTS && has_no_holders(&loaded, &name) => {
                attempts += 1;
                node.kernel.pause(RETRY_INTERVAL);
            }
            Err(errno @ (Errno::AGAIN | Errno::BUSY)) => return Err(unload_error(node, &name, errno)?),
            Err(errno) => return Err(Error::unload_refused(&name, errno)),
        }
    }
}

/// Unloads modules in this order and stops at the first failure; modules that are not loaded are skipped. Returns the
/// names of the unloaded modules.
pub(crate) fn unload_all<S: AsRef<str>>(node: &Node<'_>, names: &[S]) -> Result<Vec<String>, Error> {
    let mut unloaded = Vec::new();
    for name in names {
        if unload(node, name.as_ref())? {
            unloaded.push(kernel_name(name.as_ref()));
        }
    }
    Ok(unloaded)
}

/// Reports references that no module holds, with the processes behind them.
pub(crate) fn in_use(node: &Node<'_>, loaded: &Loaded, name: &str) -> Option<Error> {
    let module = loaded.get(name)?;
    let references =
        module.references.checked_sub(module.holders.len()).filter(|&references| references > 0)?;
    let name = kernel_name(name);
    let users = users::processes(&node.paths, &users::device_prefixes(&node.paths, loaded, &name));
    Some(Error::InUse { name, references, users })
}

/// Like [`in_use`], for drivers such as `vfio_pci` that are bound to virtual functions of the module's devices. The
/// functions disappear with the module, and the kernel waits indefinitely for processes that have one open.
pub(crate) fn virtual_functions_in_use(node: &Node<'_>, loaded: &Loaded, name: &str) -> Option<Error> {
    let others = users::virtual_function_drivers(&node.paths, name);
    others.iter().find_map(|driver| in_use(node, loaded, driver))
}

/// Checks, before any module is unloaded, whether processes prevent the unload of a module. References without a
/// visible process may belong to modules that are unloaded first. If no module uses the module, such references are an
/// error unless they are dropped within the retries.
pub(crate) fn check_users(node: &Node<'_>, name: &str) -> Result<(), Error> {
    let mut attempts = 1;
    loop {
        let loaded = Loaded::read(&node.paths)?;
        if let Some(error) = virtual_functions_in_use(node, &loaded, name) {
            return Err(error);
        }
        match in_use(node, &loaded, name) {
            None => return Ok(()),
            Some(Error::InUse { users, .. }) if users.is_empty() && !has_no_holders(&loaded, name) => {
                return Ok(());
            }
            Some(Error::InUse { users, .. }) if users.is_empty() && attempts < MAX_ATTEMPTS => {
                attempts += 1;
                node.kernel.pause(RETRY_INTERVAL);
            }
            Some(error) => return Err(error),
        }
    }
}

fn has_no_holders(loaded: &Loaded, name: &str) -> bool {
    loaded.get(name).is_none_or(|module| module.holders.is_empty())
}

fn unload_error(node: &Node<'_>, name: &str, errno: Errno) -> Result<Error, Error> {
    let loaded = Loaded::read(&node.paths)?;
    Ok(match loaded.get(name) {
        Some(module) if !module.holders.is_empty() => {
            Error::Held { name: name.to_owned(), users: module.holders.iter().cloned().collect() }
        }
        _ => in_use(node, &loaded, name).unwrap_or_else(|| Error::unload_refused(name, errno)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    fn bench() -> Bench {
        let bench = Bench::new();
        bench.host_module("ib_core", "");
        bench.host_module("ib_uverbs", "ib_core");
        bench.host_module("mlx5_ib", "ib_core,ib_uverbs");
        bench.load_from_host(&["ib_core", "ib_uverbs", "mlx5_ib"]);
        bench
    }

    #[test]
    fn users_of_a_module_are_named() {
        let bench = bench();
        let error = unload(&bench.node(), "ib-core").unwrap_err();
        assert_eq!(error.to_string(), "unload ib_core: used by ib_uverbs, mlx5_ib");
        assert_eq!(bench.kernel.pauses.get(), 0, "no retry while other modules use it");
        assert!(!unload(&bench.node(), "absent").unwrap());
    }

    #[test]
    fn an_unload_is_logged_before_it_begins_and_while_it_takes_long() {
        let bench = bench();
        bench.kernel.slow_calls.borrow_mut().insert("mlx5_ib".into(), 1);
        unload(&bench.node(), "mlx5_ib").unwrap();
        let log = bench.log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines[0], "INFO  unloading module mlx5_ib");
        assert!(
            lines[1].starts_with("WARN  still waiting for the kernel to unload module mlx5_ib (10 s)"),
            "{log}"
        );
        assert_eq!(lines[2], "INFO  unloaded module mlx5_ib");
    }

    #[test]
    fn holders_are_unloaded_first() {
        let bench = bench();
        let loaded = Loaded::read(&bench.node().paths).unwrap();
        let order = loaded.with_holders(["ib_core", "absent"]);
        assert_eq!(order, ["mlx5_ib", "ib_uverbs", "ib_core"]);
        assert_eq!(unload_all(&bench.node(), &order).unwrap(), order);
        assert_eq!(bench.loaded_versions(), Vec::<String>::new());
    }

    /// Otherwise the kernel would wait for the virtual machine in the middle of removing the device.
    #[test]
    fn an_open_virtual_function_keeps_the_driver_of_its_device() {
        let bench = bench();
        for name in ["vfio_pci", "mlx5_core"] {
            bench.host_module(name, "");
        }
        bench.load_from_host(&["mlx5_core"]);
        bench.virtual_function("mlx5_core", "vfio_pci");
        bench.load_from_host(&["vfio_pci"]);
        check_users(&bench.node(), "mlx5_core").unwrap();
        bench.set_references("vfio_pci", 1);
        let wanted = "unload vfio_pci: 1 reference(s) that no module holds";
        let error = check_users(&bench.node(), "mlx5-core").unwrap_err();
        assert!(error.to_string().starts_with(wanted), "{error}");
        let error = unload(&bench.node(), "mlx5_core").unwrap_err();
        assert!(error.to_string().starts_with(wanted), "{error}");
        assert_eq!(bench.calls(), [""; 0]);
    }

    #[test]
    fn a_mapped_device_is_a_user_too() {
        let bench = bench();
        bench.kernel.references.borrow_mut().insert("mlx5_ib".into(), 1);
        bench.host_module("x", "");
        bench.load_from_host(&["x"]);
        bench.write("/proc/12/comm", "ucx\n");
        bench.write("/proc/12/maps", "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
        bench.write("/proc/13/maps", "7f00-7f01 r--p 0000 00:05 1 /usr/lib/libc.so.6\n");
        let error = unload(&bench.node(), "mlx5_ib").unwrap_err();
        assert_eq!(
            error.to_string(),
            "unload mlx5_ib: 1 reference(s) that no module holds; in use by process 12 (ucx) with /dev/infiniband/uverbs1 open"
        );
        assert!(error.hint().starts_with("stop the processes that use the devices"));
        assert!(bench.kernel.pauses.get() > 0);
    }
}
