//! Tests of hosts at different distances from each other.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use holdfast_lab::{Lab, LinkEntry, Topology};

mod common;
use common::{is_root, receive, spec};

#[test]
fn delay_toward_one_host_differs_from_delay_to_another() {
    if !is_root() {
        return;
    }
    let extra_delay = Duration::from_millis(60);
    let entry = LinkEntry {
        toward: Some("n2".into()),
        delay_ms: Some(60.0),
        ..LinkEntry::for_host("n1")
    };
    let spec = spec("toward").nodes(3).clients(0);
    let lab = Lab::up(&spec.topology(Topology::default().with_entry(entry))).unwrap();
    let socket = |host: &str, at: SocketAddr| {
        let socket = lab
            .run_in_net_namespace(host, || UdpSocket::bind(at))
            .unwrap()
            .unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        socket
    };
    let at = |host: &str| (lab.address(host).unwrap().0, 7).into();
    // Use the minimum of several trips: other load on the machine makes none shorter.
    let smallest_delay = |from: &str, to: &str| {
        let (sender, receiver) = (
            socket(from, "0.0.0.0:0".parse().unwrap()),
            socket(to, at(to)),
        );
        let trip = |_| {
            let begun = Instant::now();
            sender.send_to(b"?", at(to)).unwrap();
            receive(&receiver, &mut [0; 1]).unwrap();
            begun.elapsed()
        };
        (0..20).map(trip).min().unwrap()
    };
    assert!(smallest_delay("n1", "n2") >= extra_delay);
    assert!(smallest_delay("n1", "n3") < extra_delay);
    assert!(smallest_delay("n2", "n1") < extra_delay);
}
