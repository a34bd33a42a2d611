//! Settings of a MOFED container, from its arguments and the environment variables that users of the Network Operator know.

use std::time::Duration;

use crate::{
    blacklist::Blacklist,
    connectivity::{read_limit, read_seconds},
    disruption::{Disruption, read_allowed},
    guard::client::read_directory,
    modules::is_module_name,
    node::{Node, is_plain_path},
};

/// Default of `STORAGE_MODULES`: initiators and targets for storage over RDMA.
const STORAGE: &str = "ib_iser ib_isert ib_srp ib_srpt nvme_rdma nvmet_rdma rpcrdma xprtrdma";

/// Default of `THIRD_PARTY_RDMA_MODULES`: RDMA drivers for other vendors' devices, and software RDMA drivers.
const THIRD_PARTY: &str = "bnxt_re efa erdma iw_cxgb4 hfi1 hns_roce ionic_rdma irdma ib_qib mana_ib ocrdma qedr \
                           rdma_rxe siw vmw_pvrdma";

/// Default of `OFED_BLACKLIST_MODULES`: in-tree modules that the host must not load while they are replaced.
const BLACKLIST: &str = "mlx5_core:mlx5_ib:ib_umad:ib_uverbs:ib_ipoib:rdma_cm:rdma_ucm:ib_core:ib_cm";

/// Default of `MLX5_AUXILIARY_MODULES`: modules that the kernel loads automatically for functions of mlx5 devices.
const AUXILIARY: &str = "mlx5_vdpa mlx5_fwctl mlx5_dpll";

/// Settings of a MOFED container. The comment of each field names the variable or option that sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is an independent variable of the operator's users")]
pub(crate) struct Settings {
    /// `--expose-root`: behave like the containers of the first operator generation. The container's whole root is bound
    /// at `mount`, and the default ready file is `/.driver-ready`.
    pub(crate) expose_root: bool,
    /// `UNLOAD_STORAGE_MODULES`: whether [`storage`](Self::storage) modules may be unloaded. Otherwise the start fails
    /// while such a module is loaded.
    pub(crate) unload_storage: bool,
    /// `UNLOAD_THIRD_PARTY_RDMA_MODULES`: the same for [`third_party`](Self::third_party) modules.
    pub(crate) unload_third_party: bool,
    /// `ALLOW_DISRUPTION`: disruptions that the replacement of the drivers may cause on the node.
    pub(crate) allowed: Vec<Disruption>,
    /// `API_SERVER_TIMEOUT_SEC`: maximum time until the API servers answer after the drivers were replaced.
    pub(crate) api_server_limit: Duration,
    /// `SWAP_GUARD`: directory of the guard that replaces the drivers; `None` if the container does so itself.
    pub(crate) guard: Option<String>,
    /// `HOOK_BEFORE`, `HOOK_AFTER`: programs that run before the drivers are replaced and after.
    pub(crate) hooks: [Option<String>; 2],
    /// `ENABLE_NFSRDMA`: also load `rpcrdma`.
    pub(crate) nfs_rdma: bool,
    /// `RESTORE_DRIVER_ON_POD_TERMINATION`: load the host's own drivers again when the container stops.
    pub(crate) restore: bool,
    /// `BIND_DELAY_SEC`: maximum time for a device to come up, in seconds.
    pub(crate) bind_delay: u32,
    /// `STORAGE_MODULES`, separated by spaces.
    pub(crate) storage: Vec<String>,
    /// `THIRD_PARTY_RDMA_MODULES`, separated by spaces.
    pub(crate) third_party: Vec<String>,
    /// `OFED_BLACKLIST_MODULES`, separated by colons.
    pub(crate) blacklist: Vec<String>,
    /// `MLX5_AUXILIARY_MODULES`, separated by spaces; an empty value means none.
    pub(crate) auxiliary: Vec<String>,
    /// `OFED_BLACKLIST_MODULES_FILE`: path of the blacklist if the host's `/run/modprobe.d` is not mounted. If it is
    /// mounted, only the file name applies.
    pub(crate) blacklist_file: String,
    /// `MLX_UDEV_RULES_FILE`, with `CREATE_IFNAMES_UDEV`: keep the interface names that the in-tree driver gave.
    pub(crate) udev_file: Option<String>,
    /// `DRIVER_READY_PATH`.
    pub(crate) ready: String,
    /// `LOCK_FILE_PATH`.
    pub(crate) lock: String,
    /// `MLX_DRIVERS_MOUNT`: volume through which other containers see the headers.
    pub(crate) mount: String,
    /// `SHARED_KERNEL_HEADERS_DIR`: directory of the headers that other containers see.
    pub(crate) headers: String,
}

