//! Labels that Node Feature Discovery takes from a file of the host (`sources/local` of NFD's documentation). So this program
//! needs no permissions in the cluster.

use std::path::Path;

use crate::{
    Result,
    gate::Decision,
    state::{Artifacts, write_durably},
};

/// File below the directory that NFD's worker reads.
const FEATURE_FILE: &str = "etc/kubernetes/node-feature-discovery/features.d/farrier-host";

/// Length of the value of a driver's label, which cannot hold a whole digest.
const DIGEST_LENGTH: usize = 12;
/// Length of the longest name of a label.
const MAX_NAME: usize = 63;

/// Writes the kernel that the host is to boot next, for which farrier builds images, and the drivers that are loaded.
pub(crate) fn write(root: &Path, decision: &Decision, loaded: &Artifacts) -> Result<()> {
    let path = root.join(FEATURE_FILE);
    // Hosts without NFD have no such directory.
    if !path.parent().is_some_and(Path::exists) {
        return Ok(());
    }
    write_durably(&path, features(decision, loaded).as_bytes())
}

fn features(decision: &Decision, loaded: &Artifacts) -> String {
    let next = decision.announced.as_ref().map(|release| {
        let is_trial = decision.trial.as_ref().is_some_and(|trial| trial.release == *release);
        let gate = if is_trial { "ready" } else { "held" };
        format!("farrier-next-kernel={}\nfarrier-kernel-gate={gate}\n", label_value(release))
    });
    let drivers = loaded.iter().filter_map(|(driver, digest)| {
        let name = format!("farrier-host.{driver}");
        let start = digest.strip_prefix("sha256:")?.get(..DIGEST_LENGTH)?;
        (name.len() <= MAX_NAME).then(|| format!("{name}={start}\n"))
    });
    next.into_iter().chain(drivers).collect()
}

/// Returns a kernel release as the value of a label, which can neither contain `+` nor end with a dot.
fn label_value(release: &str) -> String {
    release.replace('+', ".plus.").trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use super::*;
    use crate::state::Trial;

    #[test]
    fn the_kernel_that_lacks_drivers_is_announced() {
        let root = tempfile::tempdir().unwrap();
        let release = "6.12.1+deb12-amd64".to_owned();
        let held = BTreeMap::from([(release.clone(), BTreeMap::new())]);
        let mut decision = Decision { held, announced: Some(release), ..Decision::default() };
        let mut loaded = Artifacts::new();
        write(root.path(), &decision, &loaded).unwrap();
        let path = root.path().join(FEATURE_FILE);
        assert!(!path.exists(), "this host has no NFD");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        write(root.path(), &decision, &loaded).unwrap();
        let written = || fs::read_to_string(&path).unwrap();
        assert_eq!(written(), "farrier-next-kernel=6.12.1.plus.deb12-amd64\nfarrier-kernel-gate=held\n");
        assert_eq!(label_value("6.1.176-Acme+"), "6.1.176-Acme.plus");
        decision.announced = Some("6.2".to_owned());
        decision.trial =
            Some(Trial { release: "6.2".to_owned(), artifacts: Artifacts::new(), armed_in: None });
        write(root.path(), &decision, &loaded).unwrap();
        assert_eq!(written(), "farrier-next-kernel=6.2\nfarrier-kernel-gate=ready\n");
        write(root.path(), &Decision::default(), &loaded).unwrap();
        assert_eq!(written(), "");
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        loaded.extend([("hello".to_owned(), digest.clone()), ("x".repeat(60), digest)]);
        write(root.path(), &Decision::default(), &loaded).unwrap();
        assert_eq!(
            written(),
            "farrier-host.hello=0123456789ab\n",
            "a label's name has at most 63 characters"
        );
    }
}
