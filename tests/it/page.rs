//! The page of a running farrier, with the actions that the cluster's authentication allows, and the page of a registry alone.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::support::{
    kube_api::{Requests, objects},
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
    site::Site,
};

const OPERATOR: &str = "token-of-the-operator";
const VIEWER: &str = "token-of-a-viewer";

/// Sends a request to a local port; the answer is empty while nothing listens.
fn ask(port: u16, request: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return String::new() };
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// A process, killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running farrier whose page accepts remote requests.
struct Page {
    live: Live,
    port: u16,
}

impl Page {
    /// Starts farrier with the first kernel's image rolled out and the second kernel's image published.
    fn new() -> (Self, [String; 2]) {
        let mut live = Live::new([objects::node("n0", "6.1.0-901-amd64")], "image");
        let mut images = live.publish_for("n0", &["6.1.0-902-amd64"]);
        let images = ["6.1.0-901-amd64", "6.1.0-902-amd64"].map(|kernel| images.remove(kernel).unwrap());
        live.api.add_person(
            OPERATOR,
            "system:serviceaccount:ops:operator",
            &["patch daemonsets.apps drivers/driver"],
        );
        live.api.add_person(
            VIEWER,
            "system:serviceaccount:ops:viewer",
            &["patch daemonsets.apps other/driver"],
        );
        let port = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
        live.start(&["--listen", &format!("0.0.0.0:{port}"), "--page-actions"]);
        live.until("the first image", |live| live.image(DRIVER) == images[0]);
        let page = Self { live, port };
        page.live.until("the page", |_| page.get("rollouts.html", Some(OPERATOR)).contains("restore"));
        (page, images)
    }

    fn ask(&self, request: &str) -> String {
        ask(self.port, request)
    }

    /// Sends a request as forwarded by an authenticating proxy.
    fn get(&self, path: &str, token: Option<&str>) -> String {
        let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
        self.ask(&format!(
            "GET /{path} HTTP/1.1\r\nhost: farrier.example\r\n{token}connection: close\r\n\r\n"
        ))
    }

    fn post(&self, form: &str, token: &str) -> String {
        self.ask(&format!(
            "POST /do HTTP/1.1\r\nhost: farrier.example\r\nauthorization: Bearer {token}\r\n\
             sec-fetch-site: same-origin\r\norigin: https://farrier.example\r\n\
             content-type: application/x-www-form-urlencoded\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{form}",
            form.len()
        ))
    }

    /// Shows an action's preview and confirms the action.
    fn act(&self, what: &str) -> String {
        let shown = self.get(&format!("do?what={what}&of=drivers%2Fdriver"), Some(OPERATOR));
        let seen = shown.split("name=\"seen\" value=\"").nth(1).unwrap_or_else(|| panic!("{what}: {shown}"));
        let seen = seen.split('"').next().unwrap();
        let done = self.post(&format!("what={what}&of=drivers%2Fdriver&seen={seen}"), OPERATOR);
        assert!(done.starts_with("HTTP/1.1 303 ") && done.contains("location: rollouts.html"), "{done}");
        shown
    }
}

