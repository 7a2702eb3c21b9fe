//! Tests of the compare-and-set with any sequence of changes from any node.

use holdfast_proto::flow_ownership::{
    CLAIMED_EPOCH_MAX, ClaimVerdict, EpochFloors, ProcessTransits, apply_change, disputed_record,
    judge_claim, renumbered_record,
};
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, MoveId, NodeId, OwnershipChange, OwnershipRecord,
    Protocol, RecordState,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn flow(port: u16) -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        local: "10.0.0.1:80".parse().expect("an address"),
        remote: ([10, 0, 1, 2], port).into(),
    }
}

fn change(kind: ChangeKind, epoch: Epoch) -> OwnershipChange {
    let flow = flow(4242);
    OwnershipChange { flow, kind, epoch }
}

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const C: NodeId = NodeId(3);

fn node() -> impl Strategy<Value = NodeId> {
    (1_u16..4).prop_map(NodeId)
}

fn kind() -> impl Strategy<Value = ChangeKind> {
    prop_oneof![
        Just(ChangeKind::Establish),
        node().prop_map(|acceptor| ChangeKind::Divert { acceptor }),
        Just(ChangeKind::Commit),
        (0_u32..3).prop_map(|flows| ChangeKind::CommitAll { flows }),
        Just(ChangeKind::Rollback),
        Just(ChangeKind::Remove),
    ]
}

fn record() -> impl Strategy<Value = Option<OwnershipRecord>> {
    let epoch = prop_oneof![1_u32..6, Just(u32::MAX), Just(u32::MAX - 1)];
    prop_oneof![
        Just(None),
        (node(), epoch.clone())
            .prop_map(|(owner, epoch)| Some(OwnershipRecord::owned(owner, epoch))),
        (node(), node(), epoch)
            .prop_map(|(a, b, epoch)| Some(OwnershipRecord::transit(a, b, epoch))),
    ]
}

proptest! {
    /// A repeated change gets the same record again, without effect, as long as no other change happens.
    #[test]
    fn granted_change_is_idempotent(current in record(), kind in kind(), asker in node(), epoch in prop_oneof![0_u32..7, Just(u32::MAX)]) {
        let change = change(kind, epoch);
        // A rollback by the acceptor returns the flow to its donor: the repeated rollback is refused, and the refusal
        // says so.
        if let Ok(next) = apply_change(current, &change, asker) {
            match apply_change(next, &change, asker) {
                Ok(again) => prop_assert_eq!(again, next),
                Err(refusal) => {
                    prop_assert_eq!(kind, ChangeKind::Rollback);
                    prop_assert!(!next.is_some_and(|record| record.is_owned_by(asker)));
                    prop_assert_eq!(refusal.current, next);
                }
            }
        }
    }

    /// Epochs never decrease, each change of a record raises the epoch, and a refusal carries the record.
    #[test]
    fn epochs_never_decrease(current in record(), kind in kind(), asker in node(), epoch in prop_oneof![0_u32..7, Just(u32::MAX)]) {
        match apply_change(current, &change(kind, epoch), asker) {
            Err(refusal) => prop_assert_eq!(refusal.current, current),
            Ok(next) => if let (Some(old), Some(new)) = (current, next) {
                prop_assert!(new == old || new.epoch > old.epoch, "{:?} to {:?}", old, new);
            }
        }
    }

    /// No node takes a flow from its owner; a transit ends at its donor or its acceptor only.
    #[test]
    fn ownership_changes_follow_transition_rules(current in record(), kind in kind(), asker in node(), epoch in 0_u32..7) {
        let Ok(Some(next)) = apply_change(current, &change(kind, epoch), asker) else { return Ok(()); };
        match (current.map(|record| record.state), next.state) {
            (None, RecordState::Owned { owner }) => prop_assert_eq!(owner, asker),
            (Some(RecordState::Owned { owner }), RecordState::Owned { owner: new }) => prop_assert_eq!(owner, new),
            (Some(RecordState::Owned { owner }), RecordState::Transit { donor, acceptor }) => {
                prop_assert_eq!(owner, donor);
                prop_assert_eq!(owner, asker);
                prop_assert_ne!(donor, acceptor);
            }
            (Some(RecordState::Transit { donor, acceptor }), RecordState::Owned { owner }) => {
                prop_assert!(owner == donor || owner == acceptor);
                prop_assert!(asker == donor || asker == acceptor);
                let commit = matches!(kind, ChangeKind::Commit | ChangeKind::CommitAll { .. });
                prop_assert_eq!(owner == acceptor && donor != acceptor, commit && donor != acceptor);
            }
            (Some(old @ RecordState::Transit { .. }), new @ RecordState::Transit { .. }) => prop_assert_eq!(old, new),
            (None, RecordState::Transit { .. }) => prop_assert!(false, "a transit without a previous record"),
        }
    }

    /// Of the donor's rollback and the acceptor's commit of one transit, exactly one succeeds, in any order and with
    /// any repetitions.
    #[test]
    fn either_commit_or_rollback_succeeds(commit_attempts in proptest::collection::vec(any::<bool>(), 2..12), epoch in 2_u32..1000) {
        let mut current = Some(OwnershipRecord::transit(A, B, epoch));
        let (mut committed, mut rolled_back) = (false, false);
        for commit in commit_attempts {
            let (kind, asker) = if commit { (ChangeKind::Commit, B) } else { (ChangeKind::Rollback, A) };
            if let Ok(next) = apply_change(current, &change(kind, epoch), asker) {
                current = next;
                committed |= commit;
                rolled_back |= !commit;
            }
        }
        prop_assert!(committed != rolled_back);
        let owner = if committed { B } else { A };
        prop_assert_eq!(current, Some(OwnershipRecord::owned(owner, epoch + 1)));
    }

    /// With floors, epochs of a flow also grow across removals, whatever epochs its owners request.
    #[test]
    fn reused_flow_starts_at_higher_epoch(lives in proptest::collection::vec((0_u32..50, 0_u32..5), 1..20)) {
        let mut floors = EpochFloors::new(1);
        let mut highest = 0;
        for (asked, handoffs) in lives {
            let epoch = floors.start_epoch(&flow(7), asked);
            let mut current = apply_change(None, &change(ChangeKind::Establish, epoch), A).expect("free");
            for _ in 0..handoffs {
                let current_epoch = current.expect("established").epoch;
                current = apply_change(current, &change(ChangeKind::Divert { acceptor: B }, current_epoch), A).expect("owned");
                current = apply_change(current, &change(ChangeKind::Rollback, current_epoch + 1), B).expect("in transit");
            }
            prop_assert!(epoch > highest);
            highest = current.expect("owned").epoch;
            floors.raise(&flow(7), highest);
            prop_assert_eq!(apply_change(current, &change(ChangeKind::Remove, highest), A), Ok(None));
        }
    }
}

