//! Devlink parameters and the switchdev mode of devices, which are lost when their driver is unloaded. Uses the
//! `devlink` program (iproute2) of the image; without it no parameters are kept.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{files::program, node::Node};

/// Modes of parameters that are not stored permanently on the device: a change takes effect immediately, or when the device is
/// reinitialized.
const MODES: [&str; 2] = ["runtime", "driverinit"];

/// The `devlink` program, used on the devices of a node.
pub(super) struct Devlink<'a> {
    node: &'a Node<'a>,
    program: PathBuf,
}

/// A device parameter that is not stored permanently on the device (devlink-params in the kernel's documentation).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Device, for example `pci/0000:08:00.0`.
    pub(super) device: String,
    pub(super) name: String,
    /// One of [`MODES`].
    pub(super) mode: String,
    pub(super) value: String,
    /// Whether the user probably set the value; otherwise it may be a default of the driver.
    pub(super) set: bool,
}

impl Parameter {
    /// Whether both are the same parameter, regardless of the value.
    pub(super) fn is_same_parameter(&self, other: &Self) -> bool {
        (&self.device, &self.name, &self.mode) == (&other.device, &other.name, &other.mode)
    }

    pub(super) fn to_line(&self) -> String {
        let Self { device, name, mode, value, set } = self;
        format!("parameter {device} {name} {mode} {value} {set}\n")
    }

    /// Parses the fields of a line; `None` if the line is not a parameter.
    pub(super) fn of_fields(fields: &[&str]) -> Option<Self> {
        let ["parameter", device, name, mode, value, set] = *fields else { return None };
        let is_known = MODES.contains(&mode);
        let [device, name, mode, value] = [device, name, mode, value].map(str::to_owned);
        is_known.then_some(Self { device, name, mode, value, set: set == "true" })
    }
}

/// Filters out parameters that still have the value that the driver loaded with (`defaults`). `defaults` is unknown for the
/// driver that the node booted with. In that case generic parameters count as set by the user, because they mean the
/// same to every driver. Driver-specific parameters do not count.
pub(super) fn changed_parameters(current: Vec<Parameter>, defaults: &[Parameter]) -> Vec<Parameter> {
    let changed = current.into_iter().filter_map(|mut current| {
        match defaults.iter().find(|recorded| recorded.is_same_parameter(&current)) {
            Some(recorded) if !recorded.set && recorded.value == current.value => None,
            recorded => {
                current.set |= recorded.is_some();
                Some(current)
            }
        }
    });
    changed.collect()
}

impl<'a> Devlink<'a> {
    /// Returns `None` if the image has no `devlink`.
    pub(super) fn of(node: &'a Node<'a>) -> Option<Self> {
        Some(Self { node, program: program(&node.paths, "devlink")? })
    }

    /// Reads the parameters of these devices.
    pub(super) fn parameters(&self, devices: &[String]) -> Vec<Parameter> {
        // The program shows all parameters, or one by its name, but not all of one device.
        let text = run(&self.program, &["dev", "param", "show"]).unwrap_or_default();
        let mut all = parse_parameters(&text);
        all.retain(|parameter| devices.contains(&parameter.device));
        all
    }

    /// Restores parameters whose values have changed; reloads a device if one of its `driverinit` parameters was
    /// restored.
    pub(super) fn restore(&self, saved: &[Parameter]) {
        let mut devices: Vec<String> = saved.iter().map(|parameter| parameter.device.clone()).collect();
        devices.dedup();
        let current = self.parameters(&devices);
        for device in devices.iter().map(String::as_str) {
            let mut needs_reload = false;
            for saved in saved.iter().filter(|saved| saved.device == device) {
                let Parameter { name, mode, value, set, .. } = saved;
                let current = current.iter().find(|current| current.is_same_parameter(saved));
                let current_value = current.map(|current| current.value.as_str());
                let arguments = ["dev", "param", "set", device, "name", name, "value", value, "cmode", mode];
                match current_value {
                    Some(current_value) if current_value == value => {}
                    Some(current_value) if !set => self.node.log.warn(format!(
                        "{device}: {name} was {value}, and is {current_value} now. Whether it was set by hand or was \
                         the previous driver's default is unknown; to restore it: devlink {}",
                        arguments.join(" ")
                    )),
                    None if !set => {}
                    _ => needs_reload |= self.set(&arguments) && mode == "driverinit",
                }
            }
            if needs_reload {
                self.set(&["dev", "reload", device]);
            }
        }
    }

    /// Sets switchdev mode; returns whether that succeeded.
    pub(super) fn set_switchdev(&self, device: &str) -> bool {
        self.set(&["dev", "eswitch", "set", device, "mode", "switchdev"])
    }

    /// Whether a device is in switchdev mode; `None` if devlink cannot tell.
    pub(super) fn is_switchdev(&self, device: &str) -> Option<bool> {
        // Output: <device>: mode legacy inline-mode none encap-mode basic
        let text = run(&self.program, &["dev", "eswitch", "show", device]).ok()?;
        let mode = text.split_whitespace().skip_while(|word| *word != "mode").nth(1)?;
        Some(mode == "switchdev")
    }

    fn set(&self, arguments: &[&str]) -> bool {
        let joined = arguments.join(" ");
        let result = run(&self.program, arguments);
        match &result {
            Ok(_) => self.node.log.step(format!("devlink {joined}")),
            Err(error) => self.node.log.warn(format!("devlink {joined}: {error}")),
        }
        result.is_ok()
    }
}

