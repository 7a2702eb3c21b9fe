//! A session with an element of the same daemon, with a registrar: and what a user cannot do to an element.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use holdfast_api::control::BlockingClient;
use holdfast_api::pool::{
    DATA_BYTES_MAX, Element, ElementEvent, PoolSession, Registration, Service, SessionEvent,
};

use crate::{Daemon, PATIENCE, until};

/// A registrar. Ends with the test.
struct Registrar(Child);

impl Drop for Registrar {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts one in `directory`; gives its SCTP address, and its UDP port.
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

/// A user's session, whose events another thread takes.
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

fn is_up(events: &Receiver<SessionEvent>) {
    let event = events.recv_timeout(PATIENCE).expect("an event");
    assert!(matches!(event, SessionEvent::Up { .. }), "{event:?}");
}

#[test]
fn a_user_that_sends_more_than_an_element_reads_costs_itself_the_session_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_registrar, at, udp) = registrar(directory.path());
    let daemon = Daemon::with_registrar(&at, udp);
    let socket = daemon.path("pool-app.sock");
    let addresses = Vec::new();
    let service = Service::Sessions { addresses, port: 0 };
    let element = Element::register(&socket, Registration::new("echo", service));
    let element = element.expect("a channel");
    let registered =
        || matches!(element.next(), Ok(Some(ElementEvent::Registered { .. }))).then_some(());
    until("the registration", registered);

    let (session, events) = open(&socket);
    is_up(&events);
    session.send(b"hello").expect("sent");
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

    // The element reads nothing, and the user does not stop.
    let full = vec![7; DATA_BYTES_MAX];
    let broken = until("the end of patience", || {
        session.send(&full).expect("sent");
        events.try_recv().ok()
    });
    assert!(matches!(broken, SessionEvent::Broken { .. }), "{broken:?}");
    drop((session, events));
    // What was taken in comes, then the end, and the element is there for others.
    let closed = |event: &ElementEvent| *event == ElementEvent::Closed { session: number };
    until("the end of the session", || {
        let event = element.next().expect("a channel").expect("an event");
        closed(&event).then_some(())
    });
    let (_session, events) = open(&socket);
    is_up(&events);
}
