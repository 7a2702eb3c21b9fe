//! Tests of the blocking interface against a simulated daemon.

mod fake;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use fake::{DaemonSession, FakeDaemon, connect_client, flow_of, loopback_listener};
use holdfast_api::app::{FromDaemon, IncomingItem, ReclaimItem, ReclaimedFlowState, ToDaemon};
use holdfast_api::blocking::{Service, TcpConnection, WaitResult};
use holdfast_api::{Arrival, Destination, Drain, Session};

fn new_connection(arrival: Arrival<TcpConnection>) -> TcpConnection {
    match arrival {
        Arrival::New(connection) => connection,
        Arrival::HandedOff { .. } => panic!("nobody handed that off"),
    }
}

/// Returns a session with a service and one connection.
fn served(daemon: &FakeDaemon) -> (Session, DaemonSession, Service, TcpConnection, TcpStream) {
    let (session, peer) = daemon.open("n1");
    let (listener, address) = loopback_listener();
    let service = session.serve("files", listener).unwrap();
    peer.receive_serve("files");
    let client = connect_client(address);
    let connection = new_connection(service.accept().unwrap());
    assert_eq!(peer.receive_accepted(1), [flow_of(&client)]);
    assert_eq!(connection.flow(), flow_of(&client));
    (session, peer, service, connection, client)
}

fn exchange(connection: &mut TcpConnection, client: &mut TcpStream) {
    client.write_all(b"ping").unwrap();
    let mut buffer = [0; 4];
    connection.read_exact(&mut buffer).unwrap();
    connection.write_all(&buffer).unwrap();
    client.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
}

#[test]
fn a_connection_moves_with_its_state() {
    let daemon = FakeDaemon::new();
    let (_donor, donor_peer, _service, mut connection, mut client) = served(&daemon);
    let (acceptor, acceptor_peer) = daemon.open("n2");
    let acceptor_service = acceptor.serve("files", loopback_listener().0).unwrap();
    let number = acceptor_peer.receive_serve("files");
    exchange(&mut connection, &mut client);

    let flow = connection.flow();
    let drain = Drain::First { max_wait_ms: 5 };
    donor_peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "n2".into(),
        drain,
    });
    let WaitResult::HandoffRequested(destination) = connection.wait(None).unwrap() else {
        panic!("only asked for")
    };
    assert_eq!(
        destination,
        Destination::node("n2").with_drain(Duration::from_millis(5))
    );
    assert_eq!(connection.handoff_request(), Some(destination.clone()));
    let leaving = thread::spawn(move || connection.hand_off(destination, b"state".to_vec()));
    let (item, descriptor) = donor_peer.receive_hand_off("n2").pop().unwrap();
    assert_eq!(
        (item.flow, item.application_state.as_slice()),
        (flow, &b"state"[..])
    );

    acceptor_peer.hand_over(9, number, item, descriptor);
    acceptor_peer.send(&FromDaemon::Activate { ids: vec![9] });
    donor_peer.send(&FromDaemon::Moved {
        flows: vec![flow],
        to: "n2".into(),
    });
    assert_eq!(leaving.join().unwrap().unwrap().to, "n2");
    let Arrival::HandedOff {
        mut connection,
        state,
    } = acceptor_service.accept().unwrap()
    else {
        panic!("a handoff")
    };
    assert_eq!((connection.flow(), state.as_slice()), (flow, &b"state"[..]));
    exchange(&mut connection, &mut client);

    // At the acceptor the connection behaves like any other: it closes, and can move on.
    drop(connection);
    assert_eq!(
        acceptor_peer.receive().0,
        ToDaemon::Closed { flows: vec![flow] }
    );
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn kept_connection_is_usable_as_before() {
    let daemon = FakeDaemon::new();
    let (_session, peer, _service, mut connection, mut client) = served(&daemon);
    let flow = connection.flow();
    for round in 0..3 {
        peer.send(&FromDaemon::HandoffRequested {
            flows: vec![flow],
            to: "n2".into(),
            drain: Drain::None,
        });
        assert!(matches!(
            connection.wait(None).unwrap(),
            WaitResult::HandoffRequested(_)
        ));
        let leaving = thread::spawn(move || connection.hand_off("n2", vec![round]));
        assert_eq!(peer.receive_hand_off("n2").len(), 1);
        peer.send(&FromDaemon::Kept {
            flows: vec![flow],
            reason: "n2 is full".into(),
        });
        let kept = leaving.join().unwrap().unwrap_err();
        assert_eq!(kept.to_string(), "the connection stayed: n2 is full");
        connection = kept.connection;
        assert_eq!(connection.handoff_request(), None);
        exchange(&mut connection, &mut client);
    }
    let kept = connection.hand_off("n2", vec![0; 49 * 1024]).unwrap_err();
    assert!(kept.reason.contains("application state"), "{kept}");
    kept.connection.decline("busy");
    assert_eq!(
        peer.receive().0,
        ToDaemon::Declined {
            flows: vec![flow],
            reason: "busy".into()
        }
    );
}