#[test]
fn each_transition_has_its_result() {
    let owned = Some(OwnershipRecord::owned(A, 1));
    let transit = Some(OwnershipRecord::transit(A, B, 2));
    let divert = ChangeKind::Divert { acceptor: B };
    assert_eq!(
        apply_change(None, &change(ChangeKind::Establish, 1), A),
        Ok(owned)
    );
    assert_eq!(apply_change(owned, &change(divert, 1), A), Ok(transit));
    assert_eq!(
        apply_change(transit, &change(ChangeKind::Commit, 2), B),
        Ok(Some(OwnershipRecord::owned(B, 3)))
    );
    assert_eq!(
        apply_change(transit, &change(ChangeKind::Rollback, 2), A),
        Ok(Some(OwnershipRecord::owned(A, 3)))
    );
    assert_eq!(
        apply_change(transit, &change(ChangeKind::Rollback, 2), B),
        Ok(Some(OwnershipRecord::owned(A, 3)))
    );
    assert_eq!(
        apply_change(owned, &change(ChangeKind::Remove, 1), A),
        Ok(None)
    );
    // A rollback before its divert fences out the divert for ever.
    let fenced_rollback = apply_change(owned, &change(ChangeKind::Rollback, 2), A).expect("fenced");
    assert_eq!(fenced_rollback, Some(OwnershipRecord::owned(A, 3)));
    assert!(apply_change(fenced_rollback, &change(divert, 1), A).is_err());
}

/// Table of a holder that knows one process and the flows diverted with it.
struct HolderTable {
    records: BTreeMap<Flow, OwnershipRecord>,
    process_transits: ProcessTransits,
}

