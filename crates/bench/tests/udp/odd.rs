//! An association with server programs that the test drives.

use std::net::{SocketAddr, UdpSocket};

use holdfast_api::app::{Channel, FromDaemon, HandOffItem, ToDaemon, decode, encode};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_bench::cluster::{Cluster, Family};

use crate::common::{PATIENCE, eventually};
use crate::numbered::client;
use crate::{ODD_PORT, owner};

/// An association of the pool `odd`, with server programs on n2 and n3 that the test drives.
pub struct Odd {
    pub service: SocketAddr,
    pub client: UdpSocket,
    /// The socket of the program on n2.
    pub server: UdpSocket,
    pub flow: FlowText,
    /// The session of the program on n2.
    pub giver: Channel,
    /// The session of the program on n3.
    pub taker: Channel,
}

impl Odd {
    pub fn new(cluster: &Cluster) -> Self {
        let service = SocketAddr::new(cluster.service_address(Family::V4), ODD_PORT);
        let client = client(cluster, service);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (giver, taker) = (session(cluster, "n2"), session(cluster, "n3"));
        for (program, node) in [(&giver, "n2"), (&taker, "n3")] {
            let serve = ToDaemon::Serve {
                service: 1,
                pool: "odd".into(),
                protocol: Protocol::Udp,
                addresses: vec![service],
            };
            say(program, &serve);
            eventually("it is served", || serves(cluster, node, "odd"));
        }
        // An association begins with the server's first answer.
        let server = socket_in(cluster, "n2", service);
        client.send(b"?").unwrap();
        let (_, remote) = server.recv_from(&mut [0; 16]).unwrap();
        server.send_to(b"!", remote).unwrap();
        client.recv(&mut [0; 16]).unwrap();
        let flow = FlowText::new(Protocol::Udp, service, remote).unwrap();
        eventually("it is placed", || {
            owner(cluster, flow).as_deref() == Some("n2")
        });
        let flows = vec![flow];
        say(&giver, &ToDaemon::Accepted { service: 1, flows });
        Self {
            service,
            client,
            server,
            flow,
            giver,
            taker,
        }
    }

    /// Hands the association to n3, up to the freeze; returns its number there.
    pub fn give(&self) -> u64 {
        let item = HandOffItem {
            flow: self.flow,
            application_state: Vec::new(),
            descriptor: false,
        };
        let give = ToDaemon::HandOff {
            batch: 1,
            to: "n3".into(),
            drain: Drain::None,
            items: vec![item],
            last: true,
        };
        say(&self.giver, &give);
        let incoming = hear(&self.taker);
        let FromDaemon::Incoming { items } = incoming else {
            panic!("{incoming:?}")
        };
        assert!(matches!(hear(&self.taker), FromDaemon::State { .. }));
        let id = items[0].id;
        say(&self.taker, &ToDaemon::Received { ids: vec![id] });
        let collect = hear(&self.giver);
        assert!(matches!(collect, FromDaemon::Collect { .. }), "{collect:?}");
        id
    }
}

pub fn socket_in(cluster: &Cluster, node: &str, service: SocketAddr) -> UdpSocket {
    let socket = cluster.lab().in_net(node, || UdpSocket::bind(service));
    let socket = socket.unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn serves(cluster: &Cluster, node: &str, pool: &str) -> bool {
    let control = cluster.control_blocking(node).unwrap();
    let status = control.run(async |client| client.status().await).unwrap();
    let mut pools = status.programs.iter().flat_map(|program| &program.pools);
    pools.any(|other| other == pool)
}

fn session(cluster: &Cluster, node: &str) -> Channel {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let channel = Channel::connect(cluster.run_file(node, "app.sock").unwrap()).unwrap();
    set_socket_timeout(&channel, Timeout::Recv, Some(PATIENCE)).unwrap();
    let name = "strange".to_owned();
    say(&channel, &ToDaemon::Open { name });
    assert!(matches!(hear(&channel), FromDaemon::Opened { .. }));
    channel
}

pub fn say(channel: &Channel, message: &ToDaemon) {
    channel.send(&encode(message).unwrap(), &[]).unwrap();
}

pub fn hear(channel: &Channel) -> FromDaemon {
    let packet = channel.receive().unwrap().expect("a message");
    decode(&packet.bytes).unwrap()
}
