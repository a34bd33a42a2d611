//! `ibdev2netdev`: lists the network interface of each RDMA device. The output has the format of OFED's
//! script of the same name, which people and their scripts call in the OFED container.

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use crate::{
    files::{entries, name_of, text},
    node::Paths,
};

/// Runs the command. The options of OFED's script are accepted and ignored.
pub(crate) fn main() -> ExitCode {
    let lines = lines(&Paths::new("/"));
    let text: String = lines.into_iter().map(|line| line + "\n").collect();
    if io::stdout().write_all(text.as_bytes()).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Formats a line such as `mlx5_0 port 1 ==> ens2f0 (Up)` for each port that has an interface.
fn lines(paths: &Paths) -> Vec<String> {
    let mut lines = Vec::new();
    for device in entries(paths.at("/sys/class/infiniband")) {
        lines.extend(entries(device.join("ports")).iter().filter_map(|port| line(paths, &device, port)));
    }
    lines
}

fn line(paths: &Paths, device: &Path, port: &Path) -> Option<String> {
    let number = name_of(port);
    let interface = interface(device, port, &number)?;
    let state = text(paths.at("/sys/class/net").join(&interface).join("operstate"))?;
    let state = if state == "up" { "Up" } else { "Down" };
    Some(format!("{} port {number} ==> {interface} ({state})", name_of(device)))
}

/// Returns the name of the port's network interface: the interface of the port's first GID. The GID of an InfiniBand port has
/// no interface, so such a port's interface is found by its `dev_port`, which counts from 0.
fn interface(device: &Path, port: &Path, number: &str) -> Option<String> {
    let from_gid = text(port.join("gid_attrs/ndevs/0")).filter(|name| !name.is_empty());
    from_gid.or_else(|| {
        let number: u32 = number.parse().ok()?;
        let mut interfaces = entries(device.join("device/net")).into_iter();
        let interface = interfaces.find(|path| {
            text(path.join("dev_port")).and_then(|port| port.parse::<u32>().ok()) == number.checked_sub(1)
        });
        Some(name_of(&interface?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    /// Output as in the Network Operator's documentation.
    #[test]
    fn ports_have_their_interfaces() {
        let bench = Bench::new();
        let port = |device: &str, number: u32| format!("/sys/class/infiniband/{device}/ports/{number}");
        bench.write(&format!("{}/gid_attrs/ndevs/0", port("mlx5_0", 1)), "ens2f0\n");
        bench.write("/sys/class/net/ens2f0/operstate", "up\n");
        bench.write(&format!("{}/gid_attrs/ndevs/0", port("mlx5_1", 1)), "\n");
        for (interface, number) in [("ib0", 0), ("ib1", 1)] {
            let path = format!("/sys/class/infiniband/mlx5_1/device/net/{interface}/dev_port");
            bench.write(&path, &number.to_string());
            bench.write(&format!("/sys/class/net/{interface}/operstate"), "down\n");
        }
        bench.write(&format!("{}/state", port("mlx5_1", 2)), "4: ACTIVE\n");
        bench.write(&format!("{}/state", port("mlx5_2", 1)), "4: ACTIVE\n");
        let wanted =
            ["mlx5_0 port 1 ==> ens2f0 (Up)", "mlx5_1 port 1 ==> ib0 (Down)", "mlx5_1 port 2 ==> ib1 (Down)"];
        assert_eq!(lines(&bench.node().paths), wanted);
    }
}
