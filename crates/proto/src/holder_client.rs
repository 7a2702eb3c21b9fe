//! Requests to the holder of the steering table, each repeated until it is answered. The machines share this bookkeeping;
//! each keeps the timers and decides what an answer means.

use core::time::Duration;
use holdfast_wire::{ChangeRefusal, Flow, Frame, NodeId, OwnershipChange, OwnershipRecord};
use std::collections::BTreeMap;

/// Bit in the numbers of the migration machine's requests; the handoff machine's numbers do not have it.
pub(crate) const MIGRATION_REQUEST_BIT: u64 = 1 << 63;

/// Returns the number of a request, without [`MIGRATION_REQUEST_BIT`], from a number that the machine has not used. The
/// requests of earlier daemons of the node have other numbers: the holder may answer one of them late, or still let it
/// wait, and would take a request with the same number for a repetition.
pub(crate) fn request_number(boot: u64, number: u64) -> u64 {
    boot.wrapping_add(number) & !MIGRATION_REQUEST_BIT
}

/// The holder's answer to each change.
pub(crate) type HolderAnswers = Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>;

/// Number of transmissions without an answer after which the holder is reported as silent.
const SILENT_AFTER_ATTEMPTS: u32 = 4;

/// Content of a request to the holder.
#[derive(Debug, Clone)]
pub(crate) enum HolderRequestBody {
    /// Changes of records, of which the holder makes each or refuses it.
    Change(Vec<OwnershipChange>),
    /// Records of these flows.
    Lookup(Vec<Flow>),
}

impl HolderRequestBody {
    /// Returns the number of changes or flows.
    pub fn len(&self) -> usize {
        match self {
            Self::Change(changes) => changes.len(),
            Self::Lookup(flows) => flows.len(),
        }
    }

    /// Returns the frame that carries the request.
    pub fn into_frame(self, request: u64) -> Frame {
        match self {
            Self::Change(changes) => Frame::ChangeRequest { request, changes },
            Self::Lookup(flows) => Frame::Query { request, flows },
        }
    }
}

/// Kind of the holder's answer, with its number of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerShape {
    /// Results of changes.
    Changes(usize),
    /// Records.
    Records(usize),
}

/// A request to the steering table's holder that is not answered yet.
#[derive(Debug)]
pub(crate) struct UnansweredRequest<P> {
    pub body: HolderRequestBody,
    /// Operation that waits for the answer.
    pub purpose: P,
    /// Time of the next repetition.
    pub due: Duration,
    next_wait: Duration,
    transmissions: u32,
}

/// A request that is to be sent again.
#[derive(Debug)]
pub(crate) struct Repetition {
    /// Time at which the repetition was due.
    pub previous_due: Duration,
    /// Time of the next one.
    pub due: Duration,
    pub body: HolderRequestBody,
    /// True once: when the holder has left several transmissions without an answer.
    pub is_holder_silent: bool,
}

/// Open requests to the holder, by number. `P` is the operation that waits for an answer.
#[derive(Debug)]
pub(crate) struct HolderClient<P> {
    node: NodeId,
    holder: NodeId,
    wait_min: Duration,
    wait_max: Duration,
    requests: BTreeMap<u64, UnansweredRequest<P>>,
}

impl<P> HolderClient<P> {
    /// Creates the client of `node` that repeats a request after `wait_min`, then after twice as long each time up to `wait_max`.
    pub fn new(node: NodeId, holder: NodeId, wait_min: Duration, wait_max: Duration) -> Self {
        Self {
            node,
            holder,
            wait_min,
            wait_max,
            requests: BTreeMap::new(),
        }
    }

    /// Returns true if no request is open.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Records a request that is sent now. Returns the time of its first repetition.
    pub fn open(
        &mut self,
        now: Duration,
        request: u64,
        body: HolderRequestBody,
        purpose: P,
    ) -> Duration {
        let due = now + self.wait_min;
        let opened = UnansweredRequest {
            body,
            purpose,
            due,
            next_wait: self.wait_min,
            transmissions: 1,
        };
        self.requests.insert(request, opened);
        due
    }

    /// Removes a request, whose later answer is ignored.
    pub fn cancel(&mut self, request: u64) -> Option<UnansweredRequest<P>> {
        self.requests.remove(&request)
    }

