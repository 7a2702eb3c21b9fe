//! Changes of a small group, so that most of them are allowed, and some contradict each other.

use holdfast_wire::group_data::{
    GroupChange, GroupChangeRefusal, GroupNodes, GroupService, ScriptName, ServiceChecks,
    ServiceName, ServicePatch, ServicePolicy, ServiceProtocol, ServiceReplication, SlotChoice,
    WeightChanges,
};
use holdfast_wire::membership_frames::NodeName;
use holdfast_wire::rserpool::PolicyKind;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::net::IpAddr;

/// Returns the nodes `n1` to `n3`.
pub fn nodes() -> GroupNodes {
    let name = |number: u8| format!("n{number}").parse().expect("a short name");
    GroupNodes {
        names: (1..=3).map(name).collect(),
        addresses: (1..=3)
            .map(|number| IpAddr::from([10, 0, 0, number]))
            .collect(),
    }
}

fn node_name() -> impl Strategy<Value = NodeName> {
    select(vec!["n1", "n2", "n3", "n4"]).prop_map(|name| name.parse().expect("a name"))
}

fn service_name() -> impl Strategy<Value = ServiceName> {
    "[a-c]".prop_map(|name| name.parse().expect("a name"))
}

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        8 => (0..6_u8).prop_map(|number| IpAddr::from([10, 9, 0, number])),
        2 => (0..4_u16).prop_map(|number| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number])),
        1 => any::<IpAddr>(),
    ]
}

fn policy() -> impl Strategy<Value = ServicePolicy> {
    (select(PolicyKind::ALL), any::<u32>(), any::<u32>()).prop_map(|(kind, degradation, dpf)| {
        ServicePolicy {
            kind,
            degradation,
            dpf,
        }
    })
}

fn placement() -> impl Strategy<Value = SlotChoice> {
    select(vec![SlotChoice::Hash, SlotChoice::Port])
}

fn weight() -> impl Strategy<Value = u32> {
    0..=1_002_u32
}

fn drain_ms() -> impl Strategy<Value = Option<u32>> {
    option::of(0..=600_100_u32)
}

fn checks() -> impl Strategy<Value = ServiceChecks> {
    let script =
        "[a-z][a-z._-]{0,3}[a-z]".prop_map(|name| name.parse::<ScriptName>().expect("a name"));
    (
        any::<bool>(),
        option::of(script),
        (90..=600_010_u32, 0..=600_010_u32),
        (0..=102_u32, 0..=102_u32),
        0..=600_100_u32,
    )
        .prop_map(
            |(connect, script, (interval_ms, timeout_ms), (fall, rise), stall_ms)| ServiceChecks {
                connect,
                script,
                interval_ms,
                timeout_ms,
                fall,
                rise,
                stall_ms,
            },
        )
}

fn service() -> impl Strategy<Value = GroupService> {
    (
        service_name(),
        vec(address(), 0..4),
        0..4_u16,
        select(vec![ServiceProtocol::Tcp, ServiceProtocol::Udp]),
        (placement(), policy()),
        btree_map(node_name(), weight(), 0..3),
        (drain_ms(), checks()),
    )
        .prop_map(
            |(
                name,
                addresses,
                port,
                protocol,
                (placement, policy),
                weights,
                (drain_ms, checks),
            )| {
                GroupService {
                    name,
                    addresses,
                    ending_addresses: Vec::new(),
                    port,
                    protocol,
                    placement,
                    policy,
                    weights,
                    drain_ms,
                    checks,
                }
            },
        )
}

fn weights() -> impl Strategy<Value = WeightChanges> {
    vec((node_name(), option::of(weight())), 0..3)
}

fn patch() -> impl Strategy<Value = ServicePatch> {
    (
        vec(address(), 0..2),
        vec(address(), 0..2),
        option::of(placement()),
        option::of(policy()),
        weights(),
        option::of(drain_ms()),
        option::of(checks()),
    )
        .prop_map(
            |(added, removed, placement, policy, weights, drain_ms, checks)| ServicePatch {
                added_addresses: added,
                removed_addresses: removed,
                placement,
                policy,
                weights,
                drain_ms,
                checks,
            },
        )
}

/// Returns any change.
pub fn any_change() -> impl Strategy<Value = GroupChange> {
    prop_oneof![
        4 => service().prop_map(|service| GroupChange::AddService(Box::new(service))),
        4 => (service_name(), patch().prop_map(Box::new))
            .prop_map(|(name, patch)| GroupChange::SetService { name, patch }),
        1 => service_name().prop_map(GroupChange::RemoveService),
        1 => (service_name(), vec(address(), 0..3))
            .prop_map(|(name, addresses)| GroupChange::DropEndedAddresses { name, addresses }),
        1 => weights().prop_map(GroupChange::SetWeights),
        2 => replication().prop_map(GroupChange::SetReplication),
        1 => service_name().prop_map(GroupChange::EndReplication),
    ]
}

fn replication() -> impl Strategy<Value = ServiceReplication> {
    (service_name(), node_name(), vec(node_name(), 0..4), 0..5_u8).prop_map(
        |(service, replicator, legs, replicas)| ServiceReplication {
            service,
            replicator,
            legs,
            replicas,
        },
    )
}

/// Returns some refusals, with and without fields.
pub fn any_refusal() -> impl Strategy<Value = GroupChangeRefusal> {
    use GroupChangeRefusal as R;
    prop_oneof![
        service_name().prop_map(R::NameTaken),
        (service_name(), address()).prop_map(|(name, address)| R::UnknownAddress { name, address }),
        node_name().prop_map(R::UnknownNode),
        service_name().prop_map(R::Replicated),
        node_name().prop_map(R::ReplicaAtContactNode),
        any::<u32>().prop_map(R::WeightTooLarge),
        Just(R::Busy),
    ]
}
