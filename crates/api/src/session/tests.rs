//! Tests of the managed sockets, which both interfaces share. No thread runs: each test takes the session's messages
//! from the state machine, and gives the state machine the daemon's messages.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use super::tcp::{ManagedConnection, ManagedListener};
use super::{Association, ManagedUdpSocket, Session, UdpEvent};
use crate::app::{FromDaemon, IncomingItem, ToDaemon};
use crate::{Arrival, Destination, Drain, FlowText, Kept, Moved};

type HandoffResult = Result<Moved, Kept<ManagedConnection<TcpStream>>>;

/// Returns a session that a daemon has opened.
fn open_session() -> Session {
    let session = Session::detached();
    session.handle.shared.core().handle_connected();
    let node = "n1".into();
    receive(&session, FromDaemon::Opened { node }, Vec::new());
    take_sent(&session);
    session
}

/// Handles a message of the daemon.
fn receive(session: &Session, message: FromDaemon, descriptors: Vec<OwnedFd>) {
    let shared = &session.handle.shared;
    let handled = shared.core().handle_message(message, descriptors, false);
    assert_eq!(handled, Ok(()));
    loop {
        let event = shared.core().poll_event();
        let Some(event) = event else { break };
        shared.dispatch(event);
    }
}

/// Returns the messages to the daemon.
fn take_sent(session: &Session) -> Vec<ToDaemon> {
    let next = || session.handle.shared.core().poll_transmit();
    std::iter::from_fn(next)
        .map(|transmit| transmit.message)
        .collect()
}

fn poll_once<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn managed_listener(session: &Session) -> ManagedListener<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let local = listener.local_addr().expect("a bound socket");
    let managed = ManagedListener::new(listener, local, session, "pool").expect("a service");
    assert!(matches!(
        take_sent(session)[..],
        [ToDaemon::Serve { service: 1, .. }]
    ));
    managed
}

/// Connects a client; returns the client and its connection at the service.
fn accept(
    session: &Session,
    managed: &ManagedListener<TcpListener>,
) -> (TcpStream, ManagedConnection<TcpStream>) {
    let local = managed.listener().local_addr().expect("a bound socket");
    let client = TcpStream::connect(local).expect("a listener");
    let (stream, remote) = managed.listener().accept().expect("a client");
    let arrival = managed.register(stream, local, remote);
    let Ok(Arrival::New(connection)) = arrival else {
        panic!("the connection is new");
    };
    let connection: ManagedConnection<TcpStream> = connection;
    let flows = vec![connection.flow()];
    let accepted = ToDaemon::Accepted { service: 1, flows };
    assert_eq!(take_sent(session), [accepted]);
    (client, connection)
}

fn assert_echo(mut client: &TcpStream, mut server: &TcpStream) {
    client.write_all(b"ping").expect("an open connection");
    let mut buffer = [0; 4];
    server.read_exact(&mut buffer).expect("an open connection");
    assert_eq!(&buffer, b"ping");
}

fn handed_off_flows(sent: &[ToDaemon]) -> Vec<FlowText> {
    let [ToDaemon::HandOff { items, last, .. }] = sent else {
        panic!("one batch expected, not {sent:?}");
    };
    assert!(*last);
    items.iter().map(|item| item.flow).collect()
}

fn kept(flow: FlowText) -> FromDaemon {
    FromDaemon::Kept {
        flows: vec![flow],
        reason: "no".into(),
    }
}

