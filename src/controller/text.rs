//! Adapter: what a pass did, as people read it.

use std::fmt::Write as _;

use super::{PassReport, RolloutReport, TargetReport};
use crate::plan::{self, RolloutDecision};

impl PassReport {
    /// The report as text: what was done first, then how things stand.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for target in &self.targets {
            write_target(&mut text, target);
        }
        for rollout in &self.rollouts {
            write_rollout(&mut text, rollout);
        }
        let idle = self.targets.is_empty() && !self.rewrote() && !self.failed();
        if idle {
            text.push_str("nothing to do\n");
        }
        text.push_str(&plan::sections(&self.plan));
        let closing =
            if idle { plan::summary(&self.plan) } else { format!("now: {}", plan::counts(&self.plan)) };
        let _ = writeln!(text, "{closing}");
        text
    }

    /// Was an image field rewritten?
    pub fn rewrote(&self) -> bool {
        self.rollouts.iter().any(|rollout| {
            matches!(rollout.planned.decision, RolloutDecision::Rewrite { .. }) && rollout.error.is_none()
        })
    }
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
        TargetReport::Tagged { subject, references } => {
            writeln!(text, "tagged    {subject}: {}", references.join(", "))
        }
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
    let RolloutDecision::Rewrite { from, to } = &rollout.planned.decision else { return };
    let target = &rollout.planned.target;
    let _ = match &rollout.error {
        None => writeln!(text, "rewrote   {target}: {from} -> {to}"),
        Some(error) => writeln!(text, "failed    {target}: {error}"),
    };
}
