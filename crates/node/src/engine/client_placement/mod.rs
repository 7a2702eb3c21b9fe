//! Placement of new clients: by weights, or at the successor of a service's server.

mod successors;

use std::collections::BTreeMap;

use holdfast_api::control::ErrorBody;
use holdfast_bpf::shared_with_c::Successor;
use holdfast_wire::{MoveId, NodeId};

use super::operator_view::error_body;
use crate::config::ServiceConfig;
use crate::dataplane::Dataplane;

/// Where new clients of each service go.
pub struct ClientPlacement {
    services: Vec<ServiceConfig>,
    /// Each node's share of new clients, by the service's index in the configuration.
    weights: BTreeMap<u16, BTreeMap<NodeId, u32>>,
    /// Number of changes of the weights.
    epoch: u32,
    /// Services of each move to this node, by index in the configuration, with the successor known before the move.
    previous_successors: BTreeMap<MoveId, BTreeMap<usize, Option<Successor>>>,
    /// Times in seconds at which handshakes no longer end at the donor, by service index.
    forward_until_s: BTreeMap<usize, u32>,
}

impl ClientPlacement {
    /// Returns the placement by the configured weights.
    pub fn new(services: &[ServiceConfig]) -> Self {
        let weights = services.iter().map(|service| service.weights.clone());
        Self {
            services: services.to_vec(),
            weights: (0u16..).zip(weights).collect(),
            epoch: 0,
            previous_successors: BTreeMap::new(),
            forward_until_s: BTreeMap::new(),
        }
    }

    /// Returns the weights of the first service.
    pub fn first_weights(&self) -> impl Iterator<Item = (NodeId, u32)> {
        let weights = self.weights.get(&0).into_iter().flatten();
        weights.map(|(id, weight)| (*id, *weight))
    }

    /// Returns the number of changes of the weights.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Changes nodes' weights for all services.
    ///
    /// # Errors
    /// No node would take new flows, or the kernel refuses the change.
    pub fn change_weights(
        &mut self,
        dataplane: &mut Dataplane,
        changes: &BTreeMap<NodeId, u32>,
    ) -> Result<(), ErrorBody> {
        for (index, service) in (0u16..).zip(&self.services) {
            let weights = self.weights.entry(index).or_default();
            weights.extend(changes.iter().map(|(id, weight)| (*id, *weight)));
            if weights.values().all(|weight| *weight == 0) {
                return Err(error_body(
                    "no node would take new flows",
                    "leave at least one weight above 0",
                ));
            }
            dataplane
                .set_weights(index, service, weights)
                .map_err(|refused| error_body(refused.to_string(), "look at the daemon's log"))?;
        }
        self.epoch += 1;
        Ok(())
    }
}