#[test]
fn batch_is_one_message_and_each_connection_has_its_own_result() {
    let (session, other_session) = (open_session(), open_session());
    let (listener, other_listener) = (managed_listener(&session), managed_listener(&other_session));
    let (_first_client, first) = accept(&session, &listener);
    let (_other_client, foreign) = accept(&other_session, &other_listener);
    let (second_client, second) = accept(&session, &listener);
    let flows = [first.flow(), second.flow()];
    let batch = [first, foreign, second].map(|connection| (connection, vec![1]));
    let handoffs =
        ManagedConnection::<TcpStream>::hand_off_many(Vec::from(batch), Destination::node("n2"));
    let mut handoffs = pin!(handoffs);
    assert!(poll_once(handoffs.as_mut()).is_pending());
    assert_eq!(handed_off_flows(&take_sent(&session)), flows);
    assert_eq!(take_sent(&other_session), []);
    let moved = FromDaemon::Moved {
        flows: vec![flows[0]],
        to: "n2".into(),
    };
    receive(&session, moved, Vec::new());
    assert!(poll_once(handoffs.as_mut()).is_pending());
    receive(&session, kept(flows[1]), Vec::new());
    let Poll::Ready(results) = poll_once(handoffs) else {
        panic!("all results are known");
    };
    let Ok([first, foreign, second]) = <[_; 3]>::try_from(results) else {
        panic!("one result for each connection");
    };
    assert_eq!(first.expect("it moved").to, "n2");
    let reason = foreign.expect_err("it belongs to another session").reason;
    assert!(reason.contains("another session"), "{reason}");

    let second = second.expect_err("it was kept");
    assert_eq!(second.reason, "no");
    assert_echo(&second_client, second.connection.stream());
    // The connection that stayed can be handed off again.
    take_sent(&session);
    let again = second.connection.hand_off("n3".into(), Vec::new());
    let result: Poll<HandoffResult> = poll_once(pin!(again));
    assert!(result.is_pending());
    assert_eq!(handed_off_flows(&take_sent(&session)), [flows[1]]);
}

#[test]
fn handoff_that_cannot_start_returns_the_connection_at_once() {
    let session = open_session();
    let listener = managed_listener(&session);
    let (client, connection) = accept(&session, &listener);
    session.handle.shared.core().handle_disconnected();
    let handoff = connection.hand_off("n2".into(), Vec::new());
    let result: Poll<HandoffResult> = poll_once(pin!(handoff));
    let Poll::Ready(Err(kept)) = result else {
        panic!("there is no daemon");
    };
    assert!(kept.reason.contains("daemon"), "{}", kept.reason);
    assert_echo(&client, kept.connection.stream());
}

#[test]
fn handoff_request_stands_until_it_is_declined() {
    let session = open_session();
    let listener = managed_listener(&session);
    let (_client, connection) = accept(&session, &listener);
    let flows = vec![connection.flow()];
    let request = FromDaemon::HandoffRequested {
        flows: flows.clone(),
        to: "n2".into(),
        drain: Drain::None,
    };
    receive(&session, request, Vec::new());
    let requested = connection.notifications().handoff_request();
    assert_eq!(requested, Some(Destination::node("n2")));
    connection.decline("busy");
    assert_eq!(connection.notifications().handoff_request(), None);
    let reason = "busy".into();
    assert_eq!(take_sent(&session), [ToDaemon::Declined { flows, reason }]);
}

#[test]
fn dropped_connection_is_closed_and_dropped_listener_withdrawn() {
    let session = open_session();
    let listener = managed_listener(&session);
    let (_client, connection) = accept(&session, &listener);
    let flows = vec![connection.flow()];
    drop(connection);
    assert_eq!(take_sent(&session), [ToDaemon::Closed { flows }]);
    drop(listener);
    assert_eq!(take_sent(&session), [ToDaemon::Withdraw { service: 1 }]);
}

/// Hands a connection over to the service up to the point at which the program accepts the connection.
fn hand_over(
    session: &Session,
    listener: &ManagedListener<TcpListener>,
) -> (TcpStream, super::HandedOffConnection) {
    let local = listener.listener().local_addr().expect("a bound socket");
    let client = TcpStream::connect(local).expect("a listener");
    let (stream, remote) = listener.listener().accept().expect("a client");
    let flow = FlowText::new(crate::Protocol::Tcp, local, remote).expect("a flow");
    let incoming = IncomingItem {
        id: 7,
        service: 1,
        flow,
        descriptor: true,
    };
    let items = vec![incoming];
    receive(session, FromDaemon::Incoming { items }, vec![stream.into()]);
    let state = FromDaemon::State {
        id: 7,
        application_state: b"state".to_vec(),
        unread: Vec::new(),
        last: true,
    };
    receive(session, state, Vec::new());
    assert_eq!(take_sent(session), [ToDaemon::Received { ids: vec![7] }]);
    assert!(listener.queue().pop().is_none(), "the flow is in transit");
    receive(session, FromDaemon::Activate { ids: vec![7] }, Vec::new());
    (client, listener.queue().pop().expect("the connection"))
}