#[test]
fn who_the_cluster_allows_the_write_pauses_resumes_and_puts_back() {
    let (page, [first, second]) = Page::new();
    let live = &page.live;
    let rollouts = page.get("rollouts.html", Some(OPERATOR));
    for what in ["what&#x3D;pause&amp;of&#x3D;drivers%2Fdriver", "what&#x3D;restore&amp;"] {
        assert!(rollouts.contains(what), "{rollouts}");
    }
    let shown = page.act("pause");
    assert!(shown.contains("farrier.dev/paused of DaemonSet drivers/driver becomes"), "{shown}");
    let annotation = || {
        let object = live.api.get("daemonsets.apps", NAMESPACE, DRIVER).unwrap();
        object["metadata"]["annotations"]["farrier.dev/paused"].as_str().map(str::to_owned)
    };
    assert_eq!(annotation().as_deref(), Some("true"));
    live.api.set_kernel("n0", "6.1.0-902-amd64");
    live.until("the rollout waits", |_| page.get("rollouts.html", None).contains("it is paused"));
    assert_eq!(live.image(DRIVER), first, "a paused rollout was written");

    page.act("resume");
    assert_eq!(annotation().as_deref(), Some("false"));
    live.until("the second image", |live| live.image(DRIVER) == second);
    live.until("the page to show the second image", |_| {
        page.get("rollouts.html", Some(OPERATOR)).contains("restore")
    });

    let shown = page.act("restore");
    // The first image never had a running pod, so a rollback does not return to it.
    assert!(shown.contains(&second) && shown.contains(OLD_IMAGE), "{shown}");
    live.until("the previous image", |live| live.image(DRIVER) == OLD_IMAGE);
    live.until("the rollout to wait for a user", |_| {
        page.get("rollouts.html", Some(OPERATOR)).contains("what&#x3D;resume")
    });
    page.act("resume");
    live.until("the second image again", |live| live.image(DRIVER) == second);
    let log = live.log();
    assert!(
        log.contains("action requested on the page") && log.contains("system:serviceaccount:ops:operator"),
        "{log}"
    );
    assert!(!log.contains(OPERATOR), "no token in the log");
}

#[test]
fn others_are_refused_with_a_reason_and_see_no_buttons() {
    let (page, [first, _]) = Page::new();
    let live = &page.live;
    let refused = |token: &str, why: &str| {
        assert!(!page.get("rollouts.html", Some(token)).contains("do?what"), "{token}");
        for answer in [
            page.get("do?what=pause&of=drivers%2Fdriver", Some(token)),
            page.post("what=pause&of=drivers%2Fdriver&seen=", token),
        ] {
            assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains(why), "{token}: {answer}");
        }
    };
    refused(VIEWER, "system:serviceaccount:ops:viewer may not patch drivers/driver");
    refused("token-of-nobody", "the cluster does not accept the bearer token");
    assert!(!page.get("rollouts.html", None).contains("do?what"));
    let none = page.get("do?what=pause&of=drivers%2Fdriver", None);
    assert!(
        none.starts_with("HTTP/1.1 403 ") && none.contains("bearer token that the cluster accepts"),
        "{none}"
    );
    // Permissions for one object do not apply to another object or to a cell.
    for of in [
        "other%2Fdriver",
        "drivers%2F..%2Fdriver",
        "0123456789abcdef",
        "NicClusterPolicy%2Fx",
        "%3Cb%3E%2F%E2%80%AE",
    ] {
        let answer = page.get(&format!("do?what=pause&of={of}"), Some(OPERATOR));
        assert!(answer.starts_with("HTTP/1.1 403 "), "{of}: {answer}");
    }
    // farrier itself may not review tokens, and reports the missing permission.
    live.api.deny("create", "tokenreviews.authentication.k8s.io");
    refused(OPERATOR, "farrier may not create tokenreviews.authentication.k8s.io");
    let annotated = Requests::verb("patch").resource("daemonsets.apps");
    assert_eq!(live.image(DRIVER), first);
    assert!(
        live.api
            .requests()
            .iter()
            .filter(|record| annotated.matches(record))
            .all(|record| { record.body["metadata"]["annotations"].get("farrier.dev/paused").is_none() })
    );
    assert_ne!(first, OLD_IMAGE);
}

const UI: [&str; 4] = ["ui", "--no-browser", "-o", "json"];

/// `farrier ui` for a registry without a cluster.
pub struct Ui {
    port: u16,
    _running: Running,
}

impl Ui {
    pub fn of(site: &Site) -> Self {
        Self::spawn(site.command(&UI))
    }

    /// Starts the UI with a limit on open files.
    fn with_files(site: &Site, files: u32) -> Self {
        let ui = site.command(&UI);
        let mut limited = Command::new("prlimit");
        limited.arg(format!("--nofile={files}")).arg(ui.get_program()).args(ui.get_args());
        for (name, value) in ui.get_envs() {
            match value {
                Some(value) => limited.env(name, value),
                None => limited.env_remove(name),
            };
        }
        limited.stdin(Stdio::null()).stdout(Stdio::piped());
        Self::spawn(limited)
    }

