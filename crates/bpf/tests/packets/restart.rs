//! The daemon goes and comes back; the data plane stays.

use holdfast_bpf::shared::FlowState;

use super::support::raw::ACK;
use super::support::*;

#[test]
fn traffic_goes_on_while_no_daemon_runs() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all(2);
    let host = pool.lab.host("c1");
    for v6 in [false, true] {
        let mut client = Client::connect(host, v6);
        client.echo(b"before");
        let steered = pool.node("n1").count("steered_link");
        for name in ["n1", "n2"] {
            pool.node(name).stop();
        }
        client.echo(&pattern(50_000));
        let mut meanwhile = Client::connect(host, v6);
        meanwhile.echo(&pattern(50_000));
        for name in ["n1", "n2"] {
            pool.start(name);
        }
        assert!(
            pool.node("n1").count("steered_link") > steered,
            "counters are adopted"
        );
        for client in [&mut client, &mut meanwhile] {
            assert_eq!(pool.node("n2").state(&client.key()), Some(FlowState::Owned));
            client.echo(&pattern(50_000));
        }
        assert_eq!(Client::connect(host, v6).owner, 2);
        // The filters are the new programs': still there, still one of each.
        let counted = pool.node("n2").count("drop_no_socket");
        let peer = RawPeer::new(
            &pool,
            "c1",
            if v6 { 150 } else { 151 },
            v6,
            pool.lab.place("n1").link(),
        );
        peer.segment(5000, ACK, 0, &[]);
        eventually("dropped once", || {
            pool.node("n2").count("drop_no_socket") == counted + 1
        });
    }
}

#[test]
fn detaching_leaves_nothing() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all(2);
    let client = pool.lab.host("c1");
    assert_eq!(Client::connect(client, false).owner, 2);
    for name in ["n1", "n2"] {
        pool.node(name).detach();
        assert!(!pool.node(name).pins().exists());
    }
    // Nothing steers, and nothing keeps the stack from refusing what it does not know.
    assert_eq!(Client::connect(client, false).owner, 1);
    let peer = RawPeer::new(&pool, "c1", 150, false, pool.lab.place("n2").link());
    let resets = pool.lab.host("n2").snmp("Tcp", "OutRsts");
    peer.segment(5000, ACK, 0, &[]);
    eventually("reset", || {
        pool.lab.host("n2").snmp("Tcp", "OutRsts") > resets
    });
}
