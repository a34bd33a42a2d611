use std::{fs, path::Path};

use runner::plan::{Action, Run, Source};

use super::*;

fn base() -> Base {
    Base { name: "base".to_owned(), ..Base::default() }
}

fn stage(body: &str) -> Result<Recipe, StepsError> {
    read(&format!("FROM base AS modules\n{body}"), &base())
}

/// Formats the steps for display, one line for each step.
fn shown(recipe: Result<Recipe, StepsError>) -> String {
    let recipe = match recipe {
        Ok(recipe) => recipe,
        Err(error) => return format!("error: {error}"),
    };
    let steps = recipe.steps.iter().map(|step| {
        let action = match &step.action {
            Action::Directory(path) => format!("directory {path:?}"),
            Action::Copy { sources, dest, mode } => {
                let mode = mode.map(|mode| format!(" mode {mode:o}")).unwrap_or_default();
                let sources = sources.iter().map(|source| match source {
                    Source::Context(pattern) => format!(" {pattern:?}"),
                    Source::Document { name, content } => format!(" {name:?}={content:?}"),
                });
                format!("copy{} to {dest:?}{mode}", sources.collect::<String>())
            }
            Action::Run(Run { argv, env, workdir, script }) => {
                let usual =
                    ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"];
                let env = env.iter().map(|(name, value)| format!("{name}={value}"));
                let env: Vec<String> = env.filter(|variable| !usual.contains(&variable.as_str())).collect();
                let script = script.as_ref().map(|script| format!(" script {script:?}")).unwrap_or_default();
                format!("run {argv:?}{script} in {workdir} with {env:?}")
            }
        };
        format!("{}: {action}", step.line)
    });
    let notes = recipe.notes.iter().map(|note| format!("note: {note}"));
    steps.chain(notes).collect::<Vec<_>>().join("\n")
}

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