#[test]
fn a_big_batch_is_split_and_keeps_its_order() {
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let (listener, address) = loopback_listener();
    let service = session.serve("files", listener).unwrap();
    peer.receive_serve("files");
    let (mut clients, mut connections) = (Vec::new(), Vec::new());
    for index in 0..150u8 {
        clients.push(connect_client(address));
        connections.push((new_connection(service.accept().unwrap()), vec![index; 1000]));
    }
    peer.receive_accepted(150);
    let flows: Vec<_> = connections
        .iter()
        .map(|(connection, _)| connection.flow())
        .collect();
    let leaving = thread::spawn(move || (service.hand_off_many(connections, "n2"), service));
    let items = peer.receive_hand_off("n2");
    assert_eq!(
        items.iter().map(|(item, _)| item.flow).collect::<Vec<_>>(),
        flows
    );
    for (index, (item, descriptor)) in items.iter().enumerate() {
        assert_eq!(item.application_state, vec![index as u8; 1000]);
        let socket = TcpStream::from(descriptor.as_ref().unwrap().try_clone().unwrap());
        assert_eq!(socket.peer_addr().unwrap(), item.flow.remote());
    }
    let (stay, go): (Vec<_>, Vec<_>) = flows.iter().partition(|flow| flow.remote().port() % 2 == 0);
    peer.send(&FromDaemon::Kept {
        flows: stay,
        reason: "even".into(),
    });
    peer.send(&FromDaemon::Moved {
        flows: go,
        to: "n2".into(),
    });
    let (results, _service) = leaving.join().unwrap();
    for (result, flow) in results.iter().zip(&flows) {
        assert_eq!(result.is_err(), flow.remote().port() % 2 == 0);
    }
    drop(clients);
}

#[test]
fn cancelled_flow_is_closed_and_impossible_flow_is_refused() {
    let daemon = FakeDaemon::new();
    let (_donor, donor_peer, _service, connection, mut client) = served(&daemon);
    let (acceptor, peer) = daemon.open("n2");
    let service = acceptor.serve("files", loopback_listener().0).unwrap();
    let number = peer.receive_serve("files");
    let flow = connection.flow();
    let _leaving = thread::spawn(move || connection.hand_off("n2", vec![]));
    let (item, descriptor) = donor_peer.receive_hand_off("n2").pop().unwrap();
    let spare = descriptor.as_ref().unwrap().try_clone().unwrap();
    peer.hand_over(1, number, item, descriptor);
    peer.send(&FromDaemon::Cancel {
        ids: vec![1],
        reason: "the donor resumed".into(),
    });
    // An item for a service that this program does not have, with a descriptor.
    let items = vec![IncomingItem {
        id: 2,
        service: number + 1,
        flow,
        descriptor: true,
    }];
    peer.send_with(&FromDaemon::Incoming { items }, &[spare]);
    assert!(matches!(peer.receive().0, ToDaemon::Refused { ids, .. } if ids == [2]));
    // Late messages about a refused or cancelled flow change nothing.
    peer.send(&FromDaemon::State {
        id: 2,
        application_state: vec![],
        unread: vec![],
        last: true,
    });
    peer.send(&FromDaemon::Activate { ids: vec![1, 2] });
    donor_peer.send(&FromDaemon::Moved {
        flows: vec![flow],
        to: "n2".into(),
    });
    // Every descriptor of the connection is closed: the client sees the end.
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    // A request for an unknown flow is declined.
    peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "n1".into(),
        drain: Drain::None,
    });
    assert!(matches!(peer.receive().0, ToDaemon::Declined { flows, .. } if flows == [flow]));
    drop(service);
    assert_eq!(peer.receive().0, ToDaemon::Withdraw { service: number });
    drop(acceptor);
    assert_eq!(peer.receive_until_end(), []);
}

