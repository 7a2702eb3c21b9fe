//! Interfaces, addresses, routes, neighbours and socket lists, as the kernel reports them.

mod common;

use common::{Net, SERVICE_V4, exchange, pattern, services, wait_for};
use holdfast_sys::net::{
    Interface, add_address, is_local, neighbour, remove_address, resolve_neighbour, route_to,
};
use holdfast_sys::sock_diag::{tcp_connections, tcp_service};
use holdfast_sys::tcp_info::TcpState;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

#[test]
fn addresses_come_and_go() {
    let net = Net::new();
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
            UdpSocket::bind((address, 0)).expect("usable at once");
            for _ in 0..2 {
                remove_address(lo.index, address, prefix).expect("removed");
            }
            assert!(!is_local(address).expect("told"));
            assert!(UdpSocket::bind((address, 0)).is_err());
        }
    });
}

#[test]
fn routes_and_neighbours_are_told() {
    let net = Net::new();
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
        let patience = Duration::from_secs(20);
        for text in ["10.77.1.1", "fd77:1::1"] {
            let router: IpAddr = text.parse().expect("an address");
            assert_eq!(neighbour(device.index, router).expect("told"), None);
            let mac = resolve_neighbour(device.index, router, patience).expect("resolved");
            assert_eq!(mac, [2, 0x77, 0, 0, 1, 1]);
            assert_eq!(neighbour(device.index, router).expect("told"), Some(mac));
        }
        let nobody: IpAddr = "10.77.1.77".parse().expect("an address");
        let error = resolve_neighbour(device.index, nobody, Duration::from_millis(50));
        assert_eq!(
            error.expect_err("nobody").kind(),
            std::io::ErrorKind::TimedOut
        );
    });
}

#[test]
fn all_connections_of_a_service_are_listed() {
    let net = Net::new();
    for service in services() {
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
            let one = listed
                .iter()
                .find(|one| one.remote == remote)
                .expect("listed");
            assert_eq!(one.local, service);
            assert_ne!(one.inode, 0);
            let info = one.info.expect("TCP_INFO");
            assert_eq!(info.state, TcpState::Established);
        }
        let other = net.a.run(|| tcp_connections(None, 8081).expect("listed"));
        assert_eq!(other, []);
        let elsewhere: IpAddr = "10.1.1.1".parse().expect("an address");
        assert_eq!(
            net.a
                .run(|| tcp_connections(Some(elsewhere), 8080).expect("listed")),
            []
        );
    }
}

#[test]
fn the_connections_of_a_service_are_counted_from_outside() {
    let net = Net::new();
    net.client.run(|| {
        let any = TcpListener::bind("[::]:0").expect("a listener");
        let port = any.local_addr().expect("an address").port();
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), port);
        let count = |ip: &str| tcp_service(at(ip)).expect("told");
        assert_eq!(count("127.0.0.1"), Some(0));
        // A connection not accepted, one accepted, and one closed by the other side; over IPv4 and IPv6.
        let waits = TcpStream::connect(at("127.0.0.1")).expect("connected");
        let other = TcpStream::connect(at("::1")).expect("connected");
        let (first, _) = any.accept().expect("one");
        let (second, _) = any.accept().expect("another");
        waits.shutdown(Shutdown::Write).expect("ended");
        assert_eq!(count("127.0.0.1"), Some(2));
        assert_eq!(count("::1"), Some(2), "it listens everywhere");
        drop((first, second, other));
        drop(waits);
        let unserved = TcpListener::bind("127.0.0.1:0").expect("a port");
        let free = unserved.local_addr().expect("an address");
        assert_eq!(tcp_service(free).expect("told"), Some(0));
        let elsewhere = SocketAddr::new("127.0.0.2".parse().expect("an address"), free.port());
        assert_eq!(tcp_service(elsewhere).expect("told"), None);
        drop(unserved);
        // A child process of another test also holds the listener until its exec, so the listener may disappear later.
        wait_for("no listener", || tcp_service(free).expect("told").is_none());
    });
}
