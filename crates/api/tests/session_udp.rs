//! Tests of UDP associations on a shared socket against a simulated daemon, with both interfaces.

mod fake;

use std::net::UdpSocket;
use std::sync::Arc;
use std::thread;

use fake::{DaemonSession, FakeDaemon, TIMEOUT};
use holdfast_api::app::{
    FromDaemon, HandOffItem, IncomingItem, ToDaemon, join_pieces, split_pieces,
};
use holdfast_api::blocking::UdpService;
use holdfast_api::{Association, Drain, FlowText, Protocol, UdpEvent};

fn start_service(
    daemon: &FakeDaemon,
    node: &str,
) -> (UdpService, DaemonSession, std::net::SocketAddr) {
    let (session, peer) = daemon.open(node);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let service = session.serve("echo", socket).unwrap();
    peer.receive_serve("echo");
    (service, peer, address)
}

fn connect_client(address: std::net::SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(address).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    client
}

fn flow_of(client: &UdpSocket) -> FlowText {
    FlowText::new(
        Protocol::Udp,
        client.peer_addr().unwrap(),
        client.local_addr().unwrap(),
    )
    .unwrap()
}

fn next_datagram(service: &UdpService) -> (Association, Vec<u8>) {
    match service.receive(Some(TIMEOUT)).unwrap() {
        Some(UdpEvent::Datagram { association, data }) => (association, data),
        other => panic!("a datagram expected, not {other:?}"),
    }
}

/// Waits for the messages of one collection.
fn receive_collected(peer: &DaemonSession, expected: FlowText) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    loop {
        let (ToDaemon::Collected { flow, unread, last }, _) = peer.receive() else {
            panic!("Collected")
        };
        assert_eq!(flow, expected);
        pieces.extend(unread);
        if last {
            return join_pieces(pieces).unwrap();
        }
    }
}

#[test]
fn association_moves_with_unread_datagrams() {
    let daemon = FakeDaemon::new();
    let (donor, donor_peer, address) = start_service(&daemon, "n1");
    let (moving, staying) = (connect_client(address), connect_client(address));
    let flow = flow_of(&moving);
    moving.send(b"first").unwrap();
    let (association, data) = next_datagram(&donor);
    assert_eq!((association.flow(), data.as_slice()), (flow, &b"first"[..]));
    assert_eq!(donor_peer.receive_accepted(1), [flow]);
    donor_peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "n2".into(),
        drain: Drain::None,
    });
    let Some(UdpEvent::HandoffRequested {
        association,
        destination,
    }) = donor.receive(Some(TIMEOUT)).unwrap()
    else {
        panic!("asked for")
    };

    let donor = Arc::new(donor);
    let leaving = thread::spawn({
        let (donor, association) = (Arc::clone(&donor), association.clone());
        move || donor.hand_off(&association, destination, b"seen 1".to_vec())
    });
    let (item, descriptor) = donor_peer.receive_hand_off("n2").pop().unwrap();
    assert!(descriptor.is_none() && !item.descriptor);
    assert!(donor.send(&association, b"no").is_err());
    let long = vec![7; 60_000];
    for data in [&b"second"[..], &long, &[]] {
        moving.send(data).unwrap();
    }
    staying.send(b"other").unwrap();
    donor_peer.send(&FromDaemon::Collect { flows: vec![flow] });
    // The collection read the other association's datagram too and leaves it to the program. Its message may come
    // first.
    assert_eq!(donor_peer.receive_accepted(1), [flow_of(&staying)]);
    let unread = receive_collected(&donor_peer, flow);
    assert_eq!(unread, [b"second".to_vec(), long, vec![]]);
    assert_eq!(next_datagram(&donor).1, b"other");
    donor_peer.send(&FromDaemon::Moved {
        flows: vec![flow],
        to: "n2".into(),
    });
    leaving.join().unwrap().unwrap();

    let (acceptor, peer, address) = start_service(&daemon, "n2");
    // The same client connects to the acceptor's address, as if routed there by the service address.
    moving.connect(address).unwrap();
    let flow = flow_of(&moving);
    let items = vec![IncomingItem {
        id: 1,
        service: 1,
        flow,
        descriptor: false,
    }];
    peer.send(&FromDaemon::Incoming { items });
    let mut runs = split_pieces(unread.iter().map(Vec::as_slice))
        .into_iter()
        .peekable();
    let mut application_state = item.application_state;
    while let Some(unread) = runs.next() {
        let last = runs.peek().is_none();
        peer.send(&FromDaemon::State {
            id: 1,
            application_state,
            unread,
            last,
        });
        application_state = Vec::new();
    }
    assert_eq!(peer.receive().0, ToDaemon::Received { ids: vec![1] });
    // A datagram that overtakes the daemon's message waits for it: only the next client's datagram is delivered.
    moving.send(b"third").unwrap();
    let next = connect_client(address);
    next.send(b"next").unwrap();
    assert_eq!(next_datagram(&acceptor).1, b"next");
    peer.send(&FromDaemon::Activate { ids: vec![1] });
    let Some(UdpEvent::HandedOff { association, state }) = acceptor.receive(Some(TIMEOUT)).unwrap()
    else {
        panic!("handed off")
    };
    assert_eq!(state, b"seen 1");
    let datagrams: Vec<_> = (0..4).map(|_| next_datagram(&acceptor).1).collect();
    assert_eq!(datagrams[..3], unread);
    assert_eq!(datagrams[3], b"third");
    acceptor.send(&association, b"answer").unwrap();
    let mut buffer = [0; 10];
    let length = moving.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"answer");
}

