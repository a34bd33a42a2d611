//! The RDMA stack: the modules to load, the modules to unload first, and the obstacles to that. [`super`] orchestrates the
//! steps.

use std::collections::BTreeSet;

use super::settings::Settings;
use crate::{
    error::Error,
    module_file::kernel_name,
    modules::{load::Loader, loaded::Loaded, unload},
    node::Node,
};

/// Modules that OFED's own start script loads, in its order, if the image has them. Their dependencies are also loaded.
const START_MODULES: [&str; 8] =
    ["mlx5_core", "mlx5_ib", "ib_umad", "ib_uverbs", "ib_ipoib", "rdma_cm", "rdma_ucm", "ib_cm"];

/// Modules whose `srcversion` shows whether the image's drivers are loaded.
const COMPARED_MODULES: [&str; 3] = ["mlx5_core", "mlx5_ib", "ib_core"];

/// Modules of the in-tree stack. They are unloaded even if the image has no replacement.
const IN_TREE_MODULES: &str = "ib_cm ib_core ib_ipoib ib_mad ib_sa ib_addr ib_ucm ib_umad ib_uverbs iw_cm rdma_cm rdma_ucm mlx4_core \
                       mlx4_en mlx4_ib mlx5_core mlx5_ib mlx_compat mlxdevm mlxfw";

/// Current and former peer memory module. Both are compiled against the stack and keep it in use. Another container
/// loads them again.
pub(super) const PEER_MEMORY: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// The image's RDMA stack.
pub(super) struct Stack<'a> {
    pub(super) node: &'a Node<'a>,
    pub(super) settings: &'a Settings,
    pub(super) loader: Loader<'a>,
}

