//! Interfaces, addresses, routes, neighbours and socket lists, as the kernel reports them.

use holdfast_lab::testing::{
    SERVICE_V4, TestNetwork, exchange, pattern, service_addresses, wait_for,
};
use holdfast_sys::local_delivery_routes::{
    deliver_locally, end_local_delivery, has_local_delivery,
};
use holdfast_sys::net::{
    Interface, add_address, addresses, is_local, neighbour, remove_address, resolve_neighbour,
    route_to,
};
use holdfast_sys::sock_diag::{tcp_connections, tcp_service_connections};
use holdfast_sys::source_routes::{Gateway, remove_routed_servers, route_servers, routed_servers};
use holdfast_sys::tcp_info::TcpState;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

#[test]
fn addresses_are_added_and_removed() {
    let net = TestNetwork::new();
    net.client.run(|| {
        let lo = Interface::find("lo").expect("lo");
        assert_eq!(lo.mac, [0; 6]);
        assert!(Interface::find("no-such").is_err());
        for text in ["10.5.5.5", "fd05::5"] {
            let address: IpAddr = text.parse().expect("an address");
            let prefix = if address.is_ipv4() { 32 } else { 128 };
            assert!(!is_local(address).expect("told"));
            assert!(UdpSocket::bind((address, 0)).is_err());
            for _ in 0..2 {
                add_address(lo.index, address, prefix).expect("added");
            }
            assert!(is_local(address).expect("told"));
            let listed = addresses(lo.index).expect("told");
            let found = listed.iter().filter(|found| **found == (address, prefix));
            assert_eq!(found.count(), 1, "{listed:?}");
            UdpSocket::bind((address, 0)).expect("usable at once");
            for _ in 0..2 {
                remove_address(lo.index, address, prefix).expect("removed");
            }
            assert!(!is_local(address).expect("told"));
            let listed = addresses(lo.index).expect("told");
            assert!(!listed.contains(&(address, prefix)), "{listed:?}");
            assert!(UdpSocket::bind((address, 0)).is_err());
        }
    });
}

#[test]
fn local_delivery_begins_and_ends() {
    const TABLE: u32 = 4711;
    let net = TestNetwork::new();
    net.client.run(|| {
        let entries = || -> usize {
            let table = TABLE.to_string();
            let count = |family: &str, arguments: &[&str]| {
                let output = Command::new("ip")
                    .arg(family)
                    .args(arguments)
                    .output()
                    .expect("ip runs");
                String::from_utf8_lossy(&output.stdout).lines().count()
            };
            let of_family = |family| {
                count(family, &["rule", "show", "table", &table])
                    + count(family, &["route", "show", "table", &table])
            };
            of_family("-4") + of_family("-6")
        };
        assert_eq!(entries(), 0);
        // Two rules and a route for each family.
        for _ in 0..2 {
            deliver_locally(0x77, "eth0", TABLE).expect("made");
            assert_eq!(entries(), 6);
            assert!(has_local_delivery(TABLE).expect("told"));
        }
        for _ in 0..2 {
            end_local_delivery(0x77, "eth0", TABLE).expect("removed");
            assert_eq!(entries(), 0);
            assert!(!has_local_delivery(TABLE).expect("told"));
        }
    });
}

