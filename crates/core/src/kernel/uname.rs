//! The program `uname` of builds, which answers for the target kernel instead of the build host's.

/// Template of the script. It contains no single quote, so that each line can be a single-quoted shell word.
const SCRIPT: &str = r##"#!/bin/sh
# Written by farrier: answers for the kernel that this build is for.
[ $# -gt 0 ] || set -- -s
wanted=
for option; do
    case $option in
        --all) wanted=a ;;
        --kernel-name) wanted=${wanted}s ;;
        --nodename) wanted=${wanted}n ;;
        --kernel-release) wanted=${wanted}r ;;
        --kernel-version) wanted=${wanted}v ;;
        --machine) wanted=${wanted}m ;;
        --processor) wanted=${wanted}p ;;
        --hardware-platform) wanted=${wanted}i ;;
        --operating-system) wanted=${wanted}o ;;
        --* | -*[!asnrvmpio]* | [!-]* | - | "") echo "uname: unknown option $option" >&2; exit 1 ;;
        *) wanted=$wanted${option#-} ;;
    esac
done
case $wanted in *a*) wanted=snrvmo ;; esac
line=
answer() { case $wanted in *$1*) line="$line${line:+ }$2" ;; esac; }
answer s Linux
answer n farrier
answer r RELEASE
answer v "#1 SMP"
answer m MACHINE
answer p MACHINE
answer i MACHINE
answer o GNU/Linux
echo "$line""##;

/// Returns the POSIX shell script, which answers `release` and `machine` (`x86_64`).
pub fn uname_script(release: &str, machine: &str) -> String {
    SCRIPT.replace("MACHINE", machine).replace("RELEASE", release)
}

/// Returns a shell command that replaces a root file system's `uname` with the script.
pub fn install_uname(release: &str, machine: &str) -> String {
    let lines: Vec<String> = uname_script(release, machine).lines().map(|line| format!("'{line}'")).collect();
    // The existing `uname` may be a link to a multi-call program. `/bin` may be a link to `/usr/bin`.
    format!(
        "rm -f /bin/uname /usr/bin/uname && mkdir -p /usr/bin && printf '%s\\n' {} > /usr/bin/uname && \
         chmod 755 /usr/bin/uname && {{ [ -e /bin/uname ] || ln -s /usr/bin/uname /bin/uname; }}",
        lines.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    fn uname(options: &[&str]) -> Output {
        let script = uname_script("6.1.0-47-amd64", "x86_64");
        Command::new("sh").args(["-c", &script, "uname"]).args(options).output().unwrap()
    }

    #[test]
    fn it_answers_for_the_target() {
        for (options, answer) in [
            (&[][..], "Linux"),
            (&["-r"], "6.1.0-47-amd64"),
            (&["--kernel-release"], "6.1.0-47-amd64"),
            (&["-m"], "x86_64"),
            (&["-p"], "x86_64"),
            (&["-sr"], "Linux 6.1.0-47-amd64"),
            (&["-m", "-r", "-n"], "farrier 6.1.0-47-amd64 x86_64"),
            (&["-v"], "#1 SMP"),
            (&["-a"], "Linux farrier 6.1.0-47-amd64 #1 SMP x86_64 GNU/Linux"),
            (&["--all", "-r"], "Linux farrier 6.1.0-47-amd64 #1 SMP x86_64 GNU/Linux"),
        ] {
            let output = uname(options);
            assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{answer}\n"), "{options:?}");
        }
        for unknown in ["-x", "-rx", "--release", "r", "-", ""] {
            let output = uname(&[unknown]);
            assert!(!output.status.success() && output.stdout.is_empty(), "{unknown:?}");
        }
    }

    /// Both engines pass the command to a shell as one line.
    #[test]
    fn the_command_is_one_line_that_restores_the_script() {
        let command = install_uname("6.1.0-47-amd64", "x86_64");
        assert!(!command.contains('\n'), "{command}");
        let command = command.replace("/usr/bin", "$root/usr/bin").replace(" /bin", " $root/bin");
        let script = format!(
            "set -e; root=$(mktemp -d); mkdir $root/bin; ln -s /bin/false $root/bin/uname; {command}; \
             $root/bin/uname -r; $root/usr/bin/uname -m; rm -r $root"
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "6.1.0-47-amd64\nx86_64\n", "{output:?}");
    }
}
