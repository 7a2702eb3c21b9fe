//! Registrars that find each other only by multicast, on the standard ports over IP, in a separate network namespace.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_sctp::MulticastSocket;
use holdfast_sys::net::Interface;
use holdfast_wire::rserpool::Transport;
use holdfast_wire::rserpool::asap::Message;
use nix::sched::{CloneFlags, unshare};

use crate::TIMEOUT;
use crate::capture::Capture;
use crate::daemon::Daemon;

fn run_ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status();
    assert!(status.expect("the program ip").success(), "ip {words}");
}

fn wait_for<T>(condition: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {condition}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start_registrar(directory: &Path, address: &str) -> Daemon {
    let text = format!(
        r#"
[registrar]
listen = ["{address}"]
run_dir = "{}"
encapsulation = false
heartbeat_cycle_ms = 300
last_heard_max_ms = 20000
[access]
registrar = ["10.1.0.0/24"]
[multicast]
announce_ms = 200
enrp = true
interfaces = ["a0"]
mentor_hunt_ms = 1000
"#,
        directory.display()
    );
    Daemon::start_configured(directory, &text)
}

fn run_scenario() {
    // The namespace of this thread, and of the processes that it starts.
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    run_ip("link set lo up");
    run_ip("link add a0 type veth peer name a1");
    run_ip("address add 10.1.0.1/24 dev a0");
    run_ip("address add 10.1.0.2/24 dev a0");
    run_ip("link set a1 up");
    run_ip("link set a0 up");
    let _capture = Capture::start("node-multicast");
    let directory = tempfile::tempdir().expect("a directory");
    let first = start_registrar(&directory.path().join("first"), "10.1.0.1");
    let first_status = wait_for("the first registrar", || {
        first.status().filter(|status| status.ready)
    });
    let index = Interface::find("a0").expect("an interface").index;
    let group = "239.0.0.50:3863".parse().expect("an address");
    let mut elements = MulticastSocket::join(group, &[index]).expect("joined");
    let announced = wait_for("an announce to elements", || {
        let datagram = elements.receive().expect("a socket")?;
        let bytes = Bytes::copy_from_slice(datagram.bytes);
        Some(Message::parse(&bytes).expect("an ASAP message").message)
    });
    let Message::ServerAnnounce {
        registrar,
        transports,
    } = announced
    else {
        panic!("no announce: {announced:?}");
    };
    assert_eq!(registrar.to_string(), first_status.id);
    let [Transport::Sctp(at)] = transports.as_slice() else {
        panic!("wrong transports: {transports:?}");
    };
    assert_eq!(
        (at.port, at.addresses[0].to_string()),
        (3863, "10.1.0.1".into())
    );

    let second = start_registrar(&directory.path().join("second"), "10.1.0.2");
    let second_status = wait_for("the second registrar", || {
        second.status().filter(|status| status.ready)
    });
    for (viewer, seen) in [(&first, &second_status.id), (&second, &first_status.id)] {
        wait_for("registrars that found each other", || {
            viewer
                .peer(seen)
                .filter(|peer| peer.active && peer.connected)
        });
    }
}

#[test]
fn registrars_discover_peers_by_trusted_multicast() {
    std::thread::spawn(run_scenario)
        .join()
        .expect("a scenario that passes");
}
