//! The time until a node has a number and knows the settings of its group: before that there is no engine.
//!
//! The services of an earlier daemon stay as they are meanwhile. In particular, a node whose release cannot read the group's
//! settings begins no engine, because an engine removes the addresses and connections of services that it does not know.

use std::time::Duration;

use holdfast_api::control::ErrorBody;
use holdfast_wire::membership_frames::NodeName;
use tokio::time::timeout;

use super::event_loop::{EventSources, OperatorSignal};
use super::group_services::services_of_settings;
use super::operator_view::error_body;
use crate::config::Config;
use crate::credentials::{CredentialWorker, WorkerCommand, WorkerEvent};
use crate::membership::{GroupEvent, GroupMembership, MembershipStatus};
use crate::peer_channel::{DatagramKeyTable, Peers};

/// Longest wait of a voter for the keys of datagrams. A lease that could be renewed ends by then.
const KEY_WAIT_MAX: Duration = Duration::from_millis(200);

/// Waits until the group has given this node a number and this node knows the group's settings, and enters number, contact
/// node, members and services into `config`.
/// Returns false if a signal stops the daemon before. Requests of the operator are refused meanwhile; SIGHUP reloads the
/// certificates.
pub(super) async fn wait_until_joined(
    config: &mut Config,
    inputs: &mut EventSources,
    membership: &GroupMembership,
    (peers, credentials): (&Peers, &CredentialWorker),
) -> bool {
    let Some(group) = &mut inputs.group else {
        return true;
    };
    let mut backlog = Vec::new();
    // With a number and without the settings, an engine would take services and their connections for removed.
    let mut settings = None;
    let mut has_number = false;
    let joined = loop {
        tokio::select! {
            event = group.recv() => {
                match &event {
                    GroupEvent::View { view, own, members } => {
                        config.join_group(*own, view.contact_node, members);
                        has_number = true;
                    }
                    GroupEvent::Settings { settings: newer, .. } => settings = Some(newer.clone()),
                    _ => {}
                }
                backlog.push(event);
                if let Some(settings) = settings.as_ref().filter(|_| has_number) {
                    let nodes: Vec<_> = config.nodes().collect();
                    config.services = services_of_settings(settings, &nodes, &config.node.checks_dir);
                    break true;
                }
            }
            request = inputs.control.recv() => {
                request.refuse(refusal_without_engine(config, &membership.status()));
            }
            Some(event) = inputs.credential_events.recv() => match event {
                WorkerEvent::Changed { loaded, .. } => peers.set_tls(loaded.tls),
                WorkerEvent::ReloadFailed { error } => {
                    tracing::error!(%error, "cannot reload the certificates: the current ones stay in use");
                }
                // Answers to an engine that has ended.
                _ => {}
            },
            signal = inputs.signals.next() => match signal {
                OperatorSignal::Reload => credentials.send(WorkerCommand::Reload),
                OperatorSignal::Stop => break false,
            },
        }
    };
    for event in backlog.into_iter().rev() {
        group.put_back(event);
    }
    joined
}

/// Waits until this node has the keys of datagrams with all other voters, or for [`KEY_WAIT_MAX`]. Keys come over the
/// channel, which shares its thread with the engine, and the start of an engine takes longer than a lease lasts. With
/// the keys, heartbeats pass meanwhile.
pub(super) async fn wait_for_datagram_keys(membership: &GroupMembership, peers: &Peers) {
    let status = membership.status();
    let is_own = |id| Some(id) == status.own;
    if !status.voters.iter().any(|voter| is_own(voter.id)) {
        return;
    }
    let others = status.voters.iter().filter(|voter| !is_own(voter.id));
    let others: Vec<&NodeName> = others.map(|voter| &voter.name).collect();
    let has_keys = |table: &DatagramKeyTable, name: &NodeName| {
        table.get(name).is_some_and(|keys| keys.outbound.is_some())
    };
    let mut keys = peers.watch_datagram_keys();
    let all_keys = keys.wait_for(|table| others.iter().all(|name| has_keys(table, name)));
    // A voter that is away must not keep the engine from starting.
    let _ = timeout(KEY_WAIT_MAX, all_keys).await;
}

/// Returns the answer to a request of the operator before there is an engine.
fn refusal_without_engine(config: &Config, status: &MembershipStatus) -> ErrorBody {
    let (node, group) = (&config.node.name, &config.group.name);
    let problem = status.problems().next();
    match status.own {
        None => {
            let waits = || "the node asks its seeds for the contact node".to_owned();
            error_body(
                format!("node {node} is not in group {group} yet"),
                problem.unwrap_or_else(waits),
            )
        }
        Some(_) => {
            let waits = || "the node waits for the settings of the group".to_owned();
            error_body(
                format!(
                    "node {node} does not know the services of group {group}: those of its last daemon stay as they were"
                ),
                problem.unwrap_or_else(waits),
            )
        }
    }
}
