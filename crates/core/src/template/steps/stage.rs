//! Finds the stage `modules` of a Dockerfile and validates the lines before it.

use super::{
    super::lexer::{self, Lexer},
    Base, Instruction, Refusal, StepsError, line_number, mistake, unsupported,
    variables::Variables,
};

/// Returns the stage's variables, the line of its `FROM`, and its instructions.
pub(super) fn stage<'a>(
    instructions: &'a [Instruction],
    base: &Base,
    escape: char,
) -> Result<(Variables, u32, &'a [Instruction]), StepsError> {
    let from_indexes: Vec<usize> =
        (0..instructions.len()).filter(|index| instructions[*index].is("from")).collect();
    let first = from_indexes.first().copied().unwrap_or(instructions.len());
    let line = |index: usize| line_number(instructions[index].first);
    let mut global = Variables::default();
    for (index, instruction) in instructions[..first].iter().enumerate() {
        let (keyword, arguments) = instruction.split();
        let outcome = if keyword.eq_ignore_ascii_case("arg") {
            global.arg(arguments, escape)
        } else {
            Err(mistake(format!("{keyword} precedes the first FROM")))
        };
        outcome.map_err(|refusal| refusal.at(line(index)))?;
    }
    let mut candidates = from_indexes
        .iter()
        .copied()
        .filter(|index| stage_name(&instructions[*index], escape).as_deref() == Some("modules"));
    let Some(from) = candidates.next() else {
        return Err(mistake("no stage has the name `modules`: `FROM {{toolchain}} AS modules`").at(1));
    };
    if let Some(second) = candidates.next() {
        return Err(mistake("a second stage `modules`").at(line(second)));
    }
    let stages: Vec<String> = from_indexes
        .iter()
        .take_while(|index| **index < from)
        .filter_map(|index| stage_name(&instructions[*index], escape))
        .collect();
    check_from(&instructions[from], base, &stages, &global, escape)
        .map_err(|refusal| refusal.at(line(from)))?;
    let end = from_indexes.iter().copied().find(|index| *index > from).unwrap_or(instructions.len());
    let variables = Variables::of_stage(&base.env, global);
    Ok((variables, line(from), &instructions[from + 1..end]))
}

/// Returns the options and the words of a `FROM`.
fn from_words(from: &Instruction, escape: char) -> (Vec<String>, Vec<&str>) {
    let (options, arguments) = lexer::options(from.split().1, escape);
    (options, arguments.split(lexer::BLANKS).filter(|word| !word.is_empty()).collect())
}

/// Returns the name that a `FROM` gives to its stage.
fn stage_name(from: &Instruction, escape: char) -> Option<String> {
    match from_words(from, escape).1[..] {
        [_, r#as, name] if r#as.eq_ignore_ascii_case("as") => Some(name.to_lowercase()),
        _ => None,
    }
}

/// Checks that the stage starts directly from the base.
fn check_from(
    from: &Instruction,
    base: &Base,
    stages: &[String],
    global: &Variables,
    escape: char,
) -> Result<(), Refusal> {
    let (options, words) = from_words(from, escape);
    if let Some(option) = options.first() {
        return Err(unsupported(format!(
            "FROM has the option {option}; the target determines the architecture of a build"
        )));
    }
    let value = |name: &str| global.get(name);
    let image = Lexer::expanding(escape, &value).text(words[0])?;
    if stages.contains(&image.to_lowercase()) {
        return Err(unsupported(format!(
            "the stage `modules` starts from the stage {image}; move that stage's instructions into it"
        )));
    }
    if image != base.name {
        return Err(unsupported(format!(
            "the stage `modules` starts from {image:?}, not from {{{{toolchain}}}}"
        )));
    }
    if base.has_triggers {
        return Err(unsupported("the toolchain's image has ONBUILD instructions"));
    }
    Ok(())
}
