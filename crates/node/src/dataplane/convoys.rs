//! The flows of a process that moves, whose state one write changes.

use std::cell::RefCell;
use std::collections::VecDeque;

use holdfast_bpf::Error;
use holdfast_bpf::shared::{Convoy as All, FlowKey, FlowState, FlowValue, MAX_CONVOYS};
use holdfast_wire::{Flow, NodeId};

use super::{Dataplane, key_of};

/// A convoy of this node's, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Convoy(u8);

impl Convoy {
    /// No convoy: a flow has a state of its own.
    pub const NONE: Convoy = Convoy(0);

    /// As the programs have it.
    pub(super) fn number(self) -> u8 {
        self.0
    }
}

/// Those that no move has. A number is used again as late as possible: a program may be looking at one still.
pub(super) struct Numbers(RefCell<VecDeque<u8>>);

impl Numbers {
    pub(super) fn new() -> Numbers {
        let all = 1..=u8::try_from(MAX_CONVOYS - 1).unwrap_or(u8::MAX);
        Numbers(RefCell::new(all.collect()))
    }
}

impl Dataplane {
    /// A convoy without flows; `None` where so many processes move that there is no other.
    #[must_use]
    pub fn form(&self) -> Option<Convoy> {
        self.convoys.0.borrow_mut().pop_front().map(Convoy)
    }

    /// Flows that this node has join a convoy, or leave theirs for [`Convoy::NONE`]; each keeps its own state.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn join<'a>(
        &self,
        flows: impl Iterator<Item = &'a Flow>,
        convoy: Convoy,
    ) -> Result<(), Error> {
        let keys: Vec<FlowKey> = flows.map(key_of).collect();
        let joins = FlowValue {
            convoy: convoy.number(),
            ..FlowValue::default()
        };
        self.programs.set_flows(&keys, &vec![joins; keys.len()])
    }

    /// All flows of a convoy are in `state` from now on, at epochs that are `ahead` of their own.
    pub fn turn(&self, convoy: Convoy, state: FlowState, peer: NodeId, ahead: u8) {
        let all = All {
            state: state as u8,
            ahead,
            peer: peer.0,
            pad: 0,
        };
        self.set_all(convoy, all);
    }

    /// Each flow of a convoy has its own state again.
    pub fn dissolve(&self, convoy: Convoy) {
        self.set_all(convoy, All::default());
    }

    /// No flow is of a convoy any more.
    pub fn disband(&self, convoy: Convoy) {
        self.dissolve(convoy);
        if convoy != Convoy::NONE {
            self.convoys.0.borrow_mut().push_back(convoy.number());
        }
    }

    fn set_all(&self, convoy: Convoy, all: All) {
        if convoy != Convoy::NONE {
            self.programs.convoys.turn(convoy.number(), all);
        }
    }

    /// What an earlier daemon has left in convoys is by itself what it was with them. Those of a process that was only about to
    /// stop are its own again.
    pub(super) fn dissolve_all(&self) -> Result<(), Error> {
        let by_itself = |(key, value): (FlowKey, FlowValue)| {
            let mut own = self.standing(value);
            own.convoy = Convoy::NONE.0;
            if own.state == FlowState::Leaving as u8 {
                own.state = FlowState::Owned as u8;
            }
            (key, own)
        };
        let flows = self.programs.flows.entries().into_iter();
        let (keys, values): (Vec<FlowKey>, Vec<FlowValue>) = flows
            .filter(|(_, value)| value.convoy != Convoy::NONE.0)
            .map(by_itself)
            .unzip();
        self.programs.set_flows(&keys, &values)?;
        for number in &*self.convoys.0.borrow() {
            self.dissolve(Convoy(*number));
        }
        Ok(())
    }

    /// A flow as the filters take it.
    pub(super) fn standing(&self, value: FlowValue) -> FlowValue {
        match value.convoy {
            0 => value,
            convoy => value.standing(self.programs.convoys.get(convoy)),
        }
    }
}
