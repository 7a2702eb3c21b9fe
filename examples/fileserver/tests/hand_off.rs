//! Tests two servers with a client; the test plays the daemon. Connections move back and forth in the middle of
//! transfers.

#[path = "../../../crates/api/tests/fake/mod.rs"]
mod fake;
#[path = "../src/synthetic.rs"]
#[allow(dead_code, reason = "the test uses only a part of the server's module")]
mod synthetic;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fake::{DaemonSession, FakeDaemon, connect_client, flow_of};
use holdfast_api::app::{FromDaemon, ToDaemon};
use holdfast_api::{Drain, FlowText};

struct Server {
    process: Child,
    peer: DaemonSession,
    address: SocketAddr,
    service: u32,
}

impl Server {
    fn start(daemon: &FakeDaemon, node: &str, more: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_fileserver"))
            .args(["--listen", "127.0.0.1:0", "--socket"])
            .arg(daemon.path())
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let peer = daemon.accept();
        peer.send(&FromDaemon::Opened { node: node.into() });
        let service = peer.receive_serve("files");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line
            .trim()
            .strip_prefix("listening on ")
            .unwrap()
            .parse()
            .unwrap();
        Self {
            process,
            peer,
            address,
            service,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Requests a handoff of the flow and brings it to the acceptor, up to `Activate`; `None` when the connection ended before.
fn move_flow(donor: &Server, acceptor: &Server, flow: FlowText, id: u64) -> Option<()> {
    donor.peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "other".into(),
        drain: Drain::None,
    });
    let (message, descriptors) = donor.peer.receive();
    let ToDaemon::HandOff { mut items, .. } = message else {
        assert!(
            matches!(message, ToDaemon::Closed { .. } | ToDaemon::Declined { .. }),
            "{message:?}"
        );
        return None;
    };
    acceptor.peer.hand_over(
        id,
        acceptor.service,
        items.pop()?,
        descriptors.into_iter().next(),
    );
    Some(())
}

/// Moves the flow around until `stop`; `moved` counts the moves. Every third attempt fails.
fn move_until_stopped(
    servers: &[Server; 2],
    flow: FlowText,
    stop: &AtomicBool,
    moved: &AtomicUsize,
) {
    servers[0].peer.receive_accepted(1);
    let mut moves = 0;
    for id in 0.. {
        let (donor, acceptor) = (&servers[moves % 2], &servers[(moves + 1) % 2]);
        if stop.load(Ordering::Acquire) || move_flow(donor, acceptor, flow, id).is_none() {
            break;
        }
        if id % 3 == 2 {
            let reason = "not this time";
            acceptor.peer.send(&FromDaemon::Cancel {
                ids: vec![id],
                reason: reason.into(),
            });
            donor.peer.send(&FromDaemon::Kept {
                flows: vec![flow],
                reason: reason.into(),
            });
        } else {
            donor.peer.send(&FromDaemon::Moved {
                flows: vec![flow],
                to: "other".into(),
            });
            acceptor.peer.send(&FromDaemon::Activate { ids: vec![id] });
            moves += 1;
            moved.store(moves, Ordering::Release);
        }
        // A request together with `Activate` would move the connection again before it makes any progress.
        thread::sleep(MOVE_PAUSE);
    }
}

/// Pause between two moves.
const MOVE_PAUSE: Duration = Duration::from_millis(3);
/// Maximum wait for the first move.
const FIRST_MOVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Sets the stop flag when dropped: also when a test fails, which would otherwise wait forever.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs `transfer` on a new connection that moves meanwhile; `transfer` gets the number of moves.
fn while_moving<R>(
    extra_args: &[&str],
    transfer: impl FnOnce(&mut TcpStream, &AtomicUsize) -> R,
) -> (R, usize) {
    let daemon = FakeDaemon::new();
    let servers = [
        Server::start(&daemon, "n1", extra_args),
        Server::start(&daemon, "n2", extra_args),
    ];
    let mut client = connect_client(servers[0].address);
    let flow = flow_of(&client);
    let (stop, moved) = (AtomicBool::new(false), AtomicUsize::new(0));
    let result = thread::scope(|scope| {
        scope.spawn(|| move_until_stopped(&servers, flow, &stop, &moved));
        let _stopping = StopOnDrop(&stop);
        transfer(&mut client, &moved)
    });
    (result, moved.into_inner())
}

/// Reads a response's head and body. Fails the test when either is truncated.
fn response(reader: &mut impl BufRead, with_body: bool) -> (String, Vec<u8>) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(
            reader.read_line(&mut head).unwrap(),
            0,
            "the connection ended inside a response head: {head}"
        );
    }
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .unwrap()
        .parse()
        .unwrap();
    let mut body = vec![0; if with_body { length } else { 0 }];
    reader.read_exact(&mut body).unwrap();
    (head, body)
}

const SIZE: usize = 3_000_001;

fn expected(offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    synthetic::fill(offset, &mut bytes);
    bytes
}

