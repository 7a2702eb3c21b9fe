//! Rehearsals: an operator's question whether another node takes a process, answered by a move that ends with that
//! node's verdict, before any memory is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{ErrorBody, ProcessCheck};
use holdfast_proto::migration::{
    MoveOutcome, MoveRequest, MoveRequestOptions, ProcessId, ProcessKeptReason,
};
use holdfast_wire::{MoveId, NodeId};

use super::Migrations;
use crate::control::ReplySender;

/// An operator's inquiry whether a process can move.
#[derive(Debug)]
pub(crate) struct MoveInquiry {
    /// Name and id of the node to ask, if any.
    pub(crate) to: Option<(String, NodeId)>,
    /// Channel for the answer; a disconnected operator gets none.
    pub(crate) reply: ReplySender<ProcessCheck>,
}

/// Rehearsals in progress, each with this node's check of the process.
#[derive(Debug, Default)]
pub(super) struct Rehearsals(BTreeMap<MoveId, (ProcessCheck, ReplySender<ProcessCheck>)>);

impl Rehearsals {
    /// Answers the inquiry if the move was a rehearsal. Returns true in that case.
    pub(super) fn on_move_end(&mut self, id: MoveId, outcome: &MoveOutcome) -> bool {
        let Some((mut check, reply)) = self.0.remove(&id) else {
            return false;
        };
        let MoveOutcome::Kept { reason } = outcome else {
            // A rehearsal never moves anything; the reply is dropped.
            return true;
        };
        check.refusals = refusals_of(reason);
        check.movable = check.refusals.is_empty();
        let _ = reply.send(Ok(check));
        true
    }
}

impl Migrations {
    /// Continues an inquiry after this node's check: asks the named node, or answers.
    pub(super) fn continue_inquiry(
        &mut self,
        now: Duration,
        check: Result<ProcessCheck, ErrorBody>,
        inquiry: MoveInquiry,
    ) {
        let MoveInquiry { to, reply } = inquiry;
        let mut check = match (self.with_prediction(check), to) {
            (Ok(check), Some((name, id))) if check.movable => {
                let to = Some(name);
                (ProcessCheck { to, ..check }, id)
            }
            (check, _) => return drop(reply.send(check)),
        };
        let request = MoveRequest {
            process: ProcessId(u64::try_from(check.0.pid).unwrap_or(0)),
            to: check.1,
            options: MoveRequestOptions {
                rehearsal: true,
                ..MoveRequestOptions::default()
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

/// Returns the refusals with which a rehearsal ended.
fn refusals_of(reason: &ProcessKeptReason) -> Vec<String> {
    match reason {
        ProcessKeptReason::Rehearsed => Vec::new(),
        ProcessKeptReason::Refused { whys, .. } | ProcessKeptReason::Blocked(whys) => {
            whys.iter().map(ToString::to_string).collect()
        }
        other => vec![other.to_string()],
    }
}
