//! Rules of RFC 5353, one by one.

use crate::setup::*;
use holdfast_proto::registrar::{AssociationId, Event, Protocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{Body, Message as Enrp, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId};
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

/// RFC 5353 sections 3.4.1 and 3.6: a new peer is asked to identify itself, and a different checksum leads to a request
/// for its table.
#[test]
fn views_are_compared_and_what_the_peer_does_not_have_goes() {
    let mut bench = Bench::new(config());
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    bench
        .machine
        .handle_up(bench.now, id, Protocol::Enrp, &at, None);
    let peer = RegistrarId(2);
    let outputs = bench.enrp(peer, presence(false, 0xffff));
    assert_eq!(said(&outputs, "PRESENCE"), 1);
    let add = |id| Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: holdfast_wire::rserpool::PoolElement {
            home: RegistrarId(2),
            ..element(id, 9, RR)
        },
    };
    bench.enrp(peer, add(1));
    bench.enrp(peer, add(2));
    assert_eq!(bench.machine.elements_owned_by(peer), 2);
    let same = bench.machine.checksum(peer);
    assert_eq!(
        said(
            &bench.enrp(peer, presence(false, same)),
            "HANDLE_TABLE_REQUEST"
        ),
        0
    );
    let outputs = bench.enrp(peer, presence(false, !same));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    let table = |more, id| Body::HandleTableResponse {
        rejected: false,
        more,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(id, 9, RR)],
        }],
    };
    let outputs = bench.enrp(peer, table(true, 2));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    // An update between blocks is kept.
    bench.enrp(peer, add(4));
    bench.enrp(peer, table(false, 3));
    let here: Vec<_> = (1..=4).filter(|id| bench.has(*id)).collect();
    assert_eq!(here, [2, 3, 4]);
}

/// However many elements are missing from a table, others are served before all of them are removed; elements updated
/// meanwhile stay.
#[test]
fn what_a_peer_does_not_have_goes_in_turns() {
    let mut config = config();
    config.settings.turn_elements_max = 2;
    let mut bench = Bench::new(config);
    let peer = bench.peer(2);
    let add = |id| Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: element(id, 9, RR),
    };
    for id in 1..=9 {
        bench.enrp(peer, add(id));
    }
    let differs = !bench.machine.checksum(peer);
    bench.enrp(peer, presence(false, differs));
    let table = Body::HandleTableResponse {
        rejected: false,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(3, 9, RR)],
        }],
    };
    let in_step = |outputs: &[Out]| {
        outputs.iter().find_map(|out| match out {
            Out::Event(Event::InStep { removed, .. }) => Some(*removed),
            _ => None,
        })
    };
    let first = bench.enrp(peer, table);
    assert_eq!((bench.machine.elements(), in_step(&first)), (7, None));
    // No checksum is compared before the removal is complete.
    let outputs = bench.enrp(peer, presence(false, differs));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 0);
    let kept = (1..=9).find(|id| *id != 3 && bench.has(*id)).unwrap();
    bench.enrp(peer, add(kept));
    bench.enrp(peer, add(20));
    let rest = bench.wait(Duration::from_millis(1));
    let here: Vec<_> = (1..=20).filter(|id| bench.has(*id)).collect();
    let mut expected = vec![3, kept, 20];
    expected.sort_unstable();
    assert_eq!(here, expected);
    assert_eq!(in_step(&rest), Some(7));
    let outputs = bench.enrp(peer, presence(false, differs));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 1);
}

/// A full buffer drops the first presence on a new association, and neither side would ever send on it.
#[test]
fn who_does_not_say_who_it_is_is_asked_with_each_heartbeat() {
    let mut bench = Bench::new(config());
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    bench
        .machine
        .handle_up(bench.now, id, Protocol::Enrp, &at, None);
    bench.outputs();
    let asked = |outputs: &[Out]| {
        let asks = |output: &&Out| matches!(output, Out::Enrp(to, Enrp { body: Body::Presence { reply_required: true, .. }, .. }) if *to == [1002]);
        outputs.iter().filter(asks).count()
    };
    assert_eq!(asked(&bench.wait(SECOND * 31)), 1);
    bench.enrp(RegistrarId(2), presence(false, 0xffff));
    assert_eq!(asked(&bench.wait(SECOND * 31)), 0);
}