#[test]
fn downloads_continue_across_moves() {
    // The rate makes the transfer long enough for moves; the test does not measure it.
    let (bodies, moves) = while_moving(&["--rate-mbit", "40"], |client, _| {
        write!(client, "GET /synthetic/{SIZE} HTTP/1.1\r\n\r\n").unwrap();
        write!(
            client,
            "GET /synthetic/{SIZE} HTTP/1.1\r\nRange: bytes=11-\r\n\r\n"
        )
        .unwrap();
        let mut reader = BufReader::new(client);
        [response(&mut reader, true).1, response(&mut reader, true).1]
    });
    assert!(bodies[0] == expected(0, SIZE) && bodies[1] == expected(11, SIZE - 11));
    assert!(moves >= 3, "moved {moves} times");
}

#[test]
fn uploads_continue_across_moves() {
    let root = tempfile::tempdir().unwrap();
    let body = expected(0, SIZE);
    let (answers, moves) = while_moving(
        &["--root", root.path().to_str().unwrap()],
        |client, moved| {
            let mut reader = BufReader::new(client.try_clone().unwrap());
            write!(
                client,
                "PUT /digest HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            .unwrap();
            for chunk in body.chunks(4_001) {
                write!(client, "{:x}\r\n", chunk.len()).unwrap();
                client.write_all(chunk).unwrap();
                client.write_all(b"\r\n").unwrap();
            }
            client.write_all(b"0\r\n\r\n").unwrap();
            let first = response(&mut reader, true).1;
            let deadline = Instant::now() + FIRST_MOVE_TIMEOUT;
            while moved.load(Ordering::Acquire) < 3 {
                assert!(
                    Instant::now() < deadline,
                    "exceeded time: the connection is not handed off"
                );
                write!(client, "PUT /digest HTTP/1.1\r\nContent-Length: 1\r\n\r\nx").unwrap();
                response(&mut reader, true);
            }
            write!(
                client,
                "PUT /file HTTP/1.1\r\nContent-Length: {SIZE}\r\n\r\n"
            )
            .unwrap();
            client.write_all(&body).unwrap();
            [first, response(&mut reader, true).1]
        },
    );
    let answer = format!("{}  {SIZE}\n", synthetic::sha256(SIZE as u64));
    for actual in answers {
        assert_eq!(String::from_utf8(actual).unwrap(), answer);
    }
    assert!(std::fs::read(root.path().join("file")).unwrap() == body);
    assert_eq!(
        std::fs::read_dir(root.path()).unwrap().count(),
        1,
        "the directory must contain only the file"
    );
    assert!(moves >= 3, "moved {moves} times");
}

#[test]
fn http_requests_get_valid_responses() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("file"), "0123456789").unwrap();
    let daemon = FakeDaemon::new();
    let server = Server::start(&daemon, "n1", &["--root", root.path().to_str().unwrap()]);
    let mut client = connect_client(server.address);
    let mut reader = BufReader::new(client.try_clone().unwrap());
    let mut ask = |request: &str, with_body| {
        client.write_all(request.as_bytes()).unwrap();
        let (head, body) = response(&mut reader, with_body);
        (head, String::from_utf8_lossy(&body).into_owned())
    };
    let (head, body) = ask("GET /file HTTP/1.1\r\n\r\n", true);
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && body == "0123456789",
        "{head}"
    );
    let (head, body) = ask("GET /file HTTP/1.1\r\nRange: bytes=-3\r\n\r\n", true);
    assert!(
        head.starts_with("HTTP/1.1 206 ") && head.contains("bytes 7-9/10") && body == "789",
        "{head}"
    );
    let (head, _) = ask("GET /file HTTP/1.1\r\nRange: bytes=10-\r\n\r\n", true);
    assert!(
        head.starts_with("HTTP/1.1 416 ") && head.contains("bytes */10"),
        "{head}"
    );
    let (head, _) = ask("HEAD /file HTTP/1.1\r\n\r\n", false);
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.contains("content-length: 10"),
        "{head}"
    );
    assert_eq!(
        ask("GET /synthetic/9.sha256 HTTP/1.1\r\n\r\n", true)
            .1
            .trim(),
        synthetic::sha256(9)
    );
    assert!(
        ask("GET /../file HTTP/1.1\r\n\r\n", true)
            .0
            .starts_with("HTTP/1.1 404 ")
    );
    assert!(
        ask("PUT /no/such HTTP/1.1\r\nContent-Length: 1\r\n\r\n", true)
            .0
            .starts_with("HTTP/1.1 409 ")
    );
    // The last response ended the connection.
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn server_works_without_a_daemon() {
    let mut process = Command::new(env!("CARGO_BIN_EXE_fileserver"))
        .args(["--listen", "127.0.0.1:0", "--socket", "/nowhere/app.sock"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let mut client = connect_client(
        line.trim()
            .strip_prefix("listening on ")
            .unwrap()
            .parse()
            .unwrap(),
    );
    client
        .write_all(b"GET /synthetic/100 HTTP/1.0\r\n\r\n")
        .unwrap();
    let (head, body) = response(&mut BufReader::new(client), true);
    assert!(head.contains("connection: close") && body == expected(0, 100));
    process.kill().unwrap();
    let stderr = process.wait_with_output().unwrap().stderr;
    assert!(String::from_utf8_lossy(&stderr).contains("without Holdfast"));
}
