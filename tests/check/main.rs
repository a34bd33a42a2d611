//! The check on real kernels: the distribution's headers and in-tree modules, fetched through the host's apt, with
//! `modinfo`, `modprobe --dump-modversions` and `depmod` (package kmod) and `nm` (binutils) as independent witnesses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod booted;
mod broken;
mod kernels;
#[path = "../support/mod.rs"]
mod support;
mod witnesses;
