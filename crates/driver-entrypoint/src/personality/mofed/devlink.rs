//! Adapter: settings of devices that go with their driver, through the program `devlink` (iproute2) of the image: an image without it
//! keeps none.

use std::{path::PathBuf, process::Command};

use crate::{
    files::{entries, program},
    node::Node,
};

/// The program, for the devices of a node.
pub(super) struct Devlink<'a> {
    node: &'a Node<'a>,
    program: PathBuf,
}

/// A parameter of a device that is not kept in its memory (devlink-params in the kernel's documentation).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Such as `pci/0000:08:00.0`.
    pub(super) device: String,
    pub(super) name: String,
    pub(super) mode: Mode,
    pub(super) value: String,
}

/// When a parameter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// At once.
    Runtime,
    /// When the device is set up anew.
    Driverinit,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Driverinit => "driverinit",
        }
    }

    pub(super) fn of(name: &str) -> Option<Self> {
        [Self::Runtime, Self::Driverinit].into_iter().find(|mode| mode.name() == name)
    }
}

impl<'a> Devlink<'a> {
    /// `None` where the image has no such program.
    pub(super) fn of(node: &'a Node<'a>) -> Option<Self> {
        Some(Self { node, program: program(&node.paths, "devlink")? })
    }

    /// The parameters of all physical functions that the driver drives: virtual ones are made anew after these are restored.
    pub(super) fn parameters(&self) -> Vec<Parameter> {
        let devices = entries(self.node.paths.at("/sys/bus/pci/drivers/mlx5_core")).into_iter();
        let devices = devices.filter(|device| !device.join("physfn").exists());
        let names = devices.filter_map(|device| Some(device.file_name()?.to_str()?.to_owned()));
        let devices = names.filter(|name| name.contains(':')).map(|name| format!("pci/{name}"));
        devices.flat_map(|device| self.parameters_of(&device)).collect()
    }

    fn parameters_of(&self, device: &str) -> Vec<Parameter> {
        // A device without any is an error to the program.
        self.run(&["dev", "param", "show", device]).map(|text| parse(device, &text)).unwrap_or_default()
    }

    /// Puts those back that are others now; a device is set up anew where one of them asks for it.
    pub(super) fn restore(&self, wanted: &[Parameter]) {
        let mut devices: Vec<&str> = wanted.iter().map(|parameter| parameter.device.as_str()).collect();
        devices.dedup();
        for device in devices {
            let now = self.parameters_of(device);
            let others = wanted.iter().filter(|wanted| wanted.device == *device && !now.contains(wanted));
            let mut is_set_up_anew = false;
            for Parameter { device, name, mode, value } in others {
                let words: [&str; 10] =
                    ["dev", "param", "set", device, "name", name, "value", value, "cmode", mode.name()];
                is_set_up_anew |= self.set(&words) && *mode == Mode::Driverinit;
            }
            if is_set_up_anew {
                self.set(&["dev", "reload", device]);
            }
        }
    }

    /// Switchdev mode. Did it work?
    pub(super) fn switchdev(&self, pci: &str) -> bool {
        self.set(&["dev", "eswitch", "set", &format!("pci/{pci}"), "mode", "switchdev"])
    }

    fn set(&self, words: &[&str]) -> bool {
        let words_of_log = words.join(" ");
        let done = self.run(words);
        match &done {
            Ok(_) => self.node.log.step(format!("devlink {words_of_log}")),
            Err(error) => self.node.log.warn(format!("devlink {words_of_log}: {error}")),
        }
        done.is_ok()
    }

    /// What it writes, or why it failed.
    fn run(&self, words: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.program).args(words).output().map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

/// `devlink dev param show`: a line with the name, and one for each mode with its value.
fn parse(device: &str, text: &str) -> Vec<Parameter> {
    let mut name = "";
    let mut parameters = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match *words {
            ["name", found, ..] => name = found,
            ["cmode", mode, "value", value, ..] => {
                let parameter = |mode| Parameter {
                    device: device.to_owned(),
                    name: name.to_owned(),
                    mode,
                    value: value.to_owned(),
                };
                parameters.extend(Mode::of(mode).map(parameter));
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

    const PCI: &str = "0000:08:00.0";
    /// As devlink 6.1 writes it.
    const SHOWN: &str = "\
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

    /// A program that shows these parameters, and notes what it is asked to set.
    fn bench(shown: &str) -> Bench {
        let bench = Bench::new();
        bench.file(&format!("/sys/bus/pci/drivers/mlx5_core/{PCI}/vendor"), "0x15b3\n");
        bench.file("/sys/bus/pci/drivers/mlx5_core/module/x", "");
        bench.file("/shown", shown);
        let [shown, asked] = ["/shown", "/asked"].map(|path| bench.at(path).display().to_string());
        let script = format!("case \"$*\" in *show*) cat {shown} ;; *) echo \"$*\" >> {asked} ;; esac");
        bench.program("devlink", &script);
        bench
    }

    #[test]
    fn parameters_that_are_others_now_are_put_back() {
        let saved = Devlink::of(&bench(SHOWN).node()).unwrap().parameters();
        let words = |parameter: &Parameter| {
            format!("{} {} {}", parameter.name, parameter.mode.name(), parameter.value)
        };
        assert_eq!(
            saved.iter().map(words).collect::<Vec<_>>(),
            ["enable_roce driverinit true", "flow_steering_mode runtime smfs"]
        );
        let asked = |shown: &str| {
            let bench = bench(shown);
            Devlink::of(&bench.node()).unwrap().restore(&saved);
            bench.text("/asked").unwrap_or_default()
        };
        assert_eq!(asked(SHOWN), "");
        assert_eq!(
            asked(&SHOWN.replace("smfs", "dmfs")),
            "dev param set pci/0000:08:00.0 name flow_steering_mode value smfs cmode runtime\n"
        );
        assert_eq!(
            asked(&SHOWN.replace("driverinit value true", "driverinit value false")),
            "dev param set pci/0000:08:00.0 name enable_roce value true cmode driverinit\ndev reload pci/0000:08:00.0\n"
        );
    }

    #[test]
    fn what_a_device_does_not_take_is_said() {
        let bench = Bench::new();
        assert!(Devlink::of(&bench.node()).is_none(), "an image without it");
        bench.program("devlink", "echo 'kernel answers: Operation not supported' >&2; exit 1");
        let node = bench.node();
        let devlink = Devlink::of(&node).unwrap();
        assert!(devlink.parameters_of("pci/0000:08:00.0").is_empty());
        assert!(!devlink.switchdev(PCI));
        let wanted = "WARN  devlink dev eswitch set pci/0000:08:00.0 mode switchdev: kernel answers: Operation not supported";
        assert_eq!(bench.log(), wanted);
    }
}
