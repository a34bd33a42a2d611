//! KMM's `Module`.

use super::*;

fn module() -> World {
    world(OperatorResource::Module)
}

/// Changes the container of the Module.
fn set_container(world: &mut World, change: impl FnOnce(&mut Value)) {
    let mut spec = (*world.snapshot.resources[0].spec).clone();
    change(&mut spec["moduleLoader"]["container"]);
    set_spec(world, spec);
}

fn written(world: &World) -> Value {
    change(&world.plan()).spec["moduleLoader"]["container"].clone()
}

/// The repository's name and the release come first in `tags`, so that the tag with the version is no accident.
#[test]
fn a_module_gets_one_image_with_kmms_variable_for_all_kernels() {
    let mut world = module();
    let set = json!({"containerImage": "registry.test/drivers/mft:${KERNEL_FULL_VERSION}"});
    assert_eq!(written(&world), set);
    world.image("mft").spec.tags.remove(0);
    world.publish(Verdict::Loads);
    let RolloutDecision::Steps { now } = decision(&world) else { panic!("{:?}", decision(&world)) };
    insta::assert_snapshot!(now[0], @"set spec.moduleLoader.container: kmm.test/driver:1 -> registry.test/drivers/mft:4.33.0-${KERNEL_FULL_VERSION}");
    // For each kernel: the image by digest, and the name that KMM makes of the variable.
    assert_eq!(change(&world.plan()).required_images.len(), 4);
    reconcile(&mut world);
    let plan = world.plan();
    assert!(plan.rollouts[0].changes.is_empty(), "{plan:?}");
    let RolloutDecision::Settled { how } = &plan.rollouts[0].decision else { panic!("not settled") };
    assert_eq!(how, "tag 4.33.0-${KERNEL_FULL_VERSION} for 2 kernels");
    // Nodes that the Module does not select hold nothing.
    let mut other = node("n2", "6.1.0-50-amd64");
    other.labels.insert("pci".to_owned(), "no".to_owned());
    world.snapshot.nodes.push(other);
    assert!(matches!(decision(&world), RolloutDecision::Settled { .. }));
}

/// KMM takes the first mapping that matches, and the image of the container where that mapping has none.
#[test]
fn images_of_mappings_are_set_for_their_kernels_only() {
    let mut world = module();
    world.image("mft").spec.tags.remove(0);
    world.publish(Verdict::Loads);
    let mappings = json!([
        {"literal": K47, "containerImage": "kmm.test/driver:47", "inTreeModulesToRemove": ["a"]},
        {"regexp": "0-4[78]-", "containerImage": "kmm.test/driver:48"},
        {"regexp": ".", "containerImage": "kmm.test/other:1"},
    ]);
    set_container(&mut world, |container| container["kernelMappings"] = mappings.clone());
    let mut expected = mappings;
    for mapping in [0, 1] {
        expected[mapping]["containerImage"] =
            "registry.test/drivers/mft:4.33.0-${KERNEL_FULL_VERSION}".into();
    }
    assert_eq!(written(&world), json!({"kernelMappings": expected}));
    reconcile(&mut world);
    assert!(world.plan().rollouts[0].changes.is_empty());
    // The name of one kernel's image is right for a literal.
    set_container(&mut world, |container| {
        container["kernelMappings"][0]["containerImage"] =
            format!("registry.test/drivers/mft:4.33.0-{K47}").into();
        container["kernelMappings"][1].as_object_mut().unwrap().remove("containerImage");
    });
    world.snapshot.resources[0].annotations.clear();
    let now = written(&world);
    assert_eq!(now["containerImage"], "registry.test/drivers/mft:4.33.0-${KERNEL_FULL_VERSION}");
    assert_eq!(now["kernelMappings"][0]["containerImage"], format!("registry.test/drivers/mft:4.33.0-{K47}"));
}

/// KMM's ordered upgrade needs both in one write, and its webhook refuses to add or remove the version.
#[test]
fn the_version_of_a_module_changes_with_its_image() {
    let mut world = module();
    world.image("mft").spec.tags.remove(0);
    world.publish(Verdict::Loads);
    set_container(&mut world, |container| container["version"] = "v1".into());
    let image = "registry.test/drivers/mft:4.33.0-${KERNEL_FULL_VERSION}";
    assert_eq!(written(&world), json!({"containerImage": image, "version": "4.33.0"}));
    // A version that someone gives to the same image stays.
    set_container(&mut world, |container| {
        (container["containerImage"], container["version"]) = (image.into(), "v1".into());
    });
    assert!(matches!(decision(&world), RolloutDecision::Settled { .. }));
    // A label cannot have this version.
    let mut world = module();
    world.image("mft").spec.tags.remove(0);
    let resolved = world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap();
    "4.33.0+1".clone_into(&mut resolved.version);
    world.publish(Verdict::Loads);
    set_container(&mut world, |container| container["version"] = "v1".into());
    assert_eq!(written(&world)["version"], "4.33.0_1");
    reconcile(&mut world);
    assert!(world.plan().rollouts[0].changes.is_empty());
}

