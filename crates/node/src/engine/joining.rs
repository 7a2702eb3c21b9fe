//! The time until a node has a number: before that there is no engine.

use super::event_loop::{EventSources, OperatorSignal};
use super::group_services::services_of_settings;
use super::operator_view::error_body;
use crate::config::Config;
use crate::credentials::{CredentialWorker, WorkerCommand, WorkerEvent};
use crate::membership::{GroupEvent, GroupMembership};
use crate::peer_channel::Peers;

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
                    config.services = services_of_settings(settings, &nodes);
                    break true;
                }
            }
            request = inputs.control.recv() => {
                let status = membership.status();
                let error = format!(
                    "node {} is not in group {} yet",
                    config.node.name, config.group.name
                );
                let problem = status.problems().next().unwrap_or_else(|| "the node asks its seeds for the contact node".to_owned());
                request.refuse(error_body(error, problem));
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
