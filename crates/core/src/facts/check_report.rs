//! The check report that is stored beside an image.

use serde::Serialize;
use serde_json::Value;

use kmod::{CheckReport, KernelRelease};
use oci::{Artifact, Digest, ImageError, to_json};

use super::{annotations, media_type};

/// Origin of a payload that was built for another kernel and reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReusedFrom {
    /// The kernel that the payload was built for.
    pub kernel: KernelRelease,
    /// The image that the payload was taken from.
    pub digest: Digest,
}

/// Content of the artifact's layer: `{"report": ..., "reusedFrom": {"kernel", "digest"}}`.
#[derive(Clone, Copy, Debug)]
pub struct CheckReportDocument<'a> {
    /// Verdicts and findings of the check.
    pub report: &'a CheckReport,
    /// Origin of a reused payload. The report then proves that the payload fits this kernel.
    pub reused_from: Option<&'a ReusedFrom>,
}

impl CheckReportDocument<'_> {
    /// Serializes the document. The boot's duration is omitted, so that the same findings give the same bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Document<'a> {
            report: Value,
            #[serde(skip_serializing_if = "Option::is_none")]
            reused_from: Option<&'a ReusedFrom>,
        }
        let mut report =
            serde_json::to_value(self.report).map_err(|source| ImageError::Json("check report", source))?;
        if let Some(boot) = report.get_mut("boot").and_then(Value::as_object_mut) {
            boot.remove("milliseconds");
        }
        to_json("check report", &Document { report, reused_from: self.reused_from })
    }

    /// Returns the check report as a referrer of the image whose manifest is `subject`.
    pub fn artifact(&self, subject: &[u8], summary: &str) -> Result<Artifact, ImageError> {
        let notes = [
            (annotations::KERNEL_RELEASE, self.report.kernel.as_str()),
            (annotations::CHECK_VERDICT, self.report.verdict.as_str()),
            (annotations::CHECK_SUMMARY, summary),
        ];
        Artifact::about(subject, media_type::CHECK_REPORT, self.to_bytes()?, &notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kmod::{BootOutcome, BootReport, ModuleBoot, Verdict};
    use oci::{ImageManifest, is_referrers_tag, keep_tag, referrers_tag, subject_of_tag};

    fn report(milliseconds: u64) -> CheckReport {
        CheckReport {
            kernel: "6.1.0-56-amd64".to_owned(),
            architecture: kmod::Architecture::Amd64,
            verdict: Verdict::Loads,
            findings: Vec::new(),
            modules: Vec::new(),
            load_order: vec!["hello".to_owned()],
            boot: Some(BootReport {
                kernel: "6.1.0-56-amd64".to_owned(),
                accelerator: "kvm".to_owned(),
                milliseconds,
                modules: vec![ModuleBoot {
                    path: "hello.ko".to_owned(),
                    name: "hello".to_owned(),
                    outcome: BootOutcome::Loaded,
                }],
            }),
        }
    }

    fn artifact(milliseconds: u64) -> Artifact {
        let reused = ReusedFrom { kernel: "6.1.0-55-amd64".parse().unwrap(), digest: Digest::of(b"image") };
        let report = report(milliseconds);
        let document = CheckReportDocument { report: &report, reused_from: Some(&reused) };
        document.artifact(b"subject", "1 module: loads").unwrap()
    }

    #[test]
    fn an_artifact_refers_to_its_image() {
        let artifact = artifact(1200);
        let text = String::from_utf8(artifact.manifest.clone()).unwrap();
        // Another module defines the form of the report, so its digests and sizes are masked here.
        let blob = regex::Regex::new(r#""digest":"sha256:[0-9a-f]{64}","size":\d+"#).unwrap();
        insta::assert_snapshot!(blob.replace_all(&text, "BLOB"), @r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.farrier.check-report.v1+json","config":{"mediaType":"application/vnd.oci.empty.v1+json",BLOB},"layers":[{"mediaType":"application/vnd.farrier.check-report.v1+json",BLOB}],"subject":{"mediaType":"application/vnd.oci.image.manifest.v1+json",BLOB},"annotations":{"farrier.dev/check-summary":"1 module: loads","farrier.dev/check-verdict":"loads","farrier.dev/kernel-release":"6.1.0-56-amd64","org.opencontainers.image.created":"1970-01-01T00:00:00Z"}}"#);
        let manifest = ImageManifest::parse(&artifact.manifest).unwrap();
        assert_eq!(manifest.subject.as_ref().unwrap().digest, Digest::of(b"subject"));
        assert_eq!(manifest.config.digest, Digest::of(crate::oci::EMPTY));
        assert_eq!(manifest.layers[0].digest, Digest::of(&artifact.content));
        assert_eq!(manifest.to_bytes().unwrap(), artifact.manifest);
        let listed = manifest.as_referrer(&artifact.manifest);
        assert_eq!(listed.artifact_type.as_deref(), Some(media_type::CHECK_REPORT));
        assert_eq!((listed.digest, listed.annotations), (artifact.digest, manifest.annotations));
    }

    #[test]
    fn the_same_findings_have_the_same_digest() {
        assert_eq!(artifact(1200), artifact(3400));
        let content: Value = serde_json::from_slice(&artifact(1).content).unwrap();
        assert_eq!(content["reusedFrom"]["kernel"], "6.1.0-55-amd64");
        assert_eq!(content["report"]["boot"]["modules"][0]["outcome"], "loaded");
        assert_eq!(content["report"]["verdict"], "loads");
    }

    #[test]
    fn tags_that_list_referrers() {
        let tag = referrers_tag(&Digest::of(b"x")).unwrap();
        assert!(is_referrers_tag(&tag), "{tag}");
        let keep = keep_tag(&Digest::of(b"x"), &Digest::of(b"y")).unwrap();
        assert!(is_referrers_tag(&keep), "{keep}");
        assert_eq!(subject_of_tag(&keep), Some(Digest::of(b"x")));
        for other in ["sha256-1".to_owned(), format!("{tag}.sig"), format!("{tag}-1"), format!("{keep}0")] {
            assert!(!is_referrers_tag(&other.parse().unwrap()), "{other}");
        }
        assert_eq!(subject_of_tag(&tag), Some(Digest::of(b"x")));
        assert_eq!(subject_of_tag(&format!("{tag}.sig").parse().unwrap()), Some(Digest::of(b"x")));
        for other in ["sha256-1", "1.0", &tag.as_str().to_uppercase()] {
            assert_eq!(subject_of_tag(&other.parse().unwrap()), None, "{other}");
        }
    }
}
