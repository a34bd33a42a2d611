//! An HTTP proxy on loopback that only supports `CONNECT`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};

/// A proxy that connects every tunnel to one server, whatever host the client requested, and counts the tunnels.
pub struct Tunnels {
    /// Listening address.
    pub host: String,
    opened: Arc<AtomicUsize>,
}

impl Tunnels {
    pub async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let opened = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&opened);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(tunnel(BufReader::new(stream), target.clone(), Arc::clone(&counter)));
            }
        });
        Self { host, opened }
    }

    /// Returns the number of opened tunnels.
    pub fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }
}

/// Accepts `CONNECT` from a client with the password.
async fn tunnel(mut client: BufReader<TcpStream>, target: String, opened: Arc<AtomicUsize>) -> Option<()> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if client.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    // base64 of "me:secret".
    let knows =
        head.to_ascii_lowercase().contains("proxy-authorization: basic") && head.contains("bWU6c2VjcmV0");
    if !head.starts_with("CONNECT ") || !knows {
        client.write_all(b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n").await.ok()?;
        return None;
    }
    opened.fetch_add(1, Ordering::SeqCst);
    let mut server = TcpStream::connect(target).await.ok()?;
    client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").await.ok()?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await.ok()?;
    Some(())
}
