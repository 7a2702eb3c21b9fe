//! Agreement of the nodes' files about services, in a group whose services are in files. Each node sends its services to
//! each peer that connects, and both tell their operators of differences.

use std::collections::BTreeMap;

use holdfast_wire::frame::ConfiguredService;
use holdfast_wire::group_data::{ServicePolicy, ServiceProtocol};
use holdfast_wire::{Frame, NodeId, Protocol};

use crate::config::{PlacementRule, ServiceConfig};
use crate::engine::Engine;

/// Differences between this node's file and those of other nodes.
#[derive(Debug, Default)]
pub struct FileDisagreements(BTreeMap<NodeId, Vec<String>>);

impl FileDisagreements {
    /// Returns the differences for the operator.
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.0.values().flatten().cloned()
    }
}

impl Engine {
    /// Sends the services of this node's file to a peer that has connected.
    pub(in crate::engine) fn send_configured_services(&self, peer: NodeId) {
        if self.membership.is_some() {
            return;
        }
        let services = self.configured_services();
        let frame = Frame::ConfiguredServices { services };
        if let Err(error) = self.peers.send(peer, &frame) {
            tracing::debug!(%peer, %error, "the peer does not learn this node's services");
        }
    }

    /// Compares the services of a peer's file with those of this node's.
    pub(in crate::engine) fn on_configured_services(
        &mut self,
        from: NodeId,
        services: &[ConfiguredService],
    ) {
        if self.membership.is_some() {
            return;
        }
        let name = self.node_name(from);
        let texts = differences(&self.configured_services(), services, &name);
        for text in &texts {
            tracing::warn!("{text}");
        }
        let disagreements = &mut self.group_services.disagreements.0;
        match texts.is_empty() {
            true => disagreements.remove(&from),
            false => disagreements.insert(from, texts),
        };
    }

    fn configured_services(&self) -> Vec<ConfiguredService> {
        let node_name = |id| self.node_name(id);
        let services = self.config.services.iter();
        services
            .filter_map(|service| configured_service(service, node_name))
            .collect()
    }
}

fn configured_service(
    service: &ServiceConfig,
    node_name: impl Fn(NodeId) -> String,
) -> Option<ConfiguredService> {
    // Numbers of nodes may differ between files; names are what they agree on.
    let weights = service.weights.iter();
    let weights: BTreeMap<String, u32> = weights
        .map(|(id, weight)| (node_name(*id), *weight))
        .collect();
    let weights = weights
        .iter()
        .map(|(name, weight)| format!("{name}={weight} "));
    let ServicePolicy {
        kind,
        degradation,
        dpf,
    } = service.policy;
    let is_by_port = service.placement == PlacementRule::Port;
    let settings = format!(
        "{}{is_by_port} {kind} {degradation} {dpf}",
        weights.collect::<String>()
    );
    Some(ConfiguredService {
        protocol: match service.protocol {
            Protocol::Udp => ServiceProtocol::Udp,
            _ => ServiceProtocol::Tcp,
        },
        address: service.address,
        name: service.pool.parse().ok()?,
        digest: fnv_1a(settings.as_bytes()),
    })
}

/// Returns the FNV-1a hash, the same in every release (draft-eastlake-fnv, section 2).
fn fnv_1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Returns the differences of a peer's file in words.
fn differences(
    own_services: &[ConfiguredService],
    peer_services: &[ConfiguredService],
    peer: &str,
) -> Vec<String> {
    let by_address = |services: &[ConfiguredService]| -> BTreeMap<_, ConfiguredService> {
        let with_key =
            |service: &ConfiguredService| ((service.protocol, service.address), service.clone());
        services.iter().map(with_key).collect()
    };
    let (own_services, peer_services) = (by_address(own_services), by_address(peer_services));
    let lacking = |service: &ConfiguredService, who: &str| {
        format!(
            "service {} at {} {} is missing in the file of {who}",
            service.name, service.protocol, service.address
        )
    };
    let mut problems = Vec::new();
    for (key, service) in &own_services {
        match peer_services.get(key) {
            None => problems.push(lacking(service, &format!("node {peer}"))),
            Some(other) if other.name != service.name => problems.push(format!(
                "{} {} is service {} here and {} at node {peer}",
                service.protocol, service.address, service.name, other.name
            )),
            Some(other) if other.digest != service.digest => problems.push(format!(
                "service {} at {} {} has other weights, placement or policy in the file of node {peer}",
                service.name, service.protocol, service.address
            )),
            Some(_) => {}
        }
    }
    let unknown = peer_services
        .iter()
        .filter(|(key, _)| !own_services.contains_key(key));
    problems.extend(
        unknown.map(|(_, service)| {
            format!("{}, and node {peer} has it", lacking(service, "this node"))
        }),
    );
    let with_remedy = |problem: String| {
        format!(
            "{problem}: make [[service]] the same in the files of all nodes, and restart the daemons that had others"
        )
    };
    problems.into_iter().map(with_remedy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CheckConfig;

    fn service(change: impl FnOnce(&mut ServiceConfig)) -> ServiceConfig {
        let mut service = ServiceConfig {
            pool: "web".to_owned(),
            address: "10.9.0.1:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            placement: PlacementRule::Hash,
            weights: BTreeMap::from([(NodeId(1), 1), (NodeId(2), 3)]),
            check: CheckConfig::default(),
            drain: None,
            policy: ServicePolicy::default(),
            row: 0,
            is_ending: false,
            replication: None,
        };
        change(&mut service);
        service
    }

    fn sent(service: &ServiceConfig, names: [(u16, &str); 2]) -> ConfiguredService {
        let names = BTreeMap::from(names);
        configured_service(service, |id| names[&id.0].to_owned()).unwrap()
    }

    const NAMES: [(u16, &str); 2] = [(1, "n1"), (2, "n2")];

    #[test]
    fn digest_is_that_of_the_standard() {
        assert_eq!(fnv_1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn files_with_other_node_numbers_agree() {
        let swapped = service(|it| it.weights = BTreeMap::from([(NodeId(2), 1), (NodeId(1), 3)]));
        let own = sent(&service(|_| ()), NAMES);
        let other = sent(&swapped, [(1, "n2"), (2, "n1")]);
        assert_eq!(differences(&[own], &[other], "n2"), Vec::<String>::new());
    }

    #[test]
    fn each_difference_is_named_with_a_remedy() {
        let own = sent(&service(|_| ()), NAMES);
        let text = |peers: &[ConfiguredService]| {
            let texts = differences(std::slice::from_ref(&own), peers, "n2");
            assert!(
                texts.iter().all(|text| text.contains("[[service]]")),
                "{texts:?}"
            );
            texts.join("\n")
        };
        assert!(text(&[]).contains("missing in the file of node n2"));
        let renamed = sent(&service(|it| it.pool = "mail".to_owned()), NAMES);
        assert!(text(&[renamed]).contains("web here and mail at node n2"));
        let weighted = sent(
            &service(|it| it.weights = BTreeMap::from([(NodeId(1), 0)])),
            NAMES,
        );
        assert!(text(&[weighted]).contains("other weights"));
        let elsewhere = sent(&service(|it| it.protocol = Protocol::Udp), NAMES);
        let both = text(&[own.clone(), elsewhere]);
        assert!(both.contains("missing in the file of this node"), "{both}");
    }
}
