//! A running `farrier run --cluster kube`: the real program, a real registry with images published beforehand, and the API
//! server from [`super::kube_api`].

use std::{
    collections::BTreeMap,
    fs::{self, File},
    process::{Child, Command},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    kube_api::{FakeApi, Requests, objects},
    published::publish_planned,
    site::Site,
};

/// Namespace of the DaemonSet of [`Live::new`].
pub const NAMESPACE: &str = "drivers";
/// Name of the DaemonSet and of the driver image.
pub const DRIVER: &str = "driver";
/// Initial image of the DaemonSet.
pub const OLD_IMAGE: &str = "registry.example/old:1";

/// Cluster, registry, definitions and farriers, all of which end on drop.
pub struct Live {
    pub api: FakeApi,
    pub site: Site,
    farriers: Vec<Child>,
}

impl Live {
    /// Creates nodes, a DaemonSet over all of them, and an image that `strategy` rolls out to it. No engine is needed as long
    /// as all images are published.
    pub fn new(nodes: impl IntoIterator<Item = Value>, strategy: &str) -> Self {
        Self::at(Site::new(), nodes, strategy)
    }

    /// Creates the cluster for an existing site.
    pub fn at(site: Site, nodes: impl IntoIterator<Item = Value>, strategy: &str) -> Self {
        let live = Self { api: FakeApi::start(), site, farriers: Vec::new() };
        live.site.define(
            "images/driver.yaml",
            &format!(
                "apiVersion: farrier.dev/v1alpha1\n\
                 kind: DriverImage\n\
                 metadata: {{name: {DRIVER}}}\n\
                 spec:\n  version: \"1.0\"\n  template: kbuild\n  vars: {{directory: ., makeArgs: \"\"}}\n  \
                 nodes: {{matchLabels: {{feature.node.kubernetes.io/pci-15b3.present: \"true\"}}}}\n  \
                 rollout:\n    \
                 - {{strategy: {strategy}, namespace: {NAMESPACE}, daemonSet: {DRIVER}, container: driver}}\n"
            ),
        );
        live.site.stand_in_kernels();
        live.api.create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "farrier"}}));
        live.api.load(nodes);
        live.api.create(objects::daemon_set(NAMESPACE, DRIVER, OLD_IMAGE));
        live.api.kubeconfig(&live.site.path(""));
        live
    }

    /// Creates further DaemonSets with the same driver image, each for the nodes whose `pool` has its name.
    pub fn pools(&self, names: &[String]) {
        let file = self.site.definitions().join("images/driver.yaml");
        let mut definition = fs::read_to_string(&file).unwrap();
        for name in names {
            let rollout = format!(
                "    - {{strategy: image, namespace: {NAMESPACE}, daemonSet: {name}, container: driver}}\n"
            );
            definition += &rollout;
            let mut object = objects::daemon_set(NAMESPACE, name, OLD_IMAGE);
            object["spec"]["template"]["spec"]["nodeSelector"] = json!({"pool": name});
            self.api.create(object);
        }
        fs::write(file, definition).unwrap();
    }

    /// Returns a `farrier` command for this cluster.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.site.command(args);
        command.env("FARRIER_CLUSTER", "kube").env("KUBECONFIG", self.site.path("kubeconfig"));
        command.env("FARRIER_WRITE_NAMESPACES", NAMESPACE);
        command
    }

    /// Returns the current plan.
    pub fn plan(&self) -> Value {
        let output = self.command(&["plan", "-o", "json"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
    }

    /// Publishes the images that the plan would build, and returns them by kernel release, with digests.
    pub fn publish(&self) -> BTreeMap<String, String> {
        publish_planned(&self.plan()).into_iter().map(|((_, release), image)| (release, image)).collect()
    }

    /// Publishes images for kernels that no node runs yet, by temporarily changing one node's kernel.
    pub fn publish_for(&self, node: &str, kernels: &[&str]) -> BTreeMap<String, String> {
        let before = self.api.get("nodes", "", node).unwrap();
        let before = before["status"]["nodeInfo"]["kernelVersion"].as_str().unwrap().to_owned();
        let mut images = self.publish();
        for kernel in kernels {
            self.api.set_kernel(node, kernel);
            images.extend(self.publish());
        }
        self.api.set_kernel(node, &before);
        images
    }

    /// Starts the loop, and returns its process id. The log goes to a file.
    pub fn start(&mut self, args: &[&str]) -> u32 {
        self.start_at("off", args)
    }

    /// Starts the loop with its metrics endpoint at an address.
    pub fn start_at(&mut self, listen: &str, args: &[&str]) -> u32 {
        let number = self.farriers.len();
        let log = File::create(self.site.path(format!("farrier-{number}.log"))).unwrap();
        let child = self
            .command(&[&["run"], args].concat())
            .env("FARRIER_LISTEN", listen)
            .env("FARRIER_LOG", "warn,farrier=debug")
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let pid = child.id();
        self.farriers.push(child);
        pid
    }

    /// Kills the most recently started farrier.
    pub fn kill(&mut self) {
        let mut child = self.farriers.pop().expect("a farrier is running");
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Returns the farriers' logs.
    pub fn log(&self) -> String {
        let read = |number| fs::read_to_string(self.site.path(format!("farrier-{number}.log")));
        (0..self.farriers.len()).filter_map(|number| read(number).ok()).collect()
    }

    /// Returns the number of completed reconciles.
    pub fn reconciles(&self) -> usize {
        self.log().matches("reconcile finished").count()
    }

    /// Returns the image in the DaemonSet of this name.
    pub fn image(&self, name: &str) -> String {
        let object = self.api.get("daemonsets.apps", NAMESPACE, name).expect("the DaemonSet exists");
        let containers = &object["spec"]["template"]["spec"]["containers"];
        containers[0]["image"].as_str().unwrap().to_owned()
    }

    /// Waits for a condition of the cluster; on a timeout, the panic contains farrier's log.
    #[track_caller]
    pub fn until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + Duration::from_mins(3);
        while !condition(self) {
            assert!(Instant::now() < end, "waited three minutes for {what}\n{}", self.log());
            // No notification exists; the sleep only limits the polling rate.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the number of writes to a resource so far.
    pub fn writes_to(&self, resource: &str) -> usize {
        self.api.count(&Requests::writes().resource(resource))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        for child in &mut self.farriers {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns a node whose status is as large as a real one's: many images and extended resources.
pub fn large_node(name: &str, kernel: &str, bytes: usize) -> Value {
    let mut node = objects::node(name, kernel);
    let image = |number: usize| {
        let digest = format!("{number:064x}");
        json!({"names": [format!("registry.example/team/application-{number}@sha256:{digest}")], "sizeBytes": 123_456_789})
    };
    let one = image(0).to_string().len() + 1;
    node["status"]["images"] = (0..bytes / one).map(image).collect();
    node
}
