//! Renders models as HTML. The template engine escapes all text, except its own output, which `frame` inserts.

use std::sync::LazyLock;

use farrier_core::{plan::StatusEntry, text::printable_lines};
use handlebars::{
    Context, Handlebars, Helper, HelperResult, Output, PathAndJson, RenderContext, html_escape,
};
use jiff::{SignedDuration, Timestamp};
use regex::Regex;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    action::ActionLinks,
    actions::Preview,
    details::NodesPage,
    facts::Facts,
    fleet::{Change, Fleet, subject},
    history::{Rewrite, changes},
    image::CellData,
    matrix::Filter,
    rollouts::RolloutsPage,
};

/// Script that updates an open page after each reconcile.
pub const SCRIPT: &str = include_str!("html/page.js");
pub const ICON: &str = include_str!("html/icon.svg");
/// The style sheet.
pub const STYLE: &str = include_str!("html/style.css");

/// Templates by name. `frame` surrounds the others.
const TEMPLATES: [(&str, &str); 8] = [
    ("frame", include_str!("html/frame.hbs")),
    ("fleet", include_str!("html/fleet.hbs")),
    ("cell", include_str!("html/cell.hbs")),
    ("node", include_str!("html/node.hbs")),
    ("nodes", include_str!("html/nodes.hbs")),
    ("rollouts", include_str!("html/rollouts.hbs")),
    ("confirm", include_str!("html/confirm.hbs")),
    ("missing", include_str!("html/missing.hbs")),
];

static ENGINE: LazyLock<Result<Handlebars<'static>, String>> = LazyLock::new(|| {
    let mut engine = Handlebars::new();
    engine.register_escape_fn(|text| html_escape(&printable_lines(text)));
    for (name, write) in [("words", words as fn(&Value, Timestamp) -> String), ("brief", brief)] {
        let helper = move |helper: &Helper<'_>,
                           _: &Handlebars<'_>,
                           context: &Context,
                           _: &mut RenderContext<'_, '_>,
                           out: &mut dyn Output|
              -> HelperResult {
            let now = context.data()["now"].as_str().and_then(|now| now.parse().ok()).unwrap_or_default();
            Ok(out.write(&write(helper.param(0).map_or(&Value::Null, PathAndJson::value), now))?)
        };
        engine.register_helper(name, Box::new(helper));
    }
    for (name, text) in TEMPLATES {
        engine.register_template_string(name, text).map_err(|error| error.to_string())?;
    }
    Ok(engine)
});

/// Error in a page's template.
#[derive(Debug, thiserror::Error)]
#[error("cannot write a page from its template: {0}")]
pub struct HtmlError(String);

impl HtmlError {
    /// The error of a page whose rendering panicked.
    pub fn panicked() -> Self {
        Self("a panic, see farrier's log".to_owned())
    }
}

/// Renders a whole page. `root` is the path to the directory of the style sheet: empty, or `../`.
fn html(
    template: &str,
    title: &str,
    root: &str,
    facts: &Facts,
    model: &impl Serialize,
) -> Result<String, HtmlError> {
    let engine = ENGINE.as_ref().map_err(|error| HtmlError(error.clone()))?;
    let render =
        |name, model: &Value| engine.render(name, model).map_err(|error| HtmlError(error.to_string()));
    let mut model = serde_json::to_value(model).map_err(|error| HtmlError(error.to_string()))?;
    let now = format!("{:.0}", facts.now);
    (model["root"], model["title"], model["now"]) = (root.into(), title.into(), now.clone().into());
    let body = render(template, &model)?;
    let as_of = facts.now.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
    // No script may update the confirmation page, because users must confirm exactly what they have read.
    let served = facts.served && template != "confirm";
    let frame = json!({
        "title": title, "root": root, "now": now, "as_of": as_of, "served": served, "page": template, "body": body,
        "live": served && model["live"] == true, "cluster": facts.cluster, "outdated": facts.outdated,
        "standby": facts.standby,
    });
    render("frame", &frame)
}

/// Abbreviates digests and times in a value. The `title` attribute of each has the full text.
fn brief(value: &Value, now: Timestamp) -> String {
    match value {
        Value::String(text) => abbreviate(text, now),
        Value::Null => String::new(),
        other => abbreviate(&other.to_string(), now),
    }
}