/// Runs a program; returns its standard output, or its error output if it failed.
pub(super) fn run(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Parses `devlink dev param show`: a line with the device, one for each parameter with its name, and one for each mode
/// with its value. Generic parameters count as set.
fn parse_parameters(text: &str) -> Vec<Parameter> {
    let (mut device, mut name, mut set) = ("", "", false);
    let mut parameters = Vec::new();
    for line in text.lines() {
        let arguments: Vec<&str> = line.split_whitespace().collect();
        match *arguments {
            [word] if word.contains('/') => device = word.trim_end_matches(':'),
            ["name", word, "type", kind, ..] => (name, set) = (word, kind == "generic"),
            ["cmode", mode, "value", value, ..] if MODES.contains(&mode) => {
                let [device, name, mode, value] = [device, name, mode, value].map(str::to_owned);
                parameters.push(Parameter { device, name, mode, value, set });
            }
            _ => {}
        }
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    const DEVICE: &str = "pci/0000:08:00.0";
    /// Output of devlink 6.1; the first device belongs to another driver.
    const SHOWN: &str = "\
pci/0000:07:00.0:
  name enable_roce type generic
    values:
      cmode driverinit value true
pci/0000:08:00.0:
  name enable_roce type generic
    values:
      cmode driverinit value true
  name flow_steering_mode type driver-specific
    values:
      cmode runtime value smfs
  name enable_sriov type generic
    values:
      cmode permanent value true";

    /// A `devlink` program that shows these parameters and records the changes that it is asked for.
    fn bench(shown: &str) -> Bench {
        let bench = Bench::new();
        bench.write("/shown", shown);
        let [shown, asked] = ["/shown", "/asked"].map(|path| bench.at(path).display().to_string());
        let script =
            format!("case \"$*\" in 'dev param show') cat {shown} ;; *) echo \"$*\" >> {asked} ;; esac");
        bench.program("devlink", &script);
        bench
    }

    fn parameters(shown: &str) -> Vec<Parameter> {
        Devlink::of(&bench(shown).node()).unwrap().parameters(&[DEVICE.to_owned()])
    }

    #[test]
    fn parameters_with_changed_values_are_restored() {
        let mut saved = parameters(SHOWN);
        let arguments = |parameter: &Parameter| {
            let Parameter { name, mode, value, set, .. } = parameter;
            format!("{name} {mode} {value} {set}")
        };
        assert_eq!(
            saved.iter().map(arguments).collect::<Vec<_>>(),
            ["enable_roce driverinit true true", "flow_steering_mode runtime smfs false"]
        );
        let calls_and_log = |saved: &[Parameter], shown: &str| {
            let bench = bench(shown);
            Devlink::of(&bench.node()).unwrap().restore(saved);
            (bench.read("/asked").unwrap_or_default(), bench.log())
        };
        assert_eq!(calls_and_log(&saved, SHOWN), Default::default());
        assert_eq!(
            calls_and_log(&saved, &SHOWN.replace("driverinit value true", "driverinit value false")).0,
            "dev param set pci/0000:08:00.0 name enable_roce value true cmode driverinit\ndev reload pci/0000:08:00.0\n"
        );
        let other = SHOWN.replace("smfs", "dmfs");
        let command = "dev param set pci/0000:08:00.0 name flow_steering_mode value smfs cmode runtime";
        let (none, log) = calls_and_log(&saved, &other);
        assert!(none.is_empty() && log.contains("was smfs, and is dmfs") && log.ends_with(command), "{log}");
        saved[1].set = true;
        assert_eq!(calls_and_log(&saved, &other).0, format!("{command}\n"));
    }

    #[test]
    fn defaults_of_the_driver_are_told_from_user_settings() {
        let changed = |fresh: &[Parameter], now: &str| {
            let found = changed_parameters(parameters(now), fresh).into_iter();
            found.map(|found| format!("{} {} {}", found.name, found.value, found.set)).collect::<Vec<_>>()
        };
        let mut fresh = parameters(SHOWN);
        fresh[0].set = false;
        assert_eq!(changed(&fresh, SHOWN), [""; 0]);
        assert_eq!(changed(&fresh, &SHOWN.replace("smfs", "dmfs")), ["flow_steering_mode dmfs true"]);
        // The parameter was restored when this driver was loaded.
        fresh[0].set = true;
        assert_eq!(changed(&fresh, SHOWN), ["enable_roce true true"]);
        let unknown = ["enable_roce true true", "flow_steering_mode smfs false"];
        assert_eq!(changed(&[], SHOWN), unknown);
        for parameter in &fresh {
            let line = parameter.to_line();
            let fields: Vec<&str> = line.split_whitespace().collect();
            assert_eq!(Parameter::of_fields(&fields).as_ref(), Some(parameter));
        }
    }

    #[test]
    fn parameters_that_a_device_refuses_are_logged() {
        let bench = Bench::new();
        assert!(Devlink::of(&bench.node()).is_none(), "the image has no devlink");
        bench.program("devlink", "echo 'kernel answers: Operation not supported' >&2; exit 1");
        let node = bench.node();
        let devlink = Devlink::of(&node).unwrap();
        assert!(devlink.parameters(&[DEVICE.to_owned()]).is_empty());
        assert_eq!(devlink.is_switchdev(DEVICE), None);
        assert!(!devlink.set_switchdev(DEVICE));
        let wanted = "WARN  devlink dev eswitch set pci/0000:08:00.0 mode switchdev: kernel answers: Operation not supported";
        assert_eq!(bench.log(), wanted);
    }
}
