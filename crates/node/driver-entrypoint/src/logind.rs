//! Asks systemd-logind over D-Bus whether the node is shutting down. This is the program's only D-Bus query, so the
//! program implements the protocol itself (D-Bus specification, version 0.43).

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use crate::node::Node;

/// Paths of the host's bus: where the manifest mounts the host's `/run/dbus`, and with `hostPID` below the root
/// of process 1.
const SOCKETS: [&str; 3] = [
    "/host/run/dbus/system_bus_socket",
    "/run/dbus/system_bus_socket",
    "/proc/1/root/run/dbus/system_bus_socket",
];

/// Time limit for each answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum size of a message's header fields and of its body.
const MAX_SIZE: u32 = 64 << 10;

/// Types of messages.
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;

/// Whether logind is shutting the node down or is about to. During a shutdown the kubelet ends pods while other pods still
/// need the network. Returns false if no bus is visible, or if logind does not answer.
pub(crate) fn is_shutting_down(node: &Node<'_>) -> bool {
    let socket = SOCKETS.iter().find(|socket| node.paths.at(socket).exists());
    let Some(socket) = socket else { return false };
    match UnixStream::connect(node.paths.at(socket)).and_then(query_shutdown) {
        Ok(answer) => answer,
        Err(error) => {
            node.log.step(format!("it is unknown whether the node is shutting down: {socket}: {error}"));
            false
        }
    }
}

fn query_shutdown(stream: UnixStream) -> io::Result<bool> {
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    let user: String = rustix::process::getuid().as_raw().to_string();
    writer.write_all(format!("\0AUTH EXTERNAL {}\r\n", hex::encode(user)).as_bytes())?;
    let mut line = String::new();
    (&mut reader).take(1024).read_line(&mut line)?;
    if !line.starts_with("OK ") {
        return Err(io::Error::other("the bus does not accept this process"));
    }
    writer.write_all(b"BEGIN\r\n")?;
    let bus = ["org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello"];
    writer.write_all(&encode_call(1, bus, &[]))?;
    read_reply(&mut reader)?;
    let logind =
        ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.DBus.Properties", "Get"];
    writer.write_all(&encode_call(2, logind, &["org.freedesktop.login1.Manager", "PreparingForShutdown"]))?;
    // A variant with a boolean: its signature, padding, and the value.
    match read_reply(&mut reader)?.as_slice() {
        [1, b'b', 0, 0, value @ ..] => Ok(value.iter().any(|byte| *byte != 0)),
        _ => Err(io::Error::other("logind's answer is not a boolean")),
    }
}

/// Encodes a method call with strings as arguments; `target` is the destination, path, interface and member.
fn encode_call(serial: u32, target: [&str; 4], arguments: &[&str]) -> Vec<u8> {
    let mut body = Vec::new();
    for argument in arguments {
        add_string(&mut body, argument);
    }
    let [destination, path, interface, member] = target;
    let mut fields = Vec::new();
    for (code, kind, text) in
        [(1, b'o', path), (2, b's', interface), (3, b's', member), (6, b's', destination)]
    {
        pad(&mut fields, 8);
        fields.extend([code, 1, kind, 0]);
        add_string(&mut fields, text);
    }
    if !arguments.is_empty() {
        pad(&mut fields, 8);
        fields.extend([8, 1, b'g', 0, arguments.len().to_le_bytes()[0]]);
        fields.extend(arguments.iter().map(|_| b's').chain([0]));
    }
    // Little endian, method call, no flags, version 1.
    let mut message = vec![b'l', 1, 0, 1];
    message.extend(size(&body));
    message.extend(serial.to_le_bytes());
    message.extend(size(&fields));
    message.extend(fields);
    pad(&mut message, 8);
    message.extend(body);
    message
}

