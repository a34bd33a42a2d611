//! Watches: events after a resource version, as JSON lines.

use std::{sync::Arc, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    Shared,
    answer::Failure,
    kinds::Kind,
    selectors::Selector,
    store::{Event, Object, State},
};

/// Parameters of a watch.
#[derive(Clone, Debug)]
pub struct Terms {
    pub kind: Arc<Kind>,
    pub namespace: String,
    pub selector: Selector,
    pub bookmarks: bool,
    pub timeout: Duration,
}

/// A running watch.
pub struct Watch {
    shared: Arc<Shared>,
    terms: Terms,
    from: u64,
    first: Option<Bytes>,
    bookmarks_sent: u64,
    until: Instant,
    ended: bool,
}

impl Watch {
    /// Creates a watch. Without `from` it starts with all existing objects.
    pub fn new(
        shared: &Arc<Shared>,
        state: &State,
        terms: Terms,
        from: Option<u64>,
        initial_end: bool,
    ) -> Self {
        let first = from.is_none().then(|| initial(state, &terms, initial_end));
        *shared.watches.lock().unwrap().entry(terms.kind.resource()).or_default() += 1;
        Self {
            shared: Arc::clone(shared),
            from: from.unwrap_or(state.revision),
            first,
            bookmarks_sent: state.bookmarks,
            until: Instant::now() + terms.timeout,
            terms,
            ended: false,
        }
    }

    /// Returns the next lines, or `None` at the end.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take().filter(|first| !first.is_empty()) {
            return Some(first);
        }
        let mut changed = self.shared.changed.subscribe();
        loop {
            if self.ended {
                return None;
            }
            if let Some(lines) = self.lines() {
                return Some(lines);
            }
            let change = tokio::time::timeout_at(self.until, changed.changed()).await;
            if change.is_err() {
                self.ended = true;
                // The real server also sends a bookmark shortly before it ends a watch.
                return self.terms.bookmarks.then(|| self.bookmark());
            }
        }
    }

    fn lines(&mut self) -> Option<Bytes> {
        let shared = Arc::clone(&self.shared);
        let state = shared.state.lock().unwrap();
        let resource = self.terms.kind.resource();
        if state.faults.held.contains(&resource) {
            return None;
        }
        if self.from < state.compacted {
            self.ended = true;
            let gone = Failure::too_old(self.from, state.compacted).body();
            return Some(line("ERROR", gone.to_string().as_bytes()));
        }
        let mut lines = BytesMut::new();
        for event in state.events_since(&resource, self.from) {
            self.from = event.revision;
            if let Some((what, bytes)) = seen(&self.terms, &event) {
                lines.put(line(what, &bytes));
            }
        }
        if self.terms.bookmarks && self.bookmarks_sent < state.bookmarks {
            self.bookmarks_sent = state.bookmarks;
            self.from = state.revision;
            lines.put(self.bookmark());
        }
        if !state.kinds.iter().any(|kind| kind.resource() == resource) {
            self.ended = true;
        }
        (!lines.is_empty()).then(|| lines.freeze())
    }

    fn bookmark(&self) -> Bytes {
        line("BOOKMARK", self.terms.kind.bookmark(self.from, false).to_string().as_bytes())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(count) = self.shared.watches.lock().unwrap().get_mut(&self.terms.kind.resource()) {
            *count -= 1;
        }
        self.shared.announce();
    }
}

fn initial(state: &State, terms: &Terms, end: bool) -> Bytes {
    let mut lines = BytesMut::new();
    for object in
        state.list(&terms.kind, &terms.namespace).filter(|object| terms.selector.matches(&***object))
    {
        lines.put(line("ADDED", &object.bytes));
    }
    if end {
        lines.put(line("BOOKMARK", terms.kind.bookmark(state.revision, true).to_string().as_bytes()));
    }
    lines.freeze()
}

/// Translates an event for this watch: a change of labels may add or remove an object.
fn seen(terms: &Terms, event: &Event) -> Option<(&'static str, Bytes)> {
    let visible = |object: &Option<Arc<Object>>| {
        object.as_ref().is_some_and(|object| {
            (terms.namespace.is_empty() || object.namespace == terms.namespace)
                && terms.selector.matches(&**object)
        })
    };
    match (visible(&event.before), visible(&event.after)) {
        (false, true) => Some(("ADDED", event.after.as_ref()?.bytes.clone())),
        (true, true) => Some(("MODIFIED", event.after.as_ref()?.bytes.clone())),
        (true, false) => Some(("DELETED", deleted(event)?)),
        (false, false) => None,
    }
}

/// Returns the last state visible to the watch, with the resource version of the removal.
fn deleted(event: &Event) -> Option<Bytes> {
    if let Some(last) = &event.last {
        return Some(last.clone());
    }
    let mut value: Value = event.before.as_ref()?.value();
    value["metadata"]["resourceVersion"] = json!(event.revision.to_string());
    Some(Bytes::from(value.to_string()))
}

fn line(what: &str, object: &[u8]) -> Bytes {
    let mut line = BytesMut::with_capacity(object.len() + 40);
    line.put(&br#"{"type":""#[..]);
    line.put(what.as_bytes());
    line.put(&br#"","object":"#[..]);
    line.put(object);
    line.put(&b"}\n"[..]);
    line.freeze()
}
