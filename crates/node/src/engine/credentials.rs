//! Certificates of this node and revocation lists of its group, as the engine passes them on.

use bytes::Bytes;
use holdfast_api::ca::NodeRole;
use holdfast_api::control::{ErrorBody, RevocationRequest, TOKEN_LIFETIME_S, TokenRequest};
use holdfast_wire::NodeId;
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;

use super::Engine;
use super::group_role::GroupNode;
use super::operator_view::error_body;
use crate::control::ControlRequest;
use crate::credentials::{
    GroupKnowledge, ListSource, TokenCommand, WorkerCommand, WorkerEvent, configured_group,
    join_role,
};

impl Engine {
    /// Reloads certificates and revocation list (SIGHUP). An error in the files leaves the current certificates in use.
    pub(super) fn reload_certificates(&mut self) {
        self.credentials.send_to_worker(WorkerCommand::Reload);
    }

    /// Answers the operator's requests about join tokens and revocation lists.
    pub(super) fn handle_credential_request(&mut self, request: ControlRequest) {
        let command = match request {
            ControlRequest::NewToken(TokenRequest { lifetime_s, role }, reply) => {
                let lifetime_s = lifetime_s.unwrap_or(TOKEN_LIFETIME_S);
                let role = join_role(role.unwrap_or(NodeRole::Backup));
                WorkerCommand::Token(TokenCommand::New(lifetime_s, role, reply))
            }
            ControlRequest::Tokens(reply) => WorkerCommand::Token(TokenCommand::List(reply)),
            ControlRequest::RevokeToken(id, reply) => {
                WorkerCommand::Token(TokenCommand::Revoke(id, reply))
            }
            ControlRequest::Revocations(reply) => WorkerCommand::Revocations(reply),
            ControlRequest::PublishRevocations(request, reply) => match list_of_request(&request) {
                Ok(list) => WorkerCommand::ApplyList(ListSource::Operator(reply), list),
                Err(refusal) => return drop(reply.send(Err(refusal))),
            },
            _ => return,
        };
        self.credentials.send_to_worker(command);
    }

    /// Handles an event of the worker.
    pub(super) fn handle_credential_event(&mut self, event: WorkerEvent) {
        let now = self.now();
        let metrics = self.statistics.metrics();
        self.credentials
            .handle_event(now, event, &self.peers, metrics);
    }

    /// Carries out the outputs of the machine of credentials.
    pub(super) fn run_credential_machine(&mut self) {
        let name_of = |node: NodeId| self.group.name_of(node).unwrap_or_default().to_owned();
        let metrics = self.statistics.metrics();
        self.credentials.run(&self.peers, metrics, name_of);
    }

    /// Learns a new view of the group: the nodes to ask for certificates, and the facts for hosts that join.
    pub(super) fn set_credential_view(&mut self) {
        use holdfast_api::enrolment::{JoinSettings, KnownNode};
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
        let settings = JoinSettings {
            contact: None,
            nodes: nodes.map(known).collect(),
            ..configured_group(&self.config).settings
        };
        let node_names = self.group.nodes().map(|(_, node)| node.name.clone());
        let group = GroupKnowledge {
            is_member: true,
            node_names: node_names.collect(),
            settings,
        };
        self.credentials
            .send_to_worker(WorkerCommand::SetGroup(group));
    }

    /// Learns that this node is outside the group: no node is asked for certificates first, and no host joins here.
    pub(super) fn leave_credentials_group(&mut self) {
        self.credentials.machine().set_contact(None);
        let group = GroupKnowledge {
            is_member: false,
            ..configured_group(&self.config)
        };
        self.credentials
            .send_to_worker(WorkerCommand::SetGroup(group));
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