impl Settings {
    /// Reads the arguments after `mofed` and the environment. The error names the wrong argument or variable.
    pub(crate) fn read(
        arguments: &[&str],
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let expose_root = *arguments == ["--expose-root"];
        if !expose_root && !arguments.is_empty() {
            return Err(format!("mofed takes --expose-root and nothing else, not {}", arguments.join(" ")));
        }
        let allowed = read_allowed(&environment)?;
        let non_blank = |name: &str| environment(name).filter(|value| !value.trim().is_empty());
        let flag = |name: &str| match non_blank(name).as_deref().map(str::trim) {
            None | Some("0" | "f" | "F" | "false" | "False" | "FALSE") => Ok(false),
            Some("1" | "t" | "T" | "true" | "True" | "TRUE") => Ok(true),
            Some(other) => Err(format!("{name} must be true or false, not {other}")),
        };
        let list = |name: &str, separator: char, default: &str| {
            let text = environment(name).unwrap_or_else(|| default.to_owned());
            module_names(name, &text, separator)
        };
        // For lists that must not be empty: an empty value counts as unset.
        let non_empty_list = |name: &str, separator: char, default: &str| {
            module_names(name, &non_blank(name).unwrap_or_else(|| default.to_owned()), separator)
        };
        let path = |name: &str, default: &str| match non_blank(name) {
            Some(path) if is_plain_path(&path) => Ok(path),
            Some(path) => Err(format!("{name} must be an absolute path without .., not {path}")),
            None => Ok(default.to_owned()),
        };
        let hook = |name: &str| path(name, "").map(|path| Some(path).filter(|path| !path.is_empty()));
        let bind_delay = read_seconds("BIND_DELAY_SEC", environment("BIND_DELAY_SEC"), 4)?;
        let mount = path("MLX_DRIVERS_MOUNT", "/run/mellanox/drivers")?;
        if !["/run/", "/var/run/"].iter().any(|parent| mount.starts_with(parent)) {
            return Err(format!(
                "MLX_DRIVERS_MOUNT must be a path below /run, not {mount}: a reboot must remove the files in it"
            ));
        }
        let udev_file = path("MLX_UDEV_RULES_FILE", "/host/etc/udev/rules.d/77-mlnx-net-names.rules")?;
        let ready = if expose_root { "/.driver-ready".to_owned() } else { format!("{mount}/.driver-ready") };
        Ok(Self {
            expose_root,
            allowed,
            api_server_limit: read_limit(&environment)?,
            guard: read_directory(&environment)?,
            hooks: [hook("HOOK_BEFORE")?, hook("HOOK_AFTER")?],
            unload_storage: flag("UNLOAD_STORAGE_MODULES")?,
            unload_third_party: flag("UNLOAD_THIRD_PARTY_RDMA_MODULES")?,
            nfs_rdma: flag("ENABLE_NFSRDMA")?,
            restore: flag("RESTORE_DRIVER_ON_POD_TERMINATION")?,
            bind_delay,
            storage: non_empty_list("STORAGE_MODULES", ' ', STORAGE)?,
            third_party: non_empty_list("THIRD_PARTY_RDMA_MODULES", ' ', THIRD_PARTY)?,
            blacklist: list("OFED_BLACKLIST_MODULES", ':', BLACKLIST)?,
            auxiliary: list("MLX5_AUXILIARY_MODULES", ' ', AUXILIARY)?,
            blacklist_file: path(
                "OFED_BLACKLIST_MODULES_FILE",
                "/host/etc/modprobe.d/blacklist-ofed-modules.conf",
            )?,
            udev_file: flag("CREATE_IFNAMES_UDEV")?.then_some(udev_file),
            ready: path("DRIVER_READY_PATH", &ready)?,
            lock: path("LOCK_FILE_PATH", &format!("{mount}/.lock"))?,
            headers: path("SHARED_KERNEL_HEADERS_DIR", "/usr/src")?.trim_end_matches('/').to_owned(),
            mount,
        })
    }

    /// Path of a state file that the next container reads. The file is on the node's volume below `/run`, so a reboot
    /// removes it together with the state that it describes.
    pub(crate) fn state_file(&self, name: &str) -> String {
        format!("{}/.{name}", self.mount)
    }

