//! Clients of UDP sockets that share a port reach the socket assigned to them. Needs root and bpffs.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use holdfast_bpf::reuseport::{ReuseportGroups, SocketSelector, cookie};
use holdfast_bpf::shared_with_c::FlowKey;
use rustix::net::sockopt::set_socket_reuseport;
use rustix::net::{AddressFamily, SocketType, bind, socket};

const UDP: u8 = 17;
/// More clients than one run of the program returns.
const CLIENTS: usize = 150;
const SOCKETS: usize = 4;
/// Longest wait for a datagram.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// A folder of pins, removed when dropped.
struct PinFolder(PathBuf);

impl PinFolder {
    fn new(name: &str) -> Self {
        let path = format!("/sys/fs/bpf/holdfast-{name}-{}", std::process::id());
        std::fs::create_dir_all(&path).expect("make a folder in bpffs");
        Self(path.into())
    }
}

impl Drop for PinFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn bind_shared(address: SocketAddr) -> UdpSocket {
    let fd = socket(AddressFamily::INET, SocketType::DGRAM, None).expect("socket");
    set_socket_reuseport(&fd, true).expect("SO_REUSEPORT");
    bind(&fd, &address).expect("bind");
    let socket = UdpSocket::from(fd);
    socket.set_nonblocking(true).expect("O_NONBLOCK");
    socket
}

/// Sockets that share a port, and their clients.
struct SocketGroup {
    sockets: Vec<UdpSocket>,
    clients: Vec<UdpSocket>,
    address: SocketAddr,
}

impl SocketGroup {
    fn new() -> Self {
        let first = bind_shared((Ipv4Addr::LOCALHOST, 0).into());
        let address = first.local_addr().expect("address");
        let others = (1..SOCKETS).map(|_| bind_shared(address));
        let sockets = std::iter::once(first).chain(others).collect();
        let client = |_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let clients = (0..CLIENTS).map(client).collect();
        Self {
            sockets,
            clients,
            address,
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(AsFd::as_fd).collect()
    }

    fn flows(&self) -> Vec<FlowKey> {
        let address = |client: &UdpSocket| client.local_addr().expect("address");
        let flow = |client| FlowKey::new(UDP, self.address, address(client));
        self.clients.iter().map(flow).collect()
    }

    /// Returns the socket that receives a datagram of each client. A busy kernel delivers a moment after sending, also
    /// over the loopback device.
    fn receivers(&self) -> Vec<Option<usize>> {
        let receiver = |client: &UdpSocket| {
            client.send_to(b"x", self.address).expect("send");
            let has_datagram = |socket: &UdpSocket| socket.recv(&mut [0; 8]).is_ok();
            let sent_at = Instant::now();
            loop {
                let received = self.sockets.iter().position(has_datagram);
                if received.is_some() || sent_at.elapsed() > DELIVERY_TIMEOUT {
                    return received;
                }
            }
        };
        self.clients.iter().map(receiver).collect()
    }
}

#[test]
fn clients_keep_assigned_sockets() {
    let pins = PinFolder::new("shared-port");
    let ports = ReuseportGroups::load(&pins.0).expect("load");
    let mut group = SocketGroup::new();
    let flows = group.flows();

    let by_kernel = group.receivers();
    assert_eq!(
        ports.query_receivers(&group.fds(), &flows).expect("ask"),
        by_kernel
    );
    assert!(by_kernel.iter().any(|one| *one != by_kernel[0]), "spread");

    // For all but the first clients, another socket than the kernel's choice.
    let assigned: Vec<Option<usize>> = by_kernel
        .iter()
        .enumerate()
        .map(|(client, socket)| match client {
            0..8 => *socket,
            _ => socket.map(|at| (at + 1) % SOCKETS),
        })
        .collect();
    for (index, socket) in group.sockets.iter().enumerate() {
        let assigned_clients = (8..CLIENTS).filter(|client| assigned[*client] == Some(index));
        let assigned_flows: Vec<FlowKey> = assigned_clients.map(|client| flows[client]).collect();
        ports.assign(socket.as_fd(), &assigned_flows).expect("name");
    }
    assert_eq!(group.receivers(), assigned);
    assert_eq!(
        ports.query_receivers(&group.fds(), &flows).expect("ask"),
        assigned
    );

    // A restarted daemon still has the assignments.
    drop(ports);
    let ports = ReuseportGroups::load(&pins.0).expect("load again");
    assert_eq!(
        ports.query_receivers(&group.fds(), &flows).expect("ask"),
        assigned
    );

    // Clients of a closed socket reach the others.
    drop(group.sockets.pop());
    let receivers = group.receivers();
    assert!(receivers.iter().all(Option::is_some));
    assert_eq!(
        ports.query_receivers(&group.fds(), &flows).expect("ask"),
        receivers
    );
}

#[test]
fn groups_are_listed_with_their_selectors() {
    let pins = PinFolder::new("shared-port-listed");
    let ports = ReuseportGroups::load(&pins.0).expect("load");
    let (plain, with_assignments, classic) =
        (SocketGroup::new(), SocketGroup::new(), SocketGroup::new());
    let single = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    ports
        .assign(
            with_assignments.sockets[0].as_fd(),
            &with_assignments.flows(),
        )
        .expect("name");
    // A program that returns 1: the second socket.
    let code = [6 | 1 << 32_u64];
    ports
        .attach_classic(classic.sockets[0].as_fd(), &code)
        .expect("attach");
    let all = ports.list(std::process::id().cast_signed()).expect("list");
    let find_listed = |socket: &UdpSocket| {
        let cookie = cookie(socket.as_fd()).expect("cookie");
        all.iter().find(|one| one.cookie == cookie)
    };
    assert_eq!(
        find_listed(&single),
        None,
        "no other socket shares its port"
    );
    for (group, choice) in [
        (&plain, SocketSelector::KernelHash),
        (&with_assignments, SocketSelector::KernelHash),
        (&classic, SocketSelector::ClassicBpf(code.into())),
    ] {
        let first = find_listed(&group.sockets[0]).expect("listed").group;
        for (socket, index) in group.sockets.iter().zip(0..) {
            let listed = find_listed(socket).expect("listed");
            assert_eq!((listed.index, listed.group), (Some(index), first));
            assert_eq!(listed.selector, choice);
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
fn socket_of_other_group_is_not_selected() {
    let pins = PinFolder::new("shared-port-other");
    let ports = ReuseportGroups::load(&pins.0).expect("load");
    let (group, other) = (SocketGroup::new(), SocketGroup::new());
    let flows = group.flows();
    let before = group.receivers();
    // An assignment as a dishonest peer could send it.
    ports
        .assign(other.sockets[0].as_fd(), &flows)
        .expect("name");
    ports
        .assign(group.sockets[0].as_fd(), &flows[..1])
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
