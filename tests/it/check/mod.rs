//! The check on real kernels, with the distribution's headers and in-tree modules from the host's apt. `modinfo`,
//! `modprobe --dump-modversions` and `depmod` (package kmod) and `nm` (binutils) serve as independent references.
mod booted;
mod broken;
mod kernels;
mod witnesses;
