//! The check on real kernels, with the distribution's headers and in-tree modules from the host's apt. Independent references
//! are `modinfo`, `modprobe --dump-modversions` and `depmod` (package kmod) and `nm` (binutils).

mod booted;
mod broken;
mod kernels;
mod witnesses;
