//! Multicast announcements between members of a group, in a separate network namespace.

mod common;

use holdfast_lab::testing::TestNamespace;
use holdfast_lab::testing::WAIT_LIMIT;
use holdfast_sctp::MulticastSocket;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;

fn interface_index(name: &str) -> u32 {
    let name = std::ffi::CString::new(name).expect("a name");
    // SAFETY: the name is a C string that outlives the call.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

fn next_payload(member: &mut MulticastSocket) -> Vec<u8> {
    let deadline = Instant::now() + WAIT_LIMIT;
    loop {
        if let Some(announced) = member.receive().expect("a socket") {
            return announced.bytes.to_vec();
        }
        assert!(Instant::now() < deadline, "exceeded time: no announce came");
        std::thread::yield_now();
    }
}

#[test]
fn members_receive_announcements_on_joined_interfaces() {
    let namespace = TestNamespace::new();
    namespace.ip("link add a0 type veth peer name a1");
    namespace.ip("link add b0 type veth peer name b1");
    for (interface, address) in [
        ("a0", "10.1.0.1/24"),
        ("a1", "10.1.0.2/24"),
        ("b0", "10.2.0.1/24"),
        ("b1", "10.2.0.2/24"),
    ] {
        namespace.ip(&format!("address add {address} dev {interface}"));
        namespace.ip(&format!("link set {interface} up"));
    }
    namespace.run(|| {
        let group: SocketAddr = "239.0.0.50:3863".parse().expect("an address");
        let on_both = MulticastSocket::join(group, &[interface_index("a0"), interface_index("b0")])
            .expect("joined");
        let mut at_a = MulticastSocket::join(group, &[interface_index("a0")]).expect("joined");
        let mut at_b = MulticastSocket::join(group, &[interface_index("b0")]).expect("joined");
        assert_eq!(on_both.send(b"here I am").expect("sent"), 2);
        assert_eq!(next_payload(&mut at_a), b"here I am");
        assert_eq!(next_payload(&mut at_b), b"here I am");
        let second_on_a = MulticastSocket::join(group, &[interface_index("a0")]).expect("joined");
        second_on_a.send(b"to a").expect("sent");
        on_both.send(b"to both").expect("sent");
        assert_eq!(next_payload(&mut at_a), b"to a");
        assert_eq!(
            next_payload(&mut at_b),
            b"to both",
            "b received a packet for a"
        );
    });
}

#[test]
fn unicast_address_cannot_be_joined() {
    let host = "192.0.2.1:3863".parse().expect("an address");
    let outcome = MulticastSocket::join(host, &[]);
    let kind = outcome.err().map(|error| error.kind());
    assert_eq!(kind, Some(io::ErrorKind::InvalidInput));
}
