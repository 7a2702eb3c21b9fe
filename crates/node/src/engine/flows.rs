//! The operator's requests about flows, and handoffs that the operator starts.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_api::FlowText;
use holdfast_api::control::{
    ErrorBody, FlowDetail, FlowEntry, FlowFilter, FlowList, FlowListQuery, FlowSelection,
    FlowState as ApiState, HandoffAccepted, HandoffRequest, TcpDetail,
};
use holdfast_bpf::shared_with_c::{FlowState, FlowValue};
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, NodeId, OwnershipRecord, RecordState};

use super::holder::Holder;
use super::operator_view::error_body;
use super::{Engine, flow_from_text, flow_text, wire_protocol};
use crate::config::ServiceConfig;

/// Default number of flows in one answer.
const FLOWS_PER_ANSWER: u64 = 1000;

/// Rough freeze of one connection in µs, for `flow show`: three frames between nodes and the work at both ends.
const TYPICAL_FREEZE_US: u64 = 400;

impl Engine {
    /// Returns all flows that this node knows; at the holder, all flows of the group.
    fn known_flows(&self) -> BTreeMap<Flow, (ApiState, u32)> {
        let own_name = self.config.node.name.as_str();
        let mut known_flows: BTreeMap<Flow, (ApiState, u32)> = self
            .dataplane
            .flows()
            .iter()
            .filter(|(_, state, _)| *state != FlowState::Closing)
            .map(|(flow, state, value)| {
                (
                    *flow,
                    (self.api_state(own_name, *state, value), value.epoch),
                )
            })
            .collect();
        for (flow, record) in Holder::records(&self.dataplane.programs) {
            known_flows.insert(flow, (self.state_from_record(&record), record.epoch));
        }
        known_flows
    }

    fn api_state(&self, own_name: &str, state: FlowState, value: &FlowValue) -> ApiState {
        let peer = self.node_name(NodeId(value.peer));
        match state {
            FlowState::TransitOut => ApiState::Transit {
                donor: own_name.to_owned(),
                acceptor: peer,
            },
            FlowState::TransitIn => ApiState::Transit {
                donor: peer,
                acceptor: own_name.to_owned(),
            },
            FlowState::Moved => ApiState::Owned { owner: peer },
            _ => ApiState::Owned {
                owner: own_name.to_owned(),
            },
        }
    }

    fn state_from_record(&self, record: &OwnershipRecord) -> ApiState {
        match record.state {
            RecordState::Owned { owner } => ApiState::Owned {
                owner: self.node_name(owner),
            },
            RecordState::Transit { donor, acceptor } => ApiState::Transit {
                donor: self.node_name(donor),
                acceptor: self.node_name(acceptor),
            },
        }
    }

    /// Returns the name of the node that owns a flow, as far as this node knows.
    pub(super) fn owner_of(&self, flow: &Flow) -> Option<String> {
        let record = Holder::lookup(&self.dataplane.programs, flow);
        let state = match record {
            Some(record) => self.state_from_record(&record),
            None => {
                let (state, value) = self.dataplane.flow(flow)?;
                self.api_state(&self.config.node.name, state, &value)
            }
        };
        match state {
            ApiState::Owned { owner } => Some(owner),
            ApiState::Transit { .. } => None,
        }
    }

    fn flow_entry(&self, flow: &Flow, state: ApiState, epoch: u32) -> FlowEntry {
        let service = self.service_of(flow);
        let program = self
            .programs
            .owner(flow)
            .and_then(|session| self.programs.get(session));
        FlowEntry {
            flow: flow_text(flow),
            state,
            epoch,
            pool: service.map(|service| service.pool.clone()),
            program: program.map(|program| program.name.clone()),
            taken_at_ns: self.flow_history.taken_at_ns(flow),
        }
    }

