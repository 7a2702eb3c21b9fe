//! A session with an element of the same daemon and a registrar, and limits on the harm that a user can do to an
//! element.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use holdfast_api::control::BlockingClient;
use holdfast_api::pool::{
    Choose, DATA_BYTES_MAX, Element, ElementEvent, PoolSession, Registration, Service,
    SessionEvent, SessionOptions,
};

use crate::{Daemon, PATIENCE, until};

/// A registrar that ends with the test.
struct Registrar(Child);

impl Drop for Registrar {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a registrar in `directory`; returns its SCTP address and its UDP port.
fn registrar(directory: &Path) -> (Registrar, String, u16) {
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
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfastd"));
    command
        .args(["--role", "registrar", "--config"])
        .arg(config);
    let child = Registrar(command.spawn().expect("holdfastd"));
    let client = BlockingClient::new(directory.join("registrar.sock")).expect("a client");
    let status = until("a registrar that serves", || {
        let status = client.run(|client| client.registrar()).ok()?;
        status.ready.then_some(status)
    });
    let udp = status.encapsulation_port.expect("a UDP port");
    (child, status.asap[0].to_string(), udp)
}

/// Opens a user's session; another thread receives its events.
fn open(socket: &Path) -> (Arc<PoolSession>, Receiver<SessionEvent>) {
    let session = Arc::new(PoolSession::open(socket, "echo").expect("a channel"));
    let (sender, events) = channel();
    let source = session.clone();
    std::thread::spawn(move || {
        while let Ok(Some(event)) = source.next() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    (session, events)
}

/// Waits until the session is up, and returns the number of the connection.
fn is_up(events: &Receiver<SessionEvent>) -> u64 {
    match events.recv_timeout(PATIENCE).expect("an event") {
        SessionEvent::Up { connection, .. } => connection,
        other => panic!("{other:?}"),
    }
}

fn registered(socket: &Path, service: Service) -> Element {
    let element = Element::register(socket, Registration::new("echo", service));
    let element = element.expect("a channel");
    let registered =
        || matches!(element.next(), Ok(Some(ElementEvent::Registered { .. }))).then_some(());
    until("the registration", registered);
    element
}

#[test]
fn a_user_that_sends_more_than_an_element_reads_costs_itself_the_session_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let addresses = Vec::new();
    let element = registered(&socket, Service::Sessions { addresses, port: 0 });

    let (session, events) = open(&socket);
    let connection = is_up(&events);
    session.send(connection + 1, b"not yet").expect("sent");
    session.send(connection, b"hello").expect("sent");
    let number = until("the message", || match element.next() {
        Ok(Some(ElementEvent::Data { session, bytes })) => {
            assert_eq!(bytes, b"hello");
            Some(session)
        }
        _ => None,
    });
    element.send(number, b"answer").expect("sent");
    let bytes = b"answer".to_vec();
    let answer = events.recv_timeout(PATIENCE).expect("an answer");
    assert_eq!(answer, SessionEvent::Data { bytes });

    // The element reads nothing, and the user keeps sending.
    let full = vec![7; DATA_BYTES_MAX];
    let broken = until("the end of patience", || {
        session.send(connection, &full).expect("sent");
        events.try_recv().ok()
    });
    assert!(
        matches!(
            broken,
            SessionEvent::Broken {
                in_order: false,
                ..
            }
        ),
        "{broken:?}"
    );
    drop((session, events));
    // The element still receives the accepted data, followed by the end of the session; then it serves other users.
    let closed = |event: &ElementEvent| *event == ElementEvent::Closed { session: number };
    until("the end of the session", || {
        let event = element.next().expect("a channel").expect("an event");
        closed(&event).then_some(())
    });
    let (_session, events) = open(&socket);
    is_up(&events);
}

/// Number of bytes far beyond the daemon's and the sockets' buffers.
const MUCH: usize = 48 << 20;
/// Time without progress after which the element counts as blocked.
const PAUSE: Duration = Duration::from_millis(500);

#[test]
fn a_user_that_reads_late_slows_its_element_and_loses_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let own = listener.local_addr().expect("an address");
    let _element = registered(&socket, Service::Tcp(own));
    let session = PoolSession::open(&socket, "echo").expect("a channel");
    let (mut stream, _) = listener.accept().expect("a user");
    // The element sends until no data is accepted for a while; then the user begins to read.
    stream.set_write_timeout(Some(PAUSE)).expect("a limit");
    let (piece, mut said) = (vec![7; 64 << 10], 0);
    while said < MUCH {
        match stream.write(&piece[..piece.len().min(MUCH - said)]) {
            Ok(length) => said += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("after {said} bytes: {error}"),
        }
    }
    let reader = std::thread::spawn(move || {
        let mut heard = 0;
        while heard < MUCH {
            match session.next().expect("a channel").expect("an event") {
                SessionEvent::Data { bytes } => heard += bytes.len(),
                SessionEvent::Up { connection, .. } => session.finish(connection).expect("said"),
                other => panic!("after {heard} bytes: {other:?}"),
            }
        }
        session.next().expect("a channel")
    });
    stream.set_write_timeout(None).expect("no limit");
    stream.write_all(&vec![7; MUCH - said]).expect("taken");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("the user's end");
    drop(stream);
    let last = reader.join().expect("all of it");
    assert_eq!((last, rest.len()), (Some(SessionEvent::Finished), 0));
}

/// Registers an element that answers each message with its name after a delay, or never; in the latter case it signals
/// the first message. Returns the element's ID.
fn answering(
    socket: &Path,
    name: &'static [u8],
    after: Option<Duration>,
) -> (String, Receiver<()>) {
    let addresses = Vec::new();
    let service = Service::Sessions { addresses, port: 0 };
    let element = Element::register(socket, Registration::new("two", service));
    let element = element.expect("a channel");
    let id = until("the registration", || match element.next() {
        Ok(Some(ElementEvent::Registered { id, .. })) => Some(id),
        _ => None,
    });
    let (tell, told) = channel();
    std::thread::spawn(move || {
        while let Ok(Some(event)) = element.next() {
            if let ElementEvent::Data { session, .. } = event {
                // The test may have ended already.
                let _ = match after {
                    Some(after) => {
                        std::thread::sleep(after);
                        element.send(session, name).is_ok()
                    }
                    None => tell.send(()).is_ok(),
                };
            }
        }
    });
    (id, told)
}

/// Opens a session that has sent a request; returns the session and its element.
fn asking(socket: &Path, choose: Choose) -> (PoolSession, String) {
    let options = SessionOptions {
        choose,
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(socket, "two", options).expect("a channel");
    match session.next().expect("a channel").expect("an event") {
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

fn answer(session: &PoolSession) -> Vec<u8> {
    match session.next().expect("a channel").expect("an event") {
        SessionEvent::Data { bytes } => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn users_who_choose_stay_with_the_element_that_answers_sooner() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    // A delay far longer than a busy machine adds to the quick element.
    answering(&socket, b"slow", Some(Duration::from_secs(4)));
    answering(&socket, b"quick", Some(Duration::ZERO));
    let ask = |_| answer(&asking(&socket, Choose::P2c).0);
    let answers: Vec<Vec<u8>> = (0..8).map(ask).collect();
    // Each element is tried once; by the pool's policy the two would alternate.
    let slow = answers.iter().filter(|one| *one == b"slow").count();
    assert_eq!(slow, 1, "{answers:?}");
}

/// Lifetime of answers to probes, plus a margin.
const TOO_OLD: Duration = Duration::from_millis(1_100);

#[test]
fn users_who_probe_leave_an_element_alone_that_has_work() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let (stuck, has_work) = answering(&socket, b"stuck", None);
    answering(&socket, b"free", Some(Duration::ZERO));
    // Both elements are idle at first, so each is selected sooner or later.
    let _waits = until("a session with the one that never answers", || {
        let (session, element) = asking(&socket, Choose::Prequal);
        if element == stuck {
            return Some(session);
        }
        assert_eq!(answer(&session), b"free");
        None
    });
    has_work.recv_timeout(PATIENCE).expect("its work");
    // Each selection waits for fresh probe answers: older knowledge also counts the daemon's own last selections.
    let taken = |_| {
        std::thread::sleep(TOO_OLD);
        let (session, element) = asking(&socket, Choose::Prequal);
        if element != stuck {
            assert_eq!(answer(&session), b"free");
        }
        usize::from(element == stuck)
    };
    let taken: usize = (0..8).map(taken).sum();
    // An answer that takes a second arrives too late, and the selection is random.
    assert!(taken <= 2, "it was taken {taken} times with work");
}
