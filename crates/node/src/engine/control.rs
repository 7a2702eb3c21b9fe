//! Answers to the operator's requests.

use super::Engine;
use crate::control::ControlRequest;
use holdfast_daemon::tls::Tls;

impl Engine {
    pub(super) fn handle_control(&mut self, request: ControlRequest) {
        // Send errors are ignored: a client that has disconnected needs no answer.
        match request {
            ControlRequest::Status(reply) => drop(reply.send(Ok(self.status()))),
            ControlRequest::Flows(query, reply) => drop(reply.send(Ok(self.list_flows(query)))),
            ControlRequest::Flow(flow, reply) => drop(reply.send(self.flow_detail(&flow))),
            ControlRequest::StartHandoff(request, reply) => {
                drop(reply.send(self.start_handoff(request)))
            }
            ControlRequest::Handoffs(reply) => drop(reply.send(Ok(self.handoff_list()))),
            ControlRequest::Handoff(id, reply) => drop(reply.send(self.handoff_status(id))),
            ControlRequest::Nodes(reply) => drop(reply.send(Ok(self.nodes()))),
            ControlRequest::Drops(reply) => drop(reply.send(Ok(self.drops()))),
            ControlRequest::Placement(reply) => drop(reply.send(Ok(self.placement()))),
            ControlRequest::SetPlacement(request, reply) => {
                drop(reply.send(self.set_placement(request)))
            }
            ControlRequest::Unit(name, reply) => drop(reply.send(self.migrations.unit(&name))),
            ControlRequest::Check(pid, query, reply) => self.check_process(pid, query, reply),
            ControlRequest::StartMigration(request, reply) => {
                drop(reply.send(self.start_migration(&request)))
            }
            ControlRequest::Migrations(reply) => drop(reply.send(Ok(self.migrations.list()))),
            ControlRequest::Migration(id, reply) => drop(reply.send(self.migrations.status(id))),
            ControlRequest::CancelMigration(id, reply) => {
                let now = self.now();
                drop(reply.send(self.migrations.cancel(now, id)))
            }
        }
    }

    /// Reloads certificates and revocation list (SIGHUP). An error in the files leaves the current certificates in use.
    pub(super) fn reload_certificates(&mut self) {
        match Tls::from_files(&self.config.tls, &self.config.node.name) {
            Ok(tls) => {
                self.statistics.metrics().set_certificate_end(tls.end());
                self.peers.set_tls(tls);
                tracing::info!("reloaded certificates and revocation list");
            }
            Err(error) => {
                tracing::error!(%error, "cannot reload the certificates: the current ones stay in use")
            }
        }
    }
}