impl HolderTable {
    fn new(flows: u16) -> (Self, OwnershipChange) {
        let (records, together) = (BTreeMap::new(), ProcessTransits::default());
        let mut table = Self {
            records,
            process_transits: together,
        };
        (0..flows).for_each(|port| {
            drop(table.request(A, &[change_of(flow(port), ChangeKind::Establish, 7)]))
        });
        let (donor, boot, seq) = (A, 1, 1);
        let process = Flow::process_key(MoveId { donor, boot, seq });
        let divert = ChangeKind::Divert { acceptor: B };
        let mut request = vec![
            change_of(process, ChangeKind::Establish, 1),
            change_of(process, divert, 1),
        ];
        request.extend((0..flows).map(|port| change_of(flow(port), divert, 7)));
        assert!(table.request(A, &request).iter().all(Result::is_ok));
        let flows = u32::from(flows);
        (
            table,
            change_of(process, ChangeKind::CommitAll { flows }, 2),
        )
    }

    fn request(
        &mut self,
        asker: NodeId,
        changes: &[OwnershipChange],
    ) -> Vec<Result<Option<OwnershipRecord>, ChangeRefusal>> {
        let mut results = Vec::new();
        for change in changes {
            let result = apply_change(self.records.get(&change.flow).copied(), change, asker);
            if let Ok(record) = result {
                match record {
                    Some(record) => self.records.insert(change.flow, record),
                    None => self.records.remove(&change.flow),
                };
            }
            results.push(result);
        }
        self.process_transits.record_results(changes, &results);
        results
    }

    fn committed(
        &self,
        change: &OwnershipChange,
        asker: NodeId,
    ) -> Option<Vec<(Flow, OwnershipRecord)>> {
        let current = |flow: &Flow| self.records.get(flow).copied();
        self.process_transits
            .records_after_commit(change, asker, current)
    }
}

fn change_of(flow: Flow, kind: ChangeKind, epoch: Epoch) -> OwnershipChange {
    OwnershipChange { flow, kind, epoch }
}

#[test]
fn flows_diverted_with_process_are_committed_with_it() {
    let (table, all) = HolderTable::new(3);
    let after = (0..3).map(|port| (flow(port), OwnershipRecord::owned(B, 9)));
    assert_eq!(table.committed(&all, B), Some(after.collect()));
    assert_eq!(
        table.committed(&all, C),
        None,
        "a transit of another acceptor"
    );
    let fewer = ChangeKind::CommitAll { flows: 2 };
    assert_eq!(table.committed(&change_of(all.flow, fewer, 2), B), None);
    let empty_transits = ProcessTransits::default();
    let current = |flow: &Flow| table.records.get(flow).copied();
    assert_eq!(
        empty_transits.records_after_commit(&all, B, current),
        None,
        "after a restart"
    );
    assert_eq!(
        HolderTable::new(0).0.committed(&HolderTable::new(0).1, B),
        Some(vec![])
    );
}

#[test]
fn flow_that_left_transit_prevents_joint_commit() {
    for kind in [ChangeKind::Rollback, ChangeKind::Commit] {
        let (mut table, all) = HolderTable::new(3);
        assert!(table.request(B, &[change_of(flow(1), kind, 8)])[0].is_ok());
        assert_eq!(table.committed(&all, B), None, "{kind:?}");
    }
    // A flow that is in transit again is not committed either.
    let (mut table, all) = HolderTable::new(3);
    let divert = ChangeKind::Divert { acceptor: B };
    let request = [
        change_of(flow(1), ChangeKind::Rollback, 8),
        change_of(flow(1), divert, 9),
    ];
    assert!(table.request(A, &request).iter().all(Result::is_ok));
    assert_eq!(table.committed(&all, B), None);
    // No flow is left to commit once the process's own transit has ended.
    let (mut table, all) = HolderTable::new(3);
    assert!(table.request(A, &[change_of(all.flow, ChangeKind::Rollback, 2)])[0].is_ok());
    assert_eq!(table.committed(&all, B), None);
}

