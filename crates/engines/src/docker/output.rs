//! Parses the output of Docker's classic builder.

use bollard::{errors::Error, models::BuildInfo};
use oci::error_chain;

use super::super::{BuildLog, EngineError, EngineKind, Result, error::is_disk_full, lines::LineSplitter};

/// Ends of the messages of a builder whose daemon stops.
const CANCELLATIONS: [&str; 2] = ["build cancelled", "context canceled"];

/// Reads the response to a build: forwards log lines, and records the current step and the resulting image.
pub(super) struct Output<'a> {
    log: &'a dyn BuildLog,
    splitter: LineSplitter,
    step: Option<String>,
    /// ID from the builder's separate message, which no step can send.
    image: Option<String>,
    /// ID from the last line `Successfully built`: a step can print such a line too, but only before the builder does.
    named: Option<String>,
}

impl<'a> Output<'a> {
    pub(super) fn new(log: &'a dyn BuildLog) -> Self {
        Self { log, splitter: LineSplitter::default(), step: None, image: None, named: None }
    }

    /// Processes one message.
    pub(super) fn process(&mut self, info: BuildInfo) {
        if let Some(id) = info.aux.and_then(|aux| aux.id) {
            self.image = Some(id);
        }
        let Self { log, splitter, step, image: _, named } = self;
        let mut line = |line: &str| {
            if let Some(instruction) = instruction(line) {
                *step = Some(instruction.to_owned());
            } else if let Some(id) = line.strip_prefix("Successfully built ") {
                // Podman does not always send the ID as a separate message.
                *named = Some(id.trim().to_owned());
            }
            log.line(line);
        };
        if let Some(text) = info.stream {
            splitter.feed(text.as_bytes(), &mut line);
        }
        // Pull progress would add thousands of lines.
        if let (Some(status), None) = (info.status, info.progress_detail) {
            line(&status);
        }
    }

    /// Returns the image ID at the end of the response.
    pub(super) fn image(mut self) -> Result<String> {
        self.flush();
        self.image.or(self.named).ok_or_else(|| {
            EngineError::engine(EngineKind::Docker, "build", "the daemon disconnected before the build ended")
        })
    }

    /// Classifies a failed build as a failure of the step or of the daemon.
    pub(super) fn failure(mut self, error: Error) -> EngineError {
        self.flush();
        match error {
            Error::DockerStreamError { error } => {
                self.log.line(&error);
                self.stopped(error)
            }
            // 400 means that the Dockerfile has a syntax error or lacks the stage. In some of these cases the builder responds
            // with 500. Other codes come from a plugin or proxy that limits access, or mean that an image is missing.
            Error::DockerResponseServerError { status_code, message }
                if status_code == 400
                    || status_code == 500
                        && (message.contains("ockerfile") || message.contains("build stage")) =>
            {
                EngineError::from_build(EngineKind::Docker, None, message)
            }
            error => {
                let message = error_chain(&error);
                if is_disk_full(&message) {
                    EngineError::from_build(EngineKind::Docker, None, message)
                } else {
                    EngineError::engine(EngineKind::Docker, "build", error)
                }
            }
        }
    }

    /// Classifies the message with which the builder stopped.
    fn stopped(&self, error: String) -> EngineError {
        let (step, code) = (self.step.as_deref(), exit_code(&error));
        if let (Some(step), Some(code)) = (step.filter(|step| step.starts_with("RUN ")), code) {
            // Do not search this message for a full disk: the message quotes the step, whose text may mention one.
            return EngineError::Step(format!("{step}: exit code {code}"));
        }
        let end = error.trim_end().to_lowercase();
        if CANCELLATIONS.iter().any(|words| end.ends_with(words)) {
            return EngineError::engine(EngineKind::Docker, "build", error);
        }
        // A step can print a line like the builder's for `FROM`. Its own failure has an exit code.
        match step.and_then(base) {
            Some(base) if code.is_none() => EngineError::from_pull(EngineKind::Docker, base, error),
            _ => EngineError::from_build(EngineKind::Docker, step, error),
        }
    }

    fn flush(&mut self) {
        self.splitter.finish(|line| self.log.line(line));
    }
}

/// Extracts the instruction: `Step 3/7 : RUN make` -> `RUN make`. Podman writes `STEP 3/7: RUN make`.
fn instruction(line: &str) -> Option<&str> {
    let header = line.strip_prefix("Step ").or_else(|| line.strip_prefix("STEP "))?;
    let (count, instruction) = header.split_once(':')?;
    let (step, total) = count.trim().split_once('/')?;
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    (is_number(step) && is_number(total)).then(|| instruction.trim())
}

/// Extracts the base image from the instruction `FROM`.
fn base(instruction: &str) -> Option<&str> {
    instruction.strip_prefix("FROM ")?.split(' ').find(|word| !word.starts_with("--"))
}

