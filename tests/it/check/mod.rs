//! The check on real kernels: the distribution's headers and in-tree modules, fetched through the host's apt, with
//! `modinfo`, `modprobe --dump-modversions` and `depmod` (package kmod) and `nm` (binutils) as independent witnesses.
mod booted;
mod broken;
mod kernels;
mod witnesses;
