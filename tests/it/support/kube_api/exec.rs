//! The `exec` subresource of Jobs' pods, over WebSocket. Responses and messages match an API server of Kubernetes 1.36.
//! Simplifications: no terminal and no SPDY.

use std::{process::Stdio, sync::Arc};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _, stream::SplitSink};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::{Child, ChildStdin, Command},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, frame::coding::CloseCode},
    },
};

use super::{
    Shared,
    answer::{Answer, Failure},
    http::Request,
    jobs::NodeDisruption,
    kinds::Kind,
    store::State,
};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
/// First byte of a version 5 message that closes a channel, which the second byte names.
const CLOSE: u8 = 255;

/// Start of docker's message for a program that it cannot find.
const NOT_STARTED: &[u8] = b"OCI runtime exec failed: ";

/// An authorized exec request.
pub struct Exec {
    shared: Arc<Shared>,
    protocol: &'static str,
    key: String,
    /// The pod's uid.
    uid: String,
    container: String,
    command: Vec<String>,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

type Sink = SplitSink<WebSocketStream<TcpStream>, Message>;

/// The connection ended without a status.
struct Cut;

impl Exec {
    pub fn open(
        shared: &Arc<Shared>,
        state: &State,
        (kind, namespace, name): (&Kind, &str, &str),
        request: &Request,
    ) -> Result<Self, Answer> {
        // A WebSocket request is a GET, which read permission would allow. Since 1.35 the API server also requires `create`.
        if state.faults.denies("create", "pods/exec") {
            let details = json!({"name": name, "kind": "pods"});
            let message = format!("pods \"{name}\" is forbidden: ");
            return Err(Failure::new(403, "Forbidden", message, details).answer());
        }
        let found = state.get(kind, namespace, name);
        let pod = found.ok_or_else(|| Failure::not_found(kind, name).answer())?;
        let parameters: Vec<(String, String)> =
            url::form_urlencoded::parse(request.query.as_bytes()).into_owned().collect();
        let is = |flag: &str| parameters.iter().any(|(name, value)| name == flag && value == "true");
        let value = pod.value();
        let containers = value["spec"]["containers"].as_array().cloned().unwrap_or_default();
        let wanted = parameters.iter().find(|(name, _)| name == "container").map(|(_, value)| value.as_str());
        let first = containers.first().and_then(|container| container["name"].as_str()).unwrap_or_default();
        let container = wanted.unwrap_or(first);
        if !containers.iter().any(|given| given["name"] == container) {
            let message = format!("container {container} is not valid for pod {name}");
            return Err(Failure::bad_request(message).answer());
        }
        if pod.node_name.is_empty() {
            let message = format!("pod {name} does not have a host assigned");
            return Err(Failure::bad_request(message).answer());
        }
        if !request.header("upgrade").eq_ignore_ascii_case("websocket") {
            return Err(Failure::bad_request("Upgrade request required").answer());
        }
        if request.method != "GET" {
            return Err(plain(405, "bad method"));
        }
        let offered = request.header("sec-websocket-protocol");
        let known = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
        let protocol = known.into_iter().find(|known| offered.split(',').any(|word| word.trim() == *known));
        let protocol = protocol.ok_or_else(|| plain(403, ""))?;
        if !(is("stdin") || is("stdout") || is("stderr")) {
            return Err(plain(400, "you must specify at least 1 of stdin, stdout, stderr"));
        }
        let running = !value["status"]["containerStatuses"][0]["state"]["running"].is_null();
        let jobs = state.jobs.as_ref().filter(|_| running && state.has_kubelet(&pod));
        let Some(jobs) = jobs else {
            return Err(plain(500, &format!("container not found (\"{container}\")")));
        };
        Ok(Self {
            shared: Arc::clone(shared),
            protocol,
            key: request.header("sec-websocket-key").to_owned(),
            uid: pod.uid.clone(),
            container: jobs.engine.container(&pod.uid),
            stdin: is("stdin"),
            stdout: is("stdout"),
            stderr: is("stderr"),
            command: parameters
                .into_iter()
                .filter(|(name, _)| name == "command")
                .map(|(_, word)| word)
                .collect(),
        })
    }

    /// Takes over the connection until it ends.
    pub async fn serve(self, mut stream: TcpStream) {
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {}\r\nSec-WebSocket-Protocol: {}\r\n\r\n",
            derive_accept_key(self.key.as_bytes()),
            self.protocol,
        );
        if stream.write_all(head.as_bytes()).await.is_err() {
            return;
        }
        let socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        let (mut sink, mut source) = socket.split();
        let mut child = match self.start() {
            Ok(child) => child,
            Err(fault) => {
                let _ = send_status_and_close(&mut sink, &failure(&fault.to_string())).await;
                return;
            }
        };
        let mut stdin = child.stdin.take();
        // Read the client's messages concurrently with the output. When the client disconnects, drop the program's output.
        let listening = async {
            while let Some(Ok(message)) = source.next().await {
                match message {
                    Message::Binary(bytes) => forward_stdin(&mut stdin, &bytes).await,
                    Message::Close(_) => return,
                    _ => {}
                }
            }
        };
        let running = async {
            let status = self.stream(&mut child, &mut sink).await?;
            send_status_and_close(&mut sink, &status).await
        };
        tokio::select! {
            _ = running => {}
            () = listening => {}
        }
    }

