//! Tests of isolating hosts, and of undoing it.

use std::{
    io::{Read, Write},
    net::{IpAddr, TcpListener, TcpStream},
    time::Duration,
};

use holdfast_lab::{Error, Lab, LinkEntry, Topology};

mod common;
use common::{is_root, output_of, spec};

fn ping(lab: &Lab, from: &str, address: IpAddr, options: &[&str]) -> bool {
    let mut command = lab.command(from).unwrap();
    command
        .args(["ping", "-n", "-q"])
        .args(options)
        .arg(address.to_string());
    command.output().unwrap().status.success()
}

/// Returns true if a host gets an answer from an address, with a long timeout.
fn is_reachable<A: Into<IpAddr>>(lab: &Lab, from: &str, address: A) -> bool {
    ping(
        lab,
        from,
        address.into(),
        &["-c", "1", "-i", "0.2", "-w", "30"],
    )
}

/// Returns true if a host gets no answer from an address.
fn is_unreachable<A: Into<IpAddr>>(lab: &Lab, from: &str, address: A) -> bool {
    !ping(
        lab,
        from,
        address.into(),
        &["-c", "3", "-i", "0.1", "-W", "0.5"],
    )
}

fn carrier(lab: &Lab, host: &str) -> String {
    output_of(
        lab,
        host,
        "cat /sys/class/net/eth0/carrier /sys/class/net/eth0/carrier_changes /sys/class/net/eth0/operstate",
    )
}

#[test]
fn cut_host_is_isolated_and_keeps_carrier() {
    if !is_root() {
        return;
    }
    let all_delayed = Topology::default().with_entry(LinkEntry {
        delay_ms: Some(1.0),
        ..LinkEntry::for_host("all")
    });
    for topology in [Topology::default(), all_delayed] {
        let lab = Lab::up(&spec("cut").nodes(3).topology(topology)).unwrap();
        let address = |host: &str| lab.address(host).unwrap();
        let router = lab.plan().router_addresses(0);
        let before = carrier(&lab, "n1");
        assert!(is_reachable(&lab, "c1", address("n1").0));
        lab.cut("n1").unwrap();
        lab.cut("n1").unwrap();
        assert!(is_unreachable(&lab, "c1", address("n1").0));
        assert!(is_unreachable(&lab, "c1", address("n1").1));
        assert!(is_unreachable(&lab, "n1", address("n2").0));
        assert!(is_unreachable(&lab, "n1", router.1));
        assert!(
            is_reachable(&lab, "n2", address("n3").0) && is_reachable(&lab, "c1", address("n2").1)
        );
        assert_eq!(carrier(&lab, "n1"), before);
        assert!(lab.status().unwrap().hosts[0].cut);
        lab.heal("n1").unwrap();
        assert!(is_reachable(&lab, "c1", address("n1").0) && is_reachable(&lab, "n1", router.1));
        assert_eq!(carrier(&lab, "n1"), before);
        assert!(!lab.status().unwrap().hosts[0].cut);
        assert!(matches!(lab.cut("n9"), Err(Error::NoHost { .. })));
    }
}

