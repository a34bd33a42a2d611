//! A scripted HTTP server on loopback that answers requests in order and records them.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};

/// One scripted answer.
#[derive(Clone)]
pub struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of announced bytes that are never sent.
    missing: usize,
    /// Whether the body is sent at one byte per five seconds of the runtime's clock.
    crawls: bool,
    /// Number of bytes of the request's body after which the connection breaks without an answer.
    breaks_after: Option<usize>,
}

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method, such as `GET`.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Headers with lower-case names.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

pub fn answer(status: u16, body: impl AsRef<[u8]>) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: body.as_ref().to_vec(),
        missing: 0,
        crawls: false,
        breaks_after: None,
    }
}

/// Returns a break of the connection after `bytes` bytes of the request's body, without an answer.
pub fn breaks_after(bytes: usize) -> Answer {
    Answer { breaks_after: Some(bytes), ..answer(599, "") }
}

impl Answer {
    /// Ends the connection `missing` bytes before the announced end of the body.
    pub fn cut_short_by(mut self, missing: usize) -> Self {
        self.missing = missing;
        self
    }

    /// Sends the body at one byte per five seconds, for tests with paused time.
    pub fn crawling(mut self) -> Self {
        self.crawls = true;
        self
    }

    pub fn header(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }
}

/// The server, stopped with the test's runtime.
pub struct FakeHttp {
    pub host: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl FakeHttp {
    pub async fn start(script: Vec<Answer>) -> Self {
        Self::start_with(|_| script).await
    }

    /// Starts a server whose answers contain its own address.
    pub async fn start_with(script: impl FnOnce(&str) -> Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let mut script = script(&host).into_iter();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = BufReader::new(stream);
                // Close the connection on a TLS ClientHello, like an HTTP-only server.
                if stream.fill_buf().await.unwrap_or_default().first() == Some(&0x16) {
                    continue;
                }
                let Some(mut request) = read(&mut stream).await else { continue };
                let answer = script.next().unwrap_or_else(|| answer(599, "the script has ended"));
                let whole = request.header("content-length").map_or(0, |length| length.parse().unwrap());
                request.body = vec![0; answer.breaks_after.map_or(whole, |bytes| bytes.min(whole))];
                if stream.read_exact(&mut request.body).await.is_err() {
                    continue;
                }
                seen.lock().unwrap().push(request);
                if answer.breaks_after.is_none() {
                    write(stream.into_inner(), answer).await;
                }
            }
        });
        Self { host, requests }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

/// Reads a request without its body.
async fn read(stream: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    Some(Request { method, target, headers, body: Vec::new() })
}

async fn write(mut stream: TcpStream, answer: Answer) {
    let mut head = format!(
        "HTTP/1.1 {} Scripted\r\ncontent-length: {}\r\nconnection: close\r\n",
        answer.status,
        answer.body.len() + answer.missing
    );
    for (name, value) in &answer.headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head.push_str("\r\n");
    let _ = stream.write_all(head.as_bytes()).await;
    if answer.crawls {
        for byte in &answer.body {
            if stream.write_all(&[*byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        }
    } else {
        let _ = stream.write_all(&answer.body).await;
    }
    let _ = stream.shutdown().await;
}
