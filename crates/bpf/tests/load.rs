//! The programs pass this kernel's verifier, the maps keep their entries, and pins are adopted.

use holdfast_bpf::Dataplane;
use holdfast_bpf::shared_with_c::{FlowKey, FlowState, FlowValue, NODE_KNOWN, Node};

#[test]
fn programs_load_and_pins_are_adopted() {
    let pins =
        std::path::PathBuf::from(format!("/sys/fs/bpf/holdfast-test-{}", std::process::id()));
    let key = FlowKey::new(
        6,
        "10.0.0.1:80".parse().unwrap(),
        "[fd00::2]:4242".parse().unwrap(),
    );
    let value = FlowValue {
        epoch: 7,
        state: FlowState::Owned as u8,
        ..FlowValue::default()
    };

    let first = Dataplane::load(&pins, 1024).expect("load");
    first.flows.set(&key, &value).expect("set");
    first.hold_counters.count_replayed(3);
    assert_eq!(first.hold_counters.get(3), 0, "the counter does not wrap");
    assert!(
        first.congestion_restorer_name().is_some(),
        "struct_ops: {:?}",
        first.congestion_restorer_name()
    );
    drop(first);

    let second = Dataplane::load(&pins, 1024).expect("load again");
    assert_eq!(second.flows.get(&key).expect("get"), Some(value));
    assert_eq!(second.flows.entries(), vec![(key, value)]);
    assert!(second.counters().iter().all(|(_, count)| *count == 0));
    second.detach();
    assert!(!pins.exists());
}

#[test]
fn every_number_of_a_node_has_a_place() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: eBPF programs need root");
        return;
    }
    let pins =
        std::path::PathBuf::from(format!("/sys/fs/bpf/holdfast-nodes-{}", std::process::id()));
    let plane = Dataplane::load(&pins, 64).unwrap();
    // Numbers grow each time a node joins again, and by thousands at a forced takeover.
    for number in [1, 256, u16::MAX] {
        let node = Node {
            ifindex: u32::from(number),
            flags: NODE_KNOWN,
            ..Node::default()
        };
        plane.nodes.set(&u32::from(number), &node).unwrap();
        assert_eq!(plane.nodes.get(&u32::from(number)).unwrap(), Some(node));
    }
    plane.detach();
}
