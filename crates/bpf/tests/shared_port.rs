//! Clients of UDP sockets that share a port reach the socket assigned to them. Needs root and bpffs.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_bpf::shared::FlowKey;
use holdfast_bpf::shared_port::{Choice, SharedPorts, cookie};
use rustix::net::sockopt::set_socket_reuseport;
use rustix::net::{AddressFamily, SocketType, bind, socket};

const UDP: u8 = 17;
/// More clients than one run of the program returns.
const CLIENTS: usize = 150;
const SOCKETS: usize = 4;

/// A folder of pins, removed when dropped.
struct Pins(PathBuf);

impl Pins {
    fn new(name: &str) -> Self {
        let path = format!("/sys/fs/bpf/holdfast-{name}-{}", std::process::id());
        std::fs::create_dir_all(&path).expect("make a folder in bpffs");
        Self(path.into())
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn member(at: SocketAddr) -> UdpSocket {
    let fd = socket(AddressFamily::INET, SocketType::DGRAM, None).expect("socket");
    set_socket_reuseport(&fd, true).expect("SO_REUSEPORT");
    bind(&fd, &at).expect("bind");
    let socket = UdpSocket::from(fd);
    socket.set_nonblocking(true).expect("O_NONBLOCK");
    socket
}

/// Sockets that share a port, and their clients.
struct Group {
    sockets: Vec<UdpSocket>,
    clients: Vec<UdpSocket>,
    at: SocketAddr,
}

impl Group {
    fn new() -> Self {
        let first = member((Ipv4Addr::LOCALHOST, 0).into());
        let at = first.local_addr().expect("address");
        let others = (1..SOCKETS).map(|_| member(at));
        let sockets = std::iter::once(first).chain(others).collect();
        let client = |_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let clients = (0..CLIENTS).map(client).collect();
        Self {
            sockets,
            clients,
            at,
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(AsFd::as_fd).collect()
    }

    fn flows(&self) -> Vec<FlowKey> {
        let address = |client: &UdpSocket| client.local_addr().expect("address");
        let flow = |client| FlowKey::new(UDP, self.at, address(client));
        self.clients.iter().map(flow).collect()
    }

    /// Returns the socket that receives a datagram of each client. Delivery over the loopback device is part of
    /// sending.
    fn receivers(&self) -> Vec<Option<usize>> {
        let receiver = |client: &UdpSocket| {
            client.send_to(b"x", self.at).expect("send");
            let got = |socket: &UdpSocket| socket.recv(&mut [0; 8]).is_ok();
            self.sockets.iter().position(got)
        };
        self.clients.iter().map(receiver).collect()
    }
}

#[test]
fn clients_keep_the_sockets_that_are_named_for_them() {
    let pins = Pins::new("shared-port");
    let ports = SharedPorts::load(&pins.0).expect("load");
    let mut group = Group::new();
    let flows = group.flows();

    let by_kernel = group.receivers();
    assert_eq!(ports.ask(&group.fds(), &flows).expect("ask"), by_kernel);
    assert!(by_kernel.iter().any(|one| *one != by_kernel[0]), "spread");

    // For all but the first clients, another socket than the kernel's choice.
    let named: Vec<Option<usize>> = by_kernel
        .iter()
        .enumerate()
        .map(|(client, socket)| match client {
            0..8 => *socket,
            _ => socket.map(|at| (at + 1) % SOCKETS),
        })
        .collect();
    for (at, socket) in group.sockets.iter().enumerate() {
        let its = (8..CLIENTS).filter(|client| named[*client] == Some(at));
        let its: Vec<FlowKey> = its.map(|client| flows[client]).collect();
        ports.name(socket.as_fd(), &its).expect("name");
    }
    assert_eq!(group.receivers(), named);
    assert_eq!(ports.ask(&group.fds(), &flows).expect("ask"), named);

    // A restarted daemon still has the assignments.
    drop(ports);
    let ports = SharedPorts::load(&pins.0).expect("load again");
    assert_eq!(ports.ask(&group.fds(), &flows).expect("ask"), named);

    // Clients of a closed socket reach the others.
    drop(group.sockets.pop());
    let receivers = group.receivers();
    assert!(receivers.iter().all(Option::is_some));
    assert_eq!(ports.ask(&group.fds(), &flows).expect("ask"), receivers);
}

#[test]
fn groups_are_listed_with_their_programs() {
    let pins = Pins::new("shared-port-listed");
    let ports = SharedPorts::load(&pins.0).expect("load");
    let (plain, named, classic) = (Group::new(), Group::new(), Group::new());
    let alone = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    ports
        .name(named.sockets[0].as_fd(), &named.flows())
        .expect("name");
    // A program that returns 1: the second socket.
    let code = [6 | 1 << 32_u64];
    ports
        .set_classic(classic.sockets[0].as_fd(), &code)
        .expect("attach");
    let all = ports.list(std::process::id().cast_signed()).expect("list");
    let of = |socket: &UdpSocket| {
        let cookie = cookie(socket.as_fd()).expect("cookie");
        all.iter().find(|one| one.cookie == cookie)
    };
    assert_eq!(of(&alone), None, "it shares its port with nobody");
    for (group, choice) in [
        (&plain, Choice::Kernel),
        (&named, Choice::Kernel),
        (&classic, Choice::Classic(code.into())),
    ] {
        let first = of(&group.sockets[0]).expect("listed").group;
        for (socket, place) in group.sockets.iter().zip(0..) {
            let sharing = of(socket).expect("listed");
            assert_eq!((sharing.place, sharing.group), (Some(place), first));
            assert_eq!(sharing.choice, choice);
        }
    }
    assert!(
        classic
            .receivers()
            .iter()
            .all(|receiver| *receiver == Some(1))
    );
}

#[test]
fn a_socket_of_another_group_is_not_chosen() {
    let pins = Pins::new("shared-port-other");
    let ports = SharedPorts::load(&pins.0).expect("load");
    let (group, other) = (Group::new(), Group::new());
    let flows = group.flows();
    let before = group.receivers();
    // An assignment as a dishonest peer could send it.
    ports.name(other.sockets[0].as_fd(), &flows).expect("name");
    ports
        .name(group.sockets[0].as_fd(), &flows[..1])
        .expect("name");
    let after = group.receivers();
    assert_eq!(after[0], Some(0));
    assert_eq!(after[1..], before[1..]);
    for socket in &other.sockets {
        socket
            .set_read_timeout(Some(Duration::from_millis(1)))
            .expect("timeout");
        assert!(socket.recv(&mut [0; 8]).is_err());
    }
}
