//! Services that change while the daemon runs, and the group's settings that they come from.

mod api_conversion;
mod file_agreement;
mod settings_conversion;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};

use holdfast_api::control::{
    ErrorBody, PlacementRequest, PlacementWeights, ServiceChangeRequest, ServiceChanged,
};
use holdfast_bpf::shared_with_c::MAX_SERVICES;
use holdfast_proto::membership::GroupChangeFailure;
use holdfast_wire::group_data::{
    GroupChange, GroupChangeId, GroupSettings, SERVICE_ADDRESSES_MAX, ServiceName,
};
use holdfast_wire::membership_frames::NodeName;
use holdfast_wire::{Frame, Protocol};
use tokio::sync::oneshot;

pub use file_agreement::FileDisagreements;
pub use settings_conversion::services_of_settings;

use super::operator_view::error_body;
use super::{Engine, network_setup};
use crate::config::ServiceConfig;
use crate::control::ReplySender;
use crate::dataplane::monotonic_s;
use crate::membership::GroupMembership;
use crate::reach::reach_of;

// The group's settings have no more addresses than each node has rows.
const _: () = assert!(SERVICE_ADDRESSES_MAX == MAX_SERVICES);

/// Time without records after which an ending address is dropped, in seconds: a connection whose handshake was under way
/// when the address was removed has its record by then.
const ENDED_AFTER_S: u32 = 5;

/// The group's settings as this node knows them.
#[derive(Default)]
pub struct GroupServices {
    /// Version of the group data, and the settings in them; none in a group of files.
    settings: Option<(u64, GroupSettings)>,
    /// Nodes whose files name other services than this node's.
    disagreements: FileDisagreements,
    /// Services that wait for a row.
    waiting: Vec<String>,
    /// Times in seconds since which an ending service has no records, by row.
    quiet_since_s: BTreeMap<u16, u32>,
}

impl GroupServices {
    /// Returns true once the group's settings are known.
    pub fn are_known(&self) -> bool {
        self.settings.is_some()
    }

    /// Returns the problems for the operator.
    pub fn problems(&self) -> Vec<String> {
        let waiting = self.waiting.iter().map(|name| {
            format!(
                "service {name} waits until flows of removed services have ended: all {MAX_SERVICES} rows are in use"
            )
        });
        waiting.chain(self.disagreements.texts()).collect()
    }
}

/// Identifies a service address, also across changes of the service.
type ServiceKey = (Protocol, SocketAddr);

fn key_of(service: &ServiceConfig) -> ServiceKey {
    (service.protocol, service.address)
}

impl Engine {
    /// Makes the group's services those of its settings.
    pub(super) fn apply_group_settings(&mut self, version: u64, settings: GroupSettings) {
        self.group_services.settings = Some((version, settings));
        self.follow_group_nodes();
    }

    /// Places new flows by the settings after the nodes of the group have changed.
    pub(super) fn follow_group_nodes(&mut self) {
        let Some((_, settings)) = &self.group_services.settings else {
            return;
        };
        let nodes: Vec<_> = (self.group.nodes())
            .map(|(id, node)| (id, node.name.as_str()))
            .collect();
        let wanted = services_of_settings(settings, &nodes, &self.config.node.checks_dir);
        self.apply_services(wanted);
    }

