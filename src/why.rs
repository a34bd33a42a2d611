//! `farrier why`: explains the chain of reasons from labels to image fields, in sentences.

use clap::Args;
use farrier_builder::parts::TargetError;
use farrier_controller::{Planned, observe_and_plan};
use farrier_core::{
    image::{Definitions, DriverImage, ImageName},
    kernel::KernelRelease,
    plan::{Explain, Explanation, ExplanationStep},
};

use super::{
    CliError, Exit, Result, args::KernelArg, output, plan::PlanArgs, session::Session, settings::parse,
};

#[derive(Debug, Args)]
pub struct WhyArgs {
    /// node/NAME, or name of a driver image
    pub subject: String,
    #[command(flatten)]
    pub kernel: KernelArg,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// Subject of the question.
enum Subject<'a> {
    Node(&'a str),
    Image(&'a DriverImage, KernelRelease),
}

/// Prints the explanations and changes nothing.
pub async fn why(session: &Session, args: WhyArgs) -> Result<Exit> {
    let WhyArgs { subject, kernel, plan } = args;
    let (parts, cluster) = session.of_cluster(&plan).await?;
    let subject = Subject::of(&subject, kernel.get(), &parts.definitions)?;
    let planned = observe_and_plan(&parts, cluster.as_ref()).await?;
    let Planned { plan, snapshot, unreachable, .. } = &planned;
    let explain = Explain { snapshot, definitions: &parts.definitions, plan };
    let explanations = match subject {
        Subject::Node(name) => {
            #[cfg_attr(not(feature = "startup-taint"), expect(unused_mut))]
            let mut node = explain.node(name).ok_or_else(|| {
                let first = snapshot.nodes.iter().map(|node| node.name.as_str()).min();
                let hint = first.map_or("there are no nodes".to_owned(), |first| {
                    format!("its nodes: {}, such as {}", snapshot.nodes.len(), output::printable(first))
                });
                CliError::hinted(format!("{}: no node is named {name:?}", cluster.describe()), hint)
            })?;
            #[cfg(feature = "startup-taint")]
            node.chain.extend(farrier_startup_taint::explain(&parts.definitions, &planned, name));
            vec![node]
        }
        Subject::Image(image, release) => explain.image(image, &release),
    };
    session.show(&explanations, |explanations| text(explanations))?;
    Ok(if *unreachable { Exit::Unreachable } else { Exit::Done })
}

impl<'a> Subject<'a> {
    fn of(subject: &'a str, kernel: Option<&str>, definitions: &'a Definitions) -> Result<Self> {
        match (subject.strip_prefix("node/"), kernel) {
            (Some(name), None) => Ok(Self::Node(name)),
            (Some(_), Some(_)) => {
                Err(CliError::usage("a node takes no kernel: pass node/NAME alone".to_owned()))
            }
            (None, None) => Err(CliError::hinted(
                format!("{subject:?} is not node/NAME, and an image requires a kernel"),
                "run farrier why node/NAME, or farrier why IMAGE --kernel RELEASE",
            )),
            (None, Some(kernel)) => {
                let name: ImageName = parse("image", subject)?;
                let image = definitions.images.get(&name);
                let image = image.ok_or_else(|| TargetError::no_image(&name, definitions.images.keys()))?;
                Ok(Self::Image(image, parse("--kernel", kernel)?))
            }
        }
    }
}

/// Formats each chain as a table below its subject.
fn text(explanations: &[Explanation]) -> String {
    let chain = |explanation: &Explanation| {
        let rows = explanation.chain.iter().map(|ExplanationStep { about, says, hint }| {
            let hint = (!hint.is_empty()).then(|| format!("-> {}", output::printable(hint)));
            let lines = says.lines().map(output::printable).chain(hint);
            [output::printable(about), lines.collect::<Vec<_>>().join("\n")]
        });
        format!("{}\n\n{}", output::printable(&explanation.subject), output::table(["ABOUT", "WHY"], rows))
    };
    explanations.iter().map(chain).collect::<Vec<_>>().join("\n")
}