    /// Returns the flows that match a filter, with state and epoch.
    fn matching_flows<'a>(
        &'a self,
        filter: &'a FlowFilter,
    ) -> impl Iterator<Item = (Flow, ApiState, u32)> + 'a {
        let known_flows = self.known_flows().into_iter();
        let known_flows = known_flows.map(|(flow, (state, epoch))| (flow, state, epoch));
        known_flows.filter(move |(flow, state, _)| {
            let pool = || self.service_of(flow).map(|service| &service.pool);
            filter
                .pool
                .as_ref()
                .is_none_or(|wanted| pool() == Some(wanted))
                && filter
                    .protocol
                    .is_none_or(|protocol| wire_protocol(protocol) == flow.protocol)
                && filter.owner.as_ref().is_none_or(
                    |owner| matches!(state, ApiState::Owned { owner: has } if has == owner),
                )
        })
    }

    fn service_of(&self, flow: &Flow) -> Option<&ServiceConfig> {
        let row = self.dataplane.service_index(flow)?;
        let mut services = self.config.services.iter();
        services.find(|service| service.row == row)
    }

    pub(super) fn list_flows(&self, query: FlowListQuery) -> FlowList {
        let filter = FlowFilter {
            pool: query.pool,
            owner: query.owner,
            protocol: query.protocol,
            limit: None,
        };
        let after = query.after.as_ref().and_then(flow_from_text);
        let limit = usize::try_from(query.limit.unwrap_or(FLOWS_PER_ANSWER)).unwrap_or(usize::MAX);
        let (mut flows, mut total, mut has_more) = (Vec::new(), 0, false);
        for (flow, state, epoch) in self.matching_flows(&filter) {
            total += 1;
            if after.is_some_and(|after| flow <= after) {
                continue;
            }
            match flows.len() < limit {
                true => flows.push(self.flow_entry(&flow, state, epoch)),
                false => has_more = true,
            }
        }
        let last = flows.last().map(|entry| entry.flow);
        let next = last.filter(|_| has_more);
        FlowList { flows, total, next }
    }

    pub(super) fn flow_detail(&self, text: &FlowText) -> Result<FlowDetail, ErrorBody> {
        let unknown_flow_error = || {
            error_body(
                format!("there is no flow {text} on this node"),
                "`holdfast flow list` shows this node's flows, and on the contact node all flows of the group",
            )
        };
        let flow = flow_from_text(text).ok_or_else(unknown_flow_error)?;
        let (state, epoch) = self
            .known_flows()
            .remove(&flow)
            .ok_or_else(unknown_flow_error)?;
        let connections = sock_diag::tcp_connections(Some(flow.local.ip()), flow.local.port())
            .unwrap_or_default();
        let connection = connections
            .into_iter()
            .find(|connection| connection.remote == flow.remote);
        let tcp = connection.and_then(|connection| {
            let info = connection.info?;
            let queued = u64::from(connection.send_queue);
            Some(TcpDetail {
                state: format!("{:?}", info.state),
                rtt_us: info.rtt_us,
                cwnd_segments: info.snd_cwnd,
                mss_bytes: info.snd_mss,
                unread_bytes: u64::from(connection.receive_queue),
                send_queue_bytes: queued,
                unsent_bytes: u64::from(info.notsent_bytes),
                retransmits: info.total_retrans,
                predicted_drain_us: (info.delivery_rate > 0)
                    .then(|| queued * 1_000_000 / info.delivery_rate + u64::from(info.rtt_us)),
            })
        });
        let mut blockers = Vec::new();
        if self.programs.owner(&flow).is_none() && self.is_owned_here(&state) {
            blockers.push(
                "no server program with a Holdfast session has the flow, so it cannot be handed off"
                    .to_owned(),
            );
        }
        let predicted_freeze_us =
            (blockers.is_empty() && self.is_owned_here(&state)).then_some(TYPICAL_FREEZE_US);
        Ok(FlowDetail {
            entry: self.flow_entry(&flow, state, epoch),
            tcp,
            blockers,
            predicted_freeze_us,
        })
    }

    fn is_owned_here(&self, state: &ApiState) -> bool {
        matches!(state, ApiState::Owned { owner } if *owner == self.config.node.name)
    }

    /// Returns the flows of this node that a handoff request selects.
    fn select_flows(&self, selection: FlowSelection) -> Vec<Flow> {
        match selection {
            // A flow that is named twice moves once.
            FlowSelection::Flows(flows) => {
                let flows: BTreeSet<Flow> = flows.iter().filter_map(flow_from_text).collect();
                flows.into_iter().collect()
            }
            FlowSelection::AllOf(filter) => {
                let limit = filter.limit.map_or(usize::MAX, |limit| {
                    usize::try_from(limit).unwrap_or(usize::MAX)
                });
                let own_filter = FlowFilter {
                    owner: Some(self.config.node.name.clone()),
                    ..filter
                };
                let own_flows = self.matching_flows(&own_filter).map(|(flow, ..)| flow);
                own_flows
                    .filter(|flow| self.programs.owner(flow).is_some())
                    .take(limit)
                    .collect()
            }
        }
    }

    /// Returns the first of these flows that the replicator of this group serves: no node owns such a flow.
    fn first_replicated<'a>(
        &self,
        flows: &'a [FlowText],
    ) -> Option<(&'a FlowText, &ServiceConfig)> {
        let replicated = flows.iter().filter_map(|text| {
            let service = self.replicated_service_at(text.local())?;
            let flow = flow_from_text(text)?;
            self.dataplane
                .flow(&flow)
                .is_none()
                .then_some((text, service))
        });
        replicated.into_iter().next()
    }

    pub(super) fn start_handoff(
        &mut self,
        request: HandoffRequest,
    ) -> Result<HandoffAccepted, ErrorBody> {
        let HandoffRequest {
            selection,
            to,
            drain,
        } = request;
        match self.group.id_of(&to) {
            None => {
                return Err(error_body(
                    format!("there is no node {to} in this group"),
                    "`holdfast status` shows those there are",
                ));
            }
            Some(id) if id == self.group.own() => {
                return Err(error_body(
                    format!("{to} is this node"),
                    "name another node, or send the request to the node that owns the flow",
                ));
            }
            Some(_) => {}
        }
        if let FlowSelection::AllOf(FlowFilter {
            pool: Some(pool), ..
        }) = &selection
            && !(self.config.services.iter()).any(|service| service.pool == *pool)
        {
            return Err(error_body(
                format!("no service has the pool {pool}"),
                "`holdfast status` shows those there are",
            ));
        }
        if let FlowSelection::Flows(flows) = &selection
            && let Some((flow, service)) = self.first_replicated(flows)
        {
            return Err(error_body(
                format!(
                    "{flow} is a replicated connection of {}, which cannot be handed off",
                    service.pool
                ),
                format!(
                    "make another server its primary with `holdfast replicate promote {} NODE`",
                    service.pool
                ),
            ));
        }
        let are_listed = matches!(selection, FlowSelection::Flows(_));
        let flows = self.select_flows(selection);
        if are_listed && flows.is_empty() {
            return Err(error_body(
                "no flow of this node matches",
                "`holdfast flow list` shows those there are",
            ));
        }
        if let Some(flow) = flows.iter().find(|flow| self.operations.has_flow(flow)) {
            return Err(error_body(
                format!("{flow} is moving already"),
                "try again when that has ended",
            ));
        }
        if let [flow] = flows[..]
            && self.programs.owner(&flow).is_none()
        {
            return Err(error_body(
                format!("{flow} cannot be handed off from here"),
                self.no_owner_reason(&flow).to_string(),
            ));
        }
        let count = flows.len() as u64;
        let id = self.operations.begin(flows, to, drain, true);
        self.request_next_flows(id);
        Ok(HandoffAccepted { id, flows: count })
    }
}