/// Extracts the code from `returned a non-zero code: 2` (Docker) or `exit status 2` (Podman). The code explains the failure of
/// a `RUN`, whose output is in the log. For other failed steps, such as `COPY`, the engine's message is the only explanation.
fn exit_code(message: &str) -> Option<u32> {
    ["returned a non-zero code: ", "exit status "].iter().find_map(|words| {
        let (_, code) = message.split_once(words)?;
        code.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bollard::models::ImageId;

    use super::*;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl BuildLog for Lines {
        fn line(&self, line: &str) {
            self.0.lock().unwrap().push(line.to_owned());
        }
    }

    fn said(text: &str) -> BuildInfo {
        BuildInfo { stream: Some(text.to_owned()), ..BuildInfo::default() }
    }

    fn run(log: &Lines, words: &[&str]) -> Output<'static> {
        let log: &'static Lines = Box::leak(Box::new(Lines(Mutex::new(log.0.lock().unwrap().clone()))));
        let mut output = Output::new(log);
        for text in words {
            output.process(said(text));
        }
        output
    }

    #[test]
    fn a_failed_step_is_named_with_its_code() {
        let output =
            run(&Lines::default(), &["Step 2/3 : RUN ma", "ke\n", " ---> Running in 0123456789ab\n"]);
        let error = output.failure(Error::DockerStreamError {
            error: "The command '/bin/sh -c make' returned a non-zero code: 2".to_owned(),
        });
        assert_eq!(error.to_string(), "build step failed: RUN make: exit code 2");
    }

    #[test]
    fn a_step_that_speaks_of_a_full_disk_has_failed() {
        let step = "RUN echo ': no space left on device'; exit 1";
        let lines = Lines::default();
        let error = run(&lines, &[&format!("Step 2/3 : {step}\n"), "x: no space left on device\n"]).failure(
            Error::DockerStreamError {
                error: "The command '/bin/sh -c echo ': no space left on device'; exit 1' returned a non-zero code: 1"
                    .to_owned(),
            },
        );
        assert!(matches!(&error, EngineError::Step(_)), "{error:?}");
    }

    #[test]
    fn a_copy_that_finds_no_room() {
        let error =
            run(&Lines::default(), &["Step 2/3 : COPY kernel/ /\n"]).failure(Error::DockerStreamError {
                error: "Error processing tar file(exit status 1): write /x: no space left on device"
                    .to_owned(),
            });
        assert!(matches!(error, EngineError::DiskFull { .. }), "{error}");
        let error =
            run(&Lines::default(), &["Step 2/3 : COPY kernel/ /\n"]).failure(Error::DockerStreamError {
                error: "Error processing tar file(exit status 1): unexpected EOF".to_owned(),
            });
        let words =
            "build step failed: COPY kernel/ /: Error processing tar file(exit status 1): unexpected EOF";
        assert_eq!(error.to_string(), words);
    }

    #[test]
    fn a_base_that_cannot_be_pulled_and_a_daemon_that_stops_are_no_compile_errors() {
        let stop = |step: &str, message: &str| {
            run(&Lines::default(), &[step]).failure(Error::DockerStreamError { error: message.to_owned() })
        };
        let from = "Step 1/5 : FROM localhost/farrier/base:1 AS modules\n";
        let refused = "Get \"http://localhost/v2/\": dial tcp 127.0.0.1:80: connect: connection refused";
        let pull = stop(from, refused);
        assert!(pull.is_transient());
        assert_eq!(pull.to_string(), "docker failed to pull localhost/farrier/base:1");
        assert!(matches!(stop(from, "manifest unknown: manifest unknown"), EngineError::Pull { .. }));
        for message in ["context canceled", "Build cancelled\n"] {
            assert!(stop("Step 4/5 : RUN make\n", message).is_transient(), "{message}");
        }
        // A failed step that printed a line like the builder's.
        let failed = stop(from, "The command '/bin/sh -c make' returned a non-zero code: 2");
        assert!(matches!(failed, EngineError::Step(_)), "{failed}");
    }

    #[test]
    fn a_daemon_that_hangs_up_is_transient() {
        let error = run(&Lines::default(), &["Step 1/3 : FROM base\n"]).image().unwrap_err();
        assert!(error.is_transient());
    }

    #[test]
    fn a_full_disk_and_a_bad_dockerfile_are_permanent() {
        let full = run(&Lines::default(), &[])
            .failure(Error::DockerStreamError { error: "mkdir: no space left on device".into() });
        assert!(matches!(full, EngineError::DiskFull { .. }));
        let bad = run(&Lines::default(), &[]).failure(Error::DockerResponseServerError {
            status_code: 400,
            message: "dockerfile parse error line 1: unknown instruction: FRMO".into(),
        });
        assert!(matches!(bad, EngineError::Step(_)));
        for status_code in [403, 404, 429, 503] {
            let message = "no".into();
            let down = run(&Lines::default(), &[])
                .failure(Error::DockerResponseServerError { status_code, message });
            assert!(down.is_transient(), "{status_code}");
        }
    }

    #[test]
    fn the_image_comes_from_aux_or_else_from_the_text() {
        let mut output = run(&Lines::default(), &["Successfully built 0123456789ab\n"]);
        assert_eq!(
            run(&Lines::default(), &["Successfully built 0123456789ab\n"]).image().unwrap(),
            "0123456789ab"
        );
        output.process(BuildInfo {
            aux: Some(ImageId { id: Some("sha256:00".into()) }),
            ..BuildInfo::default()
        });
        assert_eq!(output.image().unwrap(), "sha256:00");
    }

    #[test]
    fn a_step_cannot_name_the_image() {
        let lines =
            ["Successfully built 0badf00d0bad\n", "--> 0123456789ab\n", "Successfully built 0123456789ab\n"];
        assert_eq!(run(&Lines::default(), &lines).image().unwrap(), "0123456789ab");
    }

    #[test]
    fn steps_and_codes() {
        assert_eq!(
            instruction("Step 10/12 : COPY --from=modules /out /"),
            Some("COPY --from=modules /out /")
        );
        assert_eq!(instruction("STEP 1/2: FROM scratch"), Some("FROM scratch"));
        assert_eq!(instruction("Step aside: x"), None);
        assert_eq!(exit_code("building at STEP \"RUN x\": while running runtime: exit status 17"), Some(17));
        assert_eq!(exit_code("COPY failed"), None);
    }
}
