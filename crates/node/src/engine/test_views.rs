//! Views of the group from a test instead of from the group itself.

use std::time::{Duration, Instant};

use holdfast_api::control::ErrorBody;
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{JoinNumber, Member};

use super::Engine;
use super::fault_injection::test_views;
use super::operator_view::error_body;
use crate::control::TestView;
use crate::dataplane::boot_time_ns;
use crate::membership::{GroupEvent, KernelLease};

impl Engine {
    /// Handles the view and the lease that a test gives.
    pub(super) fn set_test_view(&mut self, request: &TestView) -> Result<(), ErrorBody> {
        if !test_views() {
            return Err(error_body(
                "this daemon takes no views from tests",
                "set HOLDFAST_TEST_VIEWS in its environment",
            ));
        }
        let no_node = || error_body("no node has this name", "name a configured node");
        let contact_node = self.config.id_of(&request.contact).ok_or_else(no_node)?;
        let own = self.group.own();
        let is_member = |name: &str| !request.without.iter().any(|out| out == name);
        let addresses: std::collections::BTreeMap<NodeId, _> = (self.config.peers.iter())
            .map(|peer| (peer.id, peer.address))
            .collect();
        let mut members = Vec::new();
        for (id, name) in self.config.nodes().filter(|(_, name)| is_member(name)) {
            let address = addresses.get(&id).copied();
            members.push(Member {
                id,
                name: name.parse().map_err(|_| no_node())?,
                address: address.unwrap_or_else(|| self.peers.address()),
                join: JoinNumber(u64::from(id.0)),
            });
        }
        let others = members.iter().map(|member| member.id);
        let view = View {
            epoch: request.epoch,
            revision: 0,
            contact_node,
            backups: others.filter(|id| *id != contact_node).collect(),
            server_nodes: std::collections::BTreeSet::new(),
        };
        let lease = request.lease_ms.map(Duration::from_millis);
        let until = lease.map(|lease| boot_time_ns() + lease.as_nanos() as u64);
        (self.lease_writer())(KernelLease {
            until_ns: until.unwrap_or(0),
            epoch: request.epoch,
        });
        self.handle_group_event(GroupEvent::View { view, own, members });
        let until = lease.map(|lease| Instant::now() + lease);
        self.handle_group_event(GroupEvent::Lease { until });
        Ok(())
    }
}
