//! Services of the group's settings in the form of the node's configuration.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use holdfast_wire::NodeId;
use holdfast_wire::group_data::{
    GroupService, GroupSettings, ServiceChecks, ServiceReplication, SlotChoice,
};
use holdfast_wire::membership_frames::NodeName;

use crate::config::{CheckConfig, CheckScript, PlacementRule, ReplicationConfig, ServiceConfig};

/// Returns the group's services for a node, one for each address, with rows in that order. `nodes` are all nodes of the
/// group, and `checks_dir` has this node's check scripts.
pub fn services_of_settings(
    settings: &GroupSettings,
    nodes: &[(NodeId, &str)],
    checks_dir: &Path,
) -> Vec<ServiceConfig> {
    let addresses = settings.services().iter().flat_map(|service| {
        let addresses = service.socket_addresses();
        addresses.map(move |(address, is_active)| (service, address, is_active))
    });
    let services = (0u16..)
        .zip(addresses)
        .map(|(row, (service, address, is_active))| ServiceConfig {
            pool: service.name.to_string(),
            address,
            protocol: service.protocol.into(),
            placement: match service.placement {
                SlotChoice::Hash => PlacementRule::Hash,
                SlotChoice::Port => PlacementRule::Port,
            },
            weights: weights_of(settings, service, nodes),
            drain: service.drain_ms.map(|ms| Duration::from_millis(ms.into())),
            check: check_of(&service.checks, checks_dir),
            policy: service.policy,
            row,
            is_ending: !is_active,
            replication: (settings.replication(&service.name))
                .map(|replication| replication_of(replication, nodes)),
        });
    services.collect()
}

fn check_of(checks: &ServiceChecks, checks_dir: &Path) -> CheckConfig {
    let milliseconds = |ms: u32| Duration::from_millis(ms.into());
    CheckConfig {
        connect: checks.connect,
        script: checks.script.as_ref().map(|name| CheckScript {
            path: checks_dir.join(name.as_str()),
            is_named_by_group: true,
        }),
        interval: milliseconds(checks.interval_ms),
        timeout: milliseconds(checks.timeout_ms),
        fall: checks.fall,
        rise: checks.rise,
        stall_after: (checks.stall_ms > 0).then(|| milliseconds(checks.stall_ms)),
    }
}

/// Returns the weights of nodes. New clients of a replicated service that reach no replicator get the primary's server: servers of
/// other nodes may lack input.
fn weights_of(
    settings: &GroupSettings,
    service: &GroupService,
    nodes: &[(NodeId, &str)],
) -> BTreeMap<NodeId, u32> {
    let replication = settings.replication(&service.name);
    let primary = replication.and_then(ServiceReplication::primary);
    let weight_of = |&(id, name): &(NodeId, &str)| {
        let name: NodeName = name.parse().ok()?;
        let weight = match primary {
            None => service.weight(&name),
            Some(primary) => u32::from(*primary == name),
        };
        Some((id, weight))
    };
    nodes.iter().filter_map(weight_of).collect()
}

