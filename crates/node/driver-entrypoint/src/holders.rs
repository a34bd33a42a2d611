//! Report of `forecast` to farrier through the container's termination message: who holds the modules. Both sides use
//! this format.

use std::collections::BTreeSet;

/// Environment variable with the UID of the driver's own pod, whose processes end with that pod.
pub const DRIVER_POD: &str = "FARRIER_DRIVER_POD";

/// Bytes of a termination message that a kubelet keeps (`terminationMessagePath`).
const MAX_MESSAGE_SIZE: usize = 4096;

/// A user of a module that prevents its unload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// UID of the pod that the holder belongs to; `None` if the holder belongs to the node or its pod is unknown.
    pub pod: Option<String>,
    /// Description for people: `nvidia: used by process 12 (train) with /dev/nvidia0 open`.
    pub what: String,
}

/// Formats one line for each pod and one for each holder without a pod: `<uid> <what>`, with `-` for no pod. Lines
/// beyond the size that a kubelet keeps are omitted.
pub fn to_text(holders: &[Holder]) -> String {
    let mut pods = BTreeSet::new();
    let mut text = String::new();
    for Holder { pod, what } in holders {
        if pod.as_ref().is_some_and(|pod| !pods.insert(pod)) {
            continue;
        }
        let line = format!("{} {}\n", pod.as_deref().unwrap_or("-"), what.replace('\n', " "));
        if text.len() + line.len() <= MAX_MESSAGE_SIZE {
            text.push_str(&line);
        }
    }
    text
}

/// Parses the output of [`to_text`]; lines of any other form are skipped.
pub fn parse(text: &str) -> Vec<Holder> {
    let lines = text.lines().filter_map(|line| {
        let (pod, what) = line.split_once(' ')?;
        Some(Holder { pod: (pod != "-").then(|| pod.to_owned()), what: what.to_owned() })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_with_a_line_for_each_pod() {
        let holder =
            |pod: Option<&str>, what: &str| Holder { pod: pod.map(str::to_owned), what: what.to_owned() };
        let all = [holder(Some("u"), "a\nb"), holder(None, "c"), holder(Some("u"), "d"), holder(None, "e")];
        let text = to_text(&all);
        assert_eq!(text, "u a b\n- c\n- e\n");
        assert_eq!(parse(&text), [holder(Some("u"), "a b"), holder(None, "c"), holder(None, "e")]);
        assert_eq!(parse("nonsense\n\n"), []);
        assert!(to_text(&vec![holder(None, &"x".repeat(1000)); 9]).len() <= MAX_MESSAGE_SIZE);
    }
}