#[test]
fn handed_off_connection_arrives_with_its_state() {
    let session = open_session();
    let listener = managed_listener(&session);
    let (client, handed_off) = hand_over(&session, &listener);
    let arrival: io::Result<Arrival<ManagedConnection<TcpStream>>> =
        listener.activate(handed_off, Ok);
    let Ok(Arrival::HandedOff { connection, state }) = arrival else {
        panic!("the connection was handed off");
    };
    assert_eq!(state, b"state");
    assert_echo(&client, connection.stream());
}

#[test]
fn handed_off_connection_with_unusable_socket_is_closed() {
    let session = open_session();
    let listener = managed_listener(&session);
    let (_client, handed_off) = hand_over(&session, &listener);
    let flows = vec![handed_off.flow];
    let arrival: io::Result<Arrival<ManagedConnection<TcpStream>>> =
        listener.activate(handed_off, |_| Err(io::ErrorKind::OutOfMemory.into()));
    assert!(arrival.is_err());
    assert_eq!(take_sent(&session), [ToDaemon::Closed { flows }]);
}

/// Receives a datagram, whose delivery over the loopback device may take a moment.
fn receive_datagram(managed: &ManagedUdpSocket) -> (Association, Vec<u8>) {
    loop {
        match managed.receive() {
            Ok(UdpEvent::Datagram { association, data }) => return (association, data),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
            other => panic!("a datagram expected, not {other:?}"),
        }
    }
}

#[test]
fn association_in_transit_may_not_send() {
    let session = open_session();
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let address = socket.local_addr().expect("a bound socket");
    let managed = ManagedUdpSocket::new(socket, &session, "pool").expect("a service");
    let client = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    client.send_to(b"1", address).expect("a loopback device");
    let (association, data) = receive_datagram(&managed);
    assert_eq!(data, b"1");
    managed.check_may_send(&association).expect("at rest");
    take_sent(&session);

    let handoff = managed.hand_off(&association, "n2".into(), Vec::new());
    let mut handoff = pin!(handoff);
    assert!(poll_once(handoff.as_mut()).is_pending());
    let refused = managed.check_may_send(&association);
    assert_eq!(
        refused.expect_err("in transit").kind(),
        io::ErrorKind::NotConnected
    );
    assert_eq!(managed.forget_idle(Duration::ZERO), 0);
    assert_eq!(handed_off_flows(&take_sent(&session)), [association.flow()]);
    receive(&session, kept(association.flow()), Vec::new());
    let Poll::Ready(Err(kept)) = poll_once(handoff) else {
        panic!("the association was kept");
    };
    assert_eq!(kept.reason, "no");
    managed.check_may_send(&kept.connection).expect("at rest");
    assert_eq!(managed.forget_idle(Duration::ZERO), 1);
    let flows = vec![association.flow()];
    assert_eq!(take_sent(&session), [ToDaemon::Closed { flows }]);
}

#[test]
fn service_without_handoffs_gives_no_connection_away_and_takes_none() {
    let session = open_session();
    let listener = managed_listener(&session.without_handoffs("a proxy"));
    let (_client, connection) = accept(&session, &listener);
    let flows = vec![connection.flow()];
    let request = FromDaemon::HandoffRequested {
        flows: flows.clone(),
        to: "n2".into(),
        drain: Drain::None,
    };
    let reason = String::from("a proxy");
    let declined = ToDaemon::Declined {
        flows: flows.clone(),
        reason: reason.clone(),
    };
    receive(&session, request.clone(), Vec::new());
    assert_eq!(take_sent(&session), std::slice::from_ref(&declined));
    assert_eq!(connection.notifications().handoff_request(), None);

    let local = listener.listener().local_addr().expect("a bound socket");
    let remote = "127.0.0.1:1".parse().expect("an address");
    let incoming = IncomingItem {
        id: 7,
        service: 1,
        flow: FlowText::new(crate::Protocol::Tcp, local, remote).expect("a flow"),
        descriptor: false,
    };
    let items = vec![incoming];
    receive(&session, FromDaemon::Incoming { items }, Vec::new());
    let ids = vec![7];
    assert_eq!(take_sent(&session), [ToDaemon::Refused { ids, reason }]);

    // The connections of a service outlive its listener.
    drop(listener);
    assert_eq!(take_sent(&session), [ToDaemon::Withdraw { service: 1 }]);
    receive(&session, request, Vec::new());
    assert_eq!(take_sent(&session), [declined]);
}
