//! The definitions that come with farrier: what each image's Dockerfile and first tag are.

use super::load;
use crate::{
    image::{Definitions, DriverImage, TagInputs, render_tags},
    kernel::{Architecture, KernelTarget},
    template::{self, Templates},
};

fn target() -> KernelTarget {
    KernelTarget {
        os: "ubuntu".parse().unwrap(),
        os_version: "22.04".parse().unwrap(),
        release: "5.15.0-91-generic".parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

fn image<'a>(definitions: &'a Definitions, name: &str) -> &'a DriverImage {
    &definitions.images[name]
}

/// The Dockerfile as `farrier render` prints it, of a source of version `535.261.03`.
fn dockerfile(name: &str) -> String {
    let definitions = load(None).unwrap();
    let image = image(&definitions, name);
    let context = image.template_context("localhost/toolchain", "535.261.03", &target());
    let template = image.spec.template.as_str();
    template::render(template, &definitions.templates[template], &context).unwrap()
}

#[test]
fn ofed_is_configured_compiled_and_exposed() {
    insta::assert_snapshot!(dockerfile("mofed"));
}

#[test]
fn the_gpu_driver_exposes_what_peer_memory_looks_for() {
    insta::assert_snapshot!(dockerfile("nvidia-gpu"));
}

#[test]
fn nvidia_peermem_is_compiled_against_both() {
    insta::assert_snapshot!(dockerfile("nvidia-peermem"));
}

#[test]
fn nv_peer_mem_is_compiled_against_both() {
    insta::assert_snapshot!(dockerfile("nv-peer-mem"));
}

#[test]
fn any_dkms_module_is_compiled_as_its_conf_says() {
    insta::assert_snapshot!(dockerfile("generic"));
}

/// The forms of `contracts.md` section 3.
#[test]
fn the_first_tags_are_those_that_the_operators_compute() {
    let definitions = load(None).unwrap();
    let target = target();
    let first_tag = |name: &str, version: &str| {
        let needs = [("mofed", "25.10"), ("nvidia-gpu", version)].into();
        let inputs = TagInputs { version, target: &target, needs, signer: None };
        render_tags(&mut Templates::default(), &image(&definitions, name).spec.tags, &inputs).unwrap()[0]
            .to_string()
    };
    assert_eq!(first_tag("mofed", "25.10-1.2.8.0-0"), "25.10-1.2.8.0-0-5.15.0-91-generic-ubuntu22.04-amd64");
    for gpu in ["nvidia-gpu", "nvidia-gpu-proprietary"] {
        assert_eq!(first_tag(gpu, "535.261.03"), "535.261.03-5.15.0-91-generic-ubuntu22.04", "{gpu}");
    }
    // The operator's version is then 535.261.03-25.10.
    assert_eq!(first_tag("nvidia-peermem", "535.261.03"), "535.261.03-25.10-5.15.0-91-generic-ubuntu22.04");
}

#[test]
fn what_a_shipped_image_needs_is_exposed_by_a_shipped_image() {
    let definitions = load(None).unwrap();
    let needs = |name: &str| -> Vec<String> {
        image(&definitions, name).spec.needs.iter().map(|need| need.name().to_string()).collect()
    };
    for dependent in ["nvidia-peermem", "nv-peer-mem"] {
        assert_eq!(needs(dependent), ["mofed", "nvidia-gpu"], "{dependent}");
    }
    assert_eq!(image(&definitions, "mofed").spec.exposes, ["/usr/src/ofa_kernel"]);
    assert_eq!(image(&definitions, "nvidia-gpu").spec.exposes, ["/usr/src/nvidia-*"]);
}