    /// Makes the services of this node those of the list while traffic flows: adds, changes and removes rows of the
    /// packet programs' maps, and addresses. Flows of other services notice nothing. A service that is absent from the
    /// list, or marked as ending, gets no new flows, and goes when its last flow has ended.
    pub fn apply_services(&mut self, wanted: Vec<ServiceConfig>) {
        let known = std::mem::take(&mut self.config.services);
        let mut known: BTreeMap<ServiceKey, ServiceConfig> = known
            .into_iter()
            .map(|service| (key_of(&service), service))
            .collect();
        let (mut next, mut changed, mut added) = (Vec::new(), Vec::new(), Vec::new());
        for mut service in wanted {
            match known.remove(&key_of(&service)) {
                None if service.is_ending => {}
                None => added.push(service),
                Some(before) => {
                    service.row = before.row;
                    if service != before {
                        changed.push(service.clone());
                    }
                    next.push(service);
                }
            }
        }
        for mut service in known.into_values() {
            if !std::mem::replace(&mut service.is_ending, true) {
                changed.push(service.clone());
            }
            next.push(service);
        }
        let mut rows: BTreeSet<u16> = next.iter().map(|service| service.row).collect();
        self.group_services.waiting.clear();
        for mut service in added {
            let free = (0..MAX_SERVICES as u16).find(|row| !rows.contains(row));
            let Some(row) = free else {
                self.group_services.waiting.push(service.pool);
                continue;
            };
            service.row = row;
            match self.add_service(&service) {
                Ok(()) => {
                    rows.insert(row);
                    changed.push(service.clone());
                    next.push(service);
                }
                Err(error) => {
                    tracing::error!(service = service.pool, at = %service.address, %error, "cannot add a service");
                }
            }
        }
        self.config.services = next;
        self.on_services_changed(&changed);
    }

    /// Adds the rows of a service to the maps. The address follows, so that the filters see its first packet.
    fn add_service(&mut self, service: &ServiceConfig) -> Result<(), holdfast_bpf::Error> {
        tracing::info!(service = service.pool, at = %service.address, protocol = %service.protocol, "a service begins");
        self.dataplane.programs.flow_quota.set_count(service.row, 0);
        self.dataplane.set_service(service)
    }

    /// Tells all parts of the node that the list of services is another one.
    fn on_services_changed(&mut self, changed: &[ServiceConfig]) {
        network_setup::divide_flow_table(&self.config, &self.dataplane);
        if let Some(holder) = &mut self.holder {
            holder.set_services(&self.config.services);
        }
        self.migrations.set_services(&self.config.services);
        let now = self.now();
        for service in changed {
            if service.is_ending {
                tracing::info!(service = service.pool, at = %service.address, "a service gets no new clients: it was removed");
            }
            self.placement.set_service(now, service);
        }
        self.placement.place(&mut self.dataplane);
        self.health.set_services(now, &self.config.services);
        self.update_replication();
        self.publish_servers();
        let addresses: BTreeSet<IpAddr> =
            changed.iter().map(|service| service.address.ip()).collect();
        for address in addresses {
            if let Err(error) = self.contact_service.add_address(address) {
                tracing::error!(%address, %error, "cannot add a service address");
            }
        }
    }

    /// Removes the services that have ended, after a count of the flows of each row. Services that waited for a row
    /// begin.
    pub(super) fn remove_ended_services(&mut self, flow_counts: &[u32]) {
        let settings = self.group_services.settings.as_ref();
        let is_in_settings = |service: &ServiceConfig| {
            let services = settings.map_or(&[][..], |(_, settings)| settings.services());
            services.iter().any(|known| {
                Protocol::from(known.protocol) == service.protocol
                    && (known.socket_addresses()).any(|(address, _)| address == service.address)
            })
        };
        let has_ended = |service: &&ServiceConfig| {
            let records = self.holder.as_ref();
            service.is_ending
                && !is_in_settings(service)
                && flow_counts.get(usize::from(service.row)).copied() == Some(0)
                && records.is_none_or(|holder| holder.record_count(service) == 0)
        };
        let ended: Vec<ServiceConfig> = (self.config.services.iter())
            .filter(has_ended)
            .cloned()
            .collect();
        if ended.is_empty() {
            return;
        }
        for service in ended {
            if let Err(error) = self.remove_service(&service) {
                tracing::error!(service = service.pool, at = %service.address, error, "cannot remove a service");
            }
        }
        self.on_services_changed(&[]);
        if !self.group_services.waiting.is_empty() {
            self.follow_group_nodes();
        }
    }

