//! The replication of a service: the nodes with its legs.

use super::GroupSettings;
use super::change::{GroupChangeRefusal, GroupNodes};
use super::service::{ServiceName, ServiceProtocol};
use crate::frame::bounded_list_of;
use crate::membership_frames::NodeName;
use crate::replication_frames::LEGS_MAX;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

use GroupChangeRefusal as Refusal;

/// A replicated service. The contact node changes the legs when it drops or promotes one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceReplication {
    /// Name of the replicated service.
    pub service: ServiceName,
    /// The contact node whose data plane replicates. Another contact node does not continue the connections.
    pub replicator: NodeName,
    /// Nodes with a leg, the primary first. At least one.
    #[serde(deserialize_with = "bounded_list_of::<_, _, LEGS_MAX>")]
    pub legs: Vec<NodeName>,
    /// Number of replicas that the operator wants beside the primary. With 0, replication ends with the last connection.
    pub replicas: u8,
}

impl ServiceReplication {
    /// Returns the node whose server has the state of the service.
    pub fn primary(&self) -> Option<&NodeName> {
        self.legs.first()
    }
}

impl GroupSettings {
    /// Begins or changes the replication of a service.
    pub(super) fn set_replication(
        &mut self,
        replication: &ServiceReplication,
        nodes: &GroupNodes,
    ) -> Result<(), GroupChangeRefusal> {
        let named = replication.legs.iter().chain([&replication.replicator]);
        let is_unknown = |name: &&NodeName| !nodes.names.contains(*name);
        if let Some(name) = named.into_iter().find(is_unknown) {
            return Err(Refusal::UnknownNode(name.clone()));
        }
        let by_name = |known: &ServiceReplication| known.service.cmp(&replication.service);
        match self.replications.binary_search_by(by_name) {
            Ok(position) => self.replications[position] = replication.clone(),
            Err(position) => self.replications.insert(position, replication.clone()),
        }
        Ok(())
    }

    /// Ends the replication of a service. New clients go to the last primary alone, since the servers of other nodes may lack
    /// input.
    pub(super) fn end_replication(&mut self, name: &ServiceName, nodes: &GroupNodes) {
        let is_ending = |known: &ServiceReplication| known.service == *name;
        let Some(position) = self.replications.iter().position(is_ending) else {
            return;
        };
        let ended = self.replications.remove(position);
        let mut services = self.services.iter_mut();
        let service = services.find(|service| service.name == *name);
        let primary = ended.primary().filter(|name| nodes.names.contains(*name));
        // Without the primary's node the weights stay: with none above 0, the service would have no server.
        let (Some(service), Some(primary)) = (service, primary) else {
            return;
        };
        for node in &nodes.names {
            let weight = match node == primary {
                true => service.weight(node).max(1),
                false => 0,
            };
            service.weights.insert(node.clone(), weight);
        }
    }

    /// Refuses a change of a service that replication does not allow.
    pub(super) fn check_not_replicated(
        &self,
        name: &ServiceName,
    ) -> Result<(), GroupChangeRefusal> {
        match self.replication(name) {
            Some(_) => Err(Refusal::Replicated(name.clone())),
            None => Ok(()),
        }
    }

    /// Checks the rules for replicated services.
    pub(super) fn check_replications(&self) -> Result<(), GroupChangeRefusal> {
        let is_ordered =
            |left: &ServiceReplication, right: &ServiceReplication| left.service < right.service;
        if !self.replications.is_sorted_by(is_ordered) {
            return Err(Refusal::ServiceOrder);
        }
        for replication in &self.replications {
            let name = &replication.service;
            let service = self.service(name);
            let service = service.filter(|service| !service.is_ending());
            let service = service.ok_or_else(|| Refusal::UnknownService(name.clone()))?;
            let is_single = service.addresses.len() == 1 && service.ending_addresses.is_empty();
            if service.protocol != ServiceProtocol::Tcp || !is_single {
                return Err(Refusal::NotReplicable(name.clone()));
            }
            let distinct: BTreeSet<&NodeName> = replication.legs.iter().collect();
            let is_count = (1..=LEGS_MAX).contains(&replication.legs.len());
            let are_wanted = usize::from(replication.replicas) < LEGS_MAX;
            let are_distinct = distinct.len() == replication.legs.len();
            if !is_count || !are_wanted || !are_distinct {
                return Err(Refusal::ReplicaCount);
            }
            if distinct.contains(&replication.replicator) {
                return Err(Refusal::ReplicaAtContactNode(
                    replication.replicator.clone(),
                ));
            }
        }
        Ok(())
    }
}