#[test]
fn connection_survives_a_cut() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("outlive")).unwrap();
    let (address, _) = lab.address("n1").unwrap();
    let listener = lab
        .run_in_net_namespace("n1", || TcpListener::bind((address, 80)))
        .unwrap()
        .unwrap();
    let mut client = lab
        .run_in_net_namespace("c1", || TcpStream::connect((address, 80)))
        .unwrap()
        .unwrap();
    let (mut server, _) = listener.accept().unwrap();
    lab.cut("n1").unwrap();
    client.write_all(b"x").unwrap();
    server
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    assert!(server.read(&mut [0]).is_err(), "a byte passed the cut link");
    lab.heal("n1").unwrap();
    server
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut byte = [0];
    server.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn cut_between_two_hosts_leaves_others_connected() {
    if !is_root() {
        return;
    }
    // With two segments, n1 and n3 are on one, n2 is on the other.
    for (segments, topology) in [
        (1, Topology::default()),
        (2, Topology::default().with_entry(LinkEntry::for_host("n2"))),
    ] {
        let lab = Lab::up(
            &spec("between")
                .nodes(3)
                .segments(segments)
                .topology(topology),
        )
        .unwrap();
        let address = |host: &str| lab.address(host).unwrap();
        let before = carrier(&lab, "n1");
        lab.cut_between("n2", "n1").unwrap();
        lab.cut_between("n1", "n3").unwrap();
        for (from, to, open) in [
            ("n1", "n2", false),
            ("n2", "n1", false),
            ("n3", "n1", false),
            ("n2", "n3", true),
            ("c1", "n1", true),
            ("c1", "n2", true),
        ] {
            let probe = if open {
                is_reachable::<IpAddr>
            } else {
                is_unreachable::<IpAddr>
            };
            let (v4, v6) = address(to);
            for address in [IpAddr::from(v4), v6.into()] {
                assert!(
                    probe(&lab, from, address),
                    "{segments} segments, {from} to {to} at {address}: open is {open}"
                );
            }
        }
        assert_eq!(carrier(&lab, "n1"), before);
        lab.heal_between("n1", "n2").unwrap();
        assert!(
            is_reachable(&lab, "n1", address("n2").0)
                && is_unreachable(&lab, "n1", address("n3").0)
        );
        lab.heal("n1").unwrap();
        assert!(is_reachable(&lab, "n1", address("n3").1));
        assert_eq!(output_of(&lab, "sw", "nft list ruleset"), "");
        assert!(matches!(
            lab.cut_between("n1", "n1"),
            Err(Error::Invalid(_))
        ));
    }
}

#[test]
fn routed_service_address_follows_the_route() {
    if !is_root() {
        return;
    }
    for segments in [1, 2] {
        let lab = Lab::up(&spec("routed").nodes(2).segments(segments)).unwrap();
        let (v4, v6) = lab.routed_service_address();
        for node in ["n1", "n2"] {
            output_of(
                &lab,
                node,
                &format!("ip addr add {v4}/32 dev lo; ip addr add {v6}/128 dev lo nodad"),
            );
        }
        let packets_received = |host: &str| {
            let counted = |version: &str, file: &str| {
                output_of(&lab, host, &format!("awk '/{version}/' {file}"))
            };
            (
                counted("^Icmp:", "/proc/net/snmp"),
                counted("^Icmp6InEchos", "/proc/net/snmp6"),
            )
        };
        for (node, other) in [("n1", "n2"), ("n2", "n1")] {
            lab.route_service(node).unwrap();
            let (before, quiet) = (packets_received(node), packets_received(other));
            assert!(is_reachable(&lab, "c1", v4) && is_reachable(&lab, "c1", v6));
            let after = packets_received(node);
            assert!(
                before.0 != after.0 && before.1 != after.1,
                "{node} received no request"
            );
            assert_eq!(packets_received(other), quiet);
        }
        // A host cut off from the contact node does not reach the service address either.
        lab.cut_between("c1", "n2").unwrap();
        lab.route_service("n2").unwrap();
        assert!(is_unreachable(&lab, "c1", v4) && is_unreachable(&lab, "c1", v6));
    }
}

#[test]
fn shared_link_address_reaches_every_node() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("shared").nodes(3)).unwrap();
    let (service, _) = lab.service_address();
    output_of(
        &lab,
        "c1",
        &format!(
            "ip neigh replace {service} lladdr {} dev eth0 nud permanent",
            holdfast_lab::SHARED_MAC
        ),
    );
    let mut watchers = Vec::new();
    for node in ["n1", "n2", "n3"] {
        let mut command = lab.command(node).unwrap();
        command.args([
            "tcpdump",
            "-i",
            "eth0",
            "-n",
            "-c",
            "1",
            "--immediate-mode",
            "udp",
            "and",
            "host",
            &service.to_string(),
        ]);
        watchers.push(
            command
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn()
                .unwrap(),
        );
    }
    let socket = lab
        .run_in_net_namespace("c1", || std::net::UdpSocket::bind("0.0.0.0:0"))
        .unwrap()
        .unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    for watcher in &mut watchers {
        // The watchers end with the first packet they see; the time at which they start is unknown.
        while watcher.try_wait().unwrap().is_none() {
            assert!(
                std::time::Instant::now() < deadline,
                "exceeded time: a node does not see frames to the shared address"
            );
            socket.send_to(b"x", (service, 9)).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(watcher.wait().unwrap().success());
    }
}