    fn spawn(mut ui: Command) -> Self {
        let mut running = Running(ui.env_remove("FARRIER_CLUSTER").spawn().unwrap());
        let lines = BufReader::new(running.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.map_while(|line| (line != "}").then_some(line)).collect::<String>();
        let port = address.split("127.0.0.1:").nth(1).unwrap_or_else(|| panic!("no address: {address}"));
        Self { port: port.split('/').next().unwrap().parse().unwrap(), _running: running }
    }

    pub fn get(&self, path: &str) -> String {
        ask(self.port, &format!("GET /{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
    }
}

/// Opens more incomplete requests than the program may have open files.
#[test]
fn half_requests_keep_nobody_from_probes_and_pages() {
    let live = Live::new([objects::node("n0", "6.1.0-901-amd64")], "image");
    live.publish();
    let ui = Ui::with_files(&live.site, 256);
    let half = || {
        let mut stream = TcpStream::connect(("127.0.0.1", ui.port)).unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: local").unwrap();
        stream
    };
    let halves: Vec<TcpStream> = (0..400).map(|_| half()).collect();
    for path in ["healthz", "metrics", ""] {
        assert!(ui.get(path).starts_with("HTTP/1.1 200"), "{path}");
    }
    drop(halves);
}

#[test]
fn a_registry_alone_shows_its_images_and_kernels() {
    let nodes = [objects::node("n0", "6.1.0-901-amd64"), objects::node("n1", "6.1.0-902-amd64")];
    let live = Live::new(nodes, "image");
    live.publish();
    let ui = Ui::of(&live.site);
    let fleet = ui.get("");
    for wanted in ["<th scope=\"col\">driver", "6.1.0-901-amd64", "6.1.0-902-amd64", "published 2"] {
        assert!(fleet.contains(wanted), "{wanted} is not in {fleet}");
    }
    // Other definitions and their rollouts do not appear.
    assert!(!fleet.contains("mofed") && !fleet.contains("DaemonSet"), "{fleet}");
    let cell = fleet.split("<a href=c/").nth(1).and_then(|rest| rest.split('>').next()).unwrap();
    let cell = ui.get(&format!("c/{cell}"));
    assert!(cell.contains("configuration registry") && cell.contains("Published digest"), "{cell}");
    assert!(!cell.contains("do?what"), "{cell}");
}

#[test]
fn five_thousand_nodes_add_nothing_to_the_first_view_and_each_has_a_page() {
    let view = |count: usize| {
        let nodes = (0..count).map(|number| objects::node(&format!("n{number}"), "6.1.0-901-amd64"));
        let mut live = Live::new(nodes, "image");
        live.publish();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        live.start(&["--listen", &format!("127.0.0.1:{port}")]);
        let get = move |path: &str| {
            ask(port, &format!("GET /{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
        };
        live.until("the image is rolled out", |_| get("rollouts.html").contains(">set</b>"));
        (live, get)
    };
    let ((_few, few), (_many, many)) = (view(5), view(5000));
    let first = many("");
    assert!(first.contains("published 1") && first.len() < few("").len() + 100, "{first}");
    let rollouts = many("rollouts.html");
    let written = format!("rewrite: {OLD_IMAGE} -&gt; ");
    assert!(rollouts.contains("since this farrier started") && rollouts.contains(&written), "{rollouts}");
    let nodes = many("nodes.html");
    assert!(nodes.contains(">n0</a>") && nodes.contains("5000 nodes"), "{}", nodes.len());
    assert!(!nodes.contains(">n4999</a>"), "the page lists 200 nodes of a kernel");
    let found = many("nodes.html?name=n4999");
    let link =
        found.split(">n4999</a>").next().unwrap().rsplit("href=\"").next().unwrap().trim_end_matches('"');
    let node = many(link);
    assert!(node.contains("Node n4999") && node.contains("6.1.0-901-amd64"), "{node}");
    // farrier renders the page for each filtered address again. The limit allows for a debug build and concurrent tests.
    let took = (0..5).map(|_| {
        let began = Instant::now();
        assert!(many("?kernel=6.1").contains("6.1.0-901-amd64"));
        began.elapsed()
    });
    assert!(took.min().unwrap() < Duration::from_secs(1));
}