    /// Blacklist of modules that the host must not load while they are replaced. The symlink to the state file is also
    /// valid on the host, because the volume has the same path there.
    pub(crate) fn blacklist<'a>(&'a self, node: &'a Node<'a>) -> Blacklist<'a> {
        let third_party = self.third_party.iter().filter(|_| self.unload_third_party);
        Blacklist {
            node,
            name: self.blacklist_file.rsplit('/').next().unwrap_or_default().to_owned(),
            link: Some((&self.blacklist_file, self.state_file("blacklist"))),
            modules: self.blacklist.iter().chain(third_party).chain(&self.auxiliary).cloned().collect(),
        }
    }

    /// Directory to expose (the headers or the root) and where to expose it.
    pub(crate) fn exposed(&self) -> (&str, String) {
        if self.expose_root {
            ("/", self.mount.clone())
        } else {
            (&self.headers, format!("{}{}", self.mount, self.headers))
        }
    }
}

/// Parses a list of module names. The host's modprobe reads the resulting file, so any other text is rejected.
fn module_names(variable: &str, text: &str, separator: char) -> Result<Vec<String>, String> {
    let names = text.split(separator).flat_map(str::split_whitespace);
    names
        .map(|name| {
            let other = || format!("{variable} must list module names, not {name}");
            is_module_name(name).then(|| name.to_owned()).ok_or_else(other)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::read(arguments, |name| {
            environment.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn defaults_are_those_of_the_operator() {
        let settings = read(&[], &[]).unwrap();
        assert_eq!(settings.ready, "/run/mellanox/drivers/.driver-ready");
        assert_eq!(settings.lock, "/run/mellanox/drivers/.lock");
        assert_eq!(settings.exposed(), ("/usr/src", "/run/mellanox/drivers/usr/src".to_owned()));
        assert_eq!(settings.blacklist_file, "/host/etc/modprobe.d/blacklist-ofed-modules.conf");
        assert_eq!((settings.bind_delay, settings.restore, settings.unload_storage), (4, false, false));
        assert_eq!(settings.auxiliary, ["mlx5_vdpa", "mlx5_fwctl", "mlx5_dpll"]);
        assert_eq!(
            (settings.storage.len(), settings.third_party.len(), settings.blacklist.len()),
            (8, 15, 9)
        );
    }

    #[test]
    fn variables_override_the_defaults() {
        let settings = read(
            &[],
            &[
                ("UNLOAD_STORAGE_MODULES", "true"),
                ("RESTORE_DRIVER_ON_POD_TERMINATION", "1"),
                ("ENABLE_NFSRDMA", "false"),
                ("OFED_BLACKLIST_MODULES", "mlx5_core: ib_core"),
                ("MLX5_AUXILIARY_MODULES", ""),
                ("BIND_DELAY_SEC", "7"),
            ],
        )
        .unwrap();
        assert!(settings.unload_storage && settings.restore && !settings.nfs_rdma);
        assert_eq!(settings.blacklist, ["mlx5_core", "ib_core"]);
        assert_eq!(settings.auxiliary, Vec::<String>::new());
        assert_eq!(settings.bind_delay, 7);
    }

    #[test]
    fn the_first_generation_exposes_its_root() {
        let settings = read(&["--expose-root"], &[]).unwrap();
        assert_eq!(settings.exposed(), ("/", "/run/mellanox/drivers".to_owned()));
        assert_eq!(settings.ready, "/.driver-ready");
    }

    #[test]
    fn invalid_settings_are_named() {
        let error = |name, value| read(&[], &[(name, value)]).unwrap_err();
        assert_eq!(error("ENABLE_NFSRDMA", "yes"), "ENABLE_NFSRDMA must be true or false, not yes");
        assert_eq!(error("BIND_DELAY_SEC", "soon"), "BIND_DELAY_SEC must be a number of seconds, not soon");
        assert_eq!(
            error("OFED_BLACKLIST_MODULES", "a:b\ninstall x /bin/sh"),
            "OFED_BLACKLIST_MODULES must list module names, not /bin/sh"
        );
        for path in ["lock", "/run/../etc/lock", "/run/x/..", "/..", ".."] {
            let expected = format!("LOCK_FILE_PATH must be an absolute path without .., not {path}");
            assert_eq!(error("LOCK_FILE_PATH", path), expected);
        }
        assert_eq!(read(&[], &[("LOCK_FILE_PATH", "/run/..x/...")]).unwrap().lock, "/run/..x/...");
        assert_eq!(
            error("MLX_DRIVERS_MOUNT", "/opt/drivers"),
            "MLX_DRIVERS_MOUNT must be a path below /run, not /opt/drivers: a reboot must remove the files in it"
        );
        assert_eq!(
            read(&["--force"], &[]).unwrap_err(),
            "mofed takes --expose-root and nothing else, not --force"
        );
    }
}