#[test]
fn a_module_that_could_not_load_the_image_is_held() {
    let held = |change: &dyn Fn(&mut Value)| {
        let mut world = module();
        set_container(&mut world, change);
        hold(&world).to_string()
    };
    let all = [
        held(&|container| container["kernelMappings"][0]["build"] = json!({})),
        held(&|container| container["sign"] = json!({})),
        held(&|container| container["modprobe"] = json!({"moduleName": "mod"})),
        held(&|container| container["modprobe"]["firmwarePath"] = "/firmware".into()),
        held(&|container| container["modprobe"]["firmwarePath"] = "/lib/firmware".into()),
        held(&|container| container["modprobe"]["modprobedDir"] = "/etc/modprobe.d".into()),
        held(&|container| container["kernelMappings"] = json!([{"literal": "5.1"}])),
        held(&|container| container["kernelMappings"] = json!([{"regexp": "(?=x)"}])),
    ];
    insta::assert_snapshot!(all.join("\n"), @r#"
    its image cannot be set: KMM would build or sign the image itself; remove `build` from spec.moduleLoader.container and its kernelMappings
    its image cannot be set: KMM would build or sign the image itself; remove `sign` from spec.moduleLoader.container and its kernelMappings
    its image cannot be set: spec.moduleLoader.container.modprobe.dirName is "/opt", and farrier's images have their modules below "/"; set it to /
    its image cannot be set: spec.moduleLoader.container.modprobe.firmwarePath is "/firmware", and farrier's image has no files there; list the files in `firmware` of the definition, and set it to /lib/firmware
    its image cannot be set: spec.moduleLoader.container.modprobe.firmwarePath is "/lib/firmware", and farrier's image has no files there; list the files in `firmware` of the definition, and set it to /lib/firmware
    its image cannot be set: spec.moduleLoader.container.modprobe.modprobedDir is "/etc/modprobe.d", and farrier's image has no files there; remove it, or use a template that puts the files below /out
    the operator's driver is disabled: no entry of kernelMappings matches 6.1.0-47-amd64, 6.1.0-48-amd64
    its image cannot be set: kernelMappings[0].regexp is not understood: "(?=x)"
    "#);
}

/// KMM ignores a final `+` of the kernel's release.
#[test]
fn a_module_whose_directory_kmm_would_not_find_is_held() {
    let mut world = module();
    world.snapshot.nodes[0] = node("n0", "6.1.0-47-amd64+");
    insta::assert_snapshot!(hold(&world), @"its image cannot be set: on 6.1.0-47-amd64+ KMM looks for modules below /lib/modules/6.1.0-47-amd64, and farrier's image has them below /lib/modules/6.1.0-47-amd64+; exclude such nodes with the Module's selector");
}

#[test]
fn a_module_with_firmware_gets_an_image_that_has_some() {
    let is_written = |path: &str, change: &dyn Fn(&mut World)| {
        let mut world = module();
        change(&mut world);
        world.publish(Verdict::Loads);
        set_container(&mut world, |container| container["modprobe"]["firmwarePath"] = path.into());
        written(&world)["containerImage"].is_string()
    };
    assert!(is_written("", &|_| ()));
    assert!(is_written("/lib/firmware/", &|world| {
        world.image("mft").spec.firmware = vec![serde_json::from_value(json!({"source": "mft"})).unwrap()];
    }));
    assert!(is_written("/lib/firmware", &|world| {
        let base = json!({"bootstrap": {"suite": "bookworm", "include": ["firmware-nvidia-gsp"]}});
        world.image("mft").spec.runtime.base = Some(serde_json::from_value(base).unwrap());
        let resolved = world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap();
        resolved.base_identity = Some("base-1".to_owned());
    }));
    for steps in
        ["COPY sources/mft/fw/ /out/firmware/", "RUN make install DESTDIR=/out", "RUN cp -a root/* /out/"]
    {
        assert!(is_written("/firmware", &|world| {
            let template = world.definitions.templates.get_mut("mft").unwrap();
            *template = template.replace("RUN make", &format!("{steps}\nRUN make"));
        }));
    }
}

/// Fields that farrier owns stay named when other kernels are reached: an apply would remove them.
#[test]
fn what_a_module_got_before_stays_named() {
    let mut world = module();
    world.image("mft").spec.tags.remove(0);
    world.publish(Verdict::Loads);
    reconcile(&mut world);
    set_container(&mut world, |container| {
        container["kernelMappings"] = json!([{"regexp": ".", "containerImage": "kmm.test/driver:1"}]);
    });
    let now = written(&world);
    assert!(now["containerImage"].is_string() && now["kernelMappings"].is_array(), "{now}");
}
