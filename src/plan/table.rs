//! Pure: a plan as people read it.
use super::Plan;

/// The plan as tables and one closing line.
pub fn table(plan: &Plan) -> String {
    format!("{plan:?}")
}
