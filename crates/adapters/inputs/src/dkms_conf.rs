//! Warnings about a local `dkms.conf` before a build runs it: what template `dkms` leaves out, and syntax errors. The file is a
//! bash script. Here it is only parsed.

use std::path::Path;

use farrier_core::image::{DriverImageSpec, SourceOrigin};
use farrier_local::files::{if_there, read_start};

use super::{Result, process::clean_command};

/// Maximum size of a `dkms.conf` that is read, in bytes.
const MAX_CONF_SIZE: u64 = 1 << 20;

/// Returns warnings about the `dkms.conf` of an image's local sources, if the image is built with template `dkms`. Archives and
/// packages are not opened: the log of their build has the same warnings. `root` is the directory of the definitions.
pub async fn dkms_conf_warnings(root: &Path, spec: &DriverImageSpec) -> Result<Vec<String>> {
    let (Some(directory), "dkms") = (spec.vars.get("directory"), spec.template.as_str()) else {
        return Ok(Vec::new());
    };
    let mut warnings = Vec::new();
    for source in &spec.sources {
        let SourceOrigin::Path { path, .. } = &source.from else { continue };
        let subdir = source.subdir.as_ref().map_or("", |subdir| subdir.as_str());
        let conf = root.join(path).join(subdir).join(directory.as_str()).join("dkms.conf");
        if !conf.is_file() {
            continue;
        }
        let text = read_start(&conf, MAX_CONF_SIZE)?.unwrap_or_default();
        let with_source = |warning: String| format!("source {}: dkms.conf {warning}", source.name);
        warnings.extend(ignored_directives(&String::from_utf8_lossy(&text)).into_iter().map(with_source));
        // Without bash, only the build reports a syntax error.
        if let Some(run) = if_there(clean_command("bash").arg("-n").arg(&conf).output().await)?
            && !run.status.success()
        {
            let message = String::from_utf8_lossy(&run.stderr);
            let first = message.lines().next().and_then(|line| line.split_once("dkms.conf: "));
            let reason = first.map_or("bash cannot read it", |(_, reason)| reason);
            warnings.push(with_source(format!(
                "has a syntax error ({reason}): as with dkms, only what precedes it counts"
            )));
        }
    }
    Ok(warnings)
}

/// Lists what template `dkms` leaves out of a `dkms.conf`, as dkms 3.3 does.
fn ignored_directives(conf: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    for (directive, value) in conf.lines().filter_map(|line| line.trim_start().split_once('=')) {
        let value = value.trim().trim_matches(['"', '\'']);
        let index = directive.split_once('[').map_or("0", |(_, index)| index.trim_end_matches(']'));
        if directive == "CLEAN" && !["", "true", "/bin/true", "/usr/bin/true"].contains(&value) {
            warnings.push(format!(
                "sets CLEAN={value}: it is left out, because each build starts from the sources"
            ));
        } else if directive.starts_with("BUILD_EXCLUSIVE_") && index != "0" {
            warnings
                .push(format!("sets {directive}={value}: other kernels get an image without module {index}"));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use farrier_core::image::DriverImageSpec;

    use super::*;

    #[tokio::test]
    async fn a_conf_is_read_before_the_build() {
        let root = tempfile::tempdir().unwrap();
        let spec = |template: &str, subdir: &str| -> DriverImageSpec {
            serde_json::from_value(serde_json::json!({
                "version": "1", "template": template, "vars": {"directory": "."},
                "sources": [{"name": "acme", "from": {"path": {"path": "sources/acme"}}, "subdir": subdir}],
            }))
            .unwrap()
        };
        let place = root.path().join("sources/acme/linux");
        fs_err::create_dir_all(&place).unwrap();
        let conf = "PACKAGE_NAME=acme\nCLEAN=\"make clean\"\nBUILD_EXCLUSIVE_KERNEL_MAX=\"6.1\"\n\
                    BUILD_EXCLUSIVE_KERNEL_MAX[1]='5.4'\ntouch ../ran\nif [ unfinished\n";
        fs_err::write(place.join("dkms.conf"), conf).unwrap();
        let warnings = dkms_conf_warnings(root.path(), &spec("dkms", "linux")).await.unwrap();
        let [clean, module, syntax] = &warnings[..] else { panic!("{warnings:?}") };
        let left_out = "source acme: dkms.conf sets CLEAN=make clean: it is left out";
        assert!(clean.starts_with(left_out), "{clean}");
        let alone = "source acme: dkms.conf sets BUILD_EXCLUSIVE_KERNEL_MAX[1]=5.4: other kernels";
        assert!(module.starts_with(alone), "{module}");
        assert!(syntax.contains("has a syntax error (line "), "{syntax}");
        assert!(!root.path().join("sources/acme/ran").exists(), "the conf has run");
        for other in [spec("kbuild", "linux"), spec("dkms", "src")] {
            assert_eq!(dkms_conf_warnings(root.path(), &other).await.unwrap(), [""; 0]);
        }
        fs_err::write(place.join("dkms.conf"), "PACKAGE_NAME=acme\nCLEAN=true\n").unwrap();
        assert_eq!(dkms_conf_warnings(root.path(), &spec("dkms", "linux")).await.unwrap(), [""; 0]);
    }
}
