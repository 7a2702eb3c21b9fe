//! Questions of operators whether another node takes a process: moves that end with that node's verdict, before any memory
//! is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{ErrorBody, ProcessCheck};
use holdfast_proto::migration::{Options, Outcome, ProcessId, Reason, Request};
use holdfast_wire::{MoveId, NodeId};

use super::Moves;
use crate::control::Reply;

/// An operator who wants to know whether a process can move.
#[derive(Debug)]
pub(crate) struct Inquiry {
    /// Name and number of the node that is to be asked too.
    pub(crate) to: Option<(String, NodeId)>,
    /// Where the answer goes. An operator who has left hears none.
    pub(crate) reply: Reply<ProcessCheck>,
}

/// Rehearsals under way, each with what this node found of the process.
#[derive(Debug, Default)]
pub(super) struct Rehearsals(BTreeMap<MoveId, (ProcessCheck, Reply<ProcessCheck>)>);

impl Rehearsals {
    /// Answers if the move was a rehearsal.
    pub(super) fn end(&mut self, id: MoveId, outcome: &Outcome) -> bool {
        let Some((mut check, reply)) = self.0.remove(&id) else {
            return false;
        };
        let Outcome::Kept { reason } = outcome else {
            // A rehearsal never runs anything; the reply is dropped.
            return true;
        };
        check.refusals = refusals(reason);
        check.movable = check.refusals.is_empty();
        let _ = reply.send(Ok(check));
        true
    }
}

impl Moves {
    /// This node has looked at a process.
    pub(super) fn inspected(
        &mut self,
        now: Duration,
        check: Result<ProcessCheck, ErrorBody>,
        inquiry: Inquiry,
    ) {
        let Inquiry { to, reply } = inquiry;
        let mut check = match (self.with_prediction(check), to) {
            (Ok(check), Some((name, id))) if check.movable => {
                let to = Some(name);
                (ProcessCheck { to, ..check }, id)
            }
            (check, _) => return drop(reply.send(check)),
        };
        let request = Request {
            process: ProcessId(u64::try_from(check.0.pid).unwrap_or(0)),
            to: check.1,
            options: Options {
                rehearsal: true,
                ..Options::default()
            },
        };
        match self.machine.handle_request(now, request) {
            Ok(id) => drop(self.rehearsals.0.insert(id, (check.0, reply))),
            Err(error) => {
                check.0.refusals = vec![error.to_string()];
                check.0.movable = false;
                let _ = reply.send(Ok(check.0));
            }
        }
    }
}

/// Why a move would not come to be.
fn refusals(reason: &Reason) -> Vec<String> {
    match reason {
        Reason::Rehearsed => Vec::new(),
        Reason::Refused { whys, .. } | Reason::Blocked(whys) => whys.clone(),
        other => vec![other.to_string()],
    }
}
