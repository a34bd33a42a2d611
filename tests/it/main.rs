//! The tests of the whole program, with real engines, registries, headers and virtual machines; one binary, because each more
//! would compile and link farrier once more.
// clippy.toml allows these in test functions only, not in what the tests share.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::missing_panics_doc)]

mod admission;
mod air_gap;
mod argocd;
mod boot;
mod bundle;
mod chain;
mod chain_rollouts;
mod check;
mod check_report;
mod ci_templates;
mod cluster_dir;
mod copies;
mod cosign;
mod crashes;
mod dkms;
mod dockerfiles;
mod e2e_script;
mod engine;
mod explain;
mod failures;
mod families;
mod fetch;
mod fleet;
mod gc;
mod git;
mod gpudirect;
mod headers_import;
mod install_page;
mod interruptions;
mod kernel_sources;
mod kube_api;
mod kube_cluster;
mod leadership;
mod lifecycle;
mod offline;
mod own_kernel;
mod pipeline;
mod registry;
mod reproducible;
mod reuse;
mod rollback;
mod rpm;
mod sandbox;
mod schema;
mod signatures;
mod signing;
mod site;
mod status_objects;
mod support;
mod toolchain;
mod truth_table;
mod upload;
mod version_order;
