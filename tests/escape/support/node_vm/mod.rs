//! A virtual machine and its initramfs tree.

#[path = "../../../it/support/node_vm/machine.rs"]
pub mod machine;
#[path = "../../../it/support/node_vm/tree.rs"]
pub mod tree;
