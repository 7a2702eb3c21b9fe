//! Users that choose elements by probes, and unmodified servers on other hosts.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use holdfast_api::pool::{Choose, PoolSession, SessionEvent, SessionOptions};
use holdfast_bench::cluster::find_program;
use holdfast_bench::pools::{PoolLab, words};
use holdfast_sys::sock_diag::tcp_service;

use super::connect::LONG;
use super::{PATIENCE, alone, echo, text};

const ELEMENTS: [&str; 2] = ["n2", "n3"];
const PORT: u16 = 7007;
/// Number of other clients' connections to the busy server.
const OTHERS: u32 = 3;
/// Number of sessions, and the number of them that may reach the busy server: answers to probes may be late on a busy
/// machine.
const SESSIONS: usize = 16;
const ASTRAY_MAX: usize = SESSIONS / 4;
/// Lifetime of answers to probes, plus a margin.
const TOO_OLD: Duration = Duration::from_millis(1_100);

/// Brings up a registrar, two servers on separate hosts, and a pool daemon for users.
fn scene() -> PoolLab {
    let name = format!("prequal-{}", std::process::id());
    let mut lab = PoolLab::up(&name, 3).expect("a lab");
    lab.registrar("n1", None).expect("a registrar");
    let registrar = lab.registrar_words(&["n1"]).expect("a host");
    let holdfast = find_program("holdfast").expect("holdfast");
    for host in ELEMENTS {
        let mut command = words(["pool", "register", "--handle", "two"]);
        command.extend(registrar.iter().cloned());
        let server = format!("0.0.0.0:{PORT}");
        command.extend(words(["--", &echo(), "--listen", &server]));
        lab.run(host, "register", &holdfast, &command)
            .expect("an element");
    }
    lab.pool_daemon("c1", &["n1"]).expect("a pool daemon");
    let client = lab.control("n1", "registrar").expect("a client");
    let both = || {
        let pool = client.run(|client| client.pool("two")).ok()?;
        (pool.elements.len() == ELEMENTS.len()).then_some(())
    };
    lab.until("both elements", PATIENCE, both).expect("a pool");
    lab
}

/// Returns the result of a closure that runs in a host's network namespace.
fn in_host<T: Send>(lab: &PoolLab, host: &str, make: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        lab.lab().enter_net(host).expect("a host");
        make()
    };
    std::thread::scope(|scope| scope.spawn(inside).join().expect("a thread"))
}

/// Waits until a server has this number of connections.
fn has(lab: &PoolLab, host: &str, connections: u32) {
    let at = SocketAddr::new(lab.address(host).expect("a host"), PORT);
    let are_there = || {
        let count = in_host(lab, host, || tcp_service(at)).expect("told");
        (count == Some(connections)).then_some(())
    };
    lab.until("connections", PATIENCE, are_there).expect("them");
}

/// Opens a session that sends one request, and returns its element's address.
fn ask(lab: &PoolLab) -> IpAddr {
    let socket = lab.run_file("c1", "pool-app.sock").expect("a host");
    let options = SessionOptions {
        choose: Choose::Prequal,
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(socket, "two", options).expect("a channel");
    let mut at = None;
    loop {
        match session.next().expect("a channel").expect("an event") {
            SessionEvent::Up {
                connection,
                addresses,
                ..
            } => {
                at = addresses.first().map(SocketAddr::ip);
                session.send(connection, b"x").expect("sent");
            }
            SessionEvent::Data { bytes } if bytes == b"x" => return at.expect("it was up"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn users_who_probe_go_where_fewer_connections_are() {
    let Some(_alone) = alone() else { return };
    let lab = scene();
    // A first session makes the daemon probe the hosts; until then elements are chosen at random.
    ask(&lab);
    for busy in ELEMENTS {
        let at = SocketAddr::new(lab.address(busy).expect("a host"), PORT);
        let connect = |_| TcpStream::connect(at).expect("connected");
        let others: Vec<TcpStream> = in_host(&lab, "c1", || (0..OTHERS).map(connect).collect());
        has(&lab, busy, OTHERS);
        std::thread::sleep(TOO_OLD);
        let seen: Vec<IpAddr> = (0..SESSIONS).map(|_| ask(&lab)).collect();
        let astray = seen.iter().filter(|place| **place == at.ip()).count();
        assert!(astray <= ASTRAY_MAX, "{busy} is busy: {seen:?}");
        command(&lab);
        drop(others);
        has(&lab, busy, 0);
    }
}

/// Runs `holdfast pool connect` with a daemon of its own, which has no answers to probes yet.
fn command(lab: &PoolLab) {
    let mut command = lab.lab().command("c1").expect("a host");
    command
        .arg(find_program("holdfast").expect("holdfast"))
        .args(["pool", "connect", "two", "--choose", "prequal"])
        .args(["--linger", LONG])
        .args(lab.registrar_words(&["n1"]).expect("a host"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("a command that runs");
    let mut input = child.stdin.take().expect("its input");
    input.write_all(b"hello\n").expect("written");
    drop(input);
    let output = child.wait_with_output().expect("its end");
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    assert_eq!(text(&output.stdout), "hello\n", "{notes}");
}
