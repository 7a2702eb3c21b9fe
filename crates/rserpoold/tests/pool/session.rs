//! A session with an element of the same daemon and a registrar, and limits on the harm that a user can do to an
//! element.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use holdfast_api::control::BlockingControlClient;
use holdfast_api::pool::{
    DATA_BYTES_MAX, Element, ElementEvent, ElementService, PoolSession, RegistrationRequest,
    SelectionRule, SessionEvent, SessionOptions,
};

use crate::{Daemon, TIMEOUT, wait_for};

/// A registrar that ends with the test.
struct Registrar(Child);

impl Drop for Registrar {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a registrar in `directory`; returns its SCTP address and its UDP port.
fn start_registrar(directory: &Path) -> (Registrar, String, u16) {
    let config = directory.join("registrar.toml");
    let text = format!(
        r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = 0
enrp_port = 0
raw = false
encapsulation_port = 0
run_dir = "{}"
"#,
        directory.display()
    );
    std::fs::write(&config, text).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_rserpoold"));
    command.args(["registrar", "--config"]).arg(config);
    let child = Registrar(command.spawn().expect("rserpoold"));
    let client = BlockingControlClient::new(directory.join("registrar.sock")).expect("a client");
    let status = wait_for("a registrar that serves", || {
        let status = client.run(|client| client.registrar()).ok()?;
        status.ready.then_some(status)
    });
    let udp = status.encapsulation_port.expect("a UDP port");
    (child, status.asap[0].to_string(), udp)
}

/// Opens a user's session; another thread receives its events.
fn open_session(socket: &Path) -> (Arc<PoolSession>, Receiver<SessionEvent>) {
    let session = Arc::new(PoolSession::open(socket, "echo").expect("a channel"));
    let (sender, events) = channel();
    let source = session.clone();
    std::thread::spawn(move || {
        while let Ok(Some(event)) = source.next_event() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    (session, events)
}

/// Waits until the session is up, and returns the number of the connection.
fn wait_until_up(events: &Receiver<SessionEvent>) -> u64 {
    match events.recv_timeout(TIMEOUT).expect("an event") {
        SessionEvent::Up { connection, .. } => connection,
        other => panic!("{other:?}"),
    }
}

fn register_element(socket: &Path, service: ElementService) -> Element {
    let element = Element::register(socket, RegistrationRequest::new("echo", service));
    let element = element.expect("a channel");
    let registered = || {
        matches!(
            element.next_event(),
            Ok(Some(ElementEvent::Registered { .. }))
        )
        .then_some(())
    };
    wait_for("the registration", registered);
    element
}

#[test]
fn user_that_overruns_element_loses_only_its_session() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = start_registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let addresses = Vec::new();
    let element = register_element(&socket, ElementService::Sessions { addresses, port: 0 });

    let (session, events) = open_session(&socket);
    let connection = wait_until_up(&events);
    session.send(connection + 1, b"not yet").expect("sent");
    session.send(connection, b"hello").expect("sent");
    let number = wait_for("the message", || match element.next_event() {
        Ok(Some(ElementEvent::Data { session, bytes })) => {
            assert_eq!(bytes, b"hello");
            Some(session)
        }
        _ => None,
    });
    element.send(number, b"answer").expect("sent");
    let bytes = b"answer".to_vec();
    let answer = events.recv_timeout(TIMEOUT).expect("an answer");
    assert_eq!(answer, SessionEvent::Data { bytes });

    // The element reads nothing, and the user keeps sending.
    let full = vec![7; DATA_BYTES_MAX];
    let broken = wait_for("the session's end", || {
        session.send(connection, &full).expect("sent");
        events.try_recv().ok()
    });
    assert!(
        matches!(
            broken,
            SessionEvent::ElementLost {
                closed_in_order: false,
                ..
            }
        ),
        "{broken:?}"
    );
    drop((session, events));
    // The element still receives the accepted data, followed by the end of the session; then it serves other users.
    let closed = |event: &ElementEvent| *event == ElementEvent::Closed { session: number };
    wait_for("the end of the session", || {
        let event = element.next_event().expect("a channel").expect("an event");
        closed(&event).then_some(())
    });
    let (_session, events) = open_session(&socket);
    wait_until_up(&events);
}

/// Number of bytes far beyond the daemon's and the sockets' buffers.
const MORE_THAN_BUFFERS: usize = 48 << 20;
/// Time without progress after which the element counts as blocked.
const BLOCKED_AFTER: Duration = Duration::from_millis(500);

#[test]
fn slow_reader_slows_element_without_loss() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = start_registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let element_address = listener.local_addr().expect("an address");
    let _element = register_element(&socket, ElementService::Tcp(element_address));
    let session = PoolSession::open(&socket, "echo").expect("a channel");
    let (mut stream, _) = listener.accept().expect("a user");
    // The element sends until no data is accepted for a while; then the user begins to read.
    stream
        .set_write_timeout(Some(BLOCKED_AFTER))
        .expect("a limit");
    let (piece, mut sent_bytes) = (vec![7; 64 << 10], 0);
    while sent_bytes < MORE_THAN_BUFFERS {
        match stream.write(&piece[..piece.len().min(MORE_THAN_BUFFERS - sent_bytes)]) {
            Ok(length) => sent_bytes += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("after {sent_bytes} bytes: {error}"),
        }
    }
    let reader = std::thread::spawn(move || {
        let mut received_bytes = 0;
        while received_bytes < MORE_THAN_BUFFERS {
            match session.next_event().expect("a channel").expect("an event") {
                SessionEvent::Data { bytes } => received_bytes += bytes.len(),
                SessionEvent::Up { connection, .. } => {
                    session.finish_sending(connection).expect("said")
                }
                other => panic!("after {received_bytes} bytes: {other:?}"),
            }
        }
        session.next_event().expect("a channel")
    });
    stream.set_write_timeout(None).expect("no limit");
    stream
        .write_all(&vec![7; MORE_THAN_BUFFERS - sent_bytes])
        .expect("taken");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("the user's end");
    drop(stream);
    let last = reader.join().expect("all of it");
    assert_eq!((last, rest.len()), (Some(SessionEvent::Finished), 0));
}

/// Registers an element that answers each message with its name after a delay, or never; in the latter case it signals
/// the first message. Returns the element's ID.
fn start_answering_element(
    socket: &Path,
    name: &'static [u8],
    delay: Option<Duration>,
) -> (String, Receiver<()>) {
    let addresses = Vec::new();
    let service = ElementService::Sessions { addresses, port: 0 };
    let element = Element::register(socket, RegistrationRequest::new("two", service));
    let element = element.expect("a channel");
    let id = wait_for("the registration", || match element.next_event() {
        Ok(Some(ElementEvent::Registered { id, .. })) => Some(id),
        _ => None,
    });
    let (request_sender, request_receiver) = channel();
    std::thread::spawn(move || {
        while let Ok(Some(event)) = element.next_event() {
            if let ElementEvent::Data { session, .. } = event {
                // The test may have ended already.
                let _ = match delay {
                    Some(after) => {
                        std::thread::sleep(after);
                        element.send(session, name).is_ok()
                    }
                    None => request_sender.send(()).is_ok(),
                };
            }
        }
    });
    (id, request_receiver)
}

/// Opens a session that has sent a request; returns the session and its element.
fn open_session_with_request(socket: &Path, choose: SelectionRule) -> (PoolSession, String) {
    let options = SessionOptions {
        rule: choose,
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(socket, "two", options).expect("a channel");
    match session.next_event().expect("a channel").expect("an event") {
        SessionEvent::Up {
            connection,
            element,
            ..
        } => {
            session.send(connection, b"who?").expect("sent");
            (session, element)
        }
        other => panic!("{other:?}"),
    }
}

fn receive_answer(session: &PoolSession) -> Vec<u8> {
    match session.next_event().expect("a channel").expect("an event") {
        SessionEvent::Data { bytes } => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn power_of_two_choices_prefers_faster_element() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = start_registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    // A delay far longer than a busy machine adds to the quick element.
    start_answering_element(&socket, b"slow", Some(Duration::from_secs(4)));
    start_answering_element(&socket, b"quick", Some(Duration::ZERO));
    let ask =
        |_| receive_answer(&open_session_with_request(&socket, SelectionRule::PowerOfTwoChoices).0);
    let answers: Vec<Vec<u8>> = (0..8).map(ask).collect();
    // Each element is tried once; by the pool's policy the two would alternate.
    let slow = answers.iter().filter(|reply| *reply == b"slow").count();
    assert_eq!(slow, 1, "{answers:?}");
}

/// Lifetime of answers to probes, plus a margin.
const PROBE_EXPIRY: Duration = Duration::from_millis(1_100);

#[test]
fn probing_users_avoid_busy_element() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = start_registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let (stuck, requests) = start_answering_element(&socket, b"stuck", None);
    start_answering_element(&socket, b"free", Some(Duration::ZERO));
    // Both elements are idle at first, so each is selected sooner or later.
    let _waiting_session = wait_for("a session with the stuck element", || {
        let (session, element) = open_session_with_request(&socket, SelectionRule::Prequal);
        if element == stuck {
            return Some(session);
        }
        assert_eq!(receive_answer(&session), b"free");
        None
    });
    requests.recv_timeout(TIMEOUT).expect("a request");
    // Each selection waits for fresh probe answers: older knowledge also counts the daemon's own last selections.
    let is_stuck_selected = |_| {
        std::thread::sleep(PROBE_EXPIRY);
        let (session, element) = open_session_with_request(&socket, SelectionRule::Prequal);
        if element != stuck {
            assert_eq!(receive_answer(&session), b"free");
        }
        usize::from(element == stuck)
    };
    let stuck_selections: usize = (0..8).map(is_stuck_selected).sum();
    // An answer that takes a second arrives too late, and the selection is random.
    assert!(
        stuck_selections <= 2,
        "the busy element was selected {stuck_selections} times"
    );
}
