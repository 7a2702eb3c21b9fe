//! A server program driven by the test: it sends any messages of the daemon's protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use holdfast_api::app::{Channel, FromDaemon, HandOffItem, Listener, ToDaemon, decode, encode};
use holdfast_api::{Drain, FlowText, Protocol};

use crate::common::LoadedGroup;

/// Environment variable of the helper process: where to pass the listener, its address, and true for a Multipath TCP
/// socket.
const LISTENER_HELPER: &str = "HOLDFAST_TEST_LISTENER";

/// Returns a listener made in a host. The daemon only watches sockets made in its host, and connections accepted from
/// them, so a helper process in the host makes the listener and passes it to this process.
pub fn listener_in(
    world: &LoadedGroup,
    host: &str,
    address: SocketAddr,
    multipath: bool,
) -> TcpListener {
    let path = world.cluster.directory().join(format!("{host}.listener"));
    let passing_socket = Listener::bind(&path).unwrap();
    let mut command = world.cluster.lab().command(host).unwrap();
    command.arg(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "scripted_program::listener_helper_process",
        "--ignored",
    ]);
    command.env(
        LISTENER_HELPER,
        format!("{} {address} {multipath}", path.display()),
    );
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::remove_file(&path).unwrap();
    let packet = passing_socket.accept().unwrap().receive().unwrap().unwrap();
    TcpListener::from(packet.descriptors.into_iter().next().unwrap())
}

/// Runs as a separate process in a host; see [`listener_in`].
#[test]
#[ignore = "started by other tests"]
fn listener_helper_process() {
    use rustix::net::{AddressFamily, SocketType, bind, ipproto, listen, socket, sockopt};
    let Ok(arguments) = std::env::var(LISTENER_HELPER) else {
        return;
    };
    let fields: Vec<&str> = arguments.split(' ').collect();
    let address: SocketAddr = fields[1].parse().unwrap();
    let protocol = match fields[2] {
        "true" => ipproto::MPTCP,
        _ => ipproto::TCP,
    };
    let listener = socket(AddressFamily::INET, SocketType::STREAM, Some(protocol)).unwrap();
    sockopt::set_socket_reuseaddr(&listener, true).unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 64).unwrap();
    let channel = Channel::connect(fields[0]).unwrap();
    channel.send(&[1], &[listener.as_fd()]).unwrap();
}

/// A session of a server program with the daemon of a node.
pub struct ScriptedProgram {
    pub channel: Channel,
}

impl ScriptedProgram {
    /// Opens a session at a node.
    pub fn open(world: &LoadedGroup, node: &str) -> Self {
        let path = world.cluster.run_path(node, "app.sock").unwrap();
        let channel = Channel::connect(path).unwrap();
        let limit = Some(crate::common::PATIENCE);
        rustix::net::sockopt::set_socket_timeout(
            &channel,
            rustix::net::sockopt::Timeout::Recv,
            limit,
        )
        .unwrap();
        let program = Self { channel };
        program.send(&ToDaemon::Open {
            name: "strange".into(),
        });
        let answer = program.receive();
        assert!(matches!(answer, FromDaemon::Opened { .. }), "{answer:?}");
        program
    }

    /// Registers the program as a server of the pool `odd`.
    pub fn serve_odd_pool(&self, world: &LoadedGroup) {
        self.send(&ToDaemon::Serve {
            service: 1,
            pool: "odd".into(),
            protocol: Protocol::Tcp,
            addresses: vec![world.odd_address()],
        });
    }

    pub fn send(&self, message: &ToDaemon) {
        self.channel.send(&encode(message).unwrap(), &[]).unwrap();
    }

    pub fn send_with_descriptors(&self, message: &ToDaemon, descriptors: &[BorrowedFd<'_>]) {
        self.channel
            .send(&encode(message).unwrap(), descriptors)
            .unwrap();
    }

    /// Receives the next message.
    pub fn receive(&self) -> FromDaemon {
        self.receive_with_descriptors().0
    }

    pub fn receive_with_descriptors(&self) -> (FromDaemon, Vec<OwnedFd>) {
        let packet = self.channel.receive().unwrap().expect("a message");
        (decode(&packet.bytes).unwrap(), packet.descriptors)
    }

    /// Reports that the program has accepted a connection.
    pub fn report_accepted(&self, flow: FlowText) {
        self.send(&ToDaemon::Accepted {
            service: 1,
            flows: vec![flow],
        });
    }

    /// Hands a flow off, with any descriptor.
    pub fn hand_off(&self, flow: FlowText, to: &str, descriptor: Option<BorrowedFd<'_>>) {
        let message = hand_off(flow, to, descriptor.is_some(), Vec::new());
        self.send_with_descriptors(&message, descriptor.as_slice());
    }

    /// Receives the reason for which the daemon keeps a flow.
    #[track_caller]
    pub fn receive_kept_reason(&self, flow: FlowText) -> String {
        match self.receive() {
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
pub fn open_connection(
    world: &LoadedGroup,
    listener: &TcpListener,
) -> (TcpStream, TcpStream, FlowText) {
    let client = world.connect_to_odd();
    let (server, remote) = listener.accept().unwrap();
    server
        .set_read_timeout(Some(crate::common::PATIENCE))
        .unwrap();
    (client, server, world.flow_of(world.odd_address(), remote))
}

/// Asserts that data passes in both directions.
#[track_caller]
pub fn assert_data_passes(client: &mut TcpStream, server: &mut TcpStream) {
    let mut received = [0; 5];
    client.write_all(b"there").unwrap();
    server.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"there");
    server.write_all(b"again").unwrap();
    client.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"again");
}
