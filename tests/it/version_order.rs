//! Compares farrier's version orders with their references: `dpkg --compare-versions` and rpm's own comparison.
use std::{
    cmp::Ordering,
    io::Write as _,
    process::{Command, Stdio},
};

use farrier_core::kernel::{debian_version, rpm_version};
use proptest::{prelude::*, test_runner::Config};

type Pairs = Vec<(String, String)>;

/// Passes one pair per line to a program, and returns its answer for each: `<`, `=` or `>`.
fn said_by(command: &mut Command, pairs: &Pairs) -> Vec<Ordering> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let text: String = pairs.iter().flat_map(|(a, b)| [a, " ", b, "\n"]).collect();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let order = |line: &str| match line {
        "<" => Ordering::Less,
        "=" => Ordering::Equal,
        ">" => Ordering::Greater,
        other => panic!("{other:?} is not an answer"),
    };
    String::from_utf8(output.stdout).unwrap().lines().map(order).collect()
}

fn dpkg(pairs: &Pairs) -> Vec<Ordering> {
    let script = r#"while read -r a b; do
        if dpkg --compare-versions "$a" lt "$b"; then echo '<'; elif dpkg --compare-versions "$a" gt "$b"; then echo '>'; else echo '='; fi
    done"#;
    said_by(Command::new("sh").args(["-c", script]), pairs)
}

/// rpm's Lua cannot read standard input, only a file. No character in these texts ends a Lua string.
fn rpm(pairs: &Pairs) -> Vec<Ordering> {
    let script = r#"%{lua: for line in io.lines("/dev/stdin") do
        local at = line:find(" ")
        print(({[-1] = "<", [0] = "=", [1] = ">"})[rpm.vercmp(line:sub(1, at - 1), line:sub(at + 1))] .. "\n")
    end}"#;
    let mut command = Command::new("sh");
    command.args(["-c", r#"rpm --eval "$1" | sed '/^$/d'"#, "sh", script]);
    said_by(&mut command, pairs)
}

fn told_apart(
    pairs: &Pairs,
    ours: fn(&str, &str) -> Ordering,
    theirs: &[Ordering],
) -> Result<(), TestCaseError> {
    prop_assert_eq!(pairs.len(), theirs.len());
    for ((a, b), theirs) in pairs.iter().zip(theirs) {
        prop_assert_eq!(ours(a, b), *theirs, "{} and {}", a, b);
    }
    Ok(())
}

/// Generates pairs of versions of one form: some numbers and a distribution's suffix. The few distinct parts give many nearly
/// equal pairs.
fn pairs(behind: &'static str) -> impl Strategy<Value = Pairs> {
    let version = format!("[0-6]\\.[0-9]{{1,2}}(\\.(0|00|[0-9]{{1,3}})){{0,2}}{behind}");
    let version = || prop::string::string_regex(&version).unwrap();
    prop::collection::vec((version(), version()), 150)
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(6) })]

    #[test]
    fn debian_s_order_is_dpkg_s(pairs in pairs("([~+.][a-z]{0,3}[0-9]{0,2}){0,2}(-[0-9]{1,3}([~+.][a-z0-9]{1,4}){0,2})?")) {
        told_apart(&pairs, debian_version::compare, &dpkg(&pairs))?;
    }

    #[test]
    fn rpm_s_order_is_rpm_s(pairs in pairs("([~^._+][a-z]{0,3}[0-9]{0,3}){0,3}")) {
        told_apart(&pairs, rpm_version::compare_part, &rpm(&pairs))?;
    }

    /// Ranges compare version and release separately, as rpm does for packages.
    #[test]
    fn rpm_s_releases(pairs in pairs("-[0-9]{1,3}(\\.[0-9]{1,2}){0,2}(\\.(el9(_[0-9])?|fc4[0-9]|azl3))?")) {
        let parts = |at: fn((&str, &str)) -> String| -> Pairs {
            let part = |text: &String| at(text.split_once('-').unwrap());
            pairs.iter().map(|(a, b)| (part(a), part(b))).collect()
        };
        let versions = rpm(&parts(|(version, _)| version.to_owned()));
        let releases = rpm(&parts(|(_, release)| release.to_owned()));
        let theirs: Vec<Ordering> = versions.iter().zip(releases).map(|(version, release)| version.then(release)).collect();
        told_apart(&pairs, rpm_version::compare, &theirs)?;
    }
}