fn replication_of(replication: &ServiceReplication, nodes: &[(NodeId, &str)]) -> ReplicationConfig {
    let number = |name: &NodeName| {
        let mut nodes = nodes.iter();
        nodes.find_map(|(id, known)| (*known == name.as_str()).then_some(*id))
    };
    ReplicationConfig {
        replicator: number(&replication.replicator),
        legs: replication.legs.iter().filter_map(number).collect(),
        replicas: replication.replicas,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_wire::group_data::{
        GroupChange, GroupChangeId, GroupNodes, ServicePatch, ServiceProtocol,
    };

    use super::*;

    const NODES: [(NodeId, &str); 2] = [(NodeId(4), "n1"), (NodeId(9), "n2")];
    const CHECKS: &str = "/etc/holdfast/checks";

    fn settings(changes: &[GroupChange]) -> GroupSettings {
        let nodes = GroupNodes {
            names: NODES.map(|(_, name)| name.parse().unwrap()).into(),
            ..GroupNodes::default()
        };
        let changes = (1..).map(GroupChangeId).zip(changes);
        changes.fold(GroupSettings::default(), |settings, (id, change)| {
            settings.apply(id, change, &nodes).unwrap()
        })
    }

    fn web() -> GroupChange {
        let addresses = ["10.9.0.1", "fd00::9"].map(|text| text.parse().unwrap());
        let name = "web".parse().unwrap();
        let mut web = GroupService::new(name, ServiceProtocol::Tcp, 80, addresses.into());
        web.weights = [("n2".parse().unwrap(), 0)].into();
        web.drain_ms = Some(50);
        GroupChange::AddService(Box::new(web))
    }

    #[test]
    fn each_address_is_a_service_with_its_row() {
        let patch = ServicePatch {
            removed_addresses: vec!["10.9.0.1".parse().unwrap()],
            ..ServicePatch::default()
        };
        let name = "web".parse().unwrap();
        let patch = GroupChange::SetService {
            name,
            patch: Box::new(patch),
        };
        let services = services_of_settings(&settings(&[web(), patch]), &NODES, CHECKS.as_ref());
        let [v6, v4] = &services[..] else {
            panic!("{services:?}");
        };
        assert_eq!(
            (v6.row, v6.is_ending, v4.row, v4.is_ending),
            (0, false, 1, true)
        );
        assert_eq!(v6.address, "[fd00::9]:80".parse().unwrap());
        assert_eq!(v6.weights, [(NodeId(4), 1), (NodeId(9), 0)].into());
        assert_eq!(v6.drain, Some(Duration::from_millis(50)));
    }

    #[test]
    fn new_clients_of_a_replicated_service_get_its_primary() {
        let name = "redis".parse().unwrap();
        let address = vec!["10.9.0.1".parse().unwrap()];
        let redis = GroupService::new(name, ServiceProtocol::Tcp, 6379, address);
        let replicate = GroupChange::SetReplication(ServiceReplication {
            service: "redis".parse().unwrap(),
            replicator: "n1".parse().unwrap(),
            legs: vec!["n2".parse().unwrap()],
            replicas: 1,
        });
        let settings = settings(&[GroupChange::AddService(Box::new(redis)), replicate]);
        let services = services_of_settings(&settings, &NODES, CHECKS.as_ref());
        assert_eq!(services[0].weights, [(NodeId(4), 0), (NodeId(9), 1)].into());
        let replication = ReplicationConfig {
            replicator: Some(NodeId(4)),
            legs: vec![NodeId(9)],
            replicas: 1,
        };
        assert_eq!(services[0].replication, Some(replication));
    }

    #[test]
    fn default_checks_are_those_of_a_file_without_any() {
        let services = services_of_settings(&settings(&[web()]), &NODES, CHECKS.as_ref());
        let mut services = services.iter();
        assert!(services.all(|service| service.check == CheckConfig::default()));
    }

    #[test]
    fn check_scripts_are_in_this_nodes_directory() {
        let checks = ServiceChecks {
            connect: true,
            script: Some("check-web".parse().unwrap()),
            interval_ms: 200,
            timeout_ms: 100,
            fall: 3,
            rise: 4,
            stall_ms: 0,
        };
        let patch = GroupChange::SetService {
            name: "web".parse().unwrap(),
            patch: Box::new(ServicePatch {
                checks: Some(checks),
                ..ServicePatch::default()
            }),
        };
        let services = services_of_settings(&settings(&[web(), patch]), &NODES, CHECKS.as_ref());
        let expected = CheckConfig {
            connect: true,
            script: Some(CheckScript {
                path: "/etc/holdfast/checks/check-web".into(),
                is_named_by_group: true,
            }),
            interval: Duration::from_millis(200),
            timeout: Duration::from_millis(100),
            fall: 3,
            rise: 4,
            stall_after: None,
        };
        assert!(services.iter().all(|service| service.check == expected));
    }
}