    fn start(&self) -> std::io::Result<Child> {
        let mut docker = Command::new("docker");
        docker.arg("exec");
        if self.stdin {
            docker.arg("--interactive");
        }
        let piped = if self.stdin { Stdio::piped() } else { Stdio::null() };
        docker.arg(&self.container).args(&self.command).stdin(piped);
        docker.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()
    }

    /// Sends the program's output and returns its status.
    async fn stream(&self, child: &mut Child, sink: &mut Sink) -> Result<Value, Cut> {
        send(sink, STDOUT, &[]).await?;
        let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (mut stdout_open, mut stderr_open, mut sent) = (true, true, 0);
        let mut engine_error = Vec::new();
        while stdout_open || stderr_open {
            tokio::select! {
                piece = read(&mut stdout), if stdout_open => {
                    stdout_open = !piece.is_empty();
                    if sent == 0 && piece.starts_with(NOT_STARTED) {
                        engine_error = piece;
                    } else if self.stdout && stdout_open {
                        self.send_stdout(sink, &piece, &mut sent).await?;
                    }
                }
                piece = read(&mut stderr), if stderr_open => {
                    stderr_open = !piece.is_empty();
                    if piece.starts_with(NOT_STARTED) || piece.starts_with(b"Error response from daemon: ") {
                        engine_error = piece;
                    } else if self.stderr && stderr_open {
                        send(sink, STDERR, &piece).await?;
                    }
                }
            }
        }
        let code = child.wait().await.ok().and_then(|status| status.code()).unwrap_or(137);
        if self.is_lost() {
            return Err(Cut);
        }
        if !engine_error.is_empty() && code != 0 {
            let why = String::from_utf8_lossy(&engine_error);
            return Ok(failure(&format!("error executing command in container: {}", why.trim())));
        }
        Ok(match code {
            0 => json!({"metadata": {}, "status": "Success"}),
            code => json!({
                "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                "message": format!(
                    "command terminated with non-zero exit code: command terminated with exit code {code}"
                ),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            }),
        })
    }

    /// Sends a piece of standard output. If the test cuts the exec within this piece, sends only the bytes before the cut.
    async fn send_stdout(&self, sink: &mut Sink, piece: &[u8], sent: &mut u64) -> Result<(), Cut> {
        let end = *sent + piece.len() as u64;
        let cut = {
            let mut state = self.shared.state.lock().unwrap();
            let cuts = state.jobs.as_mut().map(|jobs| &mut jobs.cuts);
            cuts.and_then(|cuts| cuts.pop_front_if(|cut| *cut <= end))
        };
        if let Some(cut) = cut {
            let before_cut = usize::try_from(cut.saturating_sub(*sent)).unwrap_or(0);
            send(sink, STDOUT, &piece[..before_cut]).await?;
            self.shared.announce();
            return Err(Cut);
        }
        *sent = end;
        send(sink, STDOUT, piece).await
    }

    /// Returns whether the pod's node is lost; a lost node reports no status.
    fn is_lost(&self) -> bool {
        let state = self.shared.state.lock().unwrap();
        state
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.disrupted.get(&self.uid) == Some(&NodeDisruption::NodeLost))
    }
}

/// Reads a piece, which is empty at the end of the stream.
async fn read(from: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut piece = vec![0; 32 << 10];
    let length = from.read(&mut piece).await.unwrap_or(0);
    piece.truncate(length);
    piece
}

async fn forward_stdin(stdin: &mut Option<ChildStdin>, message: &Bytes) {
    match message.as_ref() {
        [STDIN, text @ ..] => {
            if let Some(stdin) = stdin {
                let _ = stdin.write_all(text).await;
            }
        }
        [CLOSE, STDIN] => *stdin = None,
        _ => {}
    }
}

async fn send(sink: &mut Sink, channel: u8, text: &[u8]) -> Result<(), Cut> {
    let message = Bytes::from([&[channel], text].concat());
    sink.send(Message::Binary(message)).await.map_err(|_| Cut)
}

/// Sends the status and closes the connection.
async fn send_status_and_close(sink: &mut Sink, status: &Value) -> Result<(), Cut> {
    send(sink, STATUS, status.to_string().as_bytes()).await?;
    let normal = CloseFrame { code: CloseCode::Normal, reason: "".into() };
    sink.send(Message::Close(Some(normal))).await.map_err(|_| Cut)
}

fn failure(why: &str) -> Value {
    let message = format!("Internal error occurred: {why}");
    json!({
        "metadata": {}, "status": "Failure", "message": message, "reason": "InternalError",
        "details": {"causes": [{"message": message}]}, "code": 500,
    })
}

fn plain(status: u16, text: &str) -> Answer {
    let body = vec![Bytes::copy_from_slice(text.as_bytes())];
    Answer { content_type: "text/plain; charset=utf-8", body, ..Answer::bytes(status, Bytes::new()) }
}
