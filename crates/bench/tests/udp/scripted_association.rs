//! An association with server programs that the test drives.

use std::net::{SocketAddr, UdpSocket};

use holdfast_api::app::{Channel, FromDaemon, HandOffItem, ToDaemon, decode, encode};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_testbed::cluster::{Cluster, IpFamily};

use crate::common::{PATIENCE, eventually};
use crate::numbered_datagrams::client_socket;
use crate::{ODD_PORT, owner_of};

/// An association of the pool `odd`, with server programs on n2 and n3 that the test drives.
pub struct ScriptedAssociation {
    pub service: SocketAddr,
    pub client: UdpSocket,
    /// The socket of the program on n2.
    pub server: UdpSocket,
    pub flow: FlowText,
    /// The session of the program on n2.
    pub donor_program: Channel,
    /// The session of the program on n3.
    pub acceptor_program: Channel,
}

impl ScriptedAssociation {
    pub fn new(cluster: &Cluster) -> Self {
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), ODD_PORT);
        let client = client_socket(cluster, service);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (donor_program, acceptor_program) =
            (open_session(cluster, "n2"), open_session(cluster, "n3"));
        for (program, node) in [(&donor_program, "n2"), (&acceptor_program, "n3")] {
            let serve = ToDaemon::Serve {
                service: 1,
                pool: "odd".into(),
                protocol: Protocol::Udp,
                addresses: vec![service],
            };
            send(program, &serve);
            eventually("the pool is served", || serves_pool(cluster, node, "odd"));
        }
        // An association begins with the server's first answer.
        let server = bind_socket_in(cluster, "n2", service);
        client.send(b"?").unwrap();
        let (_, remote) = server.recv_from(&mut [0; 16]).unwrap();
        server.send_to(b"!", remote).unwrap();
        client.recv(&mut [0; 16]).unwrap();
        let flow = FlowText::new(Protocol::Udp, service, remote).unwrap();
        eventually("the association has an owner", || {
            owner_of(cluster, flow).as_deref() == Some("n2")
        });
        let flows = vec![flow];
        send(&donor_program, &ToDaemon::Accepted { service: 1, flows });
        Self {
            service,
            client,
            server,
            flow,
            donor_program,
            acceptor_program,
        }
    }

    /// Hands the association to n3, up to the freeze; returns its number there.
    pub fn start_handoff(&self) -> u64 {
        let item = HandOffItem {
            flow: self.flow,
            application_state: Vec::new(),
            descriptor: false,
        };
        let hand_off = ToDaemon::HandOff {
            batch: 1,
            to: "n3".into(),
            drain: Drain::None,
            items: vec![item],
            last: true,
        };
        send(&self.donor_program, &hand_off);
        let incoming = receive(&self.acceptor_program);
        let FromDaemon::Incoming { items } = incoming else {
            panic!("{incoming:?}")
        };
        assert!(matches!(
            receive(&self.acceptor_program),
            FromDaemon::State { .. }
        ));
        let id = items[0].id;
        send(
            &self.acceptor_program,
            &ToDaemon::Received { ids: vec![id] },
        );
        let collect_message = receive(&self.donor_program);
        assert!(
            matches!(collect_message, FromDaemon::Collect { .. }),
            "{collect_message:?}"
        );
        id
    }
}

pub fn bind_socket_in(cluster: &Cluster, node: &str, service: SocketAddr) -> UdpSocket {
    let socket = cluster
        .lab()
        .run_in_net_namespace(node, || UdpSocket::bind(service));
    let socket = socket.unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn serves_pool(cluster: &Cluster, node: &str, pool: &str) -> bool {
    let control = cluster.blocking_control_client(node).unwrap();
    let status = control.run(async |client| client.status().await).unwrap();
    let mut pools = status.programs.iter().flat_map(|program| &program.pools);
    pools.any(|other| other == pool)
}

fn open_session(cluster: &Cluster, node: &str) -> Channel {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let channel = Channel::connect(cluster.run_path(node, "app.sock").unwrap()).unwrap();
    set_socket_timeout(&channel, Timeout::Recv, Some(PATIENCE)).unwrap();
    let name = "strange".to_owned();
    send(&channel, &ToDaemon::Open { name });
    assert!(matches!(receive(&channel), FromDaemon::Opened { .. }));
    channel
}

pub fn send(channel: &Channel, message: &ToDaemon) {
    channel.send(&encode(message).unwrap(), &[]).unwrap();
}

pub fn receive(channel: &Channel) -> FromDaemon {
    let packet = channel.receive().unwrap().expect("a message");
    decode(&packet.bytes).unwrap()
}