#[test]
fn stale_and_foreign_changes_are_refused() {
    let owned = Some(OwnershipRecord::owned(A, 5));
    let transit = Some(OwnershipRecord::transit(A, B, 5));
    let divert = ChangeKind::Divert { acceptor: B };
    let refused = [
        (owned, divert, 4, A),
        (owned, divert, 6, A),
        (owned, divert, 5, B),
        (owned, ChangeKind::Divert { acceptor: A }, 5, A),
        (owned, ChangeKind::Remove, 4, A),
        (owned, ChangeKind::Remove, 5, B),
        (owned, ChangeKind::Establish, 9, B),
        (owned, ChangeKind::Commit, 5, A),
        (transit, ChangeKind::Commit, 5, A),
        (transit, ChangeKind::Commit, 5, C),
        (transit, ChangeKind::Commit, 4, B),
        (transit, ChangeKind::Rollback, 4, A),
        (transit, ChangeKind::Rollback, 5, C),
        (transit, ChangeKind::Remove, 5, A),
        (transit, ChangeKind::Establish, 5, A),
        (None, ChangeKind::Commit, 5, B),
        (None, ChangeKind::Rollback, 5, A),
        (None, ChangeKind::Establish, 0, A),
    ];
    for (current, kind, epoch, asker) in refused {
        let result = apply_change(current, &change(kind, epoch), asker);
        assert!(
            result.is_err(),
            "{current:?} {kind:?} {epoch} by {asker}: {result:?}"
        );
    }
}

#[test]
fn removal_raises_few_floors_of_other_flows() {
    let mut floors = EpochFloors::new(3);
    floors.raise(&flow(1), 1_000);
    let raised = (2..2_000)
        .filter(|port| floors.start_epoch(&flow(*port), 1) > 3)
        .count();
    assert!(raised < 5, "{raised} of 2000 flows have a raised floor");
    assert_eq!(floors.start_epoch(&flow(1), 1), 1_001);
}

#[test]
fn node_with_a_new_number_gets_its_record_back() {
    let (former, joined, other) = (NodeId(2), NodeId(7), NodeId(3));
    let is_in_view = |node| [joined, other].contains(&node);
    let record = |owner, epoch| OwnershipRecord::owned(owner, epoch);
    let renumbered = |current, claimed| renumbered_record(current, claimed, is_in_view);
    let claim = record(joined, 5);
    assert_eq!(renumbered(Some(record(former, 5)), claim), Some(claim));
    assert_eq!(renumbered(Some(record(former, 6)), claim), None);
    assert_eq!(renumbered(Some(record(other, 5)), claim), None);
    let transit = OwnershipRecord::transit(former, other, 5);
    assert_eq!(renumbered(Some(transit), claim), None);
    assert_eq!(renumbered(None, claim), None);
}

#[test]
fn claim_replaces_only_records_of_the_claimant_and_of_its_donor() {
    use ClaimVerdict::{Disputed, Known, Stored};
    let is_in_view = |node| [A, B, C].contains(&node);
    let (owned, transit) = (OwnershipRecord::owned, OwnershipRecord::transit);
    let lost = NodeId(9);
    let cases = [
        (None, owned(A, 1), Stored),
        (Some(owned(A, 5)), owned(A, 6), Stored),
        (Some(owned(A, 5)), owned(A, 5), Known),
        (Some(owned(A, 5)), owned(B, 1_000), Disputed),
        (Some(owned(A, 5)), transit(B, A, 7), Disputed),
        (Some(transit(A, B, 5)), owned(B, 6), Stored),
        (Some(transit(A, B, 5)), owned(C, 8), Disputed),
        (Some(transit(A, B, 1_000)), owned(B, 5), Disputed),
        (Some(owned(B, 6)), transit(A, B, 5), Known),
        (Some(transit(B, C, 7)), transit(A, B, 5), Known),
        (Some(transit(lost, A, 5)), owned(B, 8), Disputed),
        (Some(owned(lost, 5)), owned(B, 5), Stored),
        (Some(owned(lost, 5)), owned(B, 4), Known),
    ];
    for (current, claimed, verdict) in cases {
        let judged = judge_claim(current, claimed, is_in_view);
        assert_eq!(judged, verdict, "{current:?}, {claimed:?}");
    }
}

#[test]
fn disputed_flow_is_refused_to_all_nodes() {
    let disputed = disputed_record(A);
    for asker in [A, B, C] {
        for kind in [
            ChangeKind::Establish,
            ChangeKind::Commit,
            ChangeKind::Rollback,
            ChangeKind::Remove,
        ] {
            for epoch in [1, 2, Epoch::MAX] {
                let result = apply_change(Some(disputed), &change(kind, epoch), asker);
                assert!(result.is_err(), "{kind:?} {epoch} by {asker}");
            }
        }
    }
}

#[test]
fn high_claim_leaves_epochs_for_later_flows() {
    let mut floors = EpochFloors::new(3);
    floors.raise(&flow(1), CLAIMED_EPOCH_MAX);
    let start = floors.start_epoch(&flow(1), 1);
    assert!(start < CLAIMED_EPOCH_MAX - (1 << 20), "{start:x}");
}
