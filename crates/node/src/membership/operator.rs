//! Requests of the operator, and the answers that wait for the group's decision.

use std::time::Duration;

use holdfast_api::control::{ErrorBody, MembershipChange};
use holdfast_proto::membership::{Membership, OperatorError, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::NodeName;
use tokio::sync::oneshot;

/// Longest time that an answer waits for the group's decision.
const DECISION_TIMEOUT: Duration = Duration::from_secs(10);

/// A request of the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorRequest {
    /// Let this node leave the group. A contact node hands its role over first.
    Leave,
    /// Remove another node, by its name.
    Remove(String),
    /// Make a backup the contact node, by its name.
    Promote(String),
    /// Make this voter the contact node without a majority.
    ForceTakeover,
}

/// A change of the group that an answer to the operator waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AwaitedChange {
    /// This node is outside the group.
    Left,
    /// The group does not contain the node.
    Removed(NodeId),
    /// The node is the contact node.
    Promoted(NodeId),
    /// The node that was asked has become the contact node by a forced takeover.
    TakenOver,
}

/// An answer that waits for the group's decision.
#[derive(Debug)]
struct WaitingAnswer {
    change: AwaitedChange,
    deadline: Duration,
    reply: oneshot::Sender<Result<MembershipChange, ErrorBody>>,
}

/// The requests that wait for the group's decision.
#[derive(Debug, Default)]
pub(super) struct OperatorRequests {
    waiting: Vec<WaitingAnswer>,
}

impl OperatorRequests {
    /// Gives the machine a request. If the machine refuses the request, answers at once.
    pub fn begin(
        &mut self,
        now: Duration,
        machine: &mut Membership,
        request: &OperatorRequest,
        reply: oneshot::Sender<Result<MembershipChange, ErrorBody>>,
    ) {
        match start(now, machine, request) {
            Ok(change) => {
                self.waiting.push(WaitingAnswer {
                    change,
                    deadline: now + DECISION_TIMEOUT,
                    reply,
                });
            }
            Err(error) => {
                // A client that has gone needs no answer.
                let _ = reply.send(Err(error));
            }
        }
    }

    /// Answers the requests that are decided or overdue.
    pub fn answer(&mut self, now: Duration, machine: &Membership) {
        let is_due = |waiting: &mut WaitingAnswer| {
            is_decided(machine, waiting.change)
                || is_lost(machine, waiting.change)
                || waiting.deadline <= now
        };
        for waiting in self.waiting.extract_if(.., is_due) {
            let answer = match is_decided(machine, waiting.change) {
                true => Ok(MembershipChange {
                    epoch: machine.voted_view().map_or(0, |view| view.epoch),
                }),
                false if is_lost(machine, waiting.change) => Err(ErrorBody {
                    error: "another node has become contact node before the group decided"
                        .to_owned(),
                    what_to_do:
                        "`holdfast node list` shows the contact node; repeat the request there"
                            .to_owned(),
                }),
                false => Err(ErrorBody {
                    error: format!(
                        "the group has not decided within {} s",
                        DECISION_TIMEOUT.as_secs()
                    ),
                    what_to_do: "the request stays in force; `holdfast node list` shows the result"
                        .to_owned(),
                }),
            };
            let _ = waiting.reply.send(answer);
        }
    }

    /// Returns the time at which the next answer is overdue.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.waiting.iter().map(|waiting| waiting.deadline).min()
    }
}

fn start(
    now: Duration,
    machine: &mut Membership,
    request: &OperatorRequest,
) -> Result<AwaitedChange, ErrorBody> {
    match request {
        OperatorRequest::Leave => {
            machine.handle_leave(now).map_err(error_body)?;
            Ok(AwaitedChange::Left)
        }
        OperatorRequest::Remove(name) => {
            let id = id_of(machine, name)?;
            machine.handle_remove(now, id).map_err(error_body)?;
            Ok(AwaitedChange::Removed(id))
        }
        OperatorRequest::Promote(name) => {
            let id = id_of(machine, name)?;
            machine.handle_promote(now, id).map_err(error_body)?;
            Ok(AwaitedChange::Promoted(id))
        }
        OperatorRequest::ForceTakeover => {
            machine.handle_force_takeover(now).map_err(error_body)?;
            Ok(AwaitedChange::TakenOver)
        }
    }
}

/// Returns the number of a node. A node that is not the contact node may not know all nodes, and the machine names the
/// contact node then.
fn id_of(machine: &Membership, name: &str) -> Result<NodeId, ErrorBody> {
    let name = name.parse::<NodeName>();
    let known = name
        .as_ref()
        .ok()
        .and_then(|name| {
            let voters = machine
                .voted_view()
                .map_or(&[][..], |view| &view.voters[..]);
            let mut members = voters.iter().chain(machine.server_nodes());
            members.find(|member| member.name == *name)
        })
        .map(|member| member.id);
    match known {
        Some(id) => Ok(id),
        None if machine.standing() != Standing::ContactNode => Ok(NodeId(0)),
        None => Err(ErrorBody {
            error: match name {
                Ok(name) => format!("there is no node {name} in this group"),
                Err(error) => error.to_string(),
            },
            what_to_do: "`holdfast node list` shows those there are".to_owned(),
        }),
    }
}

fn is_decided(machine: &Membership, change: AwaitedChange) -> bool {
    let voters = machine
        .voted_view()
        .map_or(&[][..], |view| &view.voters[..]);
    match change {
        AwaitedChange::Left => machine.standing() == Standing::Outside,
        AwaitedChange::TakenOver => machine.standing() == Standing::ContactNode,
        AwaitedChange::Promoted(id) => voters.first().is_some_and(|contact| contact.id == id),
        AwaitedChange::Removed(id) => {
            let mut members = voters.iter().chain(machine.server_nodes());
            members.all(|member| member.id != id)
        }
    }
}

/// Returns true if a request has ended without a decision: only the contact node keeps it, and the local node has lost that
/// role.
fn is_lost(machine: &Membership, change: AwaitedChange) -> bool {
    match change {
        AwaitedChange::Promoted(_) | AwaitedChange::Removed(_) => {
            machine.standing() != Standing::ContactNode
        }
        AwaitedChange::Left | AwaitedChange::TakenOver => false,
    }
}

/// Returns the body of a refusal: the error, then the remedy after the semicolon.
fn error_body(error: OperatorError) -> ErrorBody {
    let text = error.to_string();
    let (error, what_to_do) = text.split_once("; ").unwrap_or((&text, ""));
    ErrorBody {
        error: error.to_owned(),
        what_to_do: what_to_do.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use holdfast_proto::membership::MembershipConfig;
    use holdfast_wire::membership_frames::JoinRole;

    use super::*;

    #[test]
    fn request_ends_when_another_node_becomes_contact_node() {
        let now = Duration::from_secs(1);
        let (name, address) = ("n1".parse().unwrap(), ([10, 0, 0, 1], 7400).into());
        let config = MembershipConfig::new(name, address, JoinRole::Backup, 1);
        // As after a removal.
        let machine = Membership::join(now, config);
        let (reply, mut answer) = oneshot::channel();
        let mut requests = OperatorRequests::default();
        requests.waiting.push(WaitingAnswer {
            change: AwaitedChange::Promoted(NodeId(2)),
            deadline: now + DECISION_TIMEOUT,
            reply,
        });
        requests.answer(now, &machine);
        let error = answer.try_recv().unwrap().unwrap_err();
        assert!(error.error.contains("another node"), "{error}");
        assert_eq!(requests.next_timeout(), None);
    }
}
