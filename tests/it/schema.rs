//! The committed JSON Schemas match the types.
use std::{env, fs, path::Path, process::Command};

/// Compares a committed file with the current text; with `UPDATE_SCHEMA=1` writes the file.
pub fn is_current_file(name: &str, current: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if env::var_os("UPDATE_SCHEMA").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, current).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == current,
        "{name} is not current; run UPDATE_SCHEMA=1 cargo nextest run --test it schema:: reference::"
    );
}

/// Returns the output of `farrier schema` for a kind.
fn printed(kind: &str) -> String {
    let printed = Command::new(env!("CARGO_BIN_EXE_farrier")).args(["schema", kind]).output().unwrap();
    assert!(printed.status.success(), "{printed:?}");
    String::from_utf8(printed.stdout).unwrap()
}

fn is_current(name: &str, kind: &str) {
    is_current_file(&format!("schema/{name}"), &printed(kind));
}

#[test]
fn the_definition_of_driver_builds_is_current() {
    is_current_file("deploy/crds/driverbuild.yaml", &farrier_controller::status::crd_yaml().unwrap());
}

#[test]
fn the_schema_of_driver_images_is_current() {
    is_current("driverimage.json", "driver-image");
}

#[test]
fn the_schema_of_kernel_families_is_current() {
    is_current("kernelfamily.json", "kernel-family");
}

#[test]
fn the_schema_of_announced_kernels_is_current() {
    is_current("announcedkernels.json", "announced-kernels");
}

#[test]
fn the_schema_of_sites_is_current() {
    is_current("site.json", "site");
}

#[test]
fn the_schema_of_the_check_report_is_current() {
    is_current("checkreport.json", "check-report");
}

/// Every mapping rejects unknown fields, like the reader.
#[test]
fn the_schemas_refuse_unknown_fields() {
    fn check(schema: &serde_json::Value, path: &str) {
        if let Some(object) = schema.as_object() {
            if object.contains_key("properties") {
                assert_eq!(object.get("additionalProperties"), Some(&false.into()), "{path}");
            }
            for (key, value) in object {
                check(value, &format!("{path}/{key}"));
            }
        }
        for (index, value) in schema.as_array().into_iter().flatten().enumerate() {
            check(value, &format!("{path}/{index}"));
        }
    }
    for kind in ["driver-image", "kernel-family", "announced-kernels", "site"] {
        check(&serde_json::from_str(&printed(kind)).unwrap(), kind);
    }
}
