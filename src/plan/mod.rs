//! Pure: from a snapshot, the definitions and the clock to a plan.
