//! Adapter: the pass: observe, plan, apply, report.