    /// Removes a service without flows: its address first, so that the stack answers none of its packets.
    fn remove_service(&mut self, service: &ServiceConfig) -> Result<(), String> {
        let ip = service.address.ip();
        let is_other = |other: &&ServiceConfig| key_of(other) != key_of(service);
        let mut others = self.config.services.iter().filter(is_other);
        if !others.any(|other| other.address.ip() == ip) {
            (self.contact_service.remove_address(ip)).map_err(|error| format!("{ip}: {error}"))?;
        }
        self.dataplane
            .remove_service(service)
            .map_err(|error| error.to_string())?;
        self.placement.remove_service(service.row);
        self.group_services.quiet_since_s.remove(&service.row);
        self.config
            .services
            .retain(|other| key_of(other) != key_of(service));
        tracing::info!(service = service.pool, at = %service.address, "a removed service has ended");
        Ok(())
    }

    /// Lets the group drop ending addresses without flows, at the contact node, which has the records of all flows.
    pub(super) fn drop_ended_addresses(&mut self) {
        let (Some(holder), Some((_, settings)), true) = (
            &self.holder,
            &self.group_services.settings,
            self.table_rebuild.is_complete(),
        ) else {
            return;
        };
        let now_s = monotonic_s();
        let quiet_since_s = &mut self.group_services.quiet_since_s;
        let mut ended: BTreeMap<ServiceName, Vec<IpAddr>> = BTreeMap::new();
        for service in self
            .config
            .services
            .iter()
            .filter(|service| service.is_ending)
        {
            if holder.record_count(service) > 0 {
                quiet_since_s.remove(&service.row);
                continue;
            }
            let since_s = *quiet_since_s.entry(service.row).or_insert(now_s);
            let name: Option<ServiceName> = service.pool.parse().ok();
            let known = name.and_then(|name| settings.service(&name));
            let ip = service.address.ip();
            if let Some(known) = known.filter(|known| known.ending_addresses.contains(&ip))
                && now_s.saturating_sub(since_s) >= ENDED_AFTER_S
            {
                // Asked again if nothing has changed after the same time.
                quiet_since_s.insert(service.row, now_s);
                ended.entry(known.name.clone()).or_default().push(ip);
            }
        }
        for (name, addresses) in ended {
            let change = GroupChange::DropEndedAddresses { name, addresses };
            self.request_group_change(random_change_id(), change, None, |_| ());
        }
    }

    /// Reports this node's load to the contact node, where the loads change the shares of new flows.
    pub(super) fn share_new_flows(&mut self) {
        // With broadcast all nodes must know the same shares, without reports.
        let is_placed_by_contact = reach_of(self.config.group.reach).has_contact_node();
        if !is_placed_by_contact || !self.placement.needs_loads() {
            return;
        }
        let Some(share) = self.load_share() else {
            return;
        };
        let load = (share * f64::from(u32::MAX)) as u32;
        let (now, contact) = (self.now(), self.group.contact());
        if !self.group.is_contact() {
            if let Err(error) = self.peers.send(contact, &Frame::NodeLoad { load }) {
                tracing::debug!(%error, "the contact node does not learn this node's load");
            }
            return;
        }
        self.placement.on_load(now, contact, load);
        for peer in self.peers.ids() {
            let stats = self.peers.stats(peer);
            if let Some(round_trip) = stats.and_then(|stats| stats.round_trip) {
                self.placement.on_round_trip(peer, round_trip);
            }
        }
        self.placement.follow_loads(now, &mut self.dataplane);
    }

