//! Rules of RFC 5353, one by one.

use crate::test_bench::*;
use holdfast_proto::registrar::{AssociationId, Event, PoolProtocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message as Enrp, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId};
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

/// RFC 5353 sections 3.4.1 and 3.6: a new peer is asked to identify itself, and a different checksum leads to a request
/// for its table.
#[test]
fn checksum_mismatch_removes_elements_missing_from_table() {
    let mut bench = TestBench::new(config());
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    bench
        .machine
        .handle_association_up(bench.now, id, PoolProtocol::Enrp, &at, None);
    let peer = RegistrarId(2);
    let outputs = bench.send_enrp(peer, presence(false, 0xffff));
    assert_eq!(count_enrp_messages(&outputs, "PRESENCE"), 1);
    let add = |id| EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: holdfast_wire::rserpool::PoolElement {
            home: RegistrarId(2),
            ..element(id, 9, RR)
        },
    };
    bench.send_enrp(peer, add(1));
    bench.send_enrp(peer, add(2));
    assert_eq!(bench.machine.elements_owned_by(peer), 2);
    let known_checksum = bench.machine.checksum(peer);
    assert_eq!(
        count_enrp_messages(
            &bench.send_enrp(peer, presence(false, known_checksum)),
            "HANDLE_TABLE_REQUEST"
        ),
        0
    );
    let outputs = bench.send_enrp(peer, presence(false, !known_checksum));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    let table = |more, id| EnrpBody::HandleTableResponse {
        rejected: false,
        more,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(id, 9, RR)],
        }],
    };
    let outputs = bench.send_enrp(peer, table(true, 2));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    // An update between blocks is kept.
    bench.send_enrp(peer, add(4));
    bench.send_enrp(peer, table(false, 3));
    let known_ids: Vec<_> = (1..=4).filter(|id| bench.has_element(*id)).collect();
    assert_eq!(known_ids, [2, 3, 4]);
}

/// However many elements are missing from a table, others are served before all of them are removed; elements updated
/// meanwhile stay.
#[test]
fn missing_elements_are_removed_in_batches() {
    let mut config = config();
    config.settings.batch_elements_max = 2;
    let mut bench = TestBench::new(config);
    let peer = bench.add_peer(2);
    let add = |id| EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: element(id, 9, RR),
    };
    for id in 1..=9 {
        bench.send_enrp(peer, add(id));
    }
    let differs = !bench.machine.checksum(peer);
    bench.send_enrp(peer, presence(false, differs));
    let table = EnrpBody::HandleTableResponse {
        rejected: false,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(3, 9, RR)],
        }],
    };
    let in_step = |outputs: &[TestOutput]| {
        outputs.iter().find_map(|out| match out {
            TestOutput::Event(Event::Resynchronised { removed, .. }) => Some(*removed),
            _ => None,
        })
    };
    let first = bench.send_enrp(peer, table);
    assert_eq!((bench.machine.elements(), in_step(&first)), (7, None));
    // No checksum is compared before the removal is complete.
    let outputs = bench.send_enrp(peer, presence(false, differs));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 0);
    let kept = (1..=9)
        .find(|id| *id != 3 && bench.has_element(*id))
        .unwrap();
    bench.send_enrp(peer, add(kept));
    bench.send_enrp(peer, add(20));
    let rest = bench.wait(Duration::from_millis(1));
    let known_ids: Vec<_> = (1..=20).filter(|id| bench.has_element(*id)).collect();
    let mut expected = vec![3, kept, 20];
    expected.sort_unstable();
    assert_eq!(known_ids, expected);
    assert_eq!(in_step(&rest), Some(7));
    let outputs = bench.send_enrp(peer, presence(false, differs));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 1);
}

/// A full buffer drops the first presence on a new association, and neither side would ever send on it.
#[test]
fn unidentified_registrar_is_asked_at_each_heartbeat() {
    let mut bench = TestBench::new(config());
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    bench
        .machine
        .handle_association_up(bench.now, id, PoolProtocol::Enrp, &at, None);
    bench.outputs();
    let asks_presence = |outputs: &[TestOutput]| {
        let asks = |output: &&TestOutput| matches!(output, TestOutput::Enrp(to, Enrp { body: EnrpBody::Presence { reply_required: true, .. }, .. }) if *to == [1002]);
        outputs.iter().filter(asks).count()
    };
    assert_eq!(asks_presence(&bench.wait(SECOND * 31)), 1);
    bench.send_enrp(RegistrarId(2), presence(false, 0xffff));
    assert_eq!(asks_presence(&bench.wait(SECOND * 31)), 0);
}

