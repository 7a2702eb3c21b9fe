//! Tests two servers with clients; the test plays the daemon.

#[path = "../../../crates/api/tests/fake/mod.rs"]
mod fake;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};

use fake::{Daemon, PATIENCE, Peer, client};
use holdfast_api::app::{FromDaemon, ToDaemon};
use holdfast_api::{Drain, FlowText};

struct Server {
    process: Child,
    peer: Peer,
    tcp: SocketAddr,
    udp: SocketAddr,
}

impl Server {
    fn start(daemon: &Daemon, node: &str) -> Self {
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
        peer.say(&FromDaemon::Opened { node: node.into() });
        assert_eq!(
            (peer.hear_serve("echo"), peer.hear_serve("echo")),
            (TCP, UDP)
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
const TCP: u32 = 1;
const UDP: u32 = 2;
const MANY: usize = 200;

/// Moves all these flows; returns the number of batches in which the program gave them.
fn move_all(donor: &Server, acceptor: &Server, flows: &[FlowText], first_id: u64) -> usize {
    for flows in flows.chunks(1000) {
        donor.peer.say(&FromDaemon::Asked {
            flows: flows.to_vec(),
            to: "other".into(),
            drain: Drain::None,
        });
    }
    let (mut id, mut batches) = (first_id, 0);
    let mut left: HashMap<FlowText, ()> = flows.iter().map(|flow| (*flow, ())).collect();
    while !left.is_empty() {
        batches += 1;
        for (item, descriptor) in donor.peer.hear_hand_off("other") {
            let flow = item.flow;
            left.remove(&flow).expect("a flow that was asked for");
            acceptor.peer.bring(id, TCP, item, descriptor);
            donor.peer.say(&FromDaemon::Gone {
                flows: vec![flow],
                to: "other".into(),
            });
            acceptor.peer.say(&FromDaemon::Go { ids: vec![id] });
            id += 1;
        }
    }
    batches
}

#[test]
fn connections_go_and_come_back_and_lose_nothing() {
    let daemon = Daemon::new();
    let servers = [Server::start(&daemon, "n1"), Server::start(&daemon, "n2")];
    let mut clients: Vec<TcpStream> = (0..MANY).map(|_| client(servers[0].tcp)).collect();
    let flows = servers[0].peer.hear_accepted(MANY);
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
        assert!(batches < MANY, "{batches} batches");
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
fn datagrams_are_echoed_until_the_association_leaves() {
    let daemon = Daemon::new();
    let server = Server::start(&daemon, "n1");
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server.udp).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let echoed = |text: &[u8]| {
        client.send(text).unwrap();
        let mut buffer = [0; 100];
        let length = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], text);
    };
    echoed(b"one");
    let flow = server.peer.hear_accepted(1)[0];
    server.peer.say(&FromDaemon::Asked {
        flows: vec![flow],
        to: "other".into(),
        drain: Drain::None,
    });
    assert_eq!(server.peer.hear_hand_off("other")[0].0.flow, flow);
    client.send(b"two").unwrap();
    server.peer.say(&FromDaemon::Collect { flows: vec![flow] });
    let (ToDaemon::Collected { unread, .. }, _) = server.peer.hear() else {
        panic!("Collected")
    };
    assert_eq!(unread[0].bytes, b"two");
    // The association stays after all: the program answers the waiting datagram.
    server.peer.say(&FromDaemon::Kept {
        flows: vec![flow],
        reason: "no".into(),
    });
    let mut buffer = [0; 3];
    client.recv(&mut buffer).unwrap();
    assert_eq!(&buffer, b"two");
    echoed(b"three");
}
