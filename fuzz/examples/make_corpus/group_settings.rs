//! The group's settings, and requests to change them.

use holdfast_fuzz::membership::node_name;
use holdfast_wire::Frame;
use holdfast_wire::frame::ConfiguredService;
use holdfast_wire::group_data::{
    GroupChange, GroupChangeId, GroupChangeRefusal, GroupNodes, GroupService, GroupSettings,
    ServiceChecks, ServiceName, ServicePatch, ServicePolicy, ServiceProtocol, SlotChoice,
};
use holdfast_wire::membership_frames::MembershipFrame;
use holdfast_wire::rserpool::PolicyKind;
use std::net::IpAddr;

fn name() -> ServiceName {
    "web".parse().expect("a name")
}

fn changes() -> Vec<GroupChange> {
    let addresses = vec![IpAddr::from([10, 9, 0, 1])];
    let web = GroupService::new(name(), ServiceProtocol::Tcp, 80, addresses);
    let patch = ServicePatch {
        added_addresses: vec![IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9])],
        removed_addresses: vec![IpAddr::from([10, 9, 0, 1])],
        placement: Some(SlotChoice::Port),
        policy: Some(ServicePolicy {
            kind: PolicyKind::LeastUsedDpf,
            degradation: 0,
            dpf: 7,
        }),
        weights: vec![(node_name(1), Some(2)), (node_name(3), None)],
        drain_ms: Some(Some(100)),
        checks: Some(ServiceChecks {
            connect: false,
            script: Some("check-web".parse().expect("a name")),
            ..ServiceChecks::default()
        }),
    };
    vec![
        GroupChange::AddService(Box::new(web)),
        GroupChange::SetService {
            name: name(),
            patch: Box::new(patch),
        },
        GroupChange::SetWeights(vec![(node_name(2), Some(0))]),
        GroupChange::RemoveService(name()),
    ]
}

/// Returns one request for each kind of change, and two answers.
pub fn frames() -> Vec<MembershipFrame> {
    let requests = (1..).map(GroupChangeId).zip(changes());
    let requests = requests.map(|(id, change)| MembershipFrame::GroupChangeRequest {
        id,
        change,
        uid: Some(0),
    });
    let response = |result| MembershipFrame::GroupChangeResponse {
        id: GroupChangeId(1),
        result,
    };
    let responses = [Ok(2), Err(GroupChangeRefusal::NameTaken(name()))].map(response);
    requests.chain(responses).collect()
}

/// Returns the frames about services and loads that are not of the membership.
pub fn node_frames() -> Vec<Frame> {
    let service = ConfiguredService {
        protocol: ServiceProtocol::Tcp,
        address: "10.9.0.1:80".parse().expect("an address"),
        name: name(),
        digest: 5,
    };
    let services = vec![service];
    vec![
        Frame::ConfiguredServices { services },
        Frame::NodeLoad { load: 1 << 30 },
    ]
}

/// Writes new settings, and settings after each change, with the requests that follow.
pub fn write_settings() -> std::io::Result<()> {
    let frames = frames().into_iter().map(Frame::Membership);
    let stream = &crate::stream(0, &frames.collect::<Vec<Frame>>())[1..];
    let nodes = GroupNodes {
        names: (1..=3).map(node_name).collect(),
        ..GroupNodes::default()
    };
    let mut settings = GroupSettings::default();
    write_input(&[], stream, 0)?;
    for (number, change) in (1..).zip(&changes()[..4]) {
        let id = GroupChangeId(100 + number);
        settings = settings.apply(id, change, &nodes).expect("allowed");
        write_input(&settings.encode().expect("encoded"), stream, number)?;
    }
    Ok(())
}

fn write_input(settings: &[u8], stream: &[u8], number: u64) -> std::io::Result<()> {
    let length = u16::try_from(settings.len()).expect("short");
    let input = [&length.to_be_bytes(), settings, stream].concat();
    crate::write_input("group_settings", &format!("settings-{number}"), &input)
}
