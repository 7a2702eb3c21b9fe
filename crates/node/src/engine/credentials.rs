//! Certificates of this node and revocation lists of its group, as the engine passes them on.

use bytes::Bytes;
use holdfast_api::control::{
    ErrorBody, RevocationRequest, RevocationStatus, TOKEN_LIFETIME_S, TokenRequest,
};
use holdfast_wire::NodeId;
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;

use super::Engine;
use super::group_role::GroupNode;
use super::operator_view::error_body;
use crate::control::{ControlRequest, ReplySender};
use crate::credentials::{
    GroupKnowledge, ListSource, TokenCommand, WorkerCommand, WorkerEvent, configured_group,
};

impl Engine {
    /// Reloads certificates and revocation list (SIGHUP). An error in the files leaves the current certificates in use.
    pub(super) fn reload_certificates(&mut self) {
        self.credentials.send_to_worker(WorkerCommand::Reload);
    }

    /// Puts a revocation list (DER) in force that came by another way than the channel between nodes, such as with a view of
    /// the group. An old list changes nothing.
    pub(super) fn publish_revocation_list(
        &mut self,
        list: Bytes,
        reply: ReplySender<RevocationStatus>,
    ) {
        let source = ListSource::Operator(reply);
        self.credentials
            .send_to_worker(WorkerCommand::ApplyList(source, list));
    }

    /// Answers the operator's requests about join tokens and revocation lists.
    pub(super) fn handle_credential_request(&mut self, request: ControlRequest) {
        let command = match request {
            ControlRequest::NewToken(TokenRequest { lifetime_s }, reply) => WorkerCommand::Token(
                TokenCommand::New(lifetime_s.unwrap_or(TOKEN_LIFETIME_S), reply),
            ),
            ControlRequest::Tokens(reply) => WorkerCommand::Token(TokenCommand::List(reply)),
            ControlRequest::RevokeToken(id, reply) => {
                WorkerCommand::Token(TokenCommand::Revoke(id, reply))
            }
            ControlRequest::Revocations(reply) => WorkerCommand::Revocations(reply),
            ControlRequest::PublishRevocations(request, reply) => {
                return match list_of_request(&request) {
                    Ok(list) => self.publish_revocation_list(list, reply),
                    Err(refusal) => drop(reply.send(Err(refusal))),
                };
            }
            _ => return,
        };
        self.credentials.send_to_worker(command);
    }

    /// Handles an event of the worker.
    pub(super) fn handle_credential_event(&mut self, event: WorkerEvent) {
        let now = self.now();
        let metrics = self.statistics.metrics();
        let revoked = self.credentials.revoked();
        self.credentials
            .handle_event(now, event, &self.peers, metrics);
        if let Some(membership) = &self.membership
            && self.credentials.revoked() > revoked
        {
            // Without the key, the node can no longer send heartbeats, and the group removes it.
            membership.renew_key();
        }
    }

    /// Carries out the outputs of the machine of credentials.
    pub(super) fn run_credential_machine(&mut self) {
        let name_of = |node: NodeId| self.group.name_of(node).unwrap_or_default().to_owned();
        let metrics = self.statistics.metrics();
        self.credentials.run(&self.peers, metrics, name_of);
    }

    /// Learns a new view of the group: the nodes to ask for certificates, and the facts for hosts that join.
    pub(super) fn set_credential_view(&mut self) {
        use holdfast_api::enrolment::{GroupSettings, KnownNode};
        let view = self.group.view();
        self.credentials
            .machine()
            .set_contact(Some(view.contact_node));
        let is_seed = |id: NodeId| {
            id == view.contact_node || id == self.group.own() || view.backups.contains(&id)
        };
        let known = |(id, node): (NodeId, &GroupNode)| KnownNode {
            name: node.name.clone(),
            id: id.0,
            address: node.address,
        };
        let nodes = self.group.nodes().filter(|(id, _)| is_seed(*id));
        let settings = GroupSettings {
            contact: None,
            nodes: nodes.map(known).collect(),
            ..configured_group(&self.config).settings
        };
        let node_names = self.group.nodes().map(|(_, node)| node.name.clone());
        let group = GroupKnowledge {
            node_names: node_names.collect(),
            settings,
        };
        self.credentials
            .send_to_worker(WorkerCommand::SetGroup(group));
    }

    /// Puts the revocation list of the group's settings in force, if it is newer.
    pub(super) fn set_group_revocation_list(&mut self, list: &Bytes) {
        // An old list is refused, and nobody waits for the answer.
        let (reply, _) = tokio::sync::oneshot::channel();
        self.publish_revocation_list(list.clone(), reply);
    }
}

fn list_of_request(request: &RevocationRequest) -> Result<Bytes, ErrorBody> {
    CertificateRevocationListDer::from_pem_slice(request.list.as_bytes())
        .map(|list| Bytes::from(list.to_vec()))
        .map_err(|error| {
            error_body(
                format!("not a revocation list in PEM: {error}"),
                "send the file ca.crl that `holdfast ca revoke` made",
            )
        })
}
