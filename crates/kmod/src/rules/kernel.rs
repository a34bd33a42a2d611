//! Checks that the kernel can load modules, and modules of this kind.

use super::Subject;
use crate::{Architecture, Finding, KernelFacts, Rule, Verdict};

/// Checks that the kernel loads modules (`CONFIG_MODULES`).
pub(super) fn modules(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    if !subject.kernel.config.is_set("MODULES") {
        let message = "the kernel loads no modules: its configuration lacks CONFIG_MODULES";
        let remedy = "configure the kernel with CONFIG_MODULES, or build the driver into it";
        findings.push(Finding::new(Rule::Kernel, Verdict::Refused, "CONFIG_MODULES", message, remedy));
    }
}

/// Checks that LoadPin does not restrict the file systems of modules (`security/loadpin/loadpin.c`).
pub(super) fn load_pin(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let is_enforced = ["SECURITY_LOADPIN_ENFORCE", "SECURITY_LOADPIN_ENFORCING"]
        .iter()
        .any(|name| kernel.config.is_set(name));
    if kernel.config.is_set("SECURITY_LOADPIN") && is_enforced && kernel.has_security_module("loadpin") {
        let message = "LoadPin accepts only files of the file system that the first module came from";
        let remedy = "install the module on the root file system, or start the kernel with loadpin.enforce=0";
        let option = "CONFIG_SECURITY_LOADPIN_ENFORCE";
        findings.push(Finding::new(Rule::Kernel, Verdict::Unknown, option, message, remedy));
    }
}

/// Warns that the kernel cannot decompress the file (`module_xz_decompress` in `kernel/module/decompress.c`). `modprobe` of kmod 31 and
/// later leaves that to the kernel. Older versions and farrier's driver containers decompress such a file themselves.
pub(super) fn decompression(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let config = &subject.kernel.config;
    let decompresses = config.is_set("MODULE_DECOMPRESS") && config.is_set("MODULE_COMPRESS_XZ");
    if decompresses && subject.module.has_unsupported_xz_check {
        let message = "the kernel cannot decompress the xz file, whose integrity check is not CRC32: modprobe of kmod 31 and later fails";
        let remedy =
            "compress it with xz --check=crc32 --lzma2=dict=1MiB; farrier's driver containers do not need it";
        let finding = Finding::new(Rule::Kernel, Verdict::Loads, "xz", message, remedy);
        findings.push(finding.with_kernel_message("EINVAL", "decompression failed with status 6"));
    }
}

/// Warns that SUSE's `modprobe` refuses the module: unless it is configured otherwise, it loads only modules that SUSE or a partner
/// supports. The kernel itself only taints itself.
pub(super) fn supported(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let is_supported = matches!(subject.module.field("supported"), Some("yes" | "external"));
    if subject.kernel.config.is_set("SUSE_KERNEL_SUPPORTED") && !is_supported {
        let message = "the module has no field supported=external: the kernel loads it, but SUSE's modprobe refuses it on hosts";
        let remedy = "set allow_unsupported_modules 1 in /etc/modprobe.d/10-unsupported-modules.conf of hosts; driver containers \
                      do not need it";
        findings.push(Finding::new(Rule::Kernel, Verdict::Loads, "supported", message, remedy));
    }
}

/// Checks a livepatch module: the kernel must support livepatch (`check_modinfo_livepatch` in `kernel/module/main.c`), and each
/// livepatch relocation section must name its object.
pub(super) fn livepatch(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let module = subject.module;
    if subject.kernel.config.is_set("LIVEPATCH") {
        findings.extend(module.layout.misnamed_livepatch.iter().map(|section| {
            let message = format!("section {section} has an incorrectly formatted name");
            let remedy = "rebuild it: only livepatch tools make sections for livepatch";
            Finding::new(Rule::Kernel, Verdict::Refused, section, &message, remedy)
                .with_kernel_message("EINVAL", &message)
        }));
    } else if module.field("livepatch").is_some() {
        let message = "module is marked as livepatch module, but livepatch support is disabled";
        let remedy = "use a kernel with CONFIG_LIVEPATCH";
        let finding = Finding::new(Rule::Kernel, Verdict::Refused, "livepatch", message, remedy);
        findings.push(finding.with_kernel_message("ENOEXEC", message));
    }
}

/// Checks that the module has type hashes for a kernel with control-flow integrity. Such a kernel calls `init_module` through a
/// pointer and expects the hash of the function's type directly before the function. The compiler writes the hashes with
/// `-fsanitize=kcfi`. Without a hash, the kernel panics, or warns if `CONFIG_CFI_PERMISSIVE` is set. On arm64, the hashes have no
/// symbols since Linux 6.1.
pub(super) fn control_flow(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let has_symbols = kernel.arch == Architecture::Amd64 || !kernel.since(6, 1);
    if !has_cfi(kernel) || !has_symbols || !subject.module.layout.init_without_cfi {
        return;
    }
    let (verdict, consequence) = if kernel.config.is_set("CFI_PERMISSIVE") {
        (Verdict::Loads, "the kernel warns")
    } else {
        (Verdict::Refused, "the kernel panics")
    };
    let message = format!(
        "was compiled without control-flow integrity (kCFI), which the kernel has: {consequence} when it calls the module"
    );
    let remedy = "compile it with the kernel's compiler and makefiles (LLVM=1)";
    findings.push(Finding::new(Rule::Kernel, verdict, "init_module", message, remedy));
}

/// Whether the kernel checks calls through pointers: option `CFI_CLANG`, since Linux 6.18 `CFI`.
fn has_cfi(kernel: &KernelFacts) -> bool {
    ["CFI_CLANG", "CFI"].iter().any(|name| kernel.config.is_set(name))
}
