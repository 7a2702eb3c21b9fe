//! Reach `steer` on one segment.

use holdfast_bpf::shared_with_c::{EVENT_CLOSED, EVENT_ESTABLISHED, FlowState};

use super::support::*;

fn one_segment() -> Pool {
    Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default())
}

#[test]
fn connection_stays_at_owner_from_syn_to_close() {
    let pool = one_segment();
    for v6 in [false, true] {
        for (owner, name) in [(1, "n1"), (2, "n2")] {
            pool.place_all_on(u16::from(owner));
            let node = pool.node(name);
            let mut client = Client::connect(pool.lab.host("c1"), v6);
            assert_eq!(client.owner, owner);
            client.echo(&pattern(300_000));
            let key = client.key();
            eventually("established", || node.has_event(EVENT_ESTABLISHED, &key));
            let entry = node.flow(&key).expect("an entry");
            assert_eq!(FlowState::from_raw(entry.state), Some(FlowState::Owned));
            let event = node
                .events()
                .into_iter()
                .find(|e| e.flow == key)
                .expect("event");
            assert_eq!(event.epoch, entry.epoch);
            assert!(entry.epoch > 0);
            drop(client);
            // The state changes before the event is written.
            eventually("closed", || node.has_event(EVENT_CLOSED, &key));
            assert_eq!(node.state(&key), Some(FlowState::Closing));
        }
    }
    let contact = pool.node("n1");
    assert!(contact.counter("steered_link") > 0);
    assert!(contact.counter("steered_self") > 0);
    assert_eq!(contact.counter("steered_encap"), 0);
    assert_eq!(pool.node("n3").flow_count(), 0);
}

#[test]
fn answered_datagrams_create_association() {
    let pool = one_segment();
    for v6 in [false, true] {
        pool.place_all_on(3);
        let client = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        assert_eq!(client.ask(b"where"), 3);
        let node = pool.node("n3");
        assert_eq!(node.state(&client.key()), Some(FlowState::Owned));
        assert!(node.has_event(EVENT_ESTABLISHED, &client.key()));
    }
}
