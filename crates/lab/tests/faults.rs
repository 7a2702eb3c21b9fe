//! Tests of isolating hosts, and of undoing it.

use std::{
    io::{Read, Write},
    net::{IpAddr, TcpListener, TcpStream},
    time::Duration,
};

use holdfast_lab::{Error, Lab, LinkEntry, Topology};

mod common;
use common::{ask, is_root, spec};

fn ping(lab: &Lab, from: &str, address: IpAddr, how: &[&str]) -> bool {
    let mut command = lab.command(from).unwrap();
    command
        .args(["ping", "-n", "-q"])
        .args(how)
        .arg(address.to_string());
    command.output().unwrap().status.success()
}

/// Returns true if a host gets an answer from an address, with a long timeout.
fn reaches<A: Into<IpAddr>>(lab: &Lab, from: &str, address: A) -> bool {
    ping(
        lab,
        from,
        address.into(),
        &["-c", "1", "-i", "0.2", "-w", "30"],
    )
}

/// Returns true if a host gets no answer from an address.
fn misses<A: Into<IpAddr>>(lab: &Lab, from: &str, address: A) -> bool {
    !ping(
        lab,
        from,
        address.into(),
        &["-c", "3", "-i", "0.1", "-W", "0.5"],
    )
}

fn carrier(lab: &Lab, host: &str) -> String {
    ask(
        lab,
        host,
        "cat /sys/class/net/eth0/carrier /sys/class/net/eth0/carrier_changes /sys/class/net/eth0/operstate",
    )
}

#[test]
fn a_cut_host_is_alone_and_does_not_notice() {
    if !is_root() {
        return;
    }
    let all_delayed = Topology::default().with(LinkEntry {
        delay_ms: Some(1.0),
        ..LinkEntry::of("all")
    });
    for topology in [Topology::default(), all_delayed] {
        let lab = Lab::up(&spec("cut").nodes(3).topology(topology)).unwrap();
        let address = |host: &str| lab.address(host).unwrap();
        let router = lab.plan().router(0);
        let before = carrier(&lab, "n1");
        assert!(reaches(&lab, "c1", address("n1").0));
        lab.cut("n1").unwrap();
        lab.cut("n1").unwrap();
        assert!(misses(&lab, "c1", address("n1").0));
        assert!(misses(&lab, "c1", address("n1").1));
        assert!(misses(&lab, "n1", address("n2").0));
        assert!(misses(&lab, "n1", router.1));
        assert!(reaches(&lab, "n2", address("n3").0) && reaches(&lab, "c1", address("n2").1));
        assert_eq!(carrier(&lab, "n1"), before);
        assert!(lab.status().unwrap().hosts[0].cut);
        lab.heal("n1").unwrap();
        assert!(reaches(&lab, "c1", address("n1").0) && reaches(&lab, "n1", router.1));
        assert_eq!(carrier(&lab, "n1"), before);
        assert!(!lab.status().unwrap().hosts[0].cut);
        assert!(matches!(lab.cut("n9"), Err(Error::NoHost { .. })));
    }
}

#[test]
fn a_connection_outlives_a_cut() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("outlive")).unwrap();
    let (address, _) = lab.address("n1").unwrap();
    let listener = lab
        .in_net("n1", || TcpListener::bind((address, 80)))
        .unwrap()
        .unwrap();
    let mut client = lab
        .in_net("c1", || TcpStream::connect((address, 80)))
        .unwrap()
        .unwrap();
    let (mut server, _) = listener.accept().unwrap();
    lab.cut("n1").unwrap();
    client.write_all(b"x").unwrap();
    server
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    assert!(
        server.read(&mut [0]).is_err(),
        "a byte came through the cut"
    );
    lab.heal("n1").unwrap();
    server
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut byte = [0];
    server.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn a_cut_between_two_concerns_no_one_else() {
    if !is_root() {
        return;
    }
    // With two segments, n1 and n3 are on one, n2 is on the other.
    for (segments, topology) in [
        (1, Topology::default()),
        (2, Topology::default().with(LinkEntry::of("n2"))),
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
                reaches::<IpAddr>
            } else {
                misses::<IpAddr>
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
        assert!(reaches(&lab, "n1", address("n2").0) && misses(&lab, "n1", address("n3").0));
        lab.heal("n1").unwrap();
        assert!(reaches(&lab, "n1", address("n3").1));
        assert_eq!(ask(&lab, "sw", "nft list ruleset"), "");
        assert!(matches!(
            lab.cut_between("n1", "n1"),
            Err(Error::Invalid(_))
        ));
    }
}

#[test]
fn the_routed_service_address_leads_where_it_is_told() {
    if !is_root() {
        return;
    }
    for segments in [1, 2] {
        let lab = Lab::up(&spec("routed").nodes(2).segments(segments)).unwrap();
        let (v4, v6) = lab.routed_service_address();
        for node in ["n1", "n2"] {
            ask(
                &lab,
                node,
                &format!("ip addr add {v4}/32 dev lo; ip addr add {v6}/128 dev lo nodad"),
            );
        }
        let seen = |host: &str| {
            let counted =
                |version: &str, file: &str| ask(&lab, host, &format!("awk '/{version}/' {file}"));
            (
                counted("^Icmp:", "/proc/net/snmp"),
                counted("^Icmp6InEchos", "/proc/net/snmp6"),
            )
        };
        for (node, other) in [("n1", "n2"), ("n2", "n1")] {
            lab.route_service(node).unwrap();
            let (before, quiet) = (seen(node), seen(other));
            assert!(reaches(&lab, "c1", v4) && reaches(&lab, "c1", v6));
            let after = seen(node);
            assert!(
                before.0 != after.0 && before.1 != after.1,
                "{node} was not asked"
            );
            assert_eq!(seen(other), quiet);
        }
        // A host cut off from the contact node does not reach the service address either.
        lab.cut_between("c1", "n2").unwrap();
        lab.route_service("n2").unwrap();
        assert!(misses(&lab, "c1", v4) && misses(&lab, "c1", v6));
    }
}

#[test]
fn the_shared_link_address_reaches_every_node() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("shared").nodes(3)).unwrap();
    let (service, _) = lab.service_address();
    ask(
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
        .in_net("c1", || std::net::UdpSocket::bind("0.0.0.0:0"))
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
