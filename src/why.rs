//! `farrier why`: explains the chain of reasons from labels to image fields, in sentences.

use clap::Args;
use farrier_builder::services::BuildError;
use farrier_controller::{Planned, observe_and_plan};
use farrier_core::{
    image::{Definitions, DriverImage, ImageName},
    plan::{Explain, Explanation, ExplanationStep},
};

use super::{
    CliError, Exit, Result, args::KernelArg, output, plan::PlanArgs, session::Session, settings::parse,
};

#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Name of a driver image, or node/NAME; the name of a node suffices if no image has it
    pub subject: String,
    #[command(flatten)]
    pub kernel: KernelArg,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// Subject of the question.
enum Subject<'a> {
    Node(&'a str),
    Image(&'a DriverImage),
}

/// Prints the explanations and changes nothing.
pub async fn why(session: &Session, args: WhyArgs) -> Result<Exit> {
    let WhyArgs { subject, kernel, plan } = args;
    let (services, cluster) = session.services_and_cluster(&plan).await?;
    let target = Subject::of(&subject, kernel.get().is_some(), &services.definitions)?;
    let planned = observe_and_plan(&services, cluster.as_ref()).await?;
    let Planned { plan, snapshot, unreachable, .. } = &planned;
    let explain = Explain { snapshot, definitions: &services.definitions, plan };
    let explanations = match target {
        Subject::Node(name) => {
            #[cfg_attr(not(feature = "startup-taint"), expect(unused_mut))]
            let mut node = explain.node(name).ok_or_else(|| {
                let first = snapshot.nodes.iter().map(|node| node.name.as_str()).min();
                let nodes = first.map_or("there are no nodes".to_owned(), |first| {
                    format!("its nodes: {}, such as {}", snapshot.nodes.len(), output::printable(first))
                });
                let (cluster, images) = (cluster.describe(), &services.definitions.images);
                if name != subject {
                    return CliError::hinted(format!("{cluster}: no node is named {name:?}"), nodes);
                }
                let images = images.keys().map(ImageName::as_str).collect::<Vec<_>>().join(", ");
                let message = format!("{cluster}: {name:?} is neither a driver image nor a node");
                CliError::hinted(message, format!("driver images: {images}; {nodes}"))
            })?;
            #[cfg(feature = "startup-taint")]
            node.chain.extend(farrier_startup_taint::explain(&services.definitions, &planned, name));
            vec![node]
        }
        Subject::Image(image) => {
            let name = &image.metadata.name;
            let known = plan.cells.iter().filter(|cell| cell.image == *name).map(|cell| &cell.target.release);
            explain.image(image, &kernel.or_only(&format!("image {name} is planned"), known)?)
        }
    };
    session.show(&explanations, |explanations| text(explanations))?;
    Ok(if *unreachable { Exit::Unreachable } else { Exit::Done })
}

impl<'a> Subject<'a> {
    fn of(subject: &'a str, has_kernel: bool, definitions: &'a Definitions) -> Result<Self> {
        match subject.strip_prefix("node/") {
            Some(_) if has_kernel => Err(CliError::usage("a node takes no kernel: pass node/NAME alone")),
            Some(name) => Ok(Self::Node(name)),
            None => {
                let name = parse::<ImageName>("image", subject);
                match name.as_ref().ok().and_then(|name| definitions.images.get(name)) {
                    Some(image) => Ok(Self::Image(image)),
                    None if has_kernel => Err(BuildError::no_image(&name?, definitions).into()),
                    None => Ok(Self::Node(subject)),
                }
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