/// Abbreviates a digest to its first digits, and a time to the clock time or date.
fn abbreviate(text: &str, now: Timestamp) -> String {
    static LONG: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"\b(?:[0-9a-f]{64}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)\b").ok());
    let escaped = html_escape(&printable_lines(text));
    let Some(pattern) = LONG.as_ref() else { return escaped };
    let short = |captures: &regex::Captures<'_>| match captures[0].parse::<Timestamp>() {
        Ok(time) => {
            let day = |time: Timestamp| time.strftime("%F").to_string();
            let format = if day(time) == day(now) {
                "%H:%M UTC"
            } else if time.duration_since(now).abs() < SignedDuration::from_hours(300 * 24) {
                "%-d %b %H:%M UTC"
            } else {
                "%-d %b %Y"
            };
            format!("<time datetime=\"{0}\" title=\"{0}\">{1}</time>", &captures[0], time.strftime(format))
        }
        // The text looks like a time but is none.
        Err(_) if captures[0].contains('-') => captures[0].to_owned(),
        Err(_) => {
            let digits: String = captures[0].chars().take(12).collect();
            format!("<abbr title=\"{}\">{digits}…</abbr>", &captures[0])
        }
    };
    pattern.replace_all(&escaped, short).into_owned()
}

/// Formats text in which commands are between backticks.
fn words(value: &Value, now: Timestamp) -> String {
    let parts = value.as_str().unwrap_or_default().split('`').enumerate();
    let format_part = |(index, part): (usize, &str)| {
        let text = abbreviate(part, now);
        // Text and commands alternate.
        if index % 2 == 0 {
            text
        } else if part.starts_with("farrier ") || part.starts_with("kubectl ") {
            // Only the page's script can copy; without it, the button is hidden.
            format!("<code>{text}</code> <button class=\"copy\" type=\"button\">Copy</button>")
        } else {
            format!("<code>{text}</code>")
        }
    };
    parts.map(format_part).collect()
}

/// Renders the index page.
pub fn fleet_page(fleet: &Fleet<'_>, filter: Filter, observed: &[Change]) -> Result<String, HtmlError> {
    let title = if filter.state.is_empty() { "Fleet".to_owned() } else { format!("Fleet: {}", filter.state) };
    html("fleet", &title, "", fleet.facts, &fleet.page(filter, changes(fleet, observed)))
}

/// Renders the page of a cell.
pub fn cell_page(fleet: &Fleet<'_>, entry: &StatusEntry<'_>, data: CellData) -> Result<String, HtmlError> {
    html("cell", &subject(entry), "../", fleet.facts, &fleet.cell_page(entry, data))
}

/// Renders the page of a node, if there is a node of this name.
pub fn node_page(fleet: &Fleet<'_>, name: &str) -> Option<Result<String, HtmlError>> {
    let page = fleet.node_page(name)?;
    Some(html("node", name, "../", fleet.facts, &page))
}

/// Renders the page of the nodes whose names contain `name`.
pub fn nodes_page(fleet: &Fleet<'_>, name: String) -> Result<String, HtmlError> {
    html("nodes", "Nodes", "", fleet.facts, &NodesPage::of(fleet, name))
}

/// Renders the page of an address without content.
pub fn missing_page(facts: &Facts, path: &str) -> Result<String, HtmlError> {
    let root = "../".repeat(path.matches('/').count());
    html("missing", "No such page", &root, facts, &json!({}))
}

/// Renders the page of all rollouts.
pub fn rollouts_page(
    facts: &Facts,
    actions: &ActionLinks,
    rewrites: &[Rewrite],
) -> Result<String, HtmlError> {
    html("rollouts", "Rollouts", "", facts, &RolloutsPage::of(facts, actions, rewrites))
}

/// Renders the effects of an action, with the button that confirms it.
pub fn confirm_page(facts: &Facts, preview: &Preview) -> Result<String, HtmlError> {
    html("confirm", &preview.title, "", facts, preview)
}

#[cfg(test)]
#[path = "html_tests.rs"]
mod tests;
