//! Output of `farrier rollback` as text.

use farrier_controller::rollback::RollbackResult;
use farrier_core::{
    image::OperatorResource,
    plan::{PER_KERNEL_ANNOTATION, RECORD_ANNOTATION, RollbackStep},
};

use super::{indented_table, printable};

/// Scope of the search for records.
pub struct Search<'a> {
    pub cluster: String,
    /// Requested objects; empty for all.
    pub objects: &'a [String],
    /// Whether something could not be read.
    pub unseen: bool,
    /// Whether objects of another farrier were left out.
    pub others: bool,
}

/// Formats a table of fields, and how to continue.
pub fn text(rolled: &[RollbackResult], dry_run: bool, search: &Search<'_>) -> String {
    if rolled.is_empty() {
        return nothing(search);
    }
    let mut rows = Vec::new();
    let mut resume = Vec::new();
    for RollbackResult { step, failed, written } in rolled {
        let RollbackStep { object, fields, error, resume: command, change: _ } = step;
        let mut add = |field: &str, action: &str, detail: &str| {
            rows.push([object.clone(), field.to_owned(), action.to_owned(), printable(detail)]);
        };
        if let Some(error) = error {
            add("", "failed", error);
        }
        for (field, outcome) in fields {
            let (action, detail) =
                failed.as_ref().map_or_else(|| outcome.summary(), |failed| ("failed", failed.clone()));
            add(field, action, &detail);
        }
        if *written && failed.is_none() {
            resume.push(format!("  {command}\n"));
        }
    }
    let mut text = indented_table(["OBJECT", "FIELD", "ACTION", "DETAIL"], rows);
    if dry_run {
        text.push_str("\nnothing was written (--dry-run)\n");
    } else if !resume.is_empty() {
        text.push_str(
            "\nA running controller leaves these unchanged until another image is planned. To let it set them again:\n",
        );
        text.push_str(&resume.concat());
    }
    text
}

/// Formats the message for an empty result, with the scope of the search.
fn nothing(search: &Search<'_>) -> String {
    let Search { cluster, objects, unseen, others } = search;
    let subject = if objects.is_empty() {
        let exception = if *others { ", except objects of another farrier," } else { "" };
        let kinds: Vec<&str> = OperatorResource::TARGETS.iter().map(|resource| resource.kind()).collect();
        format!("no DaemonSet in any namespace and no {}{exception}", kinds.join(", "))
    } else {
        format!("none of {}", objects.join(", "))
    };
    let caveat = if *unseen { "as far as farrier can see, " } else { "" };
    format!(
        "nothing to roll back in the {cluster}: {caveat}{subject} has a record of farrier's changes (annotations \
         {RECORD_ANNOTATION}, {PER_KERNEL_ANNOTATION})\n"
    )
}

#[cfg(test)]
mod tests {
    use farrier_core::plan::{Change, NodeChange, RollbackOutcome};

    use super::*;

    fn taken(object: &str, outcome: RollbackOutcome, failed: Option<&str>) -> RollbackResult {
        let change = Change::Node(NodeChange::default());
        let differs = !matches!(outcome, RollbackOutcome::Nothing { .. });
        let step = RollbackStep {
            object: object.to_owned(),
            fields: [("driver".to_owned(), outcome)].into(),
            error: None,
            resume: format!("kubectl annotate {object}"),
            change: differs.then_some(change),
        };
        RollbackResult { step, failed: failed.map(str::to_owned), written: differs }
    }

    #[test]
    fn people_read_what_became_of_each_field_and_how_to_go_on() {
        let restored = || RollbackOutcome::Restored { from: "new@1".to_owned(), to: "old:1".to_owned() };
        let all = [
            taken("a/restored", restored(), None),
            taken("b/released", RollbackOutcome::Released { holds: "theirs:1".to_owned() }, None),
            taken(
                "c/nothing",
                RollbackOutcome::Nothing { why: "it was rolled back before".to_owned() },
                None,
            ),
            taken("d/failed", restored(), Some("write DaemonSet d/failed: forbidden")),
        ];
        let cluster = "cluster at https://k.test".to_owned();
        let everything = Search { cluster, objects: &[], unseen: false, others: false };
        insta::assert_snapshot!(format!(
            "{}---\n{}---\n{}{}",
            text(&all, false, &everything),
            text(&all, true, &everything),
            text(&[], false, &everything),
            text(&[], false, &Search { objects: &["drivers/fleet".to_owned()], unseen: true, ..everything })
        ));
    }
}
