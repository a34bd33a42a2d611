//! Drafts a definition from a `dkms.conf`. The file is a bash script, and farrier does not run it here. Plain
//! assignments are read; everything else is left to the template, which runs the script in the build.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::LazyLock,
};

use farrier_core::kernel::KernelRange;
use regex::{Captures, Regex};

use super::{Context, Drafted, fields, name_for, source};

/// Matches an assignment: directive, index, value.
static ASSIGNMENT: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"^\s*(?:export\s+)?([A-Za-z_]{1,80})(?:\[(\d{1,3})\])?=(.*)$").ok());
/// Matches `$NAME` and `${NAME}`. Other expansions keep their `$`.
static VARIABLE: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\$(?:\{([A-Za-z0-9_]+)\}|([A-Za-z0-9_]+))").ok());

/// Values of directives by name and index; `None` where only bash could evaluate the value.
type Values = BTreeMap<(String, usize), Option<String>>;

/// Whether the text is a `dkms.conf`.
pub fn is_conf(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("PACKAGE_NAME="))
}

/// Drafts the definition of a `dkms.conf` in `directory`, which also holds the driver's sources. Without `name`, the image is
/// named after the package.
pub fn draft(drafted: &mut Drafted, name: Option<&str>, conf: &str, directory: &Path, context: &Context) {
    let values = values(conf);
    let value = |name: &str| values.get(&(name.to_owned(), 0)).cloned().flatten();
    let package = value("PACKAGE_NAME");
    let name = name_for(name.or(package.as_deref()).unwrap_or_default());
    let origin = format!("dkms.conf {name}");
    let mut draft = context.draft(&origin, name);
    draft.template = "dkms";
    draft.from = source(&directory.display().to_string()).ok();
    draft.version = value("PACKAGE_VERSION").unwrap_or(draft.version);
    for ((_, index), built) in values.iter().filter(|((name, _), _)| name == "BUILT_MODULE_NAME") {
        // The check uses the name inside the module, and modprobe uses the name of the file.
        let file = values.get(&("DEST_MODULE_NAME".to_owned(), *index)).unwrap_or(built);
        draft.modules.extend(built.clone());
        draft.files.extend(file.clone());
    }
    if draft.modules.is_empty() {
        // The default of dkms: the module is named after the package.
        draft.modules.extend(package);
    }
    // dkms orders 6.1.1 after 6.1, so a maximum of 6.1 excludes all releases of 6.1.
    let bounds = [(">=", "BUILD_EXCLUSIVE_KERNEL_MIN"), ("<", "BUILD_EXCLUSIVE_KERNEL_MAX")];
    let bounds = bounds.iter().filter_map(|(sign, name)| Some(format!("{sign}{}", value(name)?)));
    let bounds = bounds.collect::<Vec<_>>().join(", ");
    let is_range = bounds.parse::<KernelRange>().is_ok();
    draft.kernels = Some(bounds).filter(|_| is_range);
    let names: BTreeSet<String> = values.keys().map(|(name, _)| name.clone()).collect();
    let mut remarks = fields::remarks(&origin, "", names, include_str!("forms/dkms.txt"));
    for remark in remarks.iter_mut().filter(|remark| remark.says.is_empty()) {
        let needs_bash = values.iter().any(|((name, _), value)| *name == remark.field && value.is_none());
        if needs_bash || remark.becomes == Some("kernels") && !is_range {
            remark.becomes = None;
            remark.says = "it cannot be converted automatically: review the definition".into();
        }
    }
    drafted.remarks.extend(remarks);
    drafted.add(draft, context);
}

fn values(conf: &str) -> Values {
    let mut values = Values::new();
    for line in conf.lines() {
        let captures = ASSIGNMENT.as_ref().and_then(|pattern| pattern.captures(line));
        let Some(captures) = captures else { continue };
        let index = captures.get(2).map_or(Ok(0), |index| index.as_str().parse()).unwrap_or_default();
        let value = word(captures[3].trim(), &values);
        values.insert((captures[1].to_owned(), index), value);
    }
    values
}

/// Evaluates a bash word with the variables assigned so far. Returns `None` if only bash could evaluate the
/// word.
fn word(text: &str, values: &Values) -> Option<String> {
    let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''));
    let text = match quote {
        Some(quote) => text[1..].split_once(quote)?.0,
        None => text.split_whitespace().next().unwrap_or_default(),
    };
    if quote == Some('\'') {
        return Some(text.to_owned());
    }
    let replaced = VARIABLE.as_ref()?.replace_all(text, |captures: &Captures<'_>| {
        let name = captures.get(1).or_else(|| captures.get(2)).map_or("", |name| name.as_str());
        let value = values.get(&(name.to_owned(), 0)).cloned().flatten();
        // A remaining `$` marks an unknown variable.
        value.unwrap_or_else(|| "$".to_owned())
    });
    (!replaced.contains(['$', '`', '\\'])).then(|| replaced.into_owned())
}
