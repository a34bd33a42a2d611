//! What `forecast` says to farrier as its container's last words: who holds the modules.

use std::collections::BTreeSet;

/// The variable with the uid of the driver's own pod, whose processes end with it.
pub const DRIVER_POD: &str = "FARRIER_DRIVER_POD";

/// Bytes that a kubelet keeps of a container's last words (`terminationMessagePath`).
const LONGEST: usize = 4096;

/// What holds a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The uid of the pod that it belongs to; `None` for what is the node's own, or not known.
    pub pod: Option<String>,
    /// For people: `nvidia: used by process 12 (train) with /dev/nvidia0 open`.
    pub what: String,
}

/// A line for each pod, and for each holder without one: `<uid> <what>`, with `-` for no pod. Lines that a kubelet would cut are left out.
pub fn to_text(holders: &[Holder]) -> String {
    let mut pods = BTreeSet::new();
    let mut text = String::new();
    for Holder { pod, what } in holders {
        if pod.as_ref().is_some_and(|pod| !pods.insert(pod)) {
            continue;
        }
        let line = format!("{} {}\n", pod.as_deref().unwrap_or("-"), what.replace('\n', " "));
        if text.len() + line.len() <= LONGEST {
            text.push_str(&line);
        }
    }
    text
}

/// Reads [`to_text`]; lines of another form say nothing.
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
    fn text_comes_back_with_a_line_for_each_pod() {
        let holder =
            |pod: Option<&str>, what: &str| Holder { pod: pod.map(str::to_owned), what: what.to_owned() };
        let all = [holder(Some("u"), "a\nb"), holder(None, "c"), holder(Some("u"), "d"), holder(None, "e")];
        let text = to_text(&all);
        assert_eq!(text, "u a b\n- c\n- e\n");
        assert_eq!(parse(&text), [holder(Some("u"), "a b"), holder(None, "c"), holder(None, "e")]);
        assert_eq!(parse("nonsense\n\n"), []);
        assert!(to_text(&vec![holder(None, &"x".repeat(1000)); 9]).len() <= LONGEST);
    }
}
