//! Frames about the connections of replicated services.

use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::{
    CHANGES_MAX, ConnectionChange, ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation,
    RECORDS_MAX, RecordError, ReplicationFrame, ReplicationRoles, canonical,
};
use holdfast_wire::{Frame, FrameDecoder, FrameError, NodeId, Protocol, encode};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::{IpAddr, SocketAddr};

fn client() -> impl Strategy<Value = SocketAddr> {
    let ip = prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from)
    ];
    (ip, any::<u16>()).prop_map(|(ip, port)| canonical(SocketAddr::new(ip, port)))
}

fn service() -> impl Strategy<Value = ServiceEndpoint> {
    client().prop_map(|address| ServiceEndpoint {
        protocol: Protocol::Tcp,
        address,
    })
}

fn leg() -> impl Strategy<Value = LegIndex> {
    (0..LEGS_MAX).prop_map(|position| LegIndex::new(position).expect("below the limit"))
}

fn leg_set() -> impl Strategy<Value = LegSet> {
    (0u8..1 << LEGS_MAX).prop_map(|bits| LegSet::try_from(bits).expect("legs below the limit"))
}

fn roles() -> impl Strategy<Value = ReplicationRoles> {
    let nodes = proptest::array::uniform4(any::<u16>().prop_map(NodeId));
    (leg(), leg_set(), nodes).prop_map(|(primary, live, nodes)| {
        let live = live.union(LegSet::of(primary));
        let node = |position: usize| {
            let leg = LegIndex::new(position).filter(|leg| live.contains(*leg));
            leg.map(|leg| nodes[leg.position()])
        };
        ReplicationRoles {
            primary,
            live,
            nodes: std::array::from_fn(node),
        }
    })
}

fn translation() -> impl Strategy<Value = LegTranslation> {
    (any::<[u32; 2]>(), any::<u16>(), 0u8..15).prop_map(|(offsets, mss, window_scale)| {
        LegTranslation {
            sequence_offset: offsets[0],
            timestamp_offset: offsets[1],
            mss,
            window_scale,
        }
    })
}

fn record() -> impl Strategy<Value = ConnectionRecord> {
    let legs = proptest::array::uniform4(proptest::option::of(translation()));
    let numbers = (
        any::<[u32; 2]>(),
        any::<u16>(),
        0u8..15,
        0u8..15,
        any::<bool>(),
    );
    (client(), numbers, leg_set(), legs).prop_map(
        |(client, (isn, mss, client_scale, service_scale, has_timestamps), live, legs)| {
            let is_known = |leg: &LegIndex| legs[leg.position()].is_some();
            ConnectionRecord {
                client,
                client_isn: isn[0],
                service_isn: isn[1],
                mss,
                client_window_scale: client_scale,
                service_window_scale: service_scale,
                has_timestamps,
                live: live.iter().filter(is_known).collect(),
                legs,
            }
        },
    )
}

fn change() -> impl Strategy<Value = ConnectionChange> {
    prop_oneof![
        record().prop_map(ConnectionChange::Opened),
        (client(), leg()).prop_map(|(client, leg)| ConnectionChange::LegLeft { client, leg }),
        client().prop_map(|client| ConnectionChange::Closed { client }),
    ]
}

/// Any frame about replicated connections.
pub fn replication_frame() -> impl Strategy<Value = Frame> {
    let snapshot = (
        (any::<[u64; 2]>(), service(), roles()),
        vec(record(), 0..9),
        any::<[bool; 2]>(),
    );
    let delta = (
        any::<[u64; 2]>(),
        service(),
        proptest::option::of(roles()),
        vec(change(), 0..9),
    );
    prop_oneof![
        snapshot.prop_map(|((numbers, service, roles), records, ends)| {
            ReplicationFrame::Snapshot {
                term: numbers[0],
                service,
                sequence: numbers[1],
                roles,
                records,
                is_first: ends[0],
                is_last: ends[1],
            }
        }),
        delta.prop_map(
            |(numbers, service, roles, changes)| ReplicationFrame::Delta {
                term: numbers[0],
                service,
                sequence: numbers[1],
                roles,
                changes,
            }
        ),
        (any::<[u64; 2]>(), service()).prop_map(|(numbers, service)| ReplicationFrame::Ack {
            term: numbers[0],
            service,
            sequence: numbers[1],
        }),
        (any::<u64>(), service())
            .prop_map(|(term, service)| ReplicationFrame::SnapshotRequest { term, service }),
        service().prop_map(|service| ReplicationFrame::ServerQuery { service }),
        (service(), any::<[bool; 2]>()).prop_map(|(service, [listens, is_routed])| {
            ReplicationFrame::ServerAnswer {
                service,
                listens,
                is_routed,
            }
        }),
    ]
    .prop_map(Frame::Replication)
}

fn decoded(frame: ReplicationFrame) -> Result<Option<Frame>, FrameError> {
    let mut bytes = Vec::new();
    encode(&Frame::Replication(frame), &mut bytes).expect("small");
    let mut decoder = FrameDecoder::new();
    decoder.feed(&bytes);
    decoder.next_frame()
}

fn example_record() -> ConnectionRecord {
    let leg = LegTranslation {
        sequence_offset: 7,
        timestamp_offset: 0,
        mss: 1460,
        window_scale: 7,
    };
    ConnectionRecord {
        client: "10.0.1.2:4242".parse().expect("an address"),
        client_isn: 1,
        service_isn: 2,
        mss: 1460,
        client_window_scale: 7,
        service_window_scale: 7,
        has_timestamps: true,
        live: LegSet::of(LegIndex::FIRST),
        legs: [Some(leg), None, None, None],
    }
}

fn example_service() -> ServiceEndpoint {
    ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: "10.0.0.1:80".parse().expect("an address"),
    }
}