#[test]
fn answers_of_servers_leave_by_a_gateway() {
    const TABLE: u32 = 4712;
    let net = TestNetwork::new();
    net.client.run(|| {
        let device = Interface::find("eth0").expect("eth0");
        let route = route_to(SERVICE_V4.into()).expect("a route");
        let own = route.source.expect("an address");
        // Another host of the link than the router.
        let gateway_address = Ipv4Addr::new(10, 77, 1, 9);
        let gateway = Gateway {
            address: gateway_address.into(),
            interface: device.index,
        };
        let route_of = |port: u16| {
            let arguments = ["route", "get", "192.0.2.9", "from"];
            let output = Command::new("ip")
                .args(arguments)
                .args([
                    &own.to_string(),
                    "ipproto",
                    "tcp",
                    "sport",
                    &port.to_string(),
                ])
                .output()
                .expect("ip runs");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let servers: BTreeSet<SocketAddr> = [80, 90].map(|port| SocketAddr::new(own, port)).into();
        for _ in 0..2 {
            route_servers(&servers, gateway, TABLE).expect("routed");
            assert_eq!(routed_servers(TABLE).expect("told"), servers);
        }
        let via = format!("via {gateway_address}");
        assert!(route_of(80).contains(&via), "{}", route_of(80));
        assert!(!route_of(81).contains(&format!("table {TABLE}")));
        let fewer: BTreeSet<SocketAddr> = [SocketAddr::new(own, 90)].into();
        route_servers(&fewer, gateway, TABLE).expect("routed");
        assert_eq!(routed_servers(TABLE).expect("told"), fewer);
        remove_routed_servers(TABLE).expect("removed");
        assert!(routed_servers(TABLE).expect("told").is_empty());
    });
}

#[test]
fn routes_and_neighbours_are_reported() {
    let net = TestNetwork::new();
    net.client.ip("neigh flush all nud permanent");
    net.client.run(|| {
        let device = Interface::find("eth0").expect("eth0");
        assert_eq!((device.mac, device.mtu), ([2, 0x77, 0, 0, 1, 2], 1500));
        let route = route_to(SERVICE_V4.into()).expect("a route");
        assert_eq!(route.interface, device.index);
        assert_eq!(
            route.gateway,
            Some("10.77.1.1".parse().expect("an address"))
        );
        assert_eq!(route.source, Some("10.77.1.2".parse().expect("an address")));
        let timeout = Duration::from_secs(20);
        for text in ["10.77.1.1", "fd77:1::1"] {
            let router: IpAddr = text.parse().expect("an address");
            assert_eq!(neighbour(device.index, router).expect("told"), None);
            let mac = resolve_neighbour(device.index, router, timeout).expect("resolved");
            assert_eq!(mac, [2, 0x77, 0, 0, 1, 1]);
            assert_eq!(neighbour(device.index, router).expect("told"), Some(mac));
        }
        let unused_address: IpAddr = "10.77.1.77".parse().expect("an address");
        let error = resolve_neighbour(device.index, unused_address, Duration::from_millis(50));
        assert_eq!(
            error.expect_err("nobody").kind(),
            std::io::ErrorKind::TimedOut
        );
    });
}

#[test]
fn connections_of_a_service_are_listed() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        let listener = net
            .a
            .run(|| std::net::TcpListener::bind(service).expect("listen"));
        let mut ends: Vec<_> = (0..50).map(|_| net.connect_to(&listener)).collect();
        let (client, server) = &mut ends[7];
        exchange(server, client, &pattern(1, 5000));
        let listed = net
            .a
            .run(|| tcp_connections(Some(service.ip()), 8080).expect("listed"));
        assert_eq!(listed.len(), 50);
        for (client, _) in &ends {
            let remote = client.local_addr().expect("address");
            let connection = listed
                .iter()
                .find(|one| one.remote == remote)
                .expect("listed");
            assert_eq!(connection.local, service);
            assert_ne!(connection.inode, 0);
            let info = connection.info.expect("TCP_INFO");
            assert_eq!(info.state, TcpState::Established);
        }
        let other_port = net.a.run(|| tcp_connections(None, 8081).expect("listed"));
        assert_eq!(other_port, []);
        let elsewhere: IpAddr = "10.1.1.1".parse().expect("an address");
        assert_eq!(
            net.a
                .run(|| tcp_connections(Some(elsewhere), 8080).expect("listed")),
            []
        );
    }
}

#[test]
fn served_connections_are_counted_per_address() {
    let net = TestNetwork::new();
    net.client.run(|| {
        let any = TcpListener::bind("[::]:0").expect("a listener");
        let port = any.local_addr().expect("an address").port();
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), port);
        let count = |ip: &str| tcp_service_connections(at(ip)).expect("told");
        assert_eq!(count("127.0.0.1"), Some(0));
        // A connection not accepted, one accepted, and one closed by the other side; over IPv4 and IPv6.
        let unaccepted = TcpStream::connect(at("127.0.0.1")).expect("connected");
        let other = TcpStream::connect(at("::1")).expect("connected");
        let (first, _) = any.accept().expect("one");
        let (second, _) = any.accept().expect("another");
        unaccepted.shutdown(Shutdown::Write).expect("ended");
        assert_eq!(count("127.0.0.1"), Some(2));
        assert_eq!(count("::1"), Some(2), "it listens everywhere");
        drop((first, second, other));
        drop(unaccepted);
        let unserved = TcpListener::bind("127.0.0.1:0").expect("a port");
        let unused_address = unserved.local_addr().expect("an address");
        assert_eq!(
            tcp_service_connections(unused_address).expect("told"),
            Some(0)
        );
        let elsewhere = SocketAddr::new(
            "127.0.0.2".parse().expect("an address"),
            unused_address.port(),
        );
        assert_eq!(tcp_service_connections(elsewhere).expect("told"), None);
        drop(unserved);
        // A child process of another test also holds the listener until its exec, so the listener may disappear later.
        wait_for("no listener", || {
            tcp_service_connections(unused_address)
                .expect("told")
                .is_none()
        });
    });
}