impl Stack<'_> {
    /// Lists the image's modules to load by name.
    pub(super) fn modules_to_load(&self) -> Vec<&'static str> {
        let nfs = self.settings.nfs_rdma.then_some("rpcrdma");
        let names = START_MODULES.into_iter().chain(nfs);
        names.filter(|name| self.loader.index.image_file(name).is_some()).collect()
    }

    /// Fails for an image without drivers for this kernel, before any change.
    pub(super) fn check_image(&self) -> Result<(), Error> {
        if self.loader.index.image_file("mlx5_core").is_none() {
            return Err(self.loader.index.missing_error("mlx5_core", None));
        }
        if let Some(name) = COMPARED_MODULES.into_iter().find(|name| self.loader.index.is_built_in(name)) {
            return Err(Error::new(
                format!("{name} is built into this kernel, and cannot be replaced"),
                "build the kernel with CONFIG_INFINIBAND=m and CONFIG_MLX5_CORE=m, or use its own drivers",
            ));
        }
        if self.settings.nfs_rdma && self.loader.index.image_file("rpcrdma").is_none() {
            self.node.log.warn("ENABLE_NFSRDMA is set, but this image was built without rpcrdma");
        }
        Ok(())
    }

    /// Finds a module that is not loaded, or whose loaded build is not the image's, and describes the difference.
    pub(super) fn find_difference(&self, loaded: &Loaded) -> Result<Option<(&'static str, String)>, Error> {
        for module in COMPARED_MODULES {
            let Some(file) = self.loader.index.image_file(module) else { continue };
            let image = file.info()?;
            if loaded.matches_file(&self.node.paths, module, &image) {
                continue;
            }
            let state = match loaded.get(module).map(|module| module.source_version.as_str()) {
                None => "not loaded".to_owned(),
                // Debian's own modules have no srcversion.
                Some("") => "loaded without a srcversion".to_owned(),
                Some(version) => format!("loaded as {version}"),
            };
            let image = match image.source_version.as_str() {
                "" => "another, without a srcversion,",
                version => version,
            };
            return Ok(Some((module, format!("{module} is {state}, but {image} in this image"))));
        }
        Ok(None)
    }

    /// Lists the loaded modules to unload, users first. Fails before any change if the operators' container would
    /// refuse, if the unload would fail halfway, or if processes use a module.
    pub(super) fn modules_to_unload(&self, loaded: &Loaded) -> Result<Vec<String>, Error> {
        let Settings { unload_storage, unload_third_party, storage, third_party, auxiliary, .. } =
            self.settings;
        for (kind, names, allowed, variable) in [
            ("storage", storage, unload_storage, "UNLOAD_STORAGE_MODULES"),
            ("third-party RDMA", third_party, unload_third_party, "UNLOAD_THIRD_PARTY_RDMA_MODULES"),
        ] {
            let names: Vec<&str> =
                names.iter().map(String::as_str).filter(|name| loaded.contains(name)).collect();
            if !allowed && !names.is_empty() {
                return Err(Error::new(
                    format!(
                        "{kind} modules are loaded, and would be unloaded with the drivers to be replaced: {}",
                        names.join(", ")
                    ),
                    format!("set {variable}=true to have them unloaded, or unload them on the node"),
                ));
            }
        }
        let mut seeds = self.own_modules()?;
        let listed = storage.iter().chain(third_party).chain(auxiliary).map(|name| kernel_name(name));
        let listed: BTreeSet<String> = listed.collect();
        seeds.extend(listed.iter().cloned());
        let in_tree = IN_TREE_MODULES.split_whitespace();
        let is_known = |name: &str| {
            listed.contains(name)
                || self.loader.index.image_file(name).is_some()
                || in_tree.clone().any(|other| other == name)
                || PEER_MEMORY.contains(&name)
        };
        let mut order = loaded.with_holders(&seeds);
        if let Some(name) = order.iter().find(|name| !is_known(name)) {
            return Err(unknown_user(loaded, &order, name));
        }
        for name in &order {
            unload::check_users(self.node, name)?;
        }
        order.retain(|name| !PEER_MEMORY.contains(&name.as_str()));
        Ok(order)
    }

    /// Loads the host's modules that the image's modules depend on, while the old drivers still work. A missing
    /// dependency shows before any module is unloaded.
    pub(super) fn load_host_deps(&self, loaded: &Loaded, to_unload: &[String]) -> Result<(), Error> {
        let staying = loaded.without(to_unload);
        for name in self.modules_to_load() {
            self.loader.load_host_deps(name, &staying)?;
        }
        Ok(())
    }

    /// Returns the modules that [`load`](Self::load) loads, for a guard: the required and the optional ones.
    pub(super) fn modules_of_swap(&self, unloaded: &[String]) -> (Vec<String>, Vec<String>) {
        let to_load = self.modules_to_load().into_iter().map(str::to_owned);
        let others = unloaded.iter().rev().chain(&self.settings.auxiliary);
        let others = others.filter(|name| self.loader.index.image_file(name).is_some()).cloned();
        let (storage, optional): (Vec<String>, Vec<String>) = others.partition(|name| {
            self.settings.storage.iter().any(|storage| kernel_name(storage) == kernel_name(name))
        });
        (to_load.chain(storage).collect(), optional)
    }

    /// Loads the stack, and the image's versions of the modules in `unloaded`.
    pub(super) fn load(&self, unloaded: &[String]) -> Result<(), Error> {
        for name in self.modules_to_load() {
            self.loader.load(name)?;
        }
        for name in unloaded.iter().rev().chain(&self.settings.auxiliary) {
            if self.loader.index.image_file(name).is_some() {
                let loaded = self.loader.load(name);
                // Storage modules are required, because the node used them before. The other modules are optional.
                if self.settings.storage.iter().any(|storage| kernel_name(storage) == *name) {
                    loaded?;
                } else {
                    self.node.log.warn_of(loaded);
                }
            } else if unloaded.contains(name) {
                self.node.log.warn(format!(
                    "module {name} was loaded before, but is not loaded now: this image does not have it, and the host's does not fit"
                ));
            }
        }
        Ok(())
    }

    /// Checks that the image's modules are loaded: udev may have loaded the host's first.
    pub(super) fn check_loaded(&self) -> Result<(), Error> {
        let loaded = Loaded::read(&self.node.paths)?;
        match self.find_difference(&loaded)? {
            // Without an identity, modules cannot be told apart.
            Some((module, _)) if loaded.identity(&self.node.paths, module).is_some() => Err(Error::new(
                format!("something else on the node has loaded a {module} that is not the image's"),
                "mount the host's /run/modprobe.d at /host/run/modprobe.d: the blacklist there keeps udev from loading it",
            )),
            _ => Ok(()),
        }
    }

    /// Names the image's modules that make up the stack.
    pub(super) fn own_modules(&self) -> Result<BTreeSet<String>, Error> {
        let mut names = BTreeSet::new();
        for name in self.modules_to_load() {
            names.extend(self.loader.image_modules_for(name)?);
        }
        Ok(names)
    }
}

/// Error for an unknown module that uses the stack.
fn unknown_user(loaded: &Loaded, order: &[String], name: &str) -> Error {
    let is_user = |other: &&String| loaded.get(other).is_some_and(|module| module.holders.contains(name));
    let used: Vec<&str> = order.iter().filter(is_user).map(String::as_str).collect();
    Error::new(
        format!("module {name} uses {}, and this image has no replacement for it", used.join(", ")),
        format!(
            "unload {name} on the node, or add it to STORAGE_MODULES and set UNLOAD_STORAGE_MODULES=true"
        ),
    )
}
