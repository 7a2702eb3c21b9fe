//! Tests of `holdfast pool connect` with elements over TCP, UDP and native SCTP that end sessions or do not answer. The
//! elements are threads of the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use holdfast_api::pool::{Element, ElementEvent, ElementService, RegistrationRequest};
use holdfast_sctp::{TransportConfig, TransportEvent};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::connect::{ConnectCommand, LONG_LINGER_S, start_pool_host};
use super::{PATIENCE, PoolHost};

/// Registers a TCP element, served by a thread in the host: `serve` handles each connection, and returns false after
/// the last one.
fn register_tcp_element(
    host: &PoolHost,
    socket: &Path,
    serve: impl Fn(TcpStream) -> bool + Send + Sync + 'static,
) -> (Element, JoinHandle<()>) {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a listener");
    let listener = in_host(host, bind);
    let at = listener.local_addr().expect("an address");
    let element = register_element(socket, ElementService::Tcp(at));
    let element_thread = spawn(
        move || {
            while serve(listener.accept().expect("a connection").0) {}
        },
    );
    (element, element_thread)
}

/// Returns the result of a closure that runs in the host's network namespace.
fn in_host<T: Send>(host: &PoolHost, work: impl FnOnce() -> T + Send) -> T {
    let run_inside = || {
        host.lab.lab().enter_net_namespace("n1").expect("a host");
        work()
    };
    std::thread::scope(|scope| scope.spawn(run_inside).join().expect("a thread"))
}

