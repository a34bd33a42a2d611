use super::*;
use crate::proprietary_modules;

#[test]
fn the_taint_of_a_needed_image_is_inherited() {
    let table = "0x00000001\tgpl_only\tvmlinux\tEXPORT_SYMBOL_GPL\t\n\
                 0x00000001\told_verb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let facts = kernel(&[], table);
    let gpu = [
        ModuleFile::named("nvidia").info("license", "NVIDIA").exports("p2p", 1).payload(),
        ModuleFile::named("nvidia_glue").needs("p2p", 1).exports("glue", 1).payload(),
        ModuleFile::named("helper").exports("help", 1).payload(),
    ];
    let symbols = "0x00000001\tp2p\tnvidia\tEXPORT_SYMBOL\t\n0x00000001\tglue\tnvidia-glue\tEXPORT_SYMBOL\t\n\
                   0x00000001\thelp\thelper\tEXPORT_SYMBOL\t\n";
    let known = NeededTable { proprietary: Some(proprietary_modules(&gpu)), ..needed("gpu", symbols) };
    let findings = |need: &NeededTable, symbol| {
        let bridge = ModuleFile::named("bridge").needs(symbol, 1).exports("bridge_f", 1).payload();
        let user = ModuleFile::named("user").needs("bridge_f", 1).needs("gpl_only", 1).payload();
        lines(&run(&facts, std::slice::from_ref(need), &[bridge, user]))
    };
    for (symbol, by) in [("p2p", "nvidia"), ("glue", "nvidia_glue")] {
        assert_eq!(
            findings(&known, symbol),
            format!(
                "refused\nuser (refused): refused License: symbol gpl_only, exported by the kernel, is for \
                 GPL modules only, but the module also uses symbols of {by} of gpu, which is proprietary: \
                 found GPL, wanted a GPL-compatible license -> use the vendor's open modules, or a driver \
                 version that does not use this symbol\n"
            )
        );
    }
    assert_eq!(findings(&known, "help"), "loads\n");
    let bare = needed("gpu", symbols);
    assert_eq!(
        findings(&bare, "help"),
        "unknown\nuser (unknown): unknown License: symbol gpl_only, exported by the kernel, is for GPL \
         modules only, and no source has the license of helper of gpu, whose symbols it also uses -> \
         provide the needed image's modules beside its symbol table, which does not list licenses\n"
    );
    // The module uses no symbol that is for GPL modules only.
    let plain = ModuleFile::named("plain").needs("p2p", 1).payload();
    assert_eq!(run(&facts, &[bare], &[plain]).verdict, Verdict::Loads);
    // Replacements of the kernel's own modules are assumed to have the same license.
    let ofed = "0x00000001\tib_verb\text/ib_core\tEXPORT_SYMBOL\t\n0x00000001\tcompat\tmlx_compat\tEXPORT_SYMBOL\t\n";
    assert_eq!(findings(&needed("mofed", ofed), "compat"), "loads\n");
}

#[test]
fn gpl_symbols_of_the_payload_are_known_by_flags_too() {
    let mut open = ModuleFile::named("open").exports("plain", 1);
    open.exports.push(("for_gpl", Some(1), true, ""));
    open.flags = Some("__kflagstab");
    let closed = |symbol| ModuleFile::named("closed").info("license", "NVIDIA").needs(symbol, 1).payload();
    let verdict = |symbol| run(&kernel(&[], ""), &[], &[open.payload(), closed(symbol)]).modules[1].verdict;
    assert_eq!((verdict("plain"), verdict("for_gpl")), (Verdict::Loads, Verdict::Refused));
}