/// RFC 5353 sections 3.4.3 and 3.5: silence, a request for a response, an arbitration, and a new home for the elements.
#[test]
fn silent_peer_is_probed_then_taken_over() {
    let mut bench = TestBench::new(config());
    let (target, other) = (bench.add_peer(2), bench.add_peer(3));
    bench.open_association(9);
    bench.outputs();
    let element = holdfast_wire::rserpool::PoolElement {
        asap_transport: Some(transport([10, 1, 0, 9], 5000)),
        ..element(1, 9, RR)
    };
    let (handle, id) = (handle(), ElementId(1));
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle.clone(),
        element,
    };
    bench.send_enrp(target, add);
    let checksum = bench.machine.checksum(target);
    let mut outputs = Vec::new();
    for _ in 0..6 {
        outputs.extend(bench.wait(SECOND * 21 / 2));
        bench.send_enrp(other, presence(false, 0xffff));
    }
    let asks = |output: &&TestOutput| matches!(output, TestOutput::Enrp(to, Enrp { body: EnrpBody::Presence { reply_required: true, .. }, .. }) if *to == [1002]);
    assert_eq!(outputs.iter().filter(asks).count(), 1);
    let outputs = bench.wait(SECOND * 4);
    assert_eq!(count_enrp_messages(&outputs, "INIT_TAKEOVER"), 1);
    assert_eq!(count_enrp_messages(&outputs, "TAKEOVER_SERVER"), 0);
    assert_eq!(bench.machine.checksum(target), checksum);
    let outputs = bench.send_enrp(other, EnrpBody::InitTakeoverAck { target });
    assert_eq!(count_enrp_messages(&outputs, "TAKEOVER_SERVER"), 1);
    assert_eq!(bench.machine.checksum(OWN), checksum);
    assert!(bench.machine.peers().all(|peer| peer.id != target));
    // The element is informed, and the peers once it has agreed.
    assert_eq!(keep_alives(&bench.wait(SECOND / 10)), [true]);
    let outputs = bench.send_asap(9, &Asap::EndpointKeepAliveAck { handle, id });
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_UPDATE"), 1);
}

/// However many elements a dead registrar has, others are served before all of them are moved; no peer sees a part.
#[test]
fn takeover_does_not_block_other_requests() {
    for takes_over in [true, false] {
        let mut config = config();
        config.settings.batch_elements_max = 10;
        let mut bench = TestBench::new(config);
        let (target, other) = (bench.add_peer(2), bench.add_peer(3));
        let add = |id| EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element: element(id, 9, RR),
        };
        for id in 1..=35 {
            bench.send_enrp(target, add(id));
        }
        let checksum = bench.machine.checksum(target);
        let to = if takes_over { OWN } else { other };
        if takes_over {
            bench
                .machine
                .handle_association_down(bench.now, AssociationId(1002));
            bench.wait(SECOND * 6);
            bench.send_enrp(other, EnrpBody::InitTakeoverAck { target });
        } else {
            bench.send_enrp(other, EnrpBody::TakeoverServer { target });
        }
        assert_eq!(bench.machine.elements_owned_by(to), 10);
        let outputs = bench.send_enrp(other, EnrpBody::HandleTableRequest { own_only: true });
        let refuses = |out: &TestOutput| {
            let TestOutput::Enrp(_, Enrp { body, .. }) = out else {
                return false;
            };
            matches!(body, EnrpBody::HandleTableResponse { rejected: true, .. })
        };
        assert!(outputs.iter().any(refuses), "{outputs:?}");
        let mut moved = 10;
        while moved < 35 {
            let at = bench.machine.poll_timeout().unwrap();
            assert!(at <= bench.now + Duration::from_nanos(1));
            bench.now = at.max(bench.now);
            bench.machine.handle_timeout(bench.now);
            let before = std::mem::replace(&mut moved, bench.machine.elements_owned_by(to));
            assert!(moved <= before + 10);
        }
        assert_eq!(bench.machine.checksum(to), checksum);
        bench.wait(Duration::from_nanos(1));
        let outputs = bench.send_enrp(other, EnrpBody::HandleTableRequest { own_only: true });
        assert!(!outputs.iter().any(refuses), "{outputs:?}");
    }
}

#[test]
fn lower_number_wins_takeover_race() {
    for (rival, wins) in [(3, false), (0x60, true)] {
        let mut bench = TestBench::new(config());
        let (target, rival) = (bench.add_peer(2), bench.add_peer(rival));
        bench
            .machine
            .handle_association_down(bench.now, AssociationId(1002));
        bench.wait(SECOND * 6);
        let outputs = bench.send_enrp(rival, EnrpBody::InitTakeover { target });
        assert_eq!(
            count_enrp_messages(&outputs, "INIT_TAKEOVER_ACK"),
            usize::from(!wins)
        );
        let outputs = bench.send_enrp(rival, EnrpBody::InitTakeoverAck { target });
        assert_eq!(
            count_enrp_messages(&outputs, "TAKEOVER_SERVER"),
            usize::from(wins)
        );
    }
}