#[test]
fn kept_association_loses_no_datagram() {
    let daemon = FakeDaemon::new();
    let (service, peer, address) = start_service(&daemon, "n1");
    let client = connect_client(address);
    client.send(b"1").unwrap();
    let (association, _) = next_datagram(&service);
    peer.receive_accepted(1);
    let service = Arc::new(service);
    let leaving = thread::spawn({
        let (service, association) = (Arc::clone(&service), association.clone());
        move || service.hand_off(&association, "n2", vec![])
    });
    let HandOffItem { flow, .. } = peer.receive_hand_off("n2").pop().unwrap().0;
    client.send(b"2").unwrap();
    peer.send(&FromDaemon::Collect { flows: vec![flow] });
    assert_eq!(receive_collected(&peer, flow), [b"2"]);
    peer.send(&FromDaemon::Kept {
        flows: vec![flow],
        reason: "no".into(),
    });
    assert_eq!(leaving.join().unwrap().unwrap_err().reason, "no");
    client.send(b"3").unwrap();
    assert_eq!(next_datagram(&service).1, b"2");
    assert_eq!(next_datagram(&service).1, b"3");
    assert_eq!(service.forget_idle(std::time::Duration::ZERO), 1);
    assert_eq!(peer.receive().0, ToDaemon::Closed { flows: vec![flow] });
}

/// Datagrams that one association's collection reads for another leave with that other one when it moves too.
#[test]
fn associations_that_move_together_keep_their_datagrams() {
    let daemon = FakeDaemon::new();
    let (service, peer, address) = start_service(&daemon, "n1");
    let clients = [connect_client(address), connect_client(address)];
    let service = Arc::new(service);
    let associations = clients.each_ref().map(|client| {
        client.send(b"1").unwrap();
        let (association, _) = next_datagram(&service);
        peer.receive_accepted(1);
        association
    });
    let leave = |index: usize| {
        let (service, association) = (Arc::clone(&service), associations[index].clone());
        let leaving = thread::spawn(move || service.hand_off(&association, "n2", vec![]));
        peer.receive_hand_off("n2");
        leaving
    };
    let first = leave(0);
    clients[1].send(b"2").unwrap();
    let flows = clients.each_ref().map(flow_of);
    let collect = |index: usize| {
        peer.send(&FromDaemon::Collect {
            flows: vec![flows[index]],
        });
        receive_collected(&peer, flows[index])
    };
    assert!(collect(0).is_empty());
    let second = leave(1);
    clients[1].send(b"3").unwrap();
    assert_eq!(collect(1), [b"2", b"3"]);
    peer.send(&FromDaemon::Moved {
        flows: flows.to_vec(),
        to: "n2".into(),
    });
    for leaving in [first, second] {
        leaving.join().unwrap().unwrap();
    }
}

#[test]
fn a_wildcard_socket_is_refused() {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let error = holdfast_api::Session::detached()
        .serve("echo", socket)
        .unwrap_err();
    assert!(error.to_string().contains("service address"), "{error}");
}

#[tokio::test]
async fn asynchronous_interface_moves_associations() {
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let service = session.serve("echo", socket).unwrap();
    peer.receive_serve("echo");
    let client = connect_client(address);
    client.send(b"1").unwrap();
    let Ok(UdpEvent::Datagram { association, .. }) = service.receive().await else {
        panic!("a datagram")
    };
    service.send(&association, b"one").await.unwrap();
    assert_eq!(client.recv(&mut [0; 10]).unwrap(), 3);
    let flow = peer.receive_accepted(1)[0];
    peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "n2".into(),
        drain: Drain::None,
    });
    let Ok(UdpEvent::HandoffRequested {
        association,
        destination,
    }) = service.receive().await
    else {
        panic!("asked for")
    };
    let daemon_side = tokio::task::spawn_blocking(move || {
        peer.receive_hand_off("n2");
        peer.send(&FromDaemon::Moved {
            flows: vec![flow],
            to: "n2".into(),
        });
        peer
    });
    assert_eq!(
        service
            .hand_off(&association, destination, vec![])
            .await
            .unwrap()
            .to,
        "n2"
    );
    assert!(service.send(&association, b"no").await.is_err());
    daemon_side.await.unwrap();
}
