//! Udev rules that name network interfaces without their port, as the in-tree drivers of older kernels do.

/// Shell script that prints the name in `$1` without its port: `enp3s0f0` for `enp3s0f0np0`, and `enp3s0f0v1` for a
/// virtual function's `enp3s0f0np0v1`.
const WITHOUT_PORT: &str =
    "case $1 in *np[01]v*) echo ${1%np[01]v*}v${1##*np[01]v};; *) echo ${1%np[01]};; esac";

/// Contents of the rules file. The rules only change the properties from which udev derives an interface's name. udev itself
/// still sets the name.
pub(super) fn rules() -> String {
    // In a udev rule, `$` and `%` begin a substitution.
    let script = WITHOUT_PORT.replace('$', "$$").replace('%', "%%");
    let rule = |property: &str| {
        format!(
            "SUBSYSTEM==\"net\", ACTION==\"add\", DRIVERS==\"mlx5_core\", ENV{{{property}}}==\"?*\", \
             PROGRAM=\"/bin/sh -c '{script}' sh $env{{{property}}}\", ENV{{{property}}}=\"%c\"\n"
        )
    };
    let rules = ["ID_NET_NAME_PATH", "ID_NET_NAME_SLOT"].map(rule).concat();
    format!("# By driver-entrypoint: interfaces of mlx5_core are named without their port.\n{rules}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn removes_the_port_and_keeps_the_function() {
        for (name, wanted) in [
            ("enp3s0f0np0", "enp3s0f0"),
            ("enp3s0f1np1v12", "enp3s0f1v12"),
            ("ens1f0", "ens1f0"),
            ("enp3s0f0np2", "enp3s0f0np2"),
        ] {
            let output = Command::new("sh").args(["-c", WITHOUT_PORT, "sh", name]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), wanted);
        }
    }

    #[test]
    fn udev_substitutes_nothing_in_the_script() {
        let rules = rules();
        let script = rules.split('\'').nth(1).unwrap();
        assert_eq!(script.replace("$$", "$").replace("%%", "%"), WITHOUT_PORT);
        assert_eq!(rules.matches("ENV{ID_NET_NAME_SLOT}=\"%c\"").count(), 1);
    }
}
