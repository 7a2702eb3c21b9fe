//! A program at its limit of open files refuses a connection with a descriptor that the kernel cannot install, and its
//! session continues. The only test of its process, because the limit applies to the process.

mod fake;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fake::{FakeDaemon, connect_client, flow_of, loopback_listener};
use holdfast_api::app::{Channel, FromDaemon, IncomingItem, ToDaemon};
use holdfast_api::{Arrival, FlowText};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sets this process's limit so that it can open `count` more files.
fn leave_descriptors(count: usize) {
    let stdin = std::io::stdin();
    let duplicate = |_| stdin.as_fd().try_clone_to_owned().unwrap();
    let room: Vec<OwnedFd> = (0..=count).map(duplicate).collect();
    set_limit(Some(room[count].as_raw_fd() as u64));
}

fn set_limit(current: Option<u64>) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

#[test]
fn flows_without_descriptors_are_refused_and_session_continues() {
    packet_reports_lost_descriptors();
    let before = getrlimit(Resource::Nofile).current;
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let service = session.serve("files", loopback_listener().0).unwrap();
    let number = peer.receive_serve("files");

    let (other, other_address) = loopback_listener();
    let mut connections = Vec::new();
    for _ in 0..3 {
        let client = connect_client(other_address);
        connections.push((flow_of(&client), client, other.accept().unwrap().0));
    }
    let items = |ids: &[u64]| -> Vec<IncomingItem> {
        let item = |(id, (flow, _, _)): (&u64, &(_, _, _))| IncomingItem {
            id: *id,
            service: number,
            flow: *flow,
            descriptor: true,
        };
        ids.iter().zip(&connections).map(item).collect()
    };
    let duplicate = |(_, _, server): &(_, _, TcpStream)| server.try_clone().unwrap().into();
    let sockets: Vec<OwnedFd> = connections.iter().map(duplicate).collect();

    leave_descriptors(1);
    peer.send_with(
        &FromDaemon::Incoming {
            items: items(&[1, 2, 3]),
        },
        &sockets,
    );
    for id in [2, 3] {
        let (ToDaemon::Refused { ids, reason }, _) = peer.receive() else {
            panic!("refused")
        };
        assert_eq!(ids, [id]);
        assert!(reason.contains("no descriptor left"), "{reason}");
    }
    set_limit(before);
    // The first has arrived, and one of the others arrives at a second attempt.
    let again = items(&[1, 4]).split_off(1);
    peer.send_with(&FromDaemon::Incoming { items: again }, &sockets[1..2]);
    let mut arrived = Vec::new();
    for id in [1, 4] {
        peer.send(&FromDaemon::State {
            id,
            application_state: Vec::new(),
            unread: Vec::new(),
            last: true,
        });
        assert_eq!(peer.receive().0, ToDaemon::Received { ids: vec![id] });
        peer.send(&FromDaemon::Activate { ids: vec![id] });
        let Arrival::HandedOff { mut connection, .. } = service.accept().unwrap() else {
            panic!("it was handed off")
        };
        let of = |(flow, _, _): &&mut (FlowText, _, _)| *flow == connection.flow();
        let (_, client, _) = connections.iter_mut().find(of).unwrap();
        connection.write_all(b"here").unwrap();
        let mut got = [0; 4];
        client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"here");
        arrived.push(connection);
    }
}

fn packet_reports_lost_descriptors() {
    let before = getrlimit(Resource::Nofile).current;
    let (program, daemon) = Channel::pair().unwrap();
    let stdin = std::io::stdin();
    for room in [0, 1, 2] {
        program.send(b"two", &[stdin.as_fd(); 2]).unwrap();
        leave_descriptors(room);
        let packet = daemon.receive().unwrap().unwrap();
        set_limit(before);
        assert_eq!(packet.bytes, b"two");
        assert_eq!(packet.descriptors.len(), room);
        assert_eq!(packet.descriptors_lost, room < 2);
    }
}
