//! Output of a reconcile as text.

use std::fmt::Write as _;

use farrier_controller::{ReconcileReport, RolloutReport, TargetReport};
use farrier_core::{
    plan::{RolloutDecision, counts, summary, tables, with_short_digests},
    text::printable_lines,
};

use super::{look, plan::sections};

/// Formats the report: first the actions, then the current state.
pub fn reconcile(report: &ReconcileReport) -> String {
    let mut text = String::new();
    for target in &report.targets {
        write_target(&mut text, target);
    }
    for rollout in &report.rollouts {
        write_rollout(&mut text, rollout);
    }
    for step in &report.steps {
        let (verb, object) = step.split_once(' ').unwrap_or((step, ""));
        let _ = writeln!(text, "{verb:<9} {object}");
    }
    if look::width().is_some() {
        text = with_short_digests(&text);
    }
    let idle = report.targets.is_empty() && report.steps.is_empty() && !report.rewrote() && !report.failed();
    if idle {
        text.push_str("nothing to do\n");
    }
    let mut plan = tables(&report.plan);
    for target in &report.targets {
        let TargetReport::Failed { error, .. } = target else { continue };
        let repeated = format!(": {}", printable_lines(error));
        for cell in plan.iter_mut().flat_map(|table| &mut table.rows).flatten() {
            *cell = cell.replace(&repeated, ", for the reason above");
        }
    }
    text.push_str(&sections(&plan));
    let closing = if idle { summary(&report.plan) } else { format!("now: {}", counts(&report.plan)) };
    let _ = writeln!(text, "{closing}");
    text
}

// Writing to a `String` cannot fail.
fn write_target(text: &mut String, target: &TargetReport) {
    let _ = match target {
        TargetReport::Built { subject, image, verdict, warnings, pushed_bytes } => {
            let _ = writeln!(
                text,
                "built     {subject}: {image} (check: {verdict}, {pushed_bytes} bytes pushed)"
            );
            warnings.iter().try_for_each(|warning| writeln!(text, "          warning: {warning}"))
        }
        TargetReport::Reused { subject, image, verdict, kernel, from: _, pushed_bytes } => writeln!(
            text,
            "reused    {subject} from kernel {kernel}: {image} (check: {verdict}, {pushed_bytes} bytes pushed)"
        ),
        TargetReport::United { subject, image, kernels } => {
            writeln!(text, "united    {subject}: {image} ({})", kernels.join(", "))
        }
        TargetReport::Tagged { subject, references } => {
            writeln!(text, "tagged    {subject}: {}", references.join(", "))
        }
        TargetReport::Signed { subject, image } => writeln!(text, "signed    {subject}: {image}"),
        TargetReport::Failed { subject, error, hint, detail } => {
            let _ = writeln!(text, "failed    {subject}: {error}");
            for line in detail {
                let _ = writeln!(text, "          | {line}");
            }
            hint.as_ref().map_or(Ok(()), |hint| writeln!(text, "          hint: {hint}"))
        }
    };
}

fn write_rollout(text: &mut String, rollout: &RolloutReport) {
    let target = &rollout.planned.target;
    let _ = match (&rollout.error, &rollout.planned.decision) {
        (Some(error), _) => writeln!(text, "failed    {target}: {error}"),
        (None, RolloutDecision::Rewrite { from, to }) => writeln!(text, "rewrote   {target}: {from} -> {to}"),
        (None, _) => Ok(()),
    };
}

#[cfg(test)]
mod tests {
    use kmod::Verdict;

    use super::*;

    #[test]
    fn targets_as_people_read_them() {
        let subject = || "x for 6.1.0-56-amd64".to_owned();
        let image = || "r.example/x@sha256:1".to_owned();
        let targets = [
            TargetReport::Built {
                subject: subject(),
                image: image(),
                verdict: Verdict::Unknown,
                warnings: vec!["it is unknown whether the modules load: m: ...".to_owned()],
                pushed_bytes: 7,
            },
            TargetReport::Reused {
                subject: subject(),
                image: image(),
                verdict: Verdict::Loads,
                kernel: "6.1.0-55-amd64".to_owned(),
                from: "r.example/x@sha256:2".to_owned(),
                pushed_bytes: 8,
            },
        ];
        let mut text = String::new();
        for target in &targets {
            write_target(&mut text, target);
        }
        insta::assert_snapshot!(text, @r"
        built     x for 6.1.0-56-amd64: r.example/x@sha256:1 (check: unknown, 7 bytes pushed)
                  warning: it is unknown whether the modules load: m: ...
        reused    x for 6.1.0-56-amd64 from kernel 6.1.0-55-amd64: r.example/x@sha256:1 (check: loads, 8 bytes pushed)
        ");
        let json = serde_json::to_value(&targets[1]).unwrap();
        assert_eq!(json["outcome"], "reused");
        assert_eq!((&json["kernel"], &json["pushedBytes"]), (&"6.1.0-55-amd64".into(), &8.into()));
    }
}