fn register_element(socket: &Path, service: ElementService) -> Element {
    let element =
        Element::register(socket, RegistrationRequest::new("p", service)).expect("a channel");
    loop {
        match element.next_event().expect("a channel").expect("an event") {
            ElementEvent::Registered { .. } => return element,
            ElementEvent::Home { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a whole session: sends the question, closes the input, and returns output, notes and success.
fn ask_question(host: &PoolHost, question: &str) -> (String, String, bool) {
    let mut session = ConnectCommand::start(host, "p", LONG_LINGER_S);
    session.write(question);
    session.input = None;
    session.finish()
}

fn read_all(stream: &mut TcpStream) -> String {
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("a question");
    all
}

#[test]
fn unanswered_question_over_tcp_fails() {
    let Some((host, socket)) = start_pool_host("tcp") else {
        return;
    };
    // The element answers the line "ask", and no other line.
    let (_element, served) = register_tcp_element(&host, &socket, |mut stream| {
        match read_all(&mut stream).as_str() {
            "ask\n" => stream.write_all(b"answer\n").expect("sent"),
            "stop\n" => return false,
            _ => {}
        }
        true
    });
    let (answer, notes, success) = ask_question(&host, "ask\n");
    assert_eq!((answer.as_str(), success), ("answer\n", true), "{notes}");
    let (answer, notes, success) = ask_question(&host, "do not tell\n");
    assert!(answer.is_empty() && !success, "{answer}{notes}");
    assert!(notes.contains("no answer came"), "{notes}");
    ask_question(&host, "stop\n");
    served.join().expect("an element");
}

#[test]
fn truncated_answer_fails() {
    let Some((host, socket)) = start_pool_host("cut") else {
        return;
    };
    let (cut_sender, cut_receiver) = channel();
    let cuts = Mutex::new(cut_receiver);
    let (_element, served) = register_tcp_element(&host, &socket, move |mut stream| {
        read_all(&mut stream);
        stream.write_all(b"an answer, or a part\n").expect("sent");
        let cuts = cuts.lock().expect("a lock");
        cuts.recv_timeout(PATIENCE).expect("an end");
        let reset = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        reset.expect("a reset");
        false
    });
    let mut session = ConnectCommand::start(&host, "p", LONG_LINGER_S);
    session.write("ask\n");
    session.close_input(&host);
    assert_eq!(session.read_line(), "an answer, or a part\n");
    cut_sender.send(()).expect("an element");
    let (_, notes, success) = session.finish();
    assert!(!success && notes.contains("is lost"), "{notes}");
    served.join().expect("an element");
}

#[test]
fn element_closing_idle_sessions_is_not_reported() {
    let Some((host, socket)) = start_pool_host("idle") else {
        return;
    };
    // One question per connection.
    let (_element, served) = register_tcp_element(&host, &socket, |stream| {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).expect("a question");
        stream.get_mut().write_all(line.as_bytes()).expect("sent");
        if line == "last\n" {
            stream.read_to_string(&mut line).expect("the end");
        }
        line != "last\n"
    });
    let mut session = ConnectCommand::start(&host, "p", LONG_LINGER_S);
    for line in ["one\n", "two\n", "last\n"] {
        // The session has an element.
        session.wait_for_note(" at tcp ");
        session.write(line);
        assert_eq!(session.read_line(), line);
        if line != "last\n" {
            session.wait_for_note("has ended the session, continuing at another");
        }
    }
    let client = host
        .lab
        .control_client("n1", "registrar")
        .expect("a client");
    let status = client.run(|client| client.registrar()).expect("a status");
    assert_eq!(status.counters.unreachable_reports, 0);
    session.input = None;
    let (_, notes, success) = session.finish();
    assert!(success, "{notes}");
    served.join().expect("an element");
}

#[test]
fn unanswered_question_over_udp_fails() {
    let Some((host, socket)) = start_pool_host("udp") else {
        return;
    };
    let element_socket = in_host(&host, || UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    let at = element_socket.local_addr().expect("an address");
    let _element = register_element(&socket, ElementService::Udp(at));
    let served = spawn(move || {
        let mut datagram = [0; 1000];
        loop {
            let (length, from) = element_socket.recv_from(&mut datagram).expect("a datagram");
            match &datagram[..length] {
                b"stop" => return,
                b"silence" => {}
                other => drop(element_socket.send_to(other, from).expect("sent")),
            }
        }
    });
    // UDP has no end of a session: only the absence of datagrams ends it.
    let mut session = ConnectCommand::start(&host, "p", "0.1");
    session.write("there and back\n");
    assert_eq!(session.read_line(), "there and back\n");
    session.input = None;
    let (_, notes, success) = session.finish();
    assert!(success, "{notes}");
    let mut session = ConnectCommand::start(&host, "p", "0.1");
    session.write("silence");
    session.input = None;
    let (_, notes, success) = session.finish();
    assert!(!success && notes.contains("no answer came"), "{notes}");
    let mut session = ConnectCommand::start(&host, "p", "0.1");
    session.write("stop");
    served.join().expect("an element");
    session.input = None;
    session.finish();
}

#[test]
fn element_with_native_sctp_answers() {
    let Some((host, socket)) = start_pool_host("sctp") else {
        return;
    };
    let at = "127.0.0.1:0".parse().expect("an address");
    let config = TransportConfig {
        encapsulation: None,
        ..TransportConfig::new(vec![at])
    };
    let mut sctp_endpoint = in_host(&host, || holdfast_sctp::open(&config).expect("an endpoint"));
    let at = sctp_endpoint.local_addresses().expect("addresses");
    let _element = register_element(&socket, ElementService::Sctp(at));
    let served = spawn(move || {
        let (mut events, mut has_ended) = (Vec::new(), false);
        while !has_ended {
            let mut fds = [PollFd::new(sctp_endpoint.fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE).expect("a descriptor");
            sctp_endpoint.recv_batch(&mut events).expect("events");
            for event in events.drain(..) {
                match event {
                    TransportEvent::Message { assoc, message } => {
                        sctp_endpoint.send(assoc, &message).expect("sent")
                    }
                    TransportEvent::Down { .. } => has_ended = true,
                    _ => {}
                }
            }
            sctp_endpoint.flush().expect("sent");
        }
    });
    let mut session = ConnectCommand::start(&host, "p", "0.1");
    session.write("there\nand back\n");
    assert_eq!(session.read_line(), "there\n");
    assert_eq!(session.read_line(), "and back\n");
    session.input = None;
    let (_, notes, success) = session.finish();
    assert!(success && notes.contains(" at sctp "), "{notes}");
    served.join().expect("an element");
}