    /// Returns what is to be sent again of an open request.
    pub fn repeat(&mut self, now: Duration, request: u64) -> Option<Repetition> {
        let open = self.requests.get_mut(&request)?;
        open.next_wait = (open.next_wait * 2).min(self.wait_max);
        open.transmissions += 1;
        let previous_due = std::mem::replace(&mut open.due, now + open.next_wait);
        Some(Repetition {
            previous_due,
            due: open.due,
            body: open.body.clone(),
            is_holder_silent: open.transmissions == SILENT_AFTER_ATTEMPTS,
        })
    }

    /// Returns the node that holds the steering table.
    pub fn holder(&self) -> NodeId {
        self.holder
    }

    /// Returns true if this node holds the steering table.
    pub fn is_holder(&self) -> bool {
        self.holder == self.node
    }

    /// Sets the node that holds the steering table from now on. Its answers count, and no earlier holder's.
    pub fn set_holder(&mut self, holder: NodeId) {
        self.holder = holder;
    }

    /// Gives an open request another number. An answer to the former one is ignored.
    pub fn renumber(&mut self, former: u64, request: u64) {
        if let Some(open) = self.requests.remove(&former) {
            self.requests.insert(request, open);
        }
    }

    /// Makes the waits of all requests start from the beginning with the next repetition, as over a new channel to the
    /// holder. Returns the requests' numbers.
    pub fn restart_waits(&mut self) -> Vec<u64> {
        for open in self.requests.values_mut() {
            open.next_wait = self.wait_min / 2;
        }
        self.requests.keys().copied().collect()
    }

    /// Removes the request that an answer belongs to.
    ///
    /// # Errors
    /// The reason to ignore the answer.
    pub fn take_answered(
        &mut self,
        from: NodeId,
        request: u64,
        answer: AnswerShape,
    ) -> Result<UnansweredRequest<P>, &'static str> {
        if from != self.holder {
            return Err("the sender is not the holder");
        }
        let open = self
            .requests
            .get(&request)
            .ok_or("no open request with this number")?;
        let expected = match &open.body {
            HolderRequestBody::Change(changes) => AnswerShape::Changes(changes.len()),
            HolderRequestBody::Lookup(flows) => AnswerShape::Records(flows.len()),
        };
        if answer != expected {
            return Err("the results do not match the request");
        }
        self.requests
            .remove(&request)
            .ok_or("no open request with this number")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDER: NodeId = NodeId(7);

    fn client() -> HolderClient<&'static str> {
        HolderClient::new(
            NodeId(1),
            HOLDER,
            Duration::from_secs(1),
            Duration::from_secs(3),
        )
    }

    #[test]
    fn waits_double_up_to_the_longest() {
        let mut client = client();
        let lookup = HolderRequestBody::Lookup(Vec::new());
        let mut due = client.open(Duration::ZERO, 5, lookup, "lookup");
        let mut waits = Vec::new();
        let mut silent = Vec::new();
        for _ in 0..4 {
            let repetition = client.repeat(due, 5).expect("open");
            assert_eq!(repetition.previous_due, due);
            waits.push((repetition.due - due).as_secs());
            silent.push(repetition.is_holder_silent);
            due = repetition.due;
        }
        assert_eq!(waits, [2, 3, 3, 3]);
        assert_eq!(silent, [false, false, true, false]);
        assert_eq!(client.restart_waits(), [5]);
        let repetition = client.repeat(due, 5).expect("open");
        assert_eq!((repetition.due - due).as_secs(), 1);
    }

    #[test]
    fn only_a_matching_answer_is_taken() {
        let mut client = client();
        let lookup = HolderRequestBody::Lookup(Vec::new());
        client.open(Duration::ZERO, 5, lookup, "lookup");
        for (from, request, answer) in [
            (NodeId(8), 5, AnswerShape::Records(0)),
            (HOLDER, 6, AnswerShape::Records(0)),
            (HOLDER, 5, AnswerShape::Records(1)),
            (HOLDER, 5, AnswerShape::Changes(0)),
        ] {
            assert!(client.take_answered(from, request, answer).is_err());
        }
        let answered = client.take_answered(HOLDER, 5, AnswerShape::Records(0));
        assert_eq!(answered.expect("open").purpose, "lookup");
        assert!(client.is_idle());
    }
}
