//! The group's settings round-trip, stay within their bounds, and change only by the rules.

pub mod strategies;

use holdfast_wire::group_data::{
    DRAIN_MS_MAX, GroupChange, GroupChangeId, GroupChangeRefusal as Refusal, GroupService,
    GroupSettings, GroupSettingsError, RECENT_CHANGES_MAX, SERVICE_ADDRESSES_MAX, ScriptName,
    ServiceChecks, ServiceName, ServicePatch, ServiceProtocol, ServiceReplication, WEIGHT_MAX,
};
use holdfast_wire::membership_frames::NodeName;
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::IpAddr;
use strategies::{any_change, nodes};

fn name(text: &str) -> ServiceName {
    text.parse().expect("a name")
}

fn node(text: &str) -> NodeName {
    text.parse().expect("a name")
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn web() -> GroupService {
    let addresses = vec![address("10.9.0.1"), address("fd00::1")];
    GroupService::new(name("web"), ServiceProtocol::Tcp, 80, addresses)
}

fn add(service: GroupService) -> GroupChange {
    GroupChange::AddService(Box::new(service))
}

fn set(service: &str, patch: ServicePatch) -> GroupChange {
    GroupChange::SetService {
        name: name(service),
        patch: Box::new(patch),
    }
}

/// Applies changes to settings, each with an identity of its own.
fn apply_all(changes: &[GroupChange]) -> Result<GroupSettings, Refusal> {
    let mut settings = GroupSettings::default();
    for (id, change) in (1..).map(GroupChangeId).zip(changes) {
        settings = settings.apply(id, change, &nodes())?;
    }
    Ok(settings)
}

fn refusal(changes: &[GroupChange]) -> Refusal {
    let refusal = apply_all(changes).expect_err("refused");
    assert!(!refusal.to_string().is_empty());
    refusal
}

#[test]
fn services_are_added_changed_and_removed() {
    let patch = ServicePatch {
        added_addresses: vec![address("10.9.0.2")],
        removed_addresses: vec![address("10.9.0.1")],
        weights: vec![(node("n1"), Some(3)), (node("n2"), Some(0))],
        drain_ms: Some(Some(100)),
        ..ServicePatch::default()
    };
    let settings = apply_all(&[add(web()), set("web", patch)]).expect("allowed");
    let service = settings.service(&name("web")).expect("added");
    assert_eq!(service.addresses, ["fd00::1", "10.9.0.2"].map(address));
    let weights = ["n1", "n2", "n3"].map(|of| service.weight(&node(of)));
    assert_eq!((weights, service.drain_ms), ([3, 0, 1], Some(100)));
    let without_weight = ServicePatch {
        weights: vec![(node("n1"), None), (node("departed"), None)],
        drain_ms: Some(None),
        ..ServicePatch::default()
    };
    let id = GroupChangeId(9);
    let settings = settings
        .apply(id, &set("web", without_weight), &nodes())
        .expect("allowed");
    let service = settings.service(&name("web")).expect("kept");
    assert_eq!((service.weight(&node("n1")), service.drain_ms), (1, None));
    let id = GroupChangeId(10);
    let removal = GroupChange::RemoveService(name("web"));
    let settings = settings.apply(id, &removal, &nodes()).expect("allowed");
    let service = settings.service(&name("web")).expect("its flows go on");
    assert!(service.is_ending() && service.ending_addresses.len() == 3);
    let addresses = service.ending_addresses.clone();
    let name = name("web");
    let ended = GroupChange::DropEndedAddresses { name, addresses };
    let settings = settings.apply(GroupChangeId(11), &ended, &nodes());
    assert!(settings.expect("allowed").services().is_empty());
}

#[test]
fn removed_addresses_end_and_can_come_back() {
    let patch = |added: &[&str], removed: &[&str]| {
        let addresses = |texts: &[&str]| texts.iter().map(|text| address(text)).collect();
        let patch = ServicePatch {
            added_addresses: addresses(added),
            removed_addresses: addresses(removed),
            ..ServicePatch::default()
        };
        set("web", patch)
    };
    let of = |changes: &[GroupChange]| {
        let settings = apply_all(changes).expect("allowed");
        let service = settings.service(&name("web")).expect("a service").clone();
        (service.addresses, service.ending_addresses)
    };
    let (v4, v6) = (address("10.9.0.1"), address("fd00::1"));
    let remove = patch(&[], &["10.9.0.1"]);
    assert_eq!(of(&[add(web()), remove.clone()]), (vec![v6], vec![v4]));
    let both = vec![v6, v4];
    let changes = [add(web()), remove, patch(&["10.9.0.1"], &[])];
    assert_eq!(of(&changes), (both, Vec::new()));
    // A new service of the same name takes its addresses over from the former one.
    let mut next = web();
    next.addresses = vec![v4];
    let removal = GroupChange::RemoveService(name("web"));
    let changes = [add(web()), removal.clone(), add(next.clone())];
    assert_eq!(of(&changes), (vec![v4], vec![v6]));
    next.port = 81;
    let taken = Refusal::NameTaken(name("web"));
    assert_eq!(refusal(&[add(web()), removal.clone(), add(next)]), taken);
    // Another service waits until the flows have ended.
    let mut other = web();
    other.name = name("other");
    assert!(matches!(
        refusal(&[add(web()), removal.clone(), add(other)]),
        Refusal::AddressTaken { .. }
    ));
    let unknown = Refusal::UnknownService(name("web"));
    assert_eq!(refusal(&[add(web()), removal.clone(), removal]), unknown);
}

#[test]
fn repeated_change_is_carried_out_once() {
    let id = GroupChangeId(7);
    let once = GroupSettings::default()
        .apply(id, &add(web()), &nodes())
        .expect("allowed");
    assert!(once.has_change(id));
    assert_eq!(once.apply(id, &add(web()), &nodes()), Ok(once.clone()));
    let other = GroupChangeId(8);
    assert_eq!(
        once.apply(other, &add(web()), &nodes()),
        Err(Refusal::NameTaken(name("web")))
    );
}

#[test]
fn remembered_changes_are_bounded() {
    let changes = vec![GroupChange::SetWeights(Vec::new()); RECENT_CHANGES_MAX + 1];
    let settings = apply_all(&changes).expect("allowed");
    assert!(!settings.has_change(GroupChangeId(1)));
    assert!(settings.has_change(GroupChangeId(2)));
    let bytes = settings.encode().expect("encoded");
    assert_eq!(GroupSettings::decode(&bytes), Ok(settings));
}

#[test]
fn impossible_services_are_refused() {
    let with = |change: fn(&mut GroupService)| {
        let mut service = web();
        change(&mut service);
        refusal(&[add(service)])
    };
    assert_eq!(with(|it| it.port = 0), Refusal::PortZero);
    assert_eq!(
        with(|it| it.addresses.clear()),
        Refusal::NoAddress(name("web"))
    );
    for unusable in [
        "0.0.0.0",
        "224.0.0.1",
        "127.0.0.1",
        "::ffff:10.9.0.1",
        "fe80::1",
    ] {
        let mut service = web();
        service.addresses.push(address(unusable));
        let expected = Refusal::UnusableAddress(address(unusable));
        assert_eq!(refusal(&[add(service)]), expected);
    }
    assert_eq!(
        with(|it| it.addresses.push(address("10.9.0.1"))),
        Refusal::RepeatedAddress(address("10.9.0.1"))
    );
    assert_eq!(
        with(|it| it.addresses.push(address("10.0.0.1"))),
        Refusal::NodeAddress(address("10.0.0.1"))
    );
    assert_eq!(
        with(|it| it.drain_ms = Some(DRAIN_MS_MAX + 1)),
        Refusal::DrainTooLong(DRAIN_MS_MAX + 1)
    );
    assert_eq!(
        with(|it| it.weights = [(node("n1"), WEIGHT_MAX + 1)].into()),
        Refusal::WeightTooLarge(WEIGHT_MAX + 1)
    );
    assert_eq!(
        with(|it| it.weights = [(node("stranger"), 1)].into()),
        Refusal::UnknownNode(node("stranger"))
    );
    assert_eq!(
        with(|it| it.weights = ["n1", "n2", "n3"].map(|of| (node(of), 0)).into()),
        Refusal::NoWeight(name("web"))
    );
}

#[test]
fn changes_that_contradict_the_settings_are_refused() {
    let mut other = web();
    other.name = name("other");
    assert!(matches!(
        refusal(&[add(web()), add(other.clone())]),
        Refusal::AddressTaken { .. }
    ));
    other.protocol = ServiceProtocol::Udp;
    assert!(apply_all(&[add(web()), add(other)]).is_ok());
    let unknown = Refusal::UnknownService(name("mail"));
    assert_eq!(
        refusal(&[GroupChange::RemoveService(name("mail"))]),
        unknown
    );
    assert_eq!(refusal(&[set("mail", ServicePatch::default())]), unknown);
    let without = |texts: &[&str]| ServicePatch {
        removed_addresses: texts.iter().map(|text| address(text)).collect(),
        ..ServicePatch::default()
    };
    assert!(matches!(
        refusal(&[add(web()), set("web", without(&["10.9.0.7"]))]),
        Refusal::UnknownAddress { .. }
    ));
    assert_eq!(
        refusal(&[add(web()), set("web", without(&["10.9.0.1", "fd00::1"]))]),
        Refusal::NoAddress(name("web"))
    );
    let zero = GroupChange::SetWeights(["n1", "n2", "n3"].map(|of| (node(of), Some(0))).to_vec());
    assert_eq!(refusal(&[add(web()), zero]), Refusal::NoWeight(name("web")));
}

fn replicate(service: &str, legs: &[&str], replicas: u8) -> GroupChange {
    GroupChange::SetReplication(ServiceReplication {
        service: name(service),
        replicator: node("n1"),
        legs: legs.iter().map(|leg| node(leg)).collect(),
        replicas,
    })
}

fn redis() -> GroupService {
    GroupService::new(
        name("redis"),
        ServiceProtocol::Tcp,
        6379,
        vec![address("10.9.0.2")],
    )
}

#[test]
fn replication_ends_with_the_last_primary_alone() {
    let begun = [
        add(redis()),
        replicate("redis", &["n2", "n3"], 1),
        replicate("redis", &["n3"], 1),
    ];
    let settings = apply_all(&begun).expect("allowed");
    let replication = settings.replication(&name("redis")).expect("replicated");
    assert_eq!(replication.primary(), Some(&node("n3")));
    let bytes = settings.encode().expect("encoded");
    assert_eq!(GroupSettings::decode(&bytes), Ok(settings));
    let end = GroupChange::EndReplication(name("redis"));
    let settings = apply_all(&[&begun[..], &[end]].concat()).expect("allowed");
    assert_eq!(settings.replication(&name("redis")), None);
    let service = settings.service(&name("redis")).expect("a service");
    let weights = ["n1", "n2", "n3"].map(|name| service.weight(&node(name)));
    assert_eq!(weights, [0, 0, 1]);
    // Releases without replication can read the settings again.
    assert_eq!(settings.encode().expect("encoded")[0], 1);
}

#[test]
fn impossible_replications_are_refused() {
    let refusal_of = |change: GroupChange| refusal(&[add(redis()), add(web()), change]);
    let refusals = [
        (
            replicate("dns", &["n2"], 0),
            Refusal::UnknownService(name("dns")),
        ),
        (
            replicate("web", &["n2", "n3"], 1),
            Refusal::NotReplicable(name("web")),
        ),
        (
            replicate("redis", &["n2", "n9"], 1),
            Refusal::UnknownNode(node("n9")),
        ),
        (replicate("redis", &["n2", "n2"], 1), Refusal::ReplicaCount),
        (replicate("redis", &[], 1), Refusal::ReplicaCount),
        (replicate("redis", &["n2", "n3"], 4), Refusal::ReplicaCount),
        (
            replicate("redis", &["n2", "n1"], 1),
            Refusal::ReplicaAtContactNode(node("n1")),
        ),
    ];
    for (change, expected) in refusals {
        assert_eq!(refusal_of(change), expected);
    }
    let begun = [add(redis()), replicate("redis", &["n2", "n3"], 1)];
    let more_addresses = ServicePatch {
        added_addresses: vec![address("10.9.0.3")],
        ..ServicePatch::default()
    };
    for change in [
        GroupChange::RemoveService(name("redis")),
        set("redis", more_addresses),
    ] {
        let refused = refusal(&[&begun[..], &[change]].concat());
        assert_eq!(refused, Refusal::Replicated(name("redis")));
    }
}

#[test]
fn service_addresses_are_bounded() {
    let service = |number: usize| {
        let addresses = vec![IpAddr::from([10, 9, 1, number as u8])];
        let name = name(&format!("service-{number}"));
        add(GroupService::new(name, ServiceProtocol::Tcp, 80, addresses))
    };
    let changes: Vec<GroupChange> = (0..=SERVICE_ADDRESSES_MAX).map(service).collect();
    assert!(apply_all(&changes[1..]).is_ok());
    assert_eq!(refusal(&changes), Refusal::TooManyAddresses(65));
}

#[test]
fn checks_are_set_as_a_whole_and_within_bounds() {
    let checks = ServiceChecks {
        connect: true,
        script: Some("check-web".parse().expect("a name")),
        ..ServiceChecks::default()
    };
    let patch = |checks: &ServiceChecks| ServicePatch {
        checks: Some(checks.clone()),
        ..ServicePatch::default()
    };
    let of = |changes: &[GroupChange]| {
        let settings = apply_all(changes).expect("allowed");
        let service = settings.service(&name("web")).expect("a service");
        service.checks.clone()
    };
    assert_eq!(of(&[add(web())]), ServiceChecks::default());
    let set_checks = set("web", patch(&checks));
    assert_eq!(of(&[add(web()), set_checks.clone()]), checks);
    let unrelated = set("web", ServicePatch::default());
    assert_eq!(of(&[add(web()), set_checks.clone(), unrelated]), checks);
    let text = set_checks.to_string();
    assert_eq!(text, "service set web checks connect script check-web");
    let refused = |change: fn(&mut ServiceChecks)| {
        let mut service = web();
        change(&mut service.checks);
        refusal(&[add(service)])
    };
    assert_eq!(
        refused(|it| it.interval_ms = 99),
        Refusal::CheckInterval(99)
    );
    assert_eq!(refused(|it| it.timeout_ms = 0), Refusal::CheckTimeout(0));
    assert_eq!(refused(|it| it.fall = 0), Refusal::CheckResults(0));
    assert_eq!(refused(|it| it.rise = 101), Refusal::CheckResults(101));
    let (stall, long) = (|it: &mut ServiceChecks| it.stall_ms = 600_001, 600_001);
    assert_eq!(refused(stall), Refusal::StallTooLong(long));
    let mut dns = web();
    (dns.protocol, dns.checks.connect) = (ServiceProtocol::Udp, true);
    assert_eq!(refusal(&[add(dns)]), Refusal::ConnectCheckOfUdp);
}

#[test]
fn names_of_scripts_stay_in_their_directory() {
    for wrong in ["", ".", "..", ".a", "a.", "a/b", "../a", "a b", "a\0", "ä"] {
        let error = wrong.parse::<ScriptName>().expect_err("no name");
        assert!(error.to_string().contains("file name alone"), "{error}");
    }
    assert!("a".repeat(65).parse::<ScriptName>().is_err());
    assert!("check_web-2.sh".parse::<ScriptName>().is_ok());
}

#[test]
fn names_are_labels_of_domain_names() {
    for wrong in ["", "-a", "a-", "A", "a.b", "a b", &"a".repeat(41)] {
        let error = wrong.parse::<ServiceName>().expect_err("no name");
        assert!(error.to_string().contains("use 1 to 40"), "{error}");
    }
    assert!("a".repeat(40).parse::<ServiceName>().is_ok());
}

#[test]
fn other_bytes_are_no_settings() {
    assert_eq!(GroupSettings::decode(&[]), Ok(GroupSettings::default()));
    assert_eq!(
        GroupSettings::decode(&[9, 0]),
        Err(GroupSettingsError::Version(9))
    );
    let bytes = apply_all(&[add(web())]).expect("allowed").encode();
    let bytes = bytes.expect("encoded");
    for wrong in [&bytes[..bytes.len() - 1], &[&bytes[..], &[0]].concat()] {
        let error = GroupSettings::decode(wrong).expect_err("damaged");
        assert!(error.to_string().contains("same release"), "{error}");
    }
}

#[test]
fn settings_format_is_stable() {
    let mut service = web();
    service.weights = [(node("n1"), 2)].into();
    let settings = apply_all(&[add(service)]).expect("allowed");
    let mut expected = vec![1, 1, 3, b'w', b'e', b'b', 2, 0, 10, 9, 0, 1, 1];
    expected.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    // Ending addresses, port, protocol, placement; policy, degradation and penalty; weights, drain time.
    expected.extend([0, 80, 0, 0, 4, 0, 0, 1, 2, b'n', b'1', 2, 0]);
    // Checks: connect, script; interval and time limit of 1,000 and 500 ms; fall, rise; stall time of 500 ms.
    expected.extend([0, 0, 0xe8, 7, 0xf4, 3, 2, 2, 0xf4, 3]);
    // Changes.
    expected.extend([1, 1]);
    assert_eq!(settings.encode().expect("encoded"), expected);
}

proptest! {
    #[test]
    fn settings_after_any_changes_round_trip(changes in vec(any_change(), 0..12)) {
        let mut settings = GroupSettings::default();
        for (id, change) in (1..).map(GroupChangeId).zip(&changes) {
            prop_assert!(!change.to_string().is_empty());
            match settings.apply(id, change, &nodes()) {
                Ok(next) => {
                    prop_assert!(next.has_change(id));
                    settings = next;
                }
                Err(refusal) => prop_assert!(!refusal.to_string().is_empty()),
            }
            let bytes = settings.encode().expect("encoded");
            prop_assert_eq!(GroupSettings::decode(&bytes), Ok(settings.clone()));
        }
    }

    #[test]
    fn any_bytes_give_settings_or_error(bytes in vec(any::<u8>(), 0..300)) {
        let with_version = [&[1], &bytes[..]].concat();
        let _ = GroupSettings::decode(&bytes);
        if let Ok(settings) = GroupSettings::decode(&with_version) {
            let again = settings.encode().expect("encoded");
            prop_assert_eq!(GroupSettings::decode(&again), Ok(settings));
        }
    }
}
