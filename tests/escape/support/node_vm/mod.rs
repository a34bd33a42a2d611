//! A virtual machine, and the tree that it boots with.

#[path = "../../../it/support/node_vm/machine.rs"]
pub mod machine;
#[path = "../../../it/support/node_vm/tree.rs"]
pub mod tree;
