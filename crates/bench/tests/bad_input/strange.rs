//! A server program driven by the test: it sends any messages of the daemon's protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use holdfast_api::app::{Channel, FromDaemon, HandOffItem, Listener, ToDaemon, decode, encode};
use holdfast_api::{Drain, FlowText, Protocol};

use crate::common::World;

/// Environment variable of the helper process: where to pass the listener, its address, and true for a Multipath TCP
/// socket.
const HELPER: &str = "HOLDFAST_TEST_LISTENER";

/// Returns a listener made in a host. The daemon only watches sockets made in its host, and connections accepted from
/// them, so a helper process in the host makes the listener and passes it to this process.
pub fn listener_in(world: &World, host: &str, address: SocketAddr, multipath: bool) -> TcpListener {
    let path = world.cluster.directory().join(format!("{host}.listener"));
    let passed = Listener::bind(&path).unwrap();
    let mut command = world.cluster.lab().command(host).unwrap();
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "strange::makes_a_listener", "--ignored"]);
    command.env(HELPER, format!("{} {address} {multipath}", path.display()));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::remove_file(&path).unwrap();
    let packet = passed.accept().unwrap().receive().unwrap().unwrap();
    TcpListener::from(packet.descriptors.into_iter().next().unwrap())
}

/// Runs as a separate process in a host; see [`listener_in`].
#[test]
#[ignore = "only of use to other tests"]
fn makes_a_listener() {
    use rustix::net::{AddressFamily, SocketType, bind, ipproto, listen, socket, sockopt};
    let Ok(order) = std::env::var(HELPER) else {
        return;
    };
    let words: Vec<&str> = order.split(' ').collect();
    let address: SocketAddr = words[1].parse().unwrap();
    let protocol = match words[2] {
        "true" => ipproto::MPTCP,
        _ => ipproto::TCP,
    };
    let listener = socket(AddressFamily::INET, SocketType::STREAM, Some(protocol)).unwrap();
    sockopt::set_socket_reuseaddr(&listener, true).unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 64).unwrap();
    let channel = Channel::connect(words[0]).unwrap();
    channel.send(&[1], &[listener.as_fd()]).unwrap();
}

/// A session of a server program with the daemon of a node.
pub struct Strange {
    pub channel: Channel,
}

impl Strange {
    /// Opens a session at a node.
    pub fn open(world: &World, node: &str) -> Self {
        let path = world.cluster.run_file(node, "app.sock").unwrap();
        let channel = Channel::connect(path).unwrap();
        let limit = Some(crate::common::PATIENCE);
        rustix::net::sockopt::set_socket_timeout(
            &channel,
            rustix::net::sockopt::Timeout::Recv,
            limit,
        )
        .unwrap();
        let strange = Self { channel };
        strange.say(&ToDaemon::Open {
            name: "strange".into(),
        });
        let opened = strange.hear();
        assert!(matches!(opened, FromDaemon::Opened { .. }), "{opened:?}");
        strange
    }

    /// Registers the program as a server of the pool `odd`.
    pub fn serves(&self, world: &World) {
        self.say(&ToDaemon::Serve {
            service: 1,
            pool: "odd".into(),
            protocol: Protocol::Tcp,
            addresses: vec![world.odd()],
        });
    }

    pub fn say(&self, message: &ToDaemon) {
        self.channel.send(&encode(message).unwrap(), &[]).unwrap();
    }

    pub fn say_with(&self, message: &ToDaemon, descriptors: &[BorrowedFd<'_>]) {
        self.channel
            .send(&encode(message).unwrap(), descriptors)
            .unwrap();
    }

    /// Receives the next message.
    pub fn hear(&self) -> FromDaemon {
        self.hear_with().0
    }

    pub fn hear_with(&self) -> (FromDaemon, Vec<OwnedFd>) {
        let packet = self.channel.receive().unwrap().expect("a message");
        (decode(&packet.bytes).unwrap(), packet.descriptors)
    }

    /// Reports that the program has accepted a connection.
    pub fn accepted(&self, flow: FlowText) {
        self.say(&ToDaemon::Accepted {
            service: 1,
            flows: vec![flow],
        });
    }

    /// Hands a flow off, with any descriptor.
    pub fn hand_off(&self, flow: FlowText, to: &str, descriptor: Option<BorrowedFd<'_>>) {
        let message = hand_off(flow, to, descriptor.is_some(), Vec::new());
        self.say_with(&message, descriptor.as_slice());
    }

    /// Receives the reason for which the daemon keeps a flow.
    #[track_caller]
    pub fn kept(&self, flow: FlowText) -> String {
        match self.hear() {
            FromDaemon::Kept { flows, reason } => {
                assert_eq!(flows, [flow]);
                reason
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Builds a `HandOff` of one flow.
pub fn hand_off(flow: FlowText, to: &str, descriptor: bool, state: Vec<u8>) -> ToDaemon {
    ToDaemon::HandOff {
        batch: 1,
        to: to.to_owned(),
        drain: Drain::None,
        items: vec![HandOffItem {
            flow,
            application_state: state,
            descriptor,
        }],
        last: true,
    }
}

/// Opens a connection to the pool `odd`: the client's end, the program's end, and its flow.
pub fn connection(world: &World, listener: &TcpListener) -> (TcpStream, TcpStream, FlowText) {
    let client = world.odd_connection();
    let (server, remote) = listener.accept().unwrap();
    server
        .set_read_timeout(Some(crate::common::PATIENCE))
        .unwrap();
    (client, server, world.flow_of(world.odd(), remote))
}

/// Asserts that data passes in both directions.
#[track_caller]
pub fn both_speak(client: &mut TcpStream, server: &mut TcpStream) {
    let mut got = [0; 5];
    client.write_all(b"there").unwrap();
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"there");
    server.write_all(b"again").unwrap();
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"again");
}
