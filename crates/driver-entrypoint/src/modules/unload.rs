//! Unloads modules, and tells who is in the way.

use std::time::Duration;

use rustix::io::Errno;

use super::{loaded::Loaded, users};
use crate::{error::Error, module_file::kernel_name, node::Node};

/// How often a module that is in use is tried again. References of a device that is just going away, or of a
/// work queue, are given back after moments.
const TRIES: u32 = 10;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// Unloads a module. Returns whether it was loaded.
pub(crate) fn unload(node: &Node<'_>, name: &str) -> Result<bool, Error> {
    let name = kernel_name(name);
    let mut tries = 1;
    loop {
        if !Loaded::read(&node.paths)?.contains(&name) {
            return Ok(false);
        }
        match node.kernel.unload(&name) {
            Ok(()) => {
                node.log.step(format!("unloaded module {name}"));
                return Ok(true);
            }
            Err(Errno::NOENT) => return Ok(false),
            Err(Errno::AGAIN | Errno::BUSY) if tries < TRIES && is_free_of_modules(node, &name)? => {
                tries += 1;
                node.kernel.pause(BETWEEN_TRIES);
            }
            Err(errno @ (Errno::AGAIN | Errno::BUSY)) => return Err(in_the_way(node, &name, errno)?),
            Err(errno) => return Err(Error::kept(&name, errno)),
        }
    }
}

/// Unloads modules in this order, up to the first that does not go; those that are not loaded are passed over.
/// Returns the names of those that were unloaded.
pub(crate) fn unload_all<S: AsRef<str>>(node: &Node<'_>, names: &[S]) -> Result<Vec<String>, Error> {
    let mut done = Vec::new();
    for name in names {
        if unload(node, name.as_ref())? {
            done.push(kernel_name(name.as_ref()));
        }
    }
    Ok(done)
}

/// References that no module holds, and the processes behind them.
pub(crate) fn in_use(node: &Node<'_>, loaded: &Loaded, name: &str) -> Option<Error> {
    let module = loaded.get(name)?;
    let references =
        module.references.checked_sub(module.holders.len()).filter(|&references| references > 0)?;
    let name = kernel_name(name);
    let by = users::processes(&node.paths, &users::devices(&node.paths, loaded, &name));
    Some(Error::InUse { name, references, by })
}

/// Says whether processes stand in the way of unloading a module, before anything is unloaded. References that no
/// process seems to hold are no reason: they may go with the modules that go first.
pub(crate) fn check_processes(node: &Node<'_>, loaded: &Loaded, name: &str) -> Result<(), Error> {
    match in_use(node, loaded, name) {
        Some(Error::InUse { by, .. }) if by.is_empty() => Ok(()),
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn is_free_of_modules(node: &Node<'_>, name: &str) -> Result<bool, Error> {
    Ok(Loaded::read(&node.paths)?.get(name).is_none_or(|module| module.holders.is_empty()))
}

fn in_the_way(node: &Node<'_>, name: &str, errno: Errno) -> Result<Error, Error> {
    let loaded = Loaded::read(&node.paths)?;
    Ok(match loaded.get(name) {
        Some(module) if !module.holders.is_empty() => {
            Error::Held { name: name.to_owned(), by: module.holders.iter().cloned().collect() }
        }
        _ => in_use(node, &loaded, name).unwrap_or_else(|| Error::kept(name, errno)),
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
        bench.loaded_from_host(&["ib_core", "ib_uverbs", "mlx5_ib"]);
        bench
    }

    #[test]
    fn who_uses_a_module_is_named() {
        let bench = bench();
        let error = unload(&bench.node(), "ib-core").unwrap_err();
        assert_eq!(error.to_string(), "unload ib_core: used by ib_uverbs, mlx5_ib");
        assert_eq!(bench.kernel.pauses.get(), 0, "modules do not go by waiting");
        assert!(!unload(&bench.node(), "absent").unwrap());
    }

    #[test]
    fn holders_go_first() {
        let bench = bench();
        let loaded = Loaded::read(&bench.node().paths).unwrap();
        let order = loaded.with_holders(["ib_core", "absent"]);
        assert_eq!(order, ["mlx5_ib", "ib_uverbs", "ib_core"]);
        assert_eq!(unload_all(&bench.node(), &order).unwrap(), order);
        assert_eq!(bench.loaded(), Vec::<String>::new());
    }

    #[test]
    fn a_mapped_device_is_a_user_too() {
        let bench = bench();
        bench.kernel.users.borrow_mut().insert("mlx5_ib".into(), 1);
        bench.host_module("x", "");
        bench.loaded_from_host(&["x"]);
        bench.file("/proc/12/comm", "ucx\n");
        bench.file("/proc/12/maps", "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
        bench.file("/proc/13/maps", "7f00-7f01 r--p 0000 00:05 1 /usr/lib/libc.so.6\n");
        let error = unload(&bench.node(), "mlx5_ib").unwrap_err();
        assert_eq!(
            error.to_string(),
            "unload mlx5_ib: 1 reference(s) that no module holds, by process 12 (ucx) with /dev/infiniband/uverbs1 open"
        );
        assert!(error.hint().starts_with("end what uses the devices"));
        assert!(bench.kernel.pauses.get() > 0);
    }
}
