//! A bundle as people read it.

use indicatif::HumanBytes;

use crate::{
    bundle::{Bundle, Content, Imported, Listed, Taken, kind_name},
    cli::printer,
};

/// What is in it.
pub(super) fn listing(bundle: &Bundle) -> String {
    let mut table = printer::table(["KIND", "NAME", "KERNEL", "SIZE"]);
    for Listed { content, kernel, size, artifact_type: _ } in &bundle.index().contents {
        let kernel = kernel.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        table.add_row([kind_name(content.kind), &name(content), &kernel, &HumanBytes(*size).to_string()]);
    }
    format!("{}\n{}", trim(&table), summary(bundle))
}

/// How many of what, and how large.
pub(super) fn summary(bundle: &Bundle) -> String {
    let index = bundle.index();
    let (carried, in_base) = index.bytes();
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for listed in &index.contents {
        let kind = kind_name(listed.content.kind);
        match kinds.last_mut() {
            Some((last, count)) if *last == kind => *count += 1,
            _ => kinds.push((kind, 1)),
        }
    }
    let kinds: Vec<String> = kinds.into_iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let mut lines = vec![
        format!("bundle   {}", bundle.id()),
        format!("file     {}, {}", bundle.path().display(), HumanBytes(bundle.length())),
        format!("made     by {} from {}", index.made_by, index.from),
        format!("holds    {}", kinds.join(", ")),
        format!("blobs    {}, {}, each once", index.carried().count(), HumanBytes(carried)),
    ];
    if let Some(base) = &index.base {
        lines.push(format!("adds to  bundle {}, made from {}", base.id, base.from));
        lines.push(format!("         which has {} more of its contents", HumanBytes(in_base)));
    }
    lines.join("\n")
}

/// What became of each.
pub(super) fn imported(imported: &Imported) -> String {
    let mut table = printer::table(["KIND", "NAME", "OUTCOME"]);
    for (content, taken) in &imported.contents {
        let outcome = match taken {
            Taken::Pushed => "pushed".to_owned(),
            Taken::Present => "there already".to_owned(),
            Taken::Moved { held } => format!("pushed; the tag held {held} before"),
            Taken::Conflict { holds } => format!("conflict: the tag holds {holds}"),
        };
        table.add_row([kind_name(content.kind), &name(content), &outcome]);
    }
    let Imported { blobs, sent, .. } = imported;
    format!("{}\nsent     {blobs} blobs, {}", trim(&table), HumanBytes(*sent))
}

fn name(content: &Content) -> String {
    let Content { kind: _, repository, tag, digest } = content;
    match tag {
        Some(tag) => format!("{repository}:{tag}"),
        None => format!("{repository}@{}", &digest.as_str()[..digest.as_str().len().min(19)]),
    }
}

fn trim(table: &comfy_table::Table) -> String {
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}