#[test]
fn session_survives_daemon_restart() {
    let mut daemon = FakeDaemon::new();
    let (session, peer, service, mut idle, mut idle_client) = served(&daemon);
    let address = service.listener().local_addr().unwrap();
    let mut clients: Vec<_> = (0..2).map(|_| connect_client(address)).collect();
    let moved_connection = new_connection(service.accept().unwrap());
    let kept = new_connection(service.accept().unwrap());
    peer.receive_accepted(2);
    let (gone_flow, kept_flow) = (moved_connection.flow(), kept.flow());
    let leaving = [moved_connection, kept]
        .map(|connection| thread::spawn(move || connection.hand_off("n2", b"s".to_vec())));
    let mut given = Vec::new();
    while given.len() < 2 {
        given.extend(peer.receive_hand_off("n2"));
    }
    // Two connections are handed to the program: one with its state, one without.
    let (outside, outside_address) = loopback_listener();
    let mut incoming_clients = [
        connect_client(outside_address),
        connect_client(outside_address),
    ];
    let number = 1;
    for (id, with_state) in [(5, true), (6, false)] {
        let (socket, _) = outside.accept().unwrap();
        let flow = flow_of(&incoming_clients[id as usize - 5]);
        let items = vec![IncomingItem {
            id,
            service: number,
            flow,
            descriptor: true,
        }];
        peer.send_with(&FromDaemon::Incoming { items }, &[socket.into()]);
        if with_state {
            peer.send(&FromDaemon::State {
                id,
                application_state: vec![42],
                unread: vec![],
                last: true,
            });
            assert_eq!(peer.receive().0, ToDaemon::Received { ids: vec![id] });
        }
    }

    daemon.stop();
    drop((peer, given));
    exchange(&mut idle, &mut idle_client);
    while session.is_open() {
        thread::yield_now();
    }
    let refused = idle.hand_off("n2", vec![]).unwrap_err();
    assert!(refused.reason.contains("daemon"), "{refused}");
    let mut idle = refused.connection;
    let mut newcomer = connect_client(address);
    let mut accepted = new_connection(service.accept().unwrap());
    exchange(&mut accepted, &mut newcomer);

    daemon.start();
    let peer = daemon.accept();
    peer.send(&FromDaemon::Opened { node: "n1".into() });
    assert_eq!(peer.receive_serve("files"), number);
    let mut owned = peer.receive_accepted(2);
    owned.sort();
    let mut expected = [idle.flow(), accepted.flow()];
    expected.sort();
    assert_eq!(owned, expected);
    let (ToDaemon::Reclaim { items }, descriptors) = peer.receive() else {
        panic!("Reclaim")
    };
    assert_eq!((items.len(), descriptors.len()), (4, 4));
    let state_of = |flow| {
        items
            .iter()
            .find(|item: &&ReclaimItem| item.flow == flow)
            .unwrap()
            .state
            .clone()
    };
    let donated = ReclaimedFlowState::Donated { to: "n2".into() };
    assert_eq!(state_of(gone_flow), donated);
    assert_eq!(state_of(kept_flow), donated);
    let incoming = |id, received| ReclaimedFlowState::Incoming { id, received };
    assert_eq!(state_of(flow_of(&incoming_clients[0])), incoming(5, true));
    assert_eq!(state_of(flow_of(&incoming_clients[1])), incoming(6, false));
    for (item, descriptor) in items.iter().zip(descriptors) {
        assert_eq!(
            TcpStream::from(descriptor).peer_addr().unwrap(),
            item.flow.remote()
        );
    }

    peer.send(&FromDaemon::Moved {
        flows: vec![gone_flow],
        to: "n2".into(),
    });
    peer.send(&FromDaemon::Kept {
        flows: vec![kept_flow],
        reason: "the daemon died".into(),
    });
    peer.send(&FromDaemon::Cancel {
        ids: vec![6],
        reason: "the daemon died".into(),
    });
    peer.send(&FromDaemon::Activate { ids: vec![5] });
    let [gone, kept] = leaving.map(|thread| thread.join().unwrap());
    assert_eq!(gone.unwrap().to, "n2");
    let mut kept = kept.unwrap_err().connection;
    let kept_client = clients
        .iter_mut()
        .find(|client| flow_of(client) == kept_flow)
        .unwrap();
    exchange(&mut kept, kept_client);
    let Arrival::HandedOff {
        mut connection,
        state,
    } = service.accept().unwrap()
    else {
        panic!("a handoff")
    };
    assert_eq!(state, [42]);
    exchange(&mut connection, &mut incoming_clients[0]);
    assert_eq!(incoming_clients[1].read(&mut [0; 1]).unwrap(), 0);
    exchange(&mut idle, &mut idle_client);
}