/// RFC 5353 sections 3.4.3 and 3.5: silence, a request for a response, an arbitration, and a new home for the elements.
#[test]
fn a_silent_peer_is_asked_then_taken_over() {
    let mut bench = Bench::new(config());
    let (target, other) = (bench.peer(2), bench.peer(3));
    bench.up(9);
    bench.outputs();
    let element = holdfast_wire::rserpool::PoolElement {
        asap_transport: Some(transport([10, 1, 0, 9], 5000)),
        ..element(1, 9, RR)
    };
    let (handle, id) = (handle(), ElementId(1));
    let add = Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle.clone(),
        element,
    };
    bench.enrp(target, add);
    let checksum = bench.machine.checksum(target);
    let mut outputs = Vec::new();
    for _ in 0..6 {
        outputs.extend(bench.wait(SECOND * 21 / 2));
        bench.enrp(other, presence(false, 0xffff));
    }
    let asks = |output: &&Out| matches!(output, Out::Enrp(to, Enrp { body: Body::Presence { reply_required: true, .. }, .. }) if *to == [1002]);
    assert_eq!(outputs.iter().filter(asks).count(), 1);
    let outputs = bench.wait(SECOND * 4);
    assert_eq!(said(&outputs, "INIT_TAKEOVER"), 1);
    assert_eq!(said(&outputs, "TAKEOVER_SERVER"), 0);
    assert_eq!(bench.machine.checksum(target), checksum);
    let outputs = bench.enrp(other, Body::InitTakeoverAck { target });
    assert_eq!(said(&outputs, "TAKEOVER_SERVER"), 1);
    assert_eq!(bench.machine.checksum(OWN), checksum);
    assert!(bench.machine.peers().all(|peer| peer.id != target));
    // The element is informed, and the peers once it has agreed.
    assert_eq!(keep_alives(&bench.wait(SECOND / 10)), [true]);
    let outputs = bench.asap(9, &Asap::EndpointKeepAliveAck { handle, id });
    assert_eq!(said(&outputs, "HANDLE_UPDATE"), 1);
}

/// However many elements a dead registrar has, others are served before all of them are moved; no peer sees a part.
#[test]
fn a_takeover_holds_up_nothing() {
    for takes_over in [true, false] {
        let mut config = config();
        config.settings.turn_elements_max = 10;
        let mut bench = Bench::new(config);
        let (target, other) = (bench.peer(2), bench.peer(3));
        let add = |id| Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element: element(id, 9, RR),
        };
        for id in 1..=35 {
            bench.enrp(target, add(id));
        }
        let checksum = bench.machine.checksum(target);
        let to = if takes_over { OWN } else { other };
        if takes_over {
            bench.machine.handle_down(bench.now, AssociationId(1002));
            bench.wait(SECOND * 6);
            bench.enrp(other, Body::InitTakeoverAck { target });
        } else {
            bench.enrp(other, Body::TakeoverServer { target });
        }
        assert_eq!(bench.machine.elements_owned_by(to), 10);
        let outputs = bench.enrp(other, Body::HandleTableRequest { own_only: true });
        let refuses = |out: &Out| {
            let Out::Enrp(_, Enrp { body, .. }) = out else {
                return false;
            };
            matches!(body, Body::HandleTableResponse { rejected: true, .. })
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
        let outputs = bench.enrp(other, Body::HandleTableRequest { own_only: true });
        assert!(!outputs.iter().any(refuses), "{outputs:?}");
    }
}

#[test]
fn of_two_that_take_over_the_lower_number_goes_on() {
    for (rival, goes_on) in [(3, false), (0x60, true)] {
        let mut bench = Bench::new(config());
        let (target, rival) = (bench.peer(2), bench.peer(rival));
        bench.machine.handle_down(bench.now, AssociationId(1002));
        bench.wait(SECOND * 6);
        let outputs = bench.enrp(rival, Body::InitTakeover { target });
        assert_eq!(said(&outputs, "INIT_TAKEOVER_ACK"), usize::from(!goes_on));
        let outputs = bench.enrp(rival, Body::InitTakeoverAck { target });
        assert_eq!(said(&outputs, "TAKEOVER_SERVER"), usize::from(goes_on));
    }
}