fn add_string(bytes: &mut Vec<u8>, text: &str) {
    pad(bytes, 4);
    bytes.extend(size(text.as_bytes()));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

fn size(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}

/// Reads messages up to the next answer to a call, and returns its body. Skips signals.
fn read_reply(reader: &mut impl Read) -> io::Result<Vec<u8>> {
    loop {
        let mut head = [0; 16];
        reader.read_exact(&mut head)?;
        let [order, kind, _, _, b0, b1, b2, b3, _, _, _, _, f0, f1, f2, f3] = head;
        let body = u32::from_le_bytes([b0, b1, b2, b3]);
        let fields = u32::from_le_bytes([f0, f1, f2, f3]);
        if order != b'l' || body > MAX_SIZE || fields > MAX_SIZE {
            return Err(io::Error::other("the bus sent a message in an unknown format"));
        }
        let mut content = Vec::new();
        let (fields, body) = (u64::from(fields.next_multiple_of(8)), u64::from(body));
        let read = reader.take(fields + body).read_to_end(&mut content)?;
        if read as u64 != fields + body {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let body = content.split_off(usize::try_from(fields).unwrap_or(content.len()).min(content.len()));
        match kind {
            METHOD_RETURN => return Ok(body),
            ERROR => return Err(io::Error::other("logind does not answer")),
            _ => {}
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{fs, os::unix::net::UnixListener, thread};

    use super::*;
    use crate::testing::Bench;

    /// A message without header fields.
    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut message = vec![b'l', kind, 0, 1];
        message.extend(size(body));
        message.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        message.extend(body);
        message
    }

    /// Starts a bus on the bench that answers one question with this body.
    pub(crate) fn bus(bench: &Bench, kind: u8, body: &'static [u8]) {
        let path = bench.at(SOCKETS[0]);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut from = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            from.read_line(&mut line).unwrap();
            assert!(line.starts_with("\0AUTH EXTERNAL "), "{line}");
            stream.write_all(b"OK 0123\r\n").unwrap();
            line.clear();
            from.read_line(&mut line).unwrap();
            assert_eq!(line, "BEGIN\r\n");
            // The bus also announces the name that the caller got.
            let hello = [message(METHOD_RETURN, b"\x04\0\0\0:1.7\0"), message(4, b"\x04\0\0\0:1.7\0")];
            stream.write_all(&hello.concat()).unwrap();
            stream.write_all(&message(kind, body)).unwrap();
            let mut asked = Vec::new();
            let _ = from.read_to_end(&mut asked);
            assert!(asked.windows(20).any(|word| word == b"PreparingForShutdown"));
        });
    }

    #[test]
    fn logind_answers_whether_the_node_shuts_down() {
        let bench = Bench::new();
        assert!(!is_shutting_down(&bench.node()));
        for (kind, body, wanted) in [
            (METHOD_RETURN, &b"\x01b\0\0\x01\0\0\0"[..], true),
            (METHOD_RETURN, b"\x01b\0\0\0\0\0\0", false),
            (METHOD_RETURN, b"\x01s\0\0\x01\0\0\0", false),
            (ERROR, b"", false),
        ] {
            bus(&bench, kind, body);
            assert_eq!(is_shutting_down(&bench.node()), wanted, "{body:?}");
        }
        assert!(bench.log().contains("it is unknown whether the node is shutting down"), "{}", bench.log());
    }

    #[test]
    fn calls_are_encoded_as_specified() {
        let bytes = encode_call(1, ["a.b", "/a", "a.i", "M"], &["x"]);
        let fields = b"\x01\x01o\0\x02\0\0\0/a\0\0\0\0\0\0\x02\x01s\0\x03\0\0\0a.i\0\0\0\0\0\x03\x01s\0\x01\0\0\0M\0\0\0\0\0\0\0\
                       \x06\x01s\0\x03\0\0\0a.b\0\0\0\0\0\x08\x01g\0\x01s\0";
        let mut wanted = b"l\x01\0\x01\x06\0\0\0\x01\0\0\0".to_vec();
        wanted.extend(size(fields));
        wanted.extend(fields);
        pad(&mut wanted, 8);
        wanted.extend(b"\x01\0\0\0x\0");
        assert_eq!(bytes, wanted);
    }
}
