//! `ocp_dtk_entrypoint`: the command that the GPU Operator runs on OpenShift for drivers that it does not know as
//! precompiled. The operator adds a container of the cluster's driver toolkit to the pod. That container is meant to
//! compile the sources that the driver's container provides in a shared directory (`controllers/object_controls.go`,
//! `assets/state-driver` of the operator). farrier's images need no compilation. The toolkit's container therefore gets
//! this program, which reports that the driver is built, and waits.

use std::fs;

use crate::{error::Error, files, node::Node, signals::Signals};

/// Usage text of `ocp_dtk_entrypoint`.
pub(crate) const USAGE: &str = "\
usage: ocp_dtk_entrypoint nv-ctr-run-with-dtk        nvidia-driver init
       ocp_dtk_entrypoint nv-fs-ctr-run-with-dtk     nvidia-gds-driver install
       ocp_dtk_entrypoint gdrcopy-ctr-run-with-dtk   nvidia-gdrcopy-driver install
       ocp_dtk_entrypoint dtk-build-driver           for the container of the driver toolkit: waits, because there is nothing to compile";

/// Directory that the pod's containers share.
const SHARED: &str = "/mnt/shared-nvidia-driver-toolkit";
/// Path of this program.
const PROGRAM: &str = "/proc/self/exe";

/// Translates a role of the operator to this program's arguments; `None` for the role of the toolkit's container.
pub(crate) fn role_arguments(arguments: &[&str]) -> Result<Option<[&'static str; 2]>, String> {
    Ok(match *arguments {
        ["nv-ctr-run-with-dtk"] => Some(["nvidia-driver", "init"]),
        ["nv-fs-ctr-run-with-dtk"] => Some(["nvidia-gds-driver", "install"]),
        ["gdrcopy-ctr-run-with-dtk"] => Some(["nvidia-gdrcopy-driver", "install"]),
        ["dtk-build-driver"] => None,
        _ => return Err(USAGE.to_owned()),
    })
}

/// Copies this program for the toolkit's container, which waits for it. Never replaces an earlier copy, because that
/// container may be running it.
pub(crate) fn provide_program(node: &Node<'_>) -> Result<(), Error> {
    let prepared = format!("{SHARED}/dir_prepared");
    if !node.paths.at(SHARED).is_dir() || node.paths.at(&prepared).exists() {
        return Ok(());
    }
    let target = format!("{SHARED}/ocp_dtk_entrypoint");
    // `fs::copy` preserves the executable permission.
    fs::copy(node.paths.at(PROGRAM), node.paths.at(&target)).map_err(Error::on("write", target.as_str()))?;
    files::write(node, &prepared, "")?;
    node.log.step("the driver toolkit's container has nothing to compile");
    Ok(())
}

/// Runs in the toolkit's container: writes the marker files that the containers of other images wait for, then waits for a
/// signal.
pub(crate) fn wait(node: &Node<'_>, signals: &mut dyn Signals) -> Result<(), Error> {
    for marker in ["driver_build_started", "driver_built"] {
        files::write(node, &format!("{SHARED}/{marker}"), "")?;
    }
    node.log.step("nothing to compile: the driver's image has its modules");
    let signal = signals.wait();
    node.log.step(format!("received {signal}: stopping"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, EndsWhenReady};

    #[test]
    fn the_toolkits_container_gets_the_program_and_waits() {
        let bench = Bench::new();
        provide_program(&bench.node()).unwrap();
        assert_eq!(bench.log(), "", "the pod has no such container");
        bench.write(PROGRAM, "program");
        bench.write(&format!("{SHARED}/.keep"), "");
        provide_program(&bench.node()).unwrap();
        assert_eq!(bench.read(&format!("{SHARED}/ocp_dtk_entrypoint")).unwrap(), "program");
        assert!(bench.read(&format!("{SHARED}/dir_prepared")).is_some());
        bench.write(PROGRAM, "another");
        provide_program(&bench.node()).unwrap();
        assert_eq!(
            bench.read(&format!("{SHARED}/ocp_dtk_entrypoint")).unwrap(),
            "program",
            "kept, because it may be running"
        );
        let mut built = || assert!(bench.read(&format!("{SHARED}/driver_built")).is_some());
        wait(&bench.node(), &mut EndsWhenReady(&mut built)).unwrap();
    }

    #[test]
    fn roles_are_those_of_the_operator() {
        for (role, arguments) in [
            ("nv-ctr-run-with-dtk", ["nvidia-driver", "init"]),
            ("nv-fs-ctr-run-with-dtk", ["nvidia-gds-driver", "install"]),
            ("gdrcopy-ctr-run-with-dtk", ["nvidia-gdrcopy-driver", "install"]),
        ] {
            assert_eq!(role_arguments(&[role]), Ok(Some(arguments)));
        }
        assert_eq!(role_arguments(&["dtk-build-driver"]), Ok(None));
        for wrong in [&[][..], &["nv-ctr-run-with-dtk", "x"], &["build"]] {
            assert!(role_arguments(wrong).is_err(), "{wrong:?}");
        }
    }
}