#[test]
fn the_corpus() {
    let mut all = String::new();
    let mut names: Vec<_> = fs::read_dir(repository("tests/fixtures/dockerfiles"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    assert!(names.len() > 30);
    for path in names {
        let name = path.file_name().unwrap().to_string_lossy();
        let recipe = read(&fs::read_to_string(path.join("Dockerfile")).unwrap(), &base());
        assert_eq!(recipe.is_err(), name.ends_with(".refused"), "{name}: {recipe:?}");
        all.extend([format!("== {name}\n"), shown(recipe), "\n\n".to_owned()]);
    }
    insta::assert_snapshot!("corpus", all);
}

#[test]
fn shipped_templates_have_steps_and_no_notes() {
    let target = crate::kernel::KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: "6.1.0-47-amd64".parse().unwrap(),
        arch: crate::kernel::Architecture::Amd64,
    };
    let mut context = crate::template::TemplateContext::new("localhost/base:1", ("driver", "1.0"), &target);
    context.sources = vec!["driver".to_owned()];
    context.needs = vec!["mofed".to_owned()];
    context.patches = vec!["a b.patch".to_owned(), "b.patch".to_owned()];
    for name in ["directory", "makeArgs", "parts", "configureArgs", "target", "module", "files"] {
        context.vars.insert(name.to_owned(), ".".to_owned());
    }
    let base = Base { name: "localhost/base:1".to_owned(), ..Base::default() };
    let mut count = 0;
    for entry in fs::read_dir(repository("templates")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.display().to_string();
        let text = fs::read_to_string(&path).unwrap();
        let rendered = crate::template::render(&name, &text, &context).unwrap();
        let recipe = read(&rendered, &base).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(recipe.notes, [], "{name}");
        assert!(matches!(&recipe.steps[..], [Step { action: Action::Copy { .. }, .. }, ..]), "{name}");
        let Some(Step { action: Action::Run(run), .. }) = recipe.steps.last() else { panic!("{name}") };
        assert!(run.argv[2].contains("depmod -b /out"), "{name}");
        count += 1;
    }
    assert_eq!(count, 8);
}

#[test]
fn what_is_not_done_in_place_says_so() {
    for (body, line, reason) in [
        ("ADD --chmod=1 a /b", 2, "ADD unpacks"),
        ("RUN true\n\nCOPY --from=0 /a /b", 4, "from another stage"),
        ("COPY --exclude=a . /b", 2, "the option --exclude"),
        ("COPY --parents a /b", 2, "the option --parents"),
        ("COPY --chmod=u+x a /b", 2, "not an octal number"),
        ("COPY a${X%b} /b", 2, "replaces parts"),
        ("RUN --mount=type=cache,target=/a x", 2, "--mount=type=cache"),
        ("RUN --mount=type=bind,source=/,target=/a x", 2, "--mount=type=bind"),
        ("RUN --mount=type=ssh x", 2, "--mount=type=ssh"),
        ("RUN --network=default x", 2, "no network"),
        ("RUN --security=insecure x", 2, "--security=insecure"),
        ("onbuild RUN x", 2, "ONBUILD"),
        ("ARG BUILDPLATFORM", 2, "BUILDPLATFORM"),
        ("ARG A=1 B=$A", 2, "same line"),
        ("ENV A=1\nARG A=2", 3, "another name"),
        ("RUN x \\\\\ny", 2, "do not agree"),
        ("RUN <<A\nx\nA\nRUN y\nCOPY --from=a b c", 6, "from another stage"),
    ] {
        match stage(body) {
            Err(error @ StepsError::Unsupported { .. }) => {
                let text = error.to_string();
                assert!(text.starts_with(&format!("line {line}: ")) && text.contains(reason), "{text}");
                assert!(text.ends_with("; use engine docker"), "{text}");
            }
            other => panic!("{body}: {other:?}"),
        }
    }
    let triggers = Base { has_triggers: true, ..base() };
    for (dockerfile, base, reason) in [
        ("FROM --platform=linux/arm64 base AS modules", base(), "--platform"),
        ("FROM other AS modules", base(), "\"other\""),
        ("FROM base AS a\nFROM a AS modules", base(), "the stage a"),
        ("FROM base AS modules", triggers, "ONBUILD"),
        ("# syntax=example.com/frontend\nFROM base AS modules", base(), "example.com/frontend"),
        ("# check=skip=all\n# escape=`\nFROM base AS modules\nRUN x `\ny", base(), "do not agree"),
    ] {
        let error = read(dockerfile, &base).unwrap_err();
        assert!(
            matches!(error, StepsError::Unsupported { .. }) && error.to_string().contains(reason),
            "{error}"
        );
    }
}

#[test]
fn a_mistake_is_one_for_every_engine() {
    for (body, line, reason) in [
        ("COPY a", 2, "a source and a destination"),
        ("COPY", 2, "a source and a destination"),
        ("COPY a b /c", 2, "must be a directory"),
        ("COPY [\"a\", 1]", 2, "only strings"),
        ("COPY $NONE /a", 2, "a source is empty"),
        ("COPY a $NONE", 2, "destination is empty"),
        ("COPY ../a /b", 2, "outside"),
        ("COPY a <<B\nB", 2, "cannot be the destination"),
        ("COPY << A /b\nA", 2, "one word"),
        ("COPY [\"<<A\", \"/b\"]", 2, "is missing below"),
        ("COPY <<a/b /c\na/b", 2, "not a file name"),
        ("COPY --chmod=8 a /b", 2, "up to 7777"),
        ("COPY --chmod=77777 a /b", 2, "up to 7777"),
        ("COPY --link --link a /b", 2, "twice"),
        ("COPY --chown a /b", 2, "--chown needs a value"),
        ("COPY --link=x a /b", 2, "true or false, not \"x\""),
        ("RUN", 2, "no command"),
        ("RUN []", 2, "no command"),
        ("RUN [1]", 2, "only strings"),
        ("RUN <<A\nx", 2, "does not end"),
        ("ENV", 2, "no name"),
        ("ENV A", 2, "no value"),
        ("ENV A=1 B", 2, "B has no ="),
        ("ENV =1", 2, "not a variable name"),
        ("ENV A=\"1", 2, "is not closed"),
        ("ARG", 2, "no name"),
        ("ARG A-B", 2, "not a variable name"),
        ("WORKDIR $NONE", 2, "no directory"),
        ("WORKDIR --x /a", 2, "no option --x"),
        ("SHELL /bin/sh", 2, "a list"),
        ("SHELL []", 2, "a list"),
        ("COPI a /b", 2, "unknown instruction COPI"),
        ("RUN a\0b", 2, "NUL"),
    ] {
        match stage(body) {
            Err(error @ StepsError::Mistake { .. }) => {
                let text = error.to_string();
                assert!(
                    text.starts_with(&format!("line {line}: ")) && text.contains(reason),
                    "{body}: {text}"
                );
            }
            other => panic!("{body}: {other:?}"),
        }
    }
    for (dockerfile, reason) in [
        ("", "no stage has the name"),
        ("FROM base", "no stage has the name"),
        ("RUN x\nFROM base AS modules", "precedes the first FROM"),
        ("FROM base AS modules\nFROM base AS modules", "a second stage"),
        ("# escape=x\nFROM base AS modules", "escape character"),
        ("# escape=`\n# escape=`\nFROM base AS modules", "is repeated"),
    ] {
        let error = read(dockerfile, &base()).unwrap_err();
        assert!(matches!(error, StepsError::Mistake { .. }) && error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn what_is_ignored_is_noted_once() {
    let recipe = stage("USER a\nCOPY --chown=a a /b\nCOPY --chown=b a /b\nUSER b\nVOLUME /x").unwrap();
    let notes: Vec<(u32, &str)> =
        recipe.notes.iter().map(|note| (note.line, note.text.split(' ').next().unwrap())).collect();
    assert_eq!(notes, [(2, "USER"), (3, "--chown"), (6, "VOLUME")]);
    let user = Base { user: "65532".to_owned(), ..base() };
    assert_eq!(read("\nFROM base AS modules", &user).unwrap().notes[0].line, 2);
}

#[test]
fn a_stage_starts_with_what_its_base_says() {
    let config = serde_json::json!({"architecture": "amd64", "config": {
        "Env": ["PATH=/own", "A=b=c", "noise"], "WorkingDir": "/work/", "User": "me", "Shell": ["/bin/bash", "-c"],
        "OnBuild": ["RUN x"],
    }});
    let read_base = Base::of("base", config.as_object().unwrap());
    let env = [("PATH", "/own"), ("A", "b=c")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(
        read_base,
        Base {
            name: "base".to_owned(),
            env: env.to_vec(),
            workdir: "/work/".to_owned(),
            user: "me".to_owned(),
            shell: vec!["/bin/bash".to_owned(), "-c".to_owned()],
            has_triggers: true,
        }
    );
    let base = Base { has_triggers: false, ..read_base };
    let recipe = read("FROM base AS modules\nWORKDIR $A\nRUN x", &base);
    insta::assert_snapshot!(shown(recipe), @r#"
    2: directory "/work/b=c"
    3: run ["/bin/bash", "-c", "x"] in /work/b=c with ["PATH=/own", "A=b=c"]
    note: line 1: the base's user is ignored: all steps run as root of the build
    "#);
    assert_eq!(Base::of("base", &Map::new()), super::tests::base());
}

proptest::proptest! {
    #[test]
    fn no_dockerfile_panics(
        text in "((FROM base AS modules|COPY|RUN|ARG|ENV|WORKDIR|SHELL|ONBUILD|--chmod=7|<<-?[AB'\"]|\n[AB]|\n#|\\$\\{?[AB]:?[-+?%/}]?|\\\\\n|`|\\[\"|,|\\.\\./|=)[ \n]?|[a-z'\"é]{0,3}){0,30}"
    ) {
        let _ = read(&text, &base());
        let _ = read(&format!("# escape=`\nFROM base AS modules\n{text}"), &base());
    }
}
