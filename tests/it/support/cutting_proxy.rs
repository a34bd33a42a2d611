//! A TCP proxy on loopback that breaks connections, to simulate an unreliable network during an upload.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Point at which a connection breaks.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// After this many further bytes to the host.
    After(u64),
    /// Before the first byte of a request with this method, after this many such requests.
    Request(&'static str, usize),
}

/// The proxy, stopped with the test's runtime.
pub struct CuttingProxy {
    pub host: String,
    sent: Arc<AtomicU64>,
    /// The pending cuts, in order.
    cuts: Arc<Mutex<VecDeque<Cut>>>,
}

impl CuttingProxy {
    /// Starts a proxy in front of `host`.
    pub async fn before(host: &str, cuts: &[Cut]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let upstream: SocketAddr = host.parse().unwrap();
        let sent = Arc::new(AtomicU64::new(0));
        let cuts = Arc::new(Mutex::new(cuts.iter().copied().collect::<VecDeque<Cut>>()));
        let proxy = Self { host: address.to_string(), sent: Arc::clone(&sent), cuts: Arc::clone(&cuts) };
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(carry(client, upstream, Arc::clone(&sent), Arc::clone(&cuts)));
            }
        });
        proxy
    }

    /// Returns the number of bytes sent to the host.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Returns whether all planned cuts have happened.
    pub fn has_cut_all(&self) -> bool {
        self.cuts.lock().unwrap().is_empty()
    }
}

async fn carry(
    client: TcpStream,
    upstream: SocketAddr,
    sent: Arc<AtomicU64>,
    cuts: Arc<Mutex<VecDeque<Cut>>>,
) {
    let server = TcpStream::connect(upstream).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let back = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
    });
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
        let (through, breaks) = pass(&cuts, &buffer[..count]);
        if to_server.write_all(&buffer[..through]).await.is_err() {
            break;
        }
        sent.fetch_add(through as u64, Ordering::SeqCst);
        if breaks {
            break;
        }
    }
    back.abort();
}

/// Returns how many of the bytes pass, and whether the connection breaks afterwards.
fn pass(cuts: &Mutex<VecDeque<Cut>>, bytes: &[u8]) -> (usize, bool) {
    let mut cuts = cuts.lock().unwrap();
    let (through, breaks) = match cuts.front_mut() {
        Some(Cut::After(left)) if *left > bytes.len() as u64 => {
            *left -= bytes.len() as u64;
            (bytes.len(), false)
        }
        Some(Cut::After(left)) => (usize::try_from(*left).unwrap(), true),
        // A request starts a new read, because clients wait for the previous answer.
        Some(Cut::Request(method, before)) if bytes.starts_with(method.as_bytes()) => {
            let now = *before == 0;
            *before = before.saturating_sub(1);
            (if now { 0 } else { bytes.len() }, now)
        }
        Some(Cut::Request(..)) | None => (bytes.len(), false),
    };
    if breaks {
        cuts.pop_front();
    }
    (through, breaks)
}
