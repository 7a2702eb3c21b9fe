//! Registrars that find each other only by multicast, on the standard ports over IP, in a separate network namespace.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_sys::net::Interface;
use holdfast_sys::transport::Multicast;
use holdfast_wire::rserpool::Transport;
use holdfast_wire::rserpool::asap::Message;
use nix::sched::{CloneFlags, unshare};

use crate::PATIENCE;
use crate::capture::Capture;
use crate::daemon::Daemon;

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status();
    assert!(status.expect("the program ip").success(), "ip {words}");
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start(directory: &Path, address: &str) -> Daemon {
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
    Daemon::configured(directory, &text)
}

fn scene() {
    // The namespace of this thread, and of the processes that it starts.
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    ip("link set lo up");
    ip("link add a0 type veth peer name a1");
    ip("address add 10.1.0.1/24 dev a0");
    ip("address add 10.1.0.2/24 dev a0");
    ip("link set a1 up");
    ip("link set a0 up");
    let _capture = Capture::start("node-multicast");
    let directory = tempfile::tempdir().expect("a directory");
    let first = start(&directory.path().join("first"), "10.1.0.1");
    let one = until("the first registrar", || {
        first.status().filter(|status| status.ready)
    });
    let index = Interface::find("a0").expect("an interface").index;
    let group = "239.0.0.50:3863".parse().expect("an address");
    let mut elements = Multicast::join(group, &[index]).expect("joined");
    let announced = until("an announce to elements", || {
        let came = elements.receive().expect("a socket")?;
        let bytes = Bytes::copy_from_slice(came.bytes);
        Some(Message::parse(&bytes).expect("an ASAP message").message)
    });
    let Message::ServerAnnounce {
        registrar,
        transports,
    } = announced
    else {
        panic!("no announce: {announced:?}");
    };
    assert_eq!(registrar.to_string(), one.id);
    let [Transport::Sctp(at)] = transports.as_slice() else {
        panic!("not where it is: {transports:?}");
    };
    assert_eq!(
        (at.port, at.addresses[0].to_string()),
        (3863, "10.1.0.1".into())
    );

    let second = start(&directory.path().join("second"), "10.1.0.2");
    let two = until("the second registrar", || {
        second.status().filter(|status| status.ready)
    });
    for (viewer, seen) in [(&first, &two.id), (&second, &one.id)] {
        until("registrars that found each other", || {
            viewer
                .peer(seen)
                .filter(|peer| peer.active && peer.connected)
        });
    }
}

#[test]
fn registrars_find_each_other_where_multicast_is_believed() {
    std::thread::spawn(scene)
        .join()
        .expect("a scene that ends well");
}
