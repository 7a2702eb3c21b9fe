//! Answers to the operator's requests.

use super::Engine;
use super::operator_view::error_body;
use crate::control::ControlRequest;

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
            ControlRequest::Load(reply) => drop(reply.send(Ok(self.load_status()))),
            ControlRequest::ReportLoad(request, uid, reply) => {
                drop(reply.send(self.report_load(request, uid)));
            }
            ControlRequest::WithdrawLoad(request, uid, reply) => {
                drop(reply.send(self.withdraw_load(&request, uid)));
            }
            ControlRequest::Drops(reply) => drop(reply.send(Ok(self.drops()))),
            ControlRequest::Placement(reply) => drop(reply.send(Ok(self.placement()))),
            ControlRequest::SetPlacement(request, uid, reply) => {
                self.set_placement(&request, uid, reply);
            }
            ControlRequest::Services(reply) => drop(reply.send(Ok(self.service_list()))),
            ControlRequest::ChangeServices(request, uid, reply) => {
                self.change_services(&request, uid, reply);
            }
            ControlRequest::Replications(reply) => {
                drop(reply.send(Ok(self.replication_list())));
            }
            ControlRequest::ChangeReplication(request, uid, reply) => {
                self.change_replication(request, uid, reply);
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
            request @ (ControlRequest::NewToken(..)
            | ControlRequest::Tokens(_)
            | ControlRequest::RevokeToken(..)
            | ControlRequest::Revocations(_)
            | ControlRequest::PublishRevocations(..)) => self.handle_credential_request(request),
            request @ (ControlRequest::Drain(..)
            | ControlRequest::DrainReport(_)
            | ControlRequest::Undrain(_)
            | ControlRequest::NodeDrain(..)
            | ControlRequest::Balance(_)
            | ControlRequest::SetBalancing(..)
            | ControlRequest::Pin(..)
            | ControlRequest::BalanceNow(_)
            | ControlRequest::BalancePlan(_)
            | ControlRequest::BalanceLog(_)) => self.handle_conductor_request(request),
            ControlRequest::Membership(request, reply) => match &self.membership {
                Some(membership) => membership.request(request, reply),
                None => drop(reply.send(Err(error_body(
                    "the nodes of this group are configured, and do not change at run time",
                    "change [[peer]] and group.contact in every node's file; a group without group.contact runs itself",
                )))),
            },
            #[cfg(feature = "test-faults")]
            ControlRequest::TestView(view, reply) => drop(reply.send(self.set_test_view(&view))),
        }
    }
}
