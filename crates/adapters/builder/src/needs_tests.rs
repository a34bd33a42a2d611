use kmod::testing::ModuleFile;
use serde_json::json;

use super::*;
use crate::{
    assemble,
    cell_build::CompileInputs,
    check, document, headers, publish,
    testing::{Bench, K9},
};

/// Publishes image `x` with these modules. Its exposed headers have a table with one symbol of each module.
async fn publish_with_table(bench: &Bench, modules: &[&ModuleFile]) {
    let cell = bench.cell(K9).await;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let compile_inputs =
        CompileInputs { headers: headers::fetch(&build).await.unwrap(), needed: NeedInputs::default() };
    let mut payload = bench.payload(K9, modules);
    let place = payload.tree.join("usr/src/x");
    fs_err::create_dir_all(&place).unwrap();
    let row = |file: &&ModuleFile| {
        let name = file.module().name;
        format!("0x00000001\t{name}_f\textra/{name}\tEXPORT_SYMBOL\t\n")
    };
    let table: String = modules.iter().map(row).collect();
    fs_err::write(place.join("Module.symvers"), table).unwrap();
    payload.exposed = Some(payload::expose(&payload.tree, &build.image.spec.exposes).unwrap().digest);
    let checked = check::check(&build, &compile_inputs, payload, None).await.unwrap();
    let image = assemble::assemble(&build, &checked).await.unwrap();
    let documents = document::document(&build, &checked, &image).await.unwrap();
    publish::publish(&build, &image, &documents).await.unwrap();
}

#[tokio::test]
async fn licenses_of_needed_modules_are_known_without_a_boot_check() {
    let mut bench = Bench::new(&json!({"modules": [], "exposes": ["/usr/src/x"], "reuse": "never"}));
    bench.add("y", &json!({"modules": ["y"], "needs": ["x"]}));
    let closed = ModuleFile::named("closed").info("license", "NVIDIA").exports("closed_f", 1);
    publish_with_table(&bench, &[&closed, &ModuleFile::named("open").exports("open_f", 1)]).await;
    let y = plan_cell(&bench.services, &"y".parse().unwrap(), &Bench::target(K9)).await.unwrap();
    let needed = fetch(&CellBuild::of(&bench.services, &y).unwrap()).await.unwrap();
    let [table] = needed.tables.as_slice() else { panic!("{} tables", needed.tables.len()) };
    assert_eq!((table.image.as_str(), table.symbols.len()), ("x", 2));
    assert_eq!(table.proprietary, Some(BTreeSet::from(["closed".to_owned()])));
    // Without a boot check the modules need not be loaded.
    assert!(needed.modules.is_empty());
}
