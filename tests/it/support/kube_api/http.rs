//! HTTP/1.1 on a loopback port: persistent connections, chunked watches, and a server that can go down and come back.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, BufWriter},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc::UnboundedReceiver,
    task::JoinSet,
};

use super::{Shared, answer::Answer, exec::Exec, routes, watch::Watch};

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub query: String,
    pub headers: BTreeMap<String, String>,
    pub body: Bytes,
}

impl Request {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn parameters(&self) -> BTreeMap<String, String> {
        url::form_urlencoded::parse(self.query.as_bytes()).into_owned().collect()
    }
}

/// The server's reaction to a request.
pub enum Reply {
    Answer(Answer),
    Watch(Box<Watch>),
    /// The connection switches to another protocol.
    Exec(Box<Exec>),
    /// The connection ends.
    Drop,
}

/// Takes the server down (false) or brings it back (true), and reports completion.
pub type Command = (bool, std::sync::mpsc::Sender<()>);

/// Serves until the sender of the commands is dropped.
pub async fn serve(
    first: TcpListener,
    shared: Arc<Shared>,
    mut commands: UnboundedReceiver<Command>,
    address: SocketAddr,
) {
    let mut listener = Some(first);
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = accepted => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(stream, Arc::clone(&shared)));
                }
            },
            Some(_) = connections.join_next() => {},
            command = commands.recv() => {
                let Some((up, done)) = command else { return };
                if up && listener.is_none() {
                    listener = Some(TcpListener::bind(address).await.unwrap());
                } else if !up {
                    listener = None;
                    connections.shutdown().await;
                }
                let _ = done.send(());
            },
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    let (mut reader, mut writer) = (BufReader::new(reader), BufWriter::with_capacity(1 << 16, writer));
    while let Some(request) = read(&mut reader, &mut writer).await {
        let sent = match routes::reply(&shared, &request).await {
            Reply::Drop => return,
            Reply::Answer(answer) => write(&mut writer, &answer, &date(&shared)).await,
            Reply::Exec(exec) => {
                // The client waits for the upgrade's answer, so the reader's buffer is empty.
                let stream = reader.into_inner().reunite(writer.into_inner()).unwrap();
                return exec.serve(stream).await;
            }
            Reply::Watch(watch) => stream_watch(&mut reader, &mut writer, *watch).await,
        };
        if sent.is_err() {
            return;
        }
    }
}

async fn read(
    reader: &mut BufReader<OwnedReadHalf>,
    writer: &mut BufWriter<OwnedWriteHalf>,
) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).await.ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let mut request = Request { method, path, query, headers, body: Bytes::new() };
    if request.header("expect").eq_ignore_ascii_case("100-continue") {
        writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
        writer.flush().await.ok()?;
    }
    let mut body = vec![0; request.header("content-length").parse().unwrap_or(0)];
    reader.read_exact(&mut body).await.ok()?;
    request.body = body.into();
    Some(request)
}

/// Returns the server's time for the `Date` header.
fn date(shared: &Shared) -> String {
    let ahead = jiff::SignedDuration::from_secs(shared.clock.load(Ordering::Relaxed));
    let printer = jiff::fmt::rfc2822::DateTimePrinter::new();
    printer.timestamp_to_rfc9110_string(&(jiff::Timestamp::now() + ahead)).unwrap()
}

async fn write(writer: &mut BufWriter<OwnedWriteHalf>, answer: &Answer, date: &str) -> std::io::Result<()> {
    let length: usize = answer.body.iter().map(Bytes::len).sum();
    let retry = answer.retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n")).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {} Fake\r\nDate: {date}\r\nContent-Type: {}\r\n{retry}Content-Length: {length}\r\n\r\n",
        answer.status, answer.content_type
    );
    writer.write_all(head.as_bytes()).await?;
    for piece in &answer.body {
        writer.write_all(piece).await?;
    }
    writer.flush().await
}

async fn stream_watch(
    reader: &mut BufReader<OwnedReadHalf>,
    writer: &mut BufWriter<OwnedWriteHalf>,
    mut watch: Watch,
) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    writer.write_all(head.as_bytes()).await?;
    writer.flush().await?;
    loop {
        let lines = tokio::select! {
            lines = watch.next() => lines,
            // A watching client sends nothing: a readable stream means that it has disconnected, so the watch ends.
            gone = reader.fill_buf() => {
                if gone?.is_empty() {
                    return Err(std::io::ErrorKind::ConnectionAborted.into());
                }
                watch.next().await
            }
        };
        let Some(lines) = lines else { break };
        writer.write_all(format!("{:x}\r\n", lines.len()).as_bytes()).await?;
        writer.write_all(&lines).await?;
        writer.write_all(b"\r\n").await?;
        writer.flush().await?;
    }
    writer.write_all(b"0\r\n\r\n").await?;
    writer.flush().await
}
