//! Settings of this node for moves, from its configuration, and the names of the nodes.

use std::collections::BTreeMap;

use holdfast_sys::cgroup::ControlGroups;
use holdfast_wire::NodeId;

use super::socket_endpoints::MovableAddresses;
use crate::config::Config;
use crate::reach::reach_of;

/// This node's settings for moves, from its configuration, and the names of the nodes.
pub(super) struct MigrationSettings {
    /// True if processes may move.
    pub(super) enabled: bool,
    /// Service and node addresses.
    pub(super) addresses: MovableAddresses,
    /// Control groups of this node.
    pub(super) cgroups: ControlGroups,
    /// True if every node receives every packet.
    pub(super) every_node_receives: bool,
    /// True if freezes run at real-time priority.
    pub(super) realtime: bool,
    /// Names of the nodes.
    node_names: BTreeMap<NodeId, String>,
}

impl MigrationSettings {
    /// Returns the settings of a configuration.
    ///
    /// # Errors
    /// The control group of this daemon cannot be found.
    pub(super) fn new(config: &Config) -> std::io::Result<MigrationSettings> {
        let cgroup_path = config.node.cgroup().map_err(std::io::Error::other)?;
        let node_names = config
            .nodes()
            .map(|(id, name)| (id, name.to_owned()))
            .collect();
        Ok(MigrationSettings {
            enabled: config.migration.enabled,
            addresses: MovableAddresses::new(
                config.services.iter().map(|service| service.address.ip()),
                config.addresses(),
            ),
            cgroups: ControlGroups::new(cgroup_path),
            every_node_receives: reach_of(config.group.reach).every_node_receives(),
            realtime: config.node.realtime,
            node_names,
        })
    }

    /// Replaces the names of the nodes by those of a new view.
    pub(super) fn set_node_names(&mut self, names: BTreeMap<NodeId, String>) {
        self.node_names = names;
    }

    /// Returns the name of a node; empty for a node that the configuration does not name.
    pub(super) fn name_of(&self, node: NodeId) -> String {
        self.node_names.get(&node).cloned().unwrap_or_default()
    }
}