    /// Changes the group's services for an operator of this node.
    pub(super) fn change_services(
        &mut self,
        request: &ServiceChangeRequest,
        uid: Option<u32>,
        reply: ReplySender<ServiceChanged>,
    ) {
        let change = match self.group_change_of(&request.change) {
            Ok(change) => change,
            Err(body) => return drop(reply.send(Err(body))),
        };
        let id = request.id.map_or_else(random_change_id, GroupChangeId);
        self.request_group_change(id, change, uid, |result| {
            let changed = result.map(|version| ServiceChanged { version });
            let _ = reply.send(changed);
        });
    }

    /// Changes the weights of all services in the group's settings.
    pub(super) fn change_group_weights(
        &mut self,
        request: &PlacementRequest,
        uid: Option<u32>,
        reply: ReplySender<PlacementWeights>,
    ) {
        let weights = request.weights.iter().map(|(name, weight)| {
            let name = name.parse::<NodeName>();
            name.map(|name| (name, Some(*weight)))
        });
        let weights = match weights.collect::<Result<Vec<_>, _>>() {
            Ok(weights) => weights,
            Err(error) => return drop(reply.send(Err(error_of_text(&error.to_string())))),
        };
        let mut placement = self.placement();
        placement.weights.extend(request.weights.clone());
        let change = GroupChange::SetWeights(weights);
        self.request_group_change(random_change_id(), change, uid, |result| {
            let placed = result.map(|version| PlacementWeights {
                epoch: u32::try_from(version).unwrap_or(u32::MAX),
                ..placement
            });
            let _ = reply.send(placed);
        });
    }

    /// Requests a change of the group's settings; `on_end` gets the version of the group data that has the change.
    pub(super) fn request_group_change(
        &self,
        id: GroupChangeId,
        change: GroupChange,
        uid: Option<u32>,
        on_end: impl FnOnce(Result<u64, ErrorBody>) + 'static,
    ) {
        let Some(membership) = &self.membership else {
            return on_end(Err(error_body(
                "the services of this group are in the files of its nodes",
                "change [[service]] in every node's file, and restart the daemons one after the other",
            )));
        };
        let (reply, result) = oneshot::channel();
        membership.change_settings(id, change.clone(), uid, reply);
        tokio::task::spawn_local(async move {
            // A channel that closes belongs to a daemon that stops, whose caller gets no answer.
            if let Ok(result) = result.await {
                log_change(&change, uid, &result);
                on_end(result.map_err(|failure| error_of_text(&failure.to_string())));
            }
        });
    }
}

/// Changes the group's settings. Returns the version of the group data that has the change.
///
/// # Errors
/// The group refuses the change, or the daemon stops.
pub(super) async fn decide_change(
    membership: &GroupMembership,
    change: GroupChange,
    uid: Option<u32>,
) -> Result<u64, ErrorBody> {
    let (reply, result) = oneshot::channel();
    membership.change_settings(random_change_id(), change.clone(), uid, reply);
    let Ok(result) = result.await else {
        return Err(error_body("the daemon stops", "try again when it runs"));
    };
    log_change(&change, uid, &result);
    result.map_err(|failure| error_of_text(&failure.to_string()))
}

/// Writes the audit line of a change that this node's operator, or the daemon itself, has requested.
fn log_change(change: &GroupChange, uid: Option<u32>, result: &Result<u64, GroupChangeFailure>) {
    let user = uid.map_or_else(|| "daemon".to_owned(), |uid| format!("uid {uid}"));
    match result {
        Ok(version) => {
            tracing::info!(target: "audit", user, %change, version, "the group has changed");
        }
        Err(failure) => {
            tracing::warn!(target: "audit", user, %change, %failure, "the group has not changed");
        }
    }
}

/// Splits a text of the form `PROBLEM; REMEDY`.
pub(super) fn error_of_text(text: &str) -> ErrorBody {
    let (error, remedy) = text
        .split_once("; ")
        .unwrap_or((text, "change the request"));
    error_body(error, remedy)
}

pub(super) fn random_change_id() -> GroupChangeId {
    // Each state has random keys of its own.
    GroupChangeId(RandomState::new().hash_one(()))
}
