//! Users that choose elements by probes, and unmodified servers on other hosts.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use holdfast_api::pool::{PoolSession, SelectionRule, SessionEvent, SessionOptions};
use holdfast_sys::sock_diag::tcp_service_connections;
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::{ProcessLab, command_words};

use super::connect::LONG_LINGER_S;
use super::{PATIENCE, echo_program, lock_lab, to_text};

const ELEMENTS: [&str; 2] = ["n2", "n3"];
const PORT: u16 = 7007;
/// Number of other clients' connections to the busy server.
const OTHER_CONNECTIONS: u32 = 3;
/// Number of sessions, and the number of them that may reach the busy server: answers to probes may be late on a busy
/// machine.
const SESSIONS: usize = 16;
const BUSY_SESSIONS_MAX: usize = SESSIONS / 4;
/// Lifetime of answers to probes, plus a margin.
const PROBE_LIFETIME: Duration = Duration::from_millis(1_100);

/// Brings up a registrar, two servers on separate hosts, and a pool daemon for users.
fn start_pool() -> ProcessLab {
    let name = format!("prequal-{}", std::process::id());
    let mut lab = ProcessLab::up(&name, 3).expect("a lab");
    lab.start_registrar("n1", None).expect("a registrar");
    let registrar = lab.registrar_arguments(&["n1"]).expect("a host");
    let holdfast = find_program("holdfast").expect("holdfast");
    for host in ELEMENTS {
        let mut command = command_words(["pool", "register", "--handle", "two"]);
        command.extend(registrar.iter().cloned());
        let server = format!("0.0.0.0:{PORT}");
        command.extend(command_words(["--", &echo_program(), "--listen", &server]));
        lab.run(host, "register", &holdfast, &command)
            .expect("an element");
    }
    lab.start_pool_daemon("c1", &["n1"]).expect("a pool daemon");
    let client = lab.control_client("n1", "registrar").expect("a client");
    let both_listed = || {
        let pool = client.run(|client| client.pool("two")).ok()?;
        (pool.elements.len() == ELEMENTS.len()).then_some(())
    };
    lab.wait_for("both elements", PATIENCE, both_listed)
        .expect("a pool");
    lab
}

/// Returns the result of a closure that runs in a host's network namespace.
fn in_host<T: Send>(lab: &ProcessLab, host: &str, work: impl FnOnce() -> T + Send) -> T {
    let run_inside = || {
        lab.lab().enter_net_namespace(host).expect("a host");
        work()
    };
    std::thread::scope(|scope| scope.spawn(run_inside).join().expect("a thread"))
}

/// Waits until a server has this number of connections.
fn wait_for_connections(lab: &ProcessLab, host: &str, connections: u32) {
    let at = SocketAddr::new(lab.address(host).expect("a host"), PORT);
    let has_connections = || {
        let count = in_host(lab, host, || tcp_service_connections(at)).expect("told");
        (count == Some(connections)).then_some(())
    };
    lab.wait_for("connections", PATIENCE, has_connections)
        .expect("them");
}

/// Opens a session that sends one request, and returns its element's address.
fn open_session(lab: &ProcessLab) -> IpAddr {
    let socket = lab.run_path("c1", "pool-app.sock").expect("a host");
    let options = SessionOptions {
        rule: SelectionRule::Prequal,
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(socket, "two", options).expect("a channel");
    let mut element_address = None;
    loop {
        match session.next_event().expect("a channel").expect("an event") {
            SessionEvent::Up {
                connection,
                addresses,
                ..
            } => {
                element_address = addresses.first().map(SocketAddr::ip);
                session.send(connection, b"x").expect("sent");
            }
            SessionEvent::Data { bytes } if bytes == b"x" => {
                return element_address.expect("it was up");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn probing_users_choose_less_busy_element() {
    let Some(_alone) = lock_lab() else { return };
    let lab = start_pool();
    // A first session makes the daemon probe the hosts; until then elements are chosen at random.
    open_session(&lab);
    for busy in ELEMENTS {
        let at = SocketAddr::new(lab.address(busy).expect("a host"), PORT);
        let connect = |_| TcpStream::connect(at).expect("connected");
        let other_connections: Vec<TcpStream> =
            in_host(&lab, "c1", || (0..OTHER_CONNECTIONS).map(connect).collect());
        wait_for_connections(&lab, busy, OTHER_CONNECTIONS);
        std::thread::sleep(PROBE_LIFETIME);
        let chosen_elements: Vec<IpAddr> = (0..SESSIONS).map(|_| open_session(&lab)).collect();
        let busy_sessions = chosen_elements
            .iter()
            .filter(|address| **address == at.ip())
            .count();
        assert!(
            busy_sessions <= BUSY_SESSIONS_MAX,
            "{busy} is busy: {chosen_elements:?}"
        );
        run_connect_command(&lab);
        drop(other_connections);
        wait_for_connections(&lab, busy, 0);
    }
}

/// Runs `holdfast pool connect` with a daemon of its own, which has no answers to probes yet.
fn run_connect_command(lab: &ProcessLab) {
    let mut command = lab.lab().command("c1").expect("a host");
    command
        .arg(find_program("holdfast").expect("holdfast"))
        .args(["pool", "connect", "two", "--choose", "prequal"])
        .args(["--linger", LONG_LINGER_S])
        .args(lab.registrar_arguments(&["n1"]).expect("a host"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("a command that runs");
    let mut input = child.stdin.take().expect("its input");
    input.write_all(b"hello\n").expect("written");
    drop(input);
    let output = child.wait_with_output().expect("its end");
    let notes = to_text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    assert_eq!(to_text(&output.stdout), "hello\n", "{notes}");
}
