//! Many flows and records are set at once: new and changed ones are in the maps. Needs root.

use std::path::PathBuf;

use holdfast_bpf::Dataplane;
use holdfast_bpf::shared_with_c::{FlowKey, FlowState, FlowValue, Record};

/// More entries than one call sets.
const FLOW_COUNT: u16 = 2 * 1024 + 100;

fn load(test: &str, flows_max: u32) -> Dataplane {
    let name = format!("/sys/fs/bpf/holdfast-test-{test}-{}", std::process::id());
    Dataplane::load(&PathBuf::from(name), flows_max).expect("load")
}

fn key(number: u16) -> FlowKey {
    let remote = format!("10.1.2.3:{}", 1000 + number);
    FlowKey::new(6, "10.0.0.1:80".parse().unwrap(), remote.parse().unwrap())
}

fn keys(count: u16) -> Vec<FlowKey> {
    (0..count).map(key).collect()
}

fn flow(number: u16, state: FlowState) -> FlowValue {
    FlowValue {
        epoch: 7 + u32::from(number),
        state: state as u8,
        peer: number,
        hold_slot: 3 * u32::from(number),
        last_packet_s: 5,
        ..FlowValue::default()
    }
}

#[test]
fn flows_are_created_and_changed() {
    let plane = load("flows", 4096);
    let keys = keys(FLOW_COUNT);
    for state in [FlowState::TransitIn, FlowState::Owned] {
        let values: Vec<FlowValue> = (0..FLOW_COUNT).map(|number| flow(number, state)).collect();
        plane.set_flows(&keys, &values).expect("set");
        for (key, value) in keys.iter().zip(&values) {
            assert_eq!(plane.flows.get(key).expect("get"), Some(*value));
        }
    }
    assert_eq!(plane.flows.entries().len(), usize::from(FLOW_COUNT));
    plane.set_flows(&[], &[]).expect("nothing");
    plane.detach();
}

#[test]
fn closed_flow_is_not_owned_again() {
    let plane = load("closed", 64);
    let set = |epoch: u32, state: FlowState| {
        let value = FlowValue {
            epoch,
            ..flow(1, state)
        };
        plane.set_flows(&[key(1)], &[value]).expect("set");
        plane.flows.get(&key(1)).expect("get").expect("an entry")
    };
    set(7, FlowState::Closing);
    let closing = set(9, FlowState::Owned);
    assert_eq!(
        (closing.epoch, closing.state),
        (9, FlowState::Closing as u8)
    );
    let moved = set(10, FlowState::Moved);
    assert_eq!((moved.epoch, moved.state), (10, FlowState::Moved as u8));
    plane.detach();
}

#[test]
fn large_table_is_read_completely() {
    const COUNT: u32 = 20_000;
    let plane = load("whole", COUNT);
    let numbered = |number: u32| FlowKey {
        remote: std::net::Ipv6Addr::from_bits(u128::from(number)).octets(),
        ..key(0)
    };
    let keys: Vec<FlowKey> = (0..COUNT).map(numbered).collect();
    let values = vec![flow(1, FlowState::Owned); keys.len()];
    plane.set_flows(&keys, &values).expect("set");
    let mut read: Vec<FlowKey> = plane.flows.entries().iter().map(|(key, _)| *key).collect();
    read.sort_unstable();
    assert!(read == keys, "{} of {COUNT} entries", read.len());
    plane.detach();
}

#[test]
fn records_are_created_and_changed() {
    let plane = load("records", 4096);
    let keys = keys(FLOW_COUNT);
    let owned = |number: u16| Record {
        epoch: 1,
        owner: number,
        state: 1,
        ..Record::default()
    };
    let transit = |number: u16| Record {
        epoch: 2,
        owner: number,
        acceptor: number + 1,
        state: 2,
        ..Record::default()
    };
    let committed = |number: u16| Record {
        epoch: 3,
        owner: number + 1,
        state: 1,
        ..Record::default()
    };
    let steps: [&dyn Fn(u16) -> Record; 4] = [&owned, &transit, &committed, &transit];
    for step in steps {
        let records: Vec<Record> = (0..FLOW_COUNT).map(step).collect();
        plane.steering.set_many(&keys, &records).expect("set");
        for (key, record) in keys.iter().zip(&records) {
            assert_eq!(plane.steering.get(key).expect("get"), Some(*record));
        }
    }
    plane.detach();
}

#[test]
fn full_map_refuses_entries() {
    let plane = load("full", 64);
    let keys = keys(100);
    let values: Vec<FlowValue> = (0..100)
        .map(|number| flow(number, FlowState::Owned))
        .collect();
    let error = plane
        .set_flows(&keys, &values)
        .expect_err("the map has room for 64");
    assert!(error.to_string().contains("of 100 entries"), "{error}");
    let stored_keys: Vec<FlowKey> = plane.flows.entries().iter().map(|(key, _)| *key).collect();
    let values = vec![flow(0, FlowState::Moved); stored_keys.len()];
    plane
        .set_flows(&stored_keys, &values)
        .expect("existing entries can be changed");
    plane.detach();
}
