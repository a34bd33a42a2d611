//! Adapter: where nodes and rollout targets are read and rewritten.