/// RFC 5353 section 3.5.1, rule 1 and the last paragraph.
#[test]
fn live_target_stops_takeover() {
    let mut bench = TestBench::new(config());
    let (peer, target) = (bench.add_peer(2), bench.add_peer(3));
    bench.outputs();
    let outputs = bench.send_enrp(peer, EnrpBody::InitTakeover { target: OWN });
    assert_eq!(count_enrp_messages(&outputs, "PRESENCE"), 1);
    assert_eq!(count_enrp_messages(&outputs, "INIT_TAKEOVER_ACK"), 0);
    bench.send_enrp(peer, EnrpBody::InitTakeover { target });
    assert!(
        bench
            .machine
            .peers()
            .any(|peer| peer.id == target && !peer.active)
    );
    bench.send_enrp(target, presence(false, 0xffff));
    assert!(bench.machine.peers().all(|peer| peer.active));
}

/// The start with a mentor (RFC 5353 section 3.2).
#[test]
fn mentor_sends_list_then_handlespace() {
    let mut config = config();
    config.mentors = vec![vec!["10.0.0.2:9901".parse().unwrap()]];
    let mut bench = TestBench::new(config);
    let outputs = bench.outputs();
    assert!(!bench.machine.is_ready(), "{outputs:?}");
    let up = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    let dial = Some(holdfast_proto::registrar::DialId(1));
    bench
        .machine
        .handle_association_up(bench.now, up.0, PoolProtocol::Enrp, &up.1, dial);
    assert_eq!(count_enrp_messages(&bench.outputs(), "LIST_REQUEST"), 1);
    let mentor = RegistrarId(2);
    // A starting registrar refuses requests.
    let outputs = bench.send_enrp(mentor, EnrpBody::HandleTableRequest { own_only: false });
    let refuses = |output: &TestOutput| {
        matches!(
            output,
            TestOutput::Enrp(
                _,
                Enrp {
                    body: EnrpBody::HandleTableResponse { rejected: true, .. },
                    ..
                }
            )
        )
    };
    assert!(outputs.iter().any(refuses));
    let list = EnrpBody::ListResponse {
        rejected: false,
        servers: Vec::new(),
    };
    assert_eq!(
        count_enrp_messages(&bench.send_enrp(mentor, list), "HANDLE_TABLE_REQUEST"),
        1
    );
    let table = |more, id| EnrpBody::HandleTableResponse {
        rejected: false,
        more,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(id, 9, RR)],
        }],
    };
    assert_eq!(
        count_enrp_messages(
            &bench.send_enrp(mentor, table(true, 1)),
            "HANDLE_TABLE_REQUEST"
        ),
        1
    );
    assert!(!bench.machine.is_ready());
    bench.send_enrp(mentor, table(false, 2));
    assert!(bench.machine.is_ready());
    assert_eq!(bench.machine.elements_owned_by(mentor), 2);
}

/// An element that the mentor attributes to this registrar was taken over before the handlespace was loaded, or dates
/// from an earlier run: it is probed.
#[test]
fn element_attributed_by_mentor_is_probed() {
    let mut config = config();
    config.mentors = vec![vec!["10.0.0.2:9901".parse().unwrap()]];
    let mut bench = TestBench::new(config);
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    let dial = Some(holdfast_proto::registrar::DialId(1));
    let (now, mentor) = (bench.now, RegistrarId(2));
    bench
        .machine
        .handle_association_up(now, id, PoolProtocol::Enrp, &at, dial);
    let servers = Vec::new();
    let rejected = false;
    bench.send_enrp(mentor, EnrpBody::ListResponse { rejected, servers });
    let mut own_element = element(1, 9, RR);
    own_element.home = OWN;
    own_element.asap_transport = Some(transport([10, 1, 0, 9], 5000));
    let table = EnrpBody::HandleTableResponse {
        rejected,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![own_element],
        }],
    };
    bench.send_enrp(mentor, table);
    assert!(bench.machine.is_ready() && bench.has_element(1));
    let outputs = bench.wait(SECOND);
    let called =
        |output: &TestOutput| matches!(output, TestOutput::Connect(_, PoolProtocol::Asap, _));
    assert!(outputs.iter().any(called), "{outputs:?}");
    bench.wait(SECOND * 5);
    assert!(!bench.has_element(1));
}