fn delta(changes: Vec<ConnectionChange>) -> ReplicationFrame {
    ReplicationFrame::Delta {
        term: 1,
        service: example_service(),
        sequence: 1,
        roles: None,
        changes,
    }
}

fn snapshot(roles: ReplicationRoles, records: Vec<ConnectionRecord>) -> ReplicationFrame {
    ReplicationFrame::Snapshot {
        term: 1,
        service: example_service(),
        sequence: 1,
        roles,
        records,
        is_first: true,
        is_last: true,
    }
}

const ROLES: ReplicationRoles = ReplicationRoles {
    primary: LegIndex::FIRST,
    live: LegSet::EMPTY,
    nodes: [None; LEGS_MAX],
};

#[test]
fn lists_beyond_their_limits_are_malformed() {
    let closed = ConnectionChange::Closed {
        client: example_record().client,
    };
    assert!(matches!(
        decoded(delta(vec![closed; CHANGES_MAX])),
        Ok(Some(_))
    ));
    assert!(matches!(
        decoded(delta(vec![closed; CHANGES_MAX + 1])),
        Err(FrameError::Malformed { .. })
    ));
    assert!(matches!(
        decoded(snapshot(ROLES, vec![example_record(); RECORDS_MAX])),
        Ok(Some(_))
    ));
    assert!(matches!(
        decoded(snapshot(ROLES, vec![example_record(); RECORDS_MAX + 1])),
        Err(FrameError::Malformed { .. })
    ));
}

#[test]
fn records_that_no_replicator_writes_are_malformed() {
    let is_malformed = |record| {
        let decoded = decoded(delta(vec![ConnectionChange::Opened(record)]));
        matches!(decoded, Err(FrameError::Malformed { .. }))
    };
    assert!(!is_malformed(example_record()));
    let untranslated = ConnectionRecord {
        legs: [None; LEGS_MAX],
        ..example_record()
    };
    assert!(is_malformed(untranslated));
    let scaled = |client_window_scale, service_window_scale| ConnectionRecord {
        client_window_scale,
        service_window_scale,
        ..example_record()
    };
    assert!(!is_malformed(scaled(14, 14)));
    assert!(is_malformed(scaled(15, 0)));
    assert!(is_malformed(scaled(0, 15)));
    let mut leg_scaled = example_record();
    leg_scaled.legs[0].as_mut().expect("a leg").window_scale = 15;
    assert!(is_malformed(leg_scaled));
}

#[test]
fn live_legs_without_primary_or_node_are_malformed() {
    let second = LegIndex::new(1).expect("below the limit");
    let headless = ReplicationRoles {
        live: LegSet::of(second),
        nodes: [Some(NodeId(1)); LEGS_MAX],
        ..ROLES
    };
    assert!(matches!(
        decoded(snapshot(headless, Vec::new())),
        Err(FrameError::Malformed { .. })
    ));
    let homeless = ReplicationRoles {
        live: LegSet::of(LegIndex::FIRST),
        ..ROLES
    };
    assert!(matches!(
        decoded(snapshot(homeless, Vec::new())),
        Err(FrameError::Malformed { .. })
    ));
    assert!(matches!(decoded(snapshot(ROLES, Vec::new())), Ok(Some(_))));
}

#[test]
fn positions_beyond_the_last_leg_are_refused() {
    assert_eq!(LegIndex::new(LEGS_MAX), None);
    assert_eq!(LegIndex::try_from(4), Err(RecordError::NoSuchLeg(4)));
    assert_eq!(LegSet::try_from(0x20), Err(RecordError::NoSuchLeg(5)));
    for error in [
        RecordError::NoSuchLeg(4),
        RecordError::NoTranslation(LegIndex::FIRST),
        RecordError::WindowScale(15),
        RecordError::DeadPrimary(LegIndex::FIRST),
        RecordError::NoNode(LegIndex::FIRST),
    ] {
        assert!(error.to_string().contains("run the same release"));
    }
}

#[test]
fn mapped_address_names_the_same_client() {
    let mapped = "[::ffff:10.0.1.2]:4242".parse().expect("an address");
    assert_eq!(canonical(mapped), example_record().client);
    let record = ConnectionRecord {
        client: mapped,
        ..example_record()
    };
    let Ok(Some(Frame::Replication(frame))) =
        decoded(delta(vec![ConnectionChange::Opened(record)]))
    else {
        panic!("not a frame");
    };
    assert_eq!(
        frame,
        delta(vec![ConnectionChange::Opened(example_record())])
    );
}

proptest! {
    #[test]
    fn set_of_legs_has_the_members_that_were_inserted(bits in 0u8..1 << LEGS_MAX, other in 0u8..1 << LEGS_MAX) {
        let set = LegSet::try_from(bits).expect("legs below the limit");
        let other_set = LegSet::try_from(other).expect("legs below the limit");
        prop_assert_eq!(set.iter().collect::<LegSet>(), set);
        prop_assert_eq!(set.len(), set.iter().count());
        prop_assert_eq!(set.is_empty(), bits == 0);
        for leg in LegIndex::all() {
            let (a, b) = (set.contains(leg), other_set.contains(leg));
            prop_assert_eq!(a, bits >> leg.position() & 1 == 1);
            prop_assert_eq!(set.union(other_set).contains(leg), a || b);
            prop_assert_eq!(set.intersection(other_set).contains(leg), a && b);
            prop_assert_eq!(set.difference(other_set).contains(leg), a && !b);
            prop_assert!(!set.without(leg).contains(leg));
            let mut changed = set;
            changed.insert(leg);
            prop_assert!(changed.contains(leg));
            changed.remove(leg);
            prop_assert_eq!(changed, set.without(leg));
        }
    }
}
