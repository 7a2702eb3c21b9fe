//! A registrar learns from rsplib's: messages recorded on the wire.

use crate::test_bench::*;
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, PoolProtocol};
use holdfast_wire::rserpool::enrp::{EnrpBody, Message};
use std::collections::BTreeSet;
use std::path::Path;

fn recorded_messages(ppid: u64) -> Vec<Bytes> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wire/tests/vectors/rserpool.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let hex = value["hex"].as_str().unwrap().to_owned();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        (value["ppid"].as_u64().unwrap(), Bytes::from(bytes))
    });
    let matching = lines.filter(|(of, _)| *of == ppid);
    matching.map(|(_, bytes)| bytes).collect()
}

fn open_registrar_association(bench: &mut TestBench) {
    let at = ["10.0.0.2:9901".parse().unwrap()];
    let id = AssociationId(1002);
    bench
        .machine
        .handle_association_up(bench.now, id, PoolProtocol::Enrp, &at, None);
}

#[test]
fn recorded_handle_table_gives_announced_checksum() {
    let messages: Vec<_> = recorded_messages(12)
        .into_iter()
        .filter_map(|bytes| Some((Message::parse(&bytes).ok()?.message, bytes)))
        .collect();
    let announced: BTreeSet<_> = messages
        .iter()
        .filter_map(|(message, _)| match message.body {
            EnrpBody::Presence { checksum, .. } => Some((message.sender, checksum?)),
            _ => None,
        })
        .collect();
    let (mut tables, mut agree) = (0, 0);
    for (message, bytes) in &messages {
        let EnrpBody::HandleTableResponse {
            rejected: false,
            more: false,
            entries,
        } = &message.body
        else {
            continue;
        };
        let elements: usize = entries.iter().map(|entry| entry.elements.len()).sum();
        let is_own_entry = |entry: &holdfast_wire::rserpool::enrp::PoolEntry| {
            entry.elements.iter().all(|e| e.home == message.sender)
        };
        if elements == 0 || !entries.iter().all(is_own_entry) {
            continue;
        }
        let mut config = config();
        config.id = message.receiver;
        let mut bench = TestBench::new(config);
        open_registrar_association(&mut bench);
        let presence = Message {
            sender: message.sender,
            receiver: message.receiver,
            body: presence(false, 0x1234),
        };
        let presence = crate::test_bench::bytes(|buffer| presence.encode(buffer).unwrap());
        let association = AssociationId(1002);
        bench.machine.handle_enrp(bench.now, association, &presence);
        bench.machine.handle_enrp(bench.now, association, bytes);
        let outputs = bench.outputs();
        let known = bench.machine.elements_owned_by(message.sender);
        assert_eq!(known, elements, "{outputs:?}");
        tables += 1;
        let checksum = bench.machine.checksum(message.sender);
        agree += usize::from(announced.contains(&(message.sender, checksum)));
    }
    println!("{tables} tables, {agree} with a checksum that was announced");
    assert!(agree >= 5, "{agree} of {tables}");
}

/// All messages of rsplib, in any order, are handled without a panic, and an error is never answered with an error.
#[test]
fn all_recorded_messages_are_handled() {
    let mut bench = TestBench::new(config());
    let user = bench.open_association(9);
    for bytes in recorded_messages(11) {
        bench
            .machine
            .handle_asap(bench.now, AssociationId(user), &bytes);
        bench.outputs();
        bench.wait(SECOND / 10);
    }
    for bytes in recorded_messages(12) {
        open_registrar_association(&mut bench);
        bench
            .machine
            .handle_enrp(bench.now, AssociationId(1002), &bytes);
        bench.outputs();
        bench
            .machine
            .handle_association_down(bench.now, AssociationId(1002));
        bench.wait(SECOND / 10);
    }
    assert!(bench.machine.counters().resolutions + bench.machine.counters().refusals > 0);
}