/// RFC 5353 section 3.5.1, rule 1 and the last paragraph.
#[test]
fn who_lives_says_so_and_a_takeover_stops() {
    let mut bench = Bench::new(config());
    let (peer, target) = (bench.peer(2), bench.peer(3));
    bench.outputs();
    let outputs = bench.enrp(peer, Body::InitTakeover { target: OWN });
    assert_eq!(said(&outputs, "PRESENCE"), 1);
    assert_eq!(said(&outputs, "INIT_TAKEOVER_ACK"), 0);
    bench.enrp(peer, Body::InitTakeover { target });
    assert!(
        bench
            .machine
            .peers()
            .any(|peer| peer.id == target && !peer.active)
    );
    bench.enrp(target, presence(false, 0xffff));
    assert!(bench.machine.peers().all(|peer| peer.active));
}

/// The start with a mentor (RFC 5353 section 3.2).
#[test]
fn a_mentor_gives_its_list_then_its_handlespace() {
    let mut config = config();
    config.mentors = vec![vec!["10.0.0.2:9901".parse().unwrap()]];
    let mut bench = Bench::new(config);
    let outputs = bench.outputs();
    assert!(!bench.machine.is_ready(), "{outputs:?}");
    let up = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    let dial = Some(holdfast_proto::registrar::DialId(1));
    bench
        .machine
        .handle_up(bench.now, up.0, Protocol::Enrp, &up.1, dial);
    assert_eq!(said(&bench.outputs(), "LIST_REQUEST"), 1);
    let mentor = RegistrarId(2);
    // A starting registrar refuses requests.
    let outputs = bench.enrp(mentor, Body::HandleTableRequest { own_only: false });
    let refuses = |output: &Out| {
        matches!(
            output,
            Out::Enrp(
                _,
                Enrp {
                    body: Body::HandleTableResponse { rejected: true, .. },
                    ..
                }
            )
        )
    };
    assert!(outputs.iter().any(refuses));
    let list = Body::ListResponse {
        rejected: false,
        servers: Vec::new(),
    };
    assert_eq!(said(&bench.enrp(mentor, list), "HANDLE_TABLE_REQUEST"), 1);
    let table = |more, id| Body::HandleTableResponse {
        rejected: false,
        more,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![element(id, 9, RR)],
        }],
    };
    assert_eq!(
        said(&bench.enrp(mentor, table(true, 1)), "HANDLE_TABLE_REQUEST"),
        1
    );
    assert!(!bench.machine.is_ready());
    bench.enrp(mentor, table(false, 2));
    assert!(bench.machine.is_ready());
    assert_eq!(bench.machine.elements_owned_by(mentor), 2);
}

/// An element that the mentor attributes to this registrar was taken over before the handlespace was loaded, or dates
/// from an earlier run: it is probed.
#[test]
fn an_element_that_a_mentor_gives_to_this_registrar_is_asked() {
    let mut config = config();
    config.mentors = vec![vec!["10.0.0.2:9901".parse().unwrap()]];
    let mut bench = Bench::new(config);
    let (id, at) = (AssociationId(1002), ["10.0.0.2:9901".parse().unwrap()]);
    let dial = Some(holdfast_proto::registrar::DialId(1));
    let (now, mentor) = (bench.now, RegistrarId(2));
    bench.machine.handle_up(now, id, Protocol::Enrp, &at, dial);
    let servers = Vec::new();
    let rejected = false;
    bench.enrp(mentor, Body::ListResponse { rejected, servers });
    let mut own = element(1, 9, RR);
    own.home = OWN;
    own.asap_transport = Some(transport([10, 1, 0, 9], 5000));
    let table = Body::HandleTableResponse {
        rejected,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![own],
        }],
    };
    bench.enrp(mentor, table);
    assert!(bench.machine.is_ready() && bench.has(1));
    let outputs = bench.wait(SECOND);
    let called = |output: &Out| matches!(output, Out::Connect(_, Protocol::Asap, _));
    assert!(outputs.iter().any(called), "{outputs:?}");
    bench.wait(SECOND * 5);
    assert!(!bench.has(1));
}
