//! Tests of `holdfast pool connect` with elements over TCP, UDP and native SCTP that end sessions or do not answer. The
//! elements are threads of the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use holdfast_api::pool::{Element, ElementEvent, Registration, Service};
use holdfast_sys::transport::{self, Config, Event};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::connect::{LONG, Session, scene};
use super::{Host, PATIENCE};

/// Registers a TCP element, served by a thread in the host: `serve` handles each connection, and returns false after
/// the last one.
fn over_tcp(
    host: &Host,
    socket: &Path,
    serve: impl Fn(TcpStream) -> bool + Send + Sync + 'static,
) -> (Element, JoinHandle<()>) {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a listener");
    let listener = in_host(host, bind);
    let at = listener.local_addr().expect("an address");
    let element = registered(socket, Service::Tcp(at));
    let served = spawn(
        move || {
            while serve(listener.accept().expect("a connection").0) {}
        },
    );
    (element, served)
}

/// Returns the result of a closure that runs in the host's network namespace.
fn in_host<T: Send>(host: &Host, make: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        host.lab.lab().enter_net("n1").expect("a host");
        make()
    };
    std::thread::scope(|scope| scope.spawn(inside).join().expect("a thread"))
}

fn registered(socket: &Path, service: Service) -> Element {
    let element = Element::register(socket, Registration::new("p", service)).expect("a channel");
    loop {
        match element.next().expect("a channel").expect("an event") {
            ElementEvent::Registered { .. } => return element,
            ElementEvent::Home { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a whole session: sends the question, closes the input, and returns output, notes and success.
fn asks(host: &Host, question: &str) -> (String, String, bool) {
    let mut session = Session::start(host, "p", LONG);
    session.write(question);
    session.input = None;
    session.end()
}

fn all(stream: &mut TcpStream) -> String {
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("a question");
    all
}

#[test]
fn what_has_no_answer_over_tcp_is_no_success() {
    let Some((host, socket)) = scene("tcp") else {
        return;
    };
    // The element answers the line "ask", and no other line.
    let (_element, served) = over_tcp(&host, &socket, |mut stream| {
        match all(&mut stream).as_str() {
            "ask\n" => stream.write_all(b"answer\n").expect("sent"),
            "stop\n" => return false,
            _ => {}
        }
        true
    });
    let (answer, notes, success) = asks(&host, "ask\n");
    assert_eq!((answer.as_str(), success), ("answer\n", true), "{notes}");
    let (answer, notes, success) = asks(&host, "do not tell\n");
    assert!(answer.is_empty() && !success, "{answer}{notes}");
    assert!(notes.contains("no answer came"), "{notes}");
    asks(&host, "stop\n");
    served.join().expect("an element");
}

#[test]
fn an_answer_that_is_cut_is_no_success() {
    let Some((host, socket)) = scene("cut") else {
        return;
    };
    let (cut, cuts) = channel();
    let cuts = Mutex::new(cuts);
    let (_element, served) = over_tcp(&host, &socket, move |mut stream| {
        all(&mut stream);
        stream.write_all(b"an answer, or a part\n").expect("sent");
        let cuts = cuts.lock().expect("a lock");
        cuts.recv_timeout(PATIENCE).expect("an end");
        let reset = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        reset.expect("a reset");
        false
    });
    let mut session = Session::start(&host, "p", LONG);
    session.write("ask\n");
    session.finish(&host);
    assert_eq!(session.line(), "an answer, or a part\n");
    cut.send(()).expect("an element");
    let (_, notes, success) = session.end();
    assert!(!success && notes.contains("is lost"), "{notes}");
    served.join().expect("an element");
}

#[test]
fn an_element_that_ends_idle_sessions_is_not_reported() {
    let Some((host, socket)) = scene("idle") else {
        return;
    };
    // One question per connection.
    let (_element, served) = over_tcp(&host, &socket, |stream| {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).expect("a question");
        stream.get_mut().write_all(line.as_bytes()).expect("sent");
        if line == "last\n" {
            stream.read_to_string(&mut line).expect("the end");
        }
        line != "last\n"
    });
    let mut session = Session::start(&host, "p", LONG);
    for line in ["one\n", "two\n", "last\n"] {
        // The session has an element.
        session.noted(" at tcp ");
        session.write(line);
        assert_eq!(session.line(), line);
        if line != "last\n" {
            session.noted("has ended the session, going on at another");
        }
    }
    let client = host.lab.control("n1", "registrar").expect("a client");
    let status = client.run(|client| client.registrar()).expect("a status");
    assert_eq!(status.counters.unreachable_reports, 0);
    session.input = None;
    let (_, notes, success) = session.end();
    assert!(success, "{notes}");
    served.join().expect("an element");
}

#[test]
fn elements_over_udp_answer_or_are_no_success() {
    let Some((host, socket)) = scene("udp") else {
        return;
    };
    let own = in_host(&host, || UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    let at = own.local_addr().expect("an address");
    let _element = registered(&socket, Service::Udp(at));
    let served = spawn(move || {
        let mut datagram = [0; 1000];
        loop {
            let (length, from) = own.recv_from(&mut datagram).expect("a datagram");
            match &datagram[..length] {
                b"stop" => return,
                b"silence" => {}
                other => drop(own.send_to(other, from).expect("sent")),
            }
        }
    });
    // UDP has no end of a session: only the absence of datagrams ends it.
    let mut session = Session::start(&host, "p", "0.1");
    session.write("there and back\n");
    assert_eq!(session.line(), "there and back\n");
    session.input = None;
    let (_, notes, success) = session.end();
    assert!(success, "{notes}");
    let mut session = Session::start(&host, "p", "0.1");
    session.write("silence");
    session.input = None;
    let (_, notes, success) = session.end();
    assert!(!success && notes.contains("no answer came"), "{notes}");
    let mut session = Session::start(&host, "p", "0.1");
    session.write("stop");
    served.join().expect("an element");
    session.input = None;
    session.end();
}

#[test]
fn an_element_has_sctp_of_its_own() {
    let Some((host, socket)) = scene("sctp") else {
        return;
    };
    let at = "127.0.0.1:0".parse().expect("an address");
    let config = Config {
        encapsulation: None,
        ..Config::new(vec![at])
    };
    let mut own = in_host(&host, || transport::open(&config).expect("an endpoint"));
    let at = own.local_addresses().expect("addresses");
    let _element = registered(&socket, Service::Sctp(at));
    let served = spawn(move || {
        let (mut events, mut is_over) = (Vec::new(), false);
        while !is_over {
            let mut fds = [PollFd::new(own.fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE).expect("a descriptor");
            own.recv_batch(&mut events).expect("events");
            for event in events.drain(..) {
                match event {
                    Event::Message { assoc, message } => own.send(assoc, &message).expect("sent"),
                    Event::Down { .. } => is_over = true,
                    _ => {}
                }
            }
            own.flush().expect("sent");
        }
    });
    let mut session = Session::start(&host, "p", "0.1");
    session.write("there\nand back\n");
    assert_eq!(session.line(), "there\n");
    assert_eq!(session.line(), "and back\n");
    session.input = None;
    let (_, notes, success) = session.end();
    assert!(success && notes.contains(" at sctp "), "{notes}");
    served.join().expect("an element");
}
