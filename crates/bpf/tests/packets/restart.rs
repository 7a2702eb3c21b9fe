//! The daemon ends and restarts; the data plane stays in force.

use holdfast_bpf::shared_with_c::{EVENT_ESTABLISHED, FlowState};

use super::support::raw_peer::ACK;
use super::support::*;

#[test]
fn traffic_continues_without_daemon() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let host = pool.lab.host("c1");
    for v6 in [false, true] {
        let mut client = Client::connect(host, v6);
        client.echo(b"before");
        let steered = pool.node("n1").counter("steered_link");
        for name in ["n1", "n2"] {
            pool.node(name).stop();
        }
        client.echo(&pattern(50_000));
        let mut meanwhile = Client::connect(host, v6);
        meanwhile.echo(&pattern(50_000));
        for name in ["n1", "n2"] {
            pool.start_node(name);
        }
        assert!(
            pool.node("n1").counter("steered_link") > steered,
            "counters are adopted"
        );
        for client in [&mut client, &mut meanwhile] {
            assert_eq!(pool.node("n2").state(&client.key()), Some(FlowState::Owned));
            client.echo(&pattern(50_000));
        }
        assert_eq!(Client::connect(host, v6).owner, 2);
        // The filters are replaced by the new programs, with one of each.
        let drops_before = pool.node("n2").counter("drop_no_socket");
        let peer = RawPeer::new(
            &pool,
            "c1",
            if v6 { 150 } else { 151 },
            v6,
            pool.lab.position("n1").link(),
        );
        for port in [5000, 5001] {
            peer.send_segment(port, ACK, 0, &[]);
        }
        let count = || pool.node("n2").counter("drop_no_socket");
        eventually("counted", || count() >= drops_before + 2);
        assert_reported_once(&pool, v6);
    }
}

/// Opens two connections, and asserts that n2 reports the first exactly once.
fn assert_reported_once(pool: &Pool, v6: bool) {
    let [first, second] = [(); 2].map(|()| Client::connect(pool.lab.host("c1"), v6));
    let reported_kinds = |client: &Client| {
        let events = pool.node("n2").events();
        let of_flow = events.iter().filter(|event| event.flow == client.key());
        of_flow.map(|event| event.kind).collect::<Vec<_>>()
    };
    // Once the second connection is reported, all events of the first are there.
    eventually("told", || !reported_kinds(&second).is_empty());
    assert_eq!(reported_kinds(&first), [EVENT_ESTABLISHED]);
}

#[test]
fn detach_removes_everything() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let client = pool.lab.host("c1");
    assert_eq!(Client::connect(client, false).owner, 2);
    for name in ["n1", "n2"] {
        pool.node(name).detach();
        assert!(!pool.node(name).pins().exists());
        // The kernel frees a link some time after its pin.
        eventually("no XDP", || {
            let device = pool.lab.host(name).ip_output("link show eth0");
            device.contains("eth0") && !device.contains("xdp")
        });
    }
    // No program steers, and the stack resets unknown connections.
    assert_eq!(Client::connect(client, false).owner, 1);
    let peer = RawPeer::new(&pool, "c1", 150, false, pool.lab.position("n2").link());
    let resets = pool.lab.host("n2").snmp("Tcp", "OutRsts");
    // The filters may be freed later too, and take a packet until then.
    eventually("reset", || {
        peer.send_segment(5000, ACK, 0, &[]);
        pool.lab.host("n2").snmp("Tcp", "OutRsts") > resets
    });
}
