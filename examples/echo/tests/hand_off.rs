//! Tests two servers with clients; the test plays the daemon.

#[path = "../../../crates/api/tests/fake/mod.rs"]
mod fake;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};

use fake::{DaemonSession, FakeDaemon, TIMEOUT, connect_client};
use holdfast_api::app::{FromDaemon, ToDaemon};
use holdfast_api::{Drain, FlowText};

struct Server {
    process: Child,
    peer: DaemonSession,
    tcp: SocketAddr,
    udp: SocketAddr,
}

impl Server {
    fn start(daemon: &FakeDaemon, node: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_echo"))
            .args([
                "--listen",
                "127.0.0.1:0",
                "--udp",
                "127.0.0.1:0",
                "--socket",
            ])
            .arg(daemon.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let peer = daemon.accept();
        peer.send(&FromDaemon::Opened { node: node.into() });
        assert_eq!(
            (peer.receive_serve("echo"), peer.receive_serve("echo")),
            (TCP_SERVICE, UDP_SERVICE)
        );
        let mut lines = BufReader::new(process.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        let mut address = |before| {
            lines
                .next()
                .unwrap()
                .strip_prefix(before)
                .unwrap()
                .parse()
                .unwrap()
        };
        let (tcp, udp) = (address("listening on "), address("answering on "));
        Self {
            process,
            peer,
            tcp,
            udp,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Numbers of the two services, in the order of the program's flags.
const TCP_SERVICE: u32 = 1;
const UDP_SERVICE: u32 = 2;
const CONNECTIONS: usize = 200;

/// Moves all these flows; returns the number of batches in which the program gave them.
fn move_all(donor: &Server, acceptor: &Server, flows: &[FlowText], first_id: u64) -> usize {
    for flows in flows.chunks(1000) {
        donor.peer.send(&FromDaemon::HandoffRequested {
            flows: flows.to_vec(),
            to: "other".into(),
            drain: Drain::None,
        });
    }
    let (mut id, mut batches) = (first_id, 0);
    let mut flows_left: HashMap<FlowText, ()> = flows.iter().map(|flow| (*flow, ())).collect();
    while !flows_left.is_empty() {
        batches += 1;
        for (item, descriptor) in donor.peer.receive_hand_off("other") {
            let flow = item.flow;
            flows_left.remove(&flow).expect("a flow that was asked for");
            acceptor.peer.hand_over(id, TCP_SERVICE, item, descriptor);
            donor.peer.send(&FromDaemon::Moved {
                flows: vec![flow],
                to: "other".into(),
            });
            acceptor.peer.send(&FromDaemon::Activate { ids: vec![id] });
            id += 1;
        }
    }
    batches
}

#[test]
fn connections_move_back_and_forth_without_data_loss() {
    let daemon = FakeDaemon::new();
    let servers = [Server::start(&daemon, "n1"), Server::start(&daemon, "n2")];
    let mut clients: Vec<TcpStream> = (0..CONNECTIONS)
        .map(|_| connect_client(servers[0].tcp))
        .collect();
    let flows = servers[0].peer.receive_accepted(CONNECTIONS);
    for round in 0..4u8 {
        let (donor, acceptor) = (
            &servers[usize::from(round % 2)],
            &servers[usize::from(1 - round % 2)],
        );
        // Bytes are in transit while the connections are.
        for (index, client) in clients.iter_mut().enumerate() {
            client.write_all(&[round, index as u8, 1]).unwrap();
        }
        let batches = move_all(donor, acceptor, &flows, u64::from(round) * 10_000);
        assert!(batches < CONNECTIONS, "the handoffs took {batches} batches");
        for (index, client) in clients.iter_mut().enumerate() {
            client.write_all(&[2]).unwrap();
            let mut buffer = [0; 4];
            client.read_exact(&mut buffer).unwrap();
            assert_eq!(buffer, [round, index as u8, 1, 2]);
        }
    }
    clients[0].shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(clients[0].read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn datagrams_are_echoed_until_the_association_moves() {
    let daemon = FakeDaemon::new();
    let server = Server::start(&daemon, "n1");
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server.udp).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    let echoed = |text: &[u8]| {
        client.send(text).unwrap();
        let mut buffer = [0; 100];
        let length = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], text);
    };
    echoed(b"one");
    let flow = server.peer.receive_accepted(1)[0];
    server.peer.send(&FromDaemon::HandoffRequested {
        flows: vec![flow],
        to: "other".into(),
        drain: Drain::None,
    });
    assert_eq!(server.peer.receive_hand_off("other")[0].0.flow, flow);
    client.send(b"two").unwrap();
    server.peer.send(&FromDaemon::Collect { flows: vec![flow] });
    let (ToDaemon::Collected { unread, .. }, _) = server.peer.receive() else {
        panic!("Collected")
    };
    assert_eq!(unread[0].bytes, b"two");
    // The association stays after all: the program answers the waiting datagram.
    server.peer.send(&FromDaemon::Kept {
        flows: vec![flow],
        reason: "no".into(),
    });
    let mut buffer = [0; 3];
    client.recv(&mut buffer).unwrap();
    assert_eq!(&buffer, b"two");
    echoed(b"three");
}