#[test]
fn session_reconnects_after_protocol_violation() {
    let daemon = FakeDaemon::new();
    let (session, mut peer) = daemon.open("n1");
    let _service = session.serve("files", loopback_listener().0).unwrap();
    let id = 3;
    let nonsense: [&dyn Fn(&DaemonSession); 4] = [
        &|peer| peer.send_raw(&[1, 200, 1, 2]),
        &|peer| peer.send_raw(&[7]),
        &|peer| {
            let flow = "tcp:10.0.0.1:1-10.0.0.2:2".parse().unwrap();
            peer.send(&FromDaemon::Incoming {
                items: vec![IncomingItem {
                    id,
                    service: 1,
                    flow,
                    descriptor: true,
                }],
            });
        },
        &|peer| {
            let flow = "tcp:10.0.0.1:1-10.0.0.2:2".parse().unwrap();
            peer.send(&FromDaemon::Incoming {
                items: vec![IncomingItem {
                    id,
                    service: 1,
                    flow,
                    descriptor: false,
                }],
            });
            peer.send(&FromDaemon::Activate { ids: vec![id] });
        },
    ];
    for nonsense in nonsense {
        peer.receive_serve("files");
        nonsense(&peer);
        assert_eq!(peer.receive_until_end(), []);
        peer = daemon.accept();
        peer.send(&FromDaemon::Opened { node: "n1".into() });
    }
}

#[test]
fn detached_session_serves_clients() {
    assert!(
        Session::connect("/nowhere/app.sock")
            .unwrap_err()
            .to_string()
            .contains("/nowhere/app.sock")
    );
    let session = Session::detached();
    let (listener, address) = loopback_listener();
    let service = session.serve("files", listener).unwrap();
    let mut client = connect_client(address);
    let mut connection = new_connection(service.accept().unwrap());
    exchange(&mut connection, &mut client);
    assert_eq!(
        connection.wait(Some(Duration::from_millis(1))).unwrap(),
        WaitResult::TimedOut
    );
    let mut connection = connection.hand_off("n2", vec![]).unwrap_err().connection;
    exchange(&mut connection, &mut client);
}

#[test]
fn late_daemon_learns_services_and_flows() {
    let mut daemon = FakeDaemon::new();
    daemon.stop();
    let session = Session::connect_later(daemon.path());
    let (listener, address) = loopback_listener();
    let service = session.serve("files", listener).unwrap();
    let client = connect_client(address);
    let connection = new_connection(service.accept().unwrap());
    daemon.start();
    let peer = daemon.accept();
    peer.send(&FromDaemon::Opened { node: "n1".into() });
    peer.receive_serve("files");
    assert_eq!(peer.receive_accepted(1), [flow_of(&client)]);
    drop((connection, service, session));
    let messages = peer.receive_until_end();
    assert_eq!(
        messages[0],
        ToDaemon::Closed {
            flows: vec![flow_of(&client)]
        }
    );
}
